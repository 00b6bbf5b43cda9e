"""The story without Ray: one worker in this process does what the cluster would hand it."""

import asyncio
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from pipelines.batch import find_todo, open_plan
from pipelines.config import BatchConfig
from pipelines.handover import Job, raise_failure
from pipelines.lifeline import Order
from pipelines.metrics import Load
from pipelines.plan import Plan, make_shards
from pipelines.run import Run, begin_attempt, open_run
from pipelines.sources import list_sources
from pipelines.statistics import Origin
from pipelines.worker import Worker


def answer(config: BatchConfig, *, most_shards: int | None = None) -> tuple[Run, Plan, list[dict[str, Any]]]:
    """Do what the story does, with one worker in this process; stop after `most_shards` as a crash would.

    Returns the summary line of each batch, too.
    """
    sources = list_sources(config.input)
    run = open_run(config, sources)
    plan = open_plan(config, sources, run.folder)
    begin_attempt(run)
    shards = make_shards(find_todo(config, run, plan).batches, num_workers=1)[:most_shards]
    return run, plan, asyncio.run(hand(config, run, plan, shards))


class QuietLine:
    """A line to a driver that never gives an order."""

    def ready(self) -> None: ...

    def committed(self, numbers: dict[str, int]) -> None: ...

    def alive(self, worker: str, *, is_busy: bool) -> None: ...

    def drained(self, worker: str) -> None: ...

    def order(self) -> Order | None:
        threading.Event().wait()
        return None


class QuietMetrics:
    """Metrics that nobody hears."""

    is_exported = False

    def __init__(self, run_tags: Mapping[str, str], origin: Origin, phases: Callable[[], Mapping[str, float]]): ...

    def ready(self, load: Callable[[], Load]) -> None: ...

    def committed(self, rows: pa.Table) -> None: ...


async def hand(
    config: BatchConfig, run: Run, plan: Plan, shards: list[pa.Table], line: QuietLine | None = None
) -> list[dict[str, Any]]:
    """Hand shards to a new worker, all at once, as Ray does."""
    job = Job(
        config=config,
        run=run.folder,
        attempt=run.attempt,
        carried=plan.carried,
        fingerprint=run.fingerprint,
        model_revision=None,
        device="cpu",
        num_accelerators=1,
        tags={},
    )
    one = Worker(job, line or QuietLine(), QuietMetrics)
    lines: list[dict[str, Any]] = []
    for summary in await asyncio.gather(*(one(shard) for shard in shards)):
        raise_failure(summary)
        lines += summary.to_pylist()
    return lines


def results(run: Run) -> list[dict[str, Any]]:
    names = [f"results/{name}" for name in run.folder.names("results")]
    tables = [pq.read_table(run.folder.path(name), filesystem=run.folder.arrow, partitioning=None) for name in names]
    return [row for table in tables for row in table.to_pylist()]


def echo(path: Path, run_url: str, *more: str) -> list[str]:
    return [
        "engine=echo", "engine.rows_per_batch=10", "input=jsonl", f"input.path={path}", "input.id_column=id",
        f"output.path={run_url}", *more,
    ]  # fmt: skip
