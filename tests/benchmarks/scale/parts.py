"""A run with parts that no worker wrote: made with the library's own functions, as fast as they go."""

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from pipelines.batch import open_plan
from pipelines.compose import compose_settings
from pipelines.config import BatchConfig
from pipelines.heartbeat import Heartbeat
from pipelines.parse import parse_config
from pipelines.parts import commit
from pipelines.plan import Plan
from pipelines.readers import read_batches
from pipelines.result_rows import request_key, result_table
from pipelines.rows import Answer, Batch, Completion, EngineTime, Request, Settled
from pipelines.run import Run, begin_attempt, open_run
from pipelines.sources import list_sources
from pipelines.statistics import Age, Origin, Timing, share_of, statistics_of

_THREADS = 4
_ROW_S = 0.001  # of a made engine, for each row


@dataclass(frozen=True, slots=True)
class Made:
    """A run that was planned, and of which some batches have a part."""

    config: BatchConfig
    run: Run
    plan: Plan


def settings_of(rows: Path, folder: Path, rows_per_batch: int, *more: str) -> list[str]:
    """The overrides of a run on the echo engine, at no cost for a token."""
    return [
        "experiment=overhead", "input=parquet", f"input.path={rows}", "input.id_column=id",
        f"engine.rows_per_batch={rows_per_batch}", f"output.path={folder}", *more,
    ]  # fmt: skip


def make_run(overrides: Sequence[str], num_left: int, num_workers: int = 2) -> Made:
    """Plan a run, and write the parts of all batches but the last `num_left`, as if so many workers had been there."""
    config = parse_config(compose_settings("batch", list(overrides), None))
    sources = list_sources(config.input)
    run = open_run(config, sources)
    plan = open_plan(config, sources, run.folder)
    begin_attempt(run)
    batches = [Batch(**line) for line in plan.batches.slice(0, plan.num_batches - num_left).to_pylist()]
    origins = [_origin(config, run, number) for number in range(num_workers if batches else 0)]
    beats = [Heartbeat(run.folder, origin, config.cluster.heartbeat_s) for origin in origins]
    template = _Template(config, plan)
    with ThreadPoolExecutor(_THREADS) as pool:
        places = ((batch, origins[place % num_workers], place // num_workers) for place, batch in enumerate(batches))
        for _ in pool.map(lambda one: template.commit(run, *one), places):
            pass
    for beat in beats:
        beat.beat()
    return Made(config, run, plan)


class _Template:
    """The rows of one batch, which stand in for those of all others: only where they come from is each batch's own."""

    def __init__(self, config: BatchConfig, plan: Plan):
        self._config = config
        self._first = Batch(**plan.batches.slice(0, 1).to_pylist()[0])
        self._block = next(read_batches(config.input, [self._first], ["id", "prompt"], plan.carried))
        self._now_s = time.time()

    def commit(self, run: Run, batch: Batch, origin: Origin, turn: int) -> None:
        """Write the part of a batch."""
        length = min(batch.num_rows, len(self._block.rows))
        block = self._block.take(range(length))
        busy_s = (turn + 1) * self._first.num_rows * _ROW_S
        settled = [Settled(_request(self._config, batch, place), self._answer(turn, place)) for place in range(length)]
        table = result_table(batch, block, [row["id"] for row in block.rows], settled, [1] * length)
        shares = [share_of([one.outcome for one in settled], origin, Age(busy_s + 1.0, busy_s))]
        timing = Timing(self._now_s + busy_s, batch.num_rows * _ROW_S)
        commit(run.folder, table, statistics_of(batch, table, timing, shares, origin), self._config.output.compression)

    def _answer(self, turn: int, place: int) -> Answer:
        arrived_s = self._now_s + (turn * self._first.num_rows + place) * _ROW_S
        return Answer(
            completions=[Completion(" ".join(["word"] * 8), "length", None, 8)],
            num_prompt_tokens=21,
            num_cached_tokens=0,
            queue_s=0.0,
            ttft_s=0.001,
            generation_s=0.01 * (1 + place % 7),
            engine_time=EngineTime(arrived_s, 0.0, _ROW_S),
        )


def _request(config: BatchConfig, batch: Batch, place: int) -> Request:
    return Request(request_key(batch, place), "", config.sampling)


def _origin(config: BatchConfig, run: Run, number: int) -> Origin:
    return Origin(
        fingerprint=run.fingerprint,
        worker=f"made{number:04d}",
        node="made",
        accelerator=config.pricing.accelerator,
        num_accelerators=1,
        attempt=run.attempt,
        pricing=config.pricing,
    )
