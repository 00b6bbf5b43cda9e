"""Parts: the Parquet file that a batch commits, its rows and its statistics in one object."""

import io
import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pipelines.config import PricingConfig
from pipelines.errors import RunFailed
from pipelines.rows import Answer, Batch, Block, Completion, Outcome
from pipelines.schema import BATCH, LATENCIES, RESULT
from pipelines.storage import Folder

RESULTS = "results"
_STATISTICS = b"fournee.batch"
_PART_NAME = re.compile(r"part-(\d{8,})\.parquet")
_FOOTER_THREADS = 16
_FOOTERS_AT_ONCE = 1000


@dataclass(frozen=True, slots=True)
class Origin:
    """Who answered a batch, and what its time costs."""

    fingerprint: str
    worker: str
    node: str
    accelerator: str
    num_accelerators: int
    attempt: int
    pricing: PricingConfig

    def cost(self, seconds: float) -> float:
        """What so many seconds of this worker's accelerators cost: seconds / 3600 x accelerators x price per hour."""
        return seconds / 3600 * self.num_accelerators * self.pricing.price_per_accelerator_hour


@dataclass(frozen=True, slots=True)
class Timing:
    """When a batch was handed to the engine (seconds since the epoch), and how long its last answer took."""

    started_at_s: float
    wall_s: float


def part_name(batch_id: int) -> str:
    """The name of a batch's part follows from its number alone."""
    return f"{RESULTS}/part-{batch_id:08d}.parquet"


def committed(run: Folder) -> list[int]:
    """The batches that have a part: one listing, whatever the number of rows."""
    matches = (_PART_NAME.fullmatch(name) for name in run.names(RESULTS))
    return [int(match[1]) for match in matches if match]


def commit(run: Folder, table: pa.Table, statistics: dict[str, Any], compression: str) -> None:
    """Write a batch's part, whole or not at all; a second writer replaces it with answers to the same rows."""
    sink = io.BytesIO()
    pq.write_table(table.replace_schema_metadata({_STATISTICS: json.dumps(statistics)}), sink, compression=compression)
    run.write(part_name(statistics["batch_id"]), sink.getvalue())


def read_statistics(run: Folder, batch_ids: Sequence[int]) -> Iterator[list[dict[str, Any]]]:
    """Yield the statistics of the given parts from their footers, some at a time; `num_rows_written` is what each holds.

    Raises RunFailed where a part cannot be read.
    """

    def read(batch_id: int) -> dict[str, Any]:
        name = part_name(batch_id)
        try:
            metadata = pq.read_metadata(run.path(name), filesystem=run.arrow)
        except (OSError, pa.ArrowInvalid) as error:
            raise RunFailed(f"{name} cannot be read: {error}; delete it and resume the run") from None
        statistics: dict[str, Any] = json.loads((metadata.metadata or {}).get(_STATISTICS, b"{}"))
        return {**statistics, "num_rows_written": metadata.num_rows}

    with ThreadPoolExecutor(_FOOTER_THREADS) as pool:
        for start in range(0, len(batch_ids), _FOOTERS_AT_ONCE):
            yield list(pool.map(read, batch_ids[start : start + _FOOTERS_AT_ONCE]))


def result_table(batch: Batch, block: Block, ids: Sequence[str | None], outcomes: Sequence[Outcome]) -> pa.Table:
    """Build the rows of a part: one for each row of the batch, in its order."""
    answers = [outcome if isinstance(outcome, Answer) else None for outcome in outcomes]
    errors = [None if isinstance(outcome, Answer) else outcome for outcome in outcomes]
    first = [None if answer is None else answer.completions[0] for answer in answers]
    columns: dict[str, list[Any]] = {
        "id": list(ids),
        "source": [batch.source] * len(outcomes),
        "source_row": list(block.source_rows),
        "status": ["failed" if answer is None else "ok" for answer in answers],
        "text": [one and one.text for one in first],
        "finish_reason": [one and one.finish_reason for one in first],
        "stop_reason": [one and one.stop_reason for one in first],
        "num_prompt_tokens": [a and a.num_prompt_tokens for a in answers],
        "num_cached_tokens": [a and a.num_cached_tokens for a in answers],
        "num_output_tokens": [a and _num_output_tokens(a) for a in answers],
        "queue_s": [a and a.queue_s for a in answers],
        "ttft_s": [a and a.ttft_s for a in answers],
        "generation_s": [a and a.generation_s for a in answers],
        "error_kind": [e and e.kind.value for e in errors],
        "error_message": [e and e.message for e in errors],
        "attempts": [1] * len(outcomes),
        "request_key": [request_key(batch, offset) for offset in range(len(outcomes))],
        "completions": [_others(a) for a in answers],
        "logprobs": [one and one.logprobs for one in first],
    }
    arrays = [pa.array(columns[f.name], f.type) if f.name in columns else pa.nulls(len(outcomes), f.type) for f in RESULT]
    schema = pa.schema([*RESULT, *block.carried.schema])
    return pa.Table.from_arrays([*arrays, *block.carried.columns], schema=schema)


