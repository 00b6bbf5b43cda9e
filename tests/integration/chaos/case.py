"""A run and what will happen to it, all of it drawn from one seed."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from tests.integration.chaos.cluster import NUM_NODES

DEADLY = "DEADLY"
_BATCHES_AT_ONCE = 16  # in an echo engine
_MOST_WORDS = 8
_WORDS = ("bread", "flour", "oven", "salt", "water", "night", "crust", "yeast", "été", "窯", "🥖")


@dataclass(frozen=True, slots=True)
class Moment:
    """When a fault strikes: after so many more parts, or after so many seconds, whatever the run is at then."""

    num_parts: int | None = None
    seconds: float | None = None

    def __str__(self) -> str:
        return f"{self.num_parts} more parts" if self.seconds is None else f"{self.seconds:.1f} s later"


@dataclass(frozen=True, slots=True)
class Case:
    """The rows of a run, its settings, and the faults that it must survive."""

    rows: Sequence[dict[str, Any]]
    settings: Mapping[str, Any]
    faults: Sequence[tuple[str, Moment]]

    @property
    def deadly(self) -> set[str]:
        """The ids of the rows that kill the engine."""
        return {row["id"] for row in self.rows if DEADLY in row["prompt"]}

    def write(self, folder: Path) -> list[str]:
        """Write the input; returns the command's overrides."""
        path = folder / "rows.jsonl"
        path.write_text("".join(f"{json.dumps(row, ensure_ascii=False)}\n" for row in self.rows), encoding="utf-8")
        return [
            "engine=echo", "input=jsonl", f"input.path={path}", "input.id_column=id", "errors.max_failed_fraction=0.5",
            f"engine.die_text={DEADLY}", *(f"{key}={value}" for key, value in self.settings.items()),
        ]  # fmt: skip


def draw_case(rng: Random, weights: Mapping[str, float]) -> Case:
    """Draw a run that takes 8 to 20 seconds if nothing happens to it, and 5 to 15 faults of kinds as frequent as weighed."""
    rows_per_batch, num_batches = rng.randint(4, 12), rng.randint(60, 160)
    workers = rng.randint(1, NUM_NODES)
    batch_s = rng.uniform(8, 20) * _BATCHES_AT_ONCE * workers / num_batches
    rows = draw_rows(rng, rows_per_batch * num_batches - rng.randint(0, rows_per_batch - 1))
    if rng.random() < 0.2:
        rng.choice(rows)["prompt"] += f" {DEADLY}"
    settings = {
        "engine.rows_per_batch": rows_per_batch,
        "engine.max_num_seqs": rows_per_batch,  # a worker is handed 16 batches at a time, as many as the engine works on
        "engine.seconds_per_token": round(min(batch_s, 2.0) / _MOST_WORDS, 4),
        **settings_for(workers),
        "cluster.drain_s": rng.choice([0.5, 3, 10]),
        "output.patience_s": rng.choice([2, 8, 30]),
        "output.rows_per_file": rng.choice(["null", "null", rows_per_batch, rng.randint(10, 400)]),
    }
    kinds = rng.choices(list(weights), list(weights.values()), k=rng.randint(5, 15))
    return Case(rows, settings, [(kind, _draw_moment(rng, num_batches)) for kind in kinds])


def draw_rows(rng: Random, count: int) -> list[dict[str, Any]]:
    """Rows with answers of their own."""
    return [
        {"id": f"r{number:05d}", "prompt": " ".join([str(number), *rng.choices(_WORDS, k=rng.randint(1, _MOST_WORDS - 1))])}
        for number in range(count)
    ]


def settings_for(workers: int) -> dict[str, Any]:
    """Settings under which faults are noticed within seconds."""
    return {
        "cluster.workers": workers,
        "cluster.worker_restarts": 30,
        "cluster.heartbeat_s": 1,
        "cluster.hang_timeout_s": 6,
        "cluster.load_timeout_s": 60,
        "cluster.start_timeout_s": 90,
    }


def _draw_moment(rng: Random, num_batches: int) -> Moment:
    if rng.random() < 0.6:
        return Moment(num_parts=rng.randint(0, max(1, num_batches // 8)))
    return Moment(seconds=rng.uniform(0.5, 10))