def request_key(batch: Batch, offset: int) -> str:
    """A row's own name within its run, whatever its id is."""
    return f"{batch.batch_id:08d}-{offset}"


def statistics_of(batch: Batch, outcomes: Sequence[Outcome], timing: Timing, origin: Origin) -> dict[str, Any]:
    """Sum up a batch: the line of `stats/batches.parquet` as JSON values, and what tells which batch of which run it is."""
    answers = [outcome for outcome in outcomes if isinstance(outcome, Answer)]
    num_prompt = sum(a.num_prompt_tokens for a in answers)
    num_output = sum(_num_output_tokens(a) for a in answers)
    engine_s = sum(a.engine_s for a in answers)
    cost = origin.cost(engine_s)
    return {
        "fingerprint": origin.fingerprint,
        "source": batch.source,
        "first_row": batch.first_row,
        "batch_id": batch.batch_id,
        "num_rows": len(outcomes),
        "num_ok": len(answers),
        "num_failed": len(outcomes) - len(answers),
        "num_prompt_tokens": num_prompt,
        "num_cached_tokens": sum(a.num_cached_tokens for a in answers),
        "num_output_tokens": num_output,
        "started_at": int(timing.started_at_s * 1e6),
        "wall_s": timing.wall_s,
        "engine_s": engine_s,
        "output_tokens_per_s": tokens_per_s(num_output, timing.wall_s),
        "total_tokens_per_s": tokens_per_s(num_prompt + num_output, timing.wall_s),
        **_latency_quantiles(answers),
        "finish_reasons": dict(Counter(one.finish_reason for a in answers for one in a.completions)),
        "error_kinds": dict(Counter(o.kind.value for o in outcomes if not isinstance(o, Answer))),
        "worker": origin.worker,
        "node": origin.node,
        "accelerator": origin.accelerator,
        "num_accelerators": origin.num_accelerators,
        "attempt": origin.attempt,
        "currency": origin.pricing.currency,
        "cost": cost,
        "cost_per_million_output_tokens": cost_per_million(cost, num_output),
        "cost_per_million_total_tokens": cost_per_million(cost, num_prompt + num_output),
    }


def tokens_per_s(num_tokens: int, seconds: float) -> float | None:
    """A speed; null where no tokens came, which is no speed at all."""
    return num_tokens / seconds if num_tokens and seconds > 0 else None


def cost_per_million(cost: float, num_tokens: int) -> float | None:
    """The cost of a million tokens; null where there are none to spread it over."""
    return cost * 1e6 / num_tokens if num_tokens else None


def batch_table(statistics: Sequence[dict[str, Any]]) -> pa.Table:
    """`stats/batches.parquet` from the statistics of all parts."""
    maps = ("finish_reasons", "error_kinds")
    lines = [{**line, **{name: list(line[name].items()) for name in maps}} for line in statistics]
    return pa.Table.from_pylist(lines, schema=BATCH)


def _latency_quantiles(answers: Sequence[Answer]) -> dict[str, float | None]:
    series: dict[str, list[float]] = {
        "queue_s": [a.queue_s for a in answers],
        "ttft_s": [a.ttft_s for a in answers],
        "time_per_output_token_s": [a.generation_s / (_num_output_tokens(a) - 1) for a in answers if _num_output_tokens(a) > 1],
        "latency_s": [a.ttft_s + a.generation_s for a in answers],
    }
    quantiles: dict[str, float | None] = {}
    for name in LATENCIES:
        values = np.quantile(series[name], (0.5, 0.95, 0.99)).tolist() if series[name] else [None] * 3
        quantiles |= dict(zip((f"{name}_p50", f"{name}_p95", f"{name}_p99"), values, strict=True))
    return quantiles


def _num_output_tokens(answer: Answer) -> int:
    return sum(one.num_output_tokens for one in answer.completions)


def _others(answer: Answer | None) -> list[dict[str, Any]] | None:
    if answer is None or len(answer.completions) < 2:
        return None
    return [_as_struct(one) for one in answer.completions[1:]]


def _as_struct(one: Completion) -> dict[str, Any]:
    return {"text": one.text, "finish_reason": one.finish_reason, "num_output_tokens": one.num_output_tokens}
