"""A worker: one Ray actor with one engine. It reads, renders, generates and commits the batches of its shards.

Reading and rendering run ahead of the engine in threads of their own, commits behind it, so that the engine never waits
for either. Shards are read in order, one after the other, but their batches overlap in the engine, so there is no barrier
between batches or shards. A worker that is told to stop hands back what has not entered its engine and commits the rest.
"""

import asyncio
import logging
import socket
import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from itertools import groupby
from typing import Any

import pyarrow as pa

from pipelines.config import EchoEngineConfig
from pipelines.engines import Ticket, build_engine
from pipelines.errors import ConfigError, EngineDead, ErrorKind, RowError, RunFailed
from pipelines.handover import Job, check_folder, failure_table, summary_table
from pipelines.heartbeat import Heartbeat
from pipelines.lifeline import Lifeline, Line
from pipelines.metrics import BuildMetrics, Load
from pipelines.model import model_folder
from pipelines.plan import batches_of
from pipelines.poison import Cell
from pipelines.result_rows import failed_offsets
from pipelines.room import Room
from pipelines.rows import Batch, Settled
from pipelines.sizing import rows_ahead, rows_open
from pipelines.starvation import Cause, Starvation
from pipelines.statistics import Origin, Timing, progress_of
from pipelines.steps import Entry, Steps, Work
from pipelines.watchdog import Watchdog

logger = logging.getLogger(__name__)

_COMMIT_THREADS = 4
_BATCHES_AHEAD = 2  # at least, however many rows they have: one enters the engine while the next is read and rendered
_OPEN_BATCHES = 8  # at least, likewise


class Worker:
    """The callable that Ray Data runs: a shard descriptor in, one summary row for each of its batches out."""

    def __init__(self, job: Job, line: Line, build_metrics: BuildMetrics):
        self._job = job
        self._line = line
        self._build_metrics = build_metrics
        self._origin = Origin(
            fingerprint=job.fingerprint,
            worker=uuid.uuid4().hex[:8],
            node=socket.gethostname(),
            accelerator=job.config.pricing.accelerator,
            num_accelerators=job.num_accelerators,
            attempt=job.attempt,
            pricing=job.config.pricing,
        )
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="read")
        self._preparer = ThreadPoolExecutor(1, thread_name_prefix="prepare")  # tokenizers are not safe to share
        self._committers = ThreadPoolExecutor(_COMMIT_THREADS, thread_name_prefix="commit")
        self._turn = asyncio.Lock()  # shards are read one after the other, in order
        self._answering: set[asyncio.Task[Any]] = set()
        self._tickets: set[Ticket] = set()
        self._is_loading = True
        self._is_isolating = False
        self._num_shards = 0
        self._num_moves = 0
        self._refusal: ConfigError | TimeoutError | None = None
        self._lifeline = Lifeline(line, self._origin.worker, job.config.cluster.heartbeat_s, self._is_busy)
        try:
            self._load()
        except (ConfigError, TimeoutError) as error:
            self._refusal = error  # raised by the first shard: Ray would start an actor that fails here over and over
        self._is_loading = False

    async def __call__(self, shard: pa.Table) -> pa.Table:
        """Answer those of a shard's batches that are not settled yet; see `raise_failure` for what else may come."""
        try:
            return summary_table(await self._work(batches_of(shard)))
        except (ConfigError, RunFailed, OSError) as error:
            return failure_table(error)

    def _load(self) -> None:
        job, settings = self._job, self._job.config.cluster
        check_folder(job)
        self._heartbeat = Heartbeat(job.run, self._origin, settings.heartbeat_s)
        self._metrics = self._build_metrics(job.tags, self._origin, self._heartbeat.phases)
        with closing(Watchdog(settings.load_timeout_s, lambda: "loading", self._end_stuck("load_timeout_s"))):
            folder = "" if isinstance(job.config.engine, EchoEngineConfig) else model_folder(job.config.model)
            self._engine = build_engine(
                job.config, folder, revision=job.model_revision, device=job.device, exports_metrics=self._metrics.is_exported
            )
        max_num_seqs = self._engine.describe()["max_num_seqs"]
        self._ahead, self._open = Room(rows_ahead(max_num_seqs), _BATCHES_AHEAD), Room(rows_open(max_num_seqs), _OPEN_BATCHES)
        self._steps = Steps(job.config, job.run, job.carried, self._origin, self._engine)
        self._heartbeat.ready(self._engine, Starvation(self._engine_load, self._waits_for))
        self._metrics.ready(self._engine_load)
        Watchdog(settings.hang_timeout_s, self._progress, self._end_stuck("hang_timeout_s"))
        self._lifeline.obey(self._is_idle, self._heartbeat)

    async def _work(self, batches: Sequence[Batch]) -> list[dict[str, Any]]:
        """Keep the batches of a shard moving, and commit each as soon as it is done."""
        if self._refusal is not None:
            raise self._refusal
        self._num_shards += 1
        try:
            lines = await self._run_shard(batches)
        finally:
            self._num_shards -= 1
        if self._lifeline.order == "leave":  # what was handed back goes to another worker when this process ends, not before
            await asyncio.Event().wait()
        return lines

    async def _run_shard(self, batches: Sequence[Batch]) -> list[dict[str, Any]]:
        tasks: list[asyncio.Task[dict[str, Any] | None]] = []
        try:
            async with asyncio.TaskGroup() as group, self._turn:
                async for work in self._read(batches):
                    self._is_isolating = work.is_suspect  # it gets the engine to itself: nothing dies with it again
                    if work.is_suspect:
                        await self._drained()
                    tasks.append(group.create_task(self._answer(work)))
                    self._answering.add(tasks[-1])
                    tasks[-1].add_done_callback(self._answering.discard)
                    if work.is_suspect:
                        await self._drained()
        except ExceptionGroup as errors:
            deaths, _ = errors.split(EngineDead)
            if deaths is not None:  # Ray starts a new process and hands its shards on, which it does for no error
                self._lifeline.end(str(deaths.exceptions[0]), self._heartbeat)
            raise errors.exceptions[0] from None
        await _in(self._committers, self._heartbeat.beat)
        return [line for task in tasks if (line := task.result()) is not None]

    async def _read(self, batches: Sequence[Batch]) -> AsyncIterator[Work]:
        """Read batch after batch, as long as there is room for one more ahead of the engine."""
        unsettled = await _in(self._reader, self._steps.unsettled, batches)
        since_attempt = self._job.attempt if self._job.config.retry_failed else 1  # who asks for a row again gets it run again
        suspicions = await _in(self._reader, self._heartbeat.suspicions, since_attempt)
        for _, group in groupby(unsettled, key=lambda pair: pair[0].source):
            neighbours = list(group)
            blocks = self._steps.blocks([batch for batch, _ in neighbours])
            for batch, part in neighbours:
                await self._open.enter(batch.num_rows)
                await self._ahead.enter(batch.num_rows)
                if self._lifeline.order is not None:
                    self._open.leave(batch.num_rows)
                    self._ahead.leave(batch.num_rows)
                    return
                block = await _in(self._reader, next, blocks)
                self._num_moves += 1
                work = Work(batch, block if part is None else block.take(failed_offsets(part)), part, suspicions)
                if work.is_suspect:  # nothing is read ahead of it
                    self._ahead.leave(batch.num_rows)
                yield work

    async def _answer(self, work: Work) -> dict[str, Any] | None:
        """Take one batch from its rows to its part; None where it is handed back."""
        try:
            started_at_s, started = time.time(), time.perf_counter()
            found = {cell: await self._settle(work, cell) for cell in work.cells}
            settled = [one for cell in sorted(found) for one in found[cell]]
            wall_s = time.perf_counter() - started
            statistics: dict[str, Any] = await _in(self._committers, self._commit, work, settled, Timing(started_at_s, wall_s))
            return statistics
        except _HandedBack:
            return None
        finally:
            self._open.leave(work.batch.num_rows)

    async def _settle(self, work: Work, cell: Cell) -> list[Settled]:
        """Answer the rows of a cell, together; a row that is known to kill engines is failed instead."""
        if work.suspicions.is_convicted(cell):
            deaths = work.suspicions.num_deaths(cell.batch_id)
            error = RowError(ErrorKind.ENGINE_KILLED, f"engines died {deaths} times until this row was found")
            return self._steps.convict(work, cell, error)
        if not work.rows_in(cell):
            return []
        await _in(self._committers, self._heartbeat.enter, cell)
        entries, ticket = await self._enter(work, cell)
        self._tickets.add(ticket)
        await asyncio.wrap_future(ticket.answered)
        self._tickets.discard(ticket)
        self._heartbeat.leave(cell)
        settled: list[Settled] = await _in(self._committers, self._steps.finish, entries, ticket)
        return settled

    async def _enter(self, work: Work, cell: Cell) -> tuple[list[Entry], Ticket]:
        """Make rows ready and see all of their requests into the engine; then there is room to read another batch."""
        try:
            entries = await _in(self._preparer, self._steps.prepare, work, cell)
            if self._lifeline.order is not None:
                self._heartbeat.leave(cell)
                raise _HandedBack
            ticket = self._engine.submit([entry.prepared for entry in entries if entry.error is None])
            await asyncio.wrap_future(ticket.admitted)
            return entries, ticket
        finally:
            if not work.is_suspect:
                self._ahead.leave(work.batch.num_rows)

    def _commit(self, work: Work, settled: Sequence[Settled], timing: Timing) -> dict[str, Any]:
        statistics, rows = self._steps.commit(work, settled, timing, self._heartbeat.age())
        self._heartbeat.committed()
        self._line.committed(progress_of(rows))
        self._metrics.committed(rows)
        self._num_moves += 1
        return statistics

    async def _drained(self) -> None:
        """Wait until no batch is being answered, of whatever shard."""
        if self._answering:
            await asyncio.wait(self._answering)

    def _progress(self) -> tuple[int, int] | None:
        """What changes as long as the worker gets anywhere; None while it has no shard."""
        return (self._engine.num_steps(), self._num_moves) if self._num_shards else None

    def _end_stuck(self, limit: str) -> Callable[[float], None]:
        return lambda silent_s: self._lifeline.end(f"no progress for {silent_s:.0f} s (cluster.{limit})", self._heartbeat)

    def _waits_for(self) -> Cause | None:
        """What keeps the next batch from the engine; None where there is none, or where it is kept back on purpose."""
        if not self._turn.locked() or self._is_isolating:
            return None
        return "long answers" if self._open.is_waited_for else "rendering" if self._ahead.is_waited_for else "input"

    def _engine_load(self) -> Load:
        running, held = self._engine.clock.num_running, sum(ticket.num_left for ticket in self._tickets.copy())
        return Load(running, max(0, held - running), self._engine.describe()["max_num_seqs"], len(self._answering))

    def _is_busy(self) -> bool:
        return self._is_loading or self._num_shards > 0

    def _is_idle(self) -> bool:
        return not self._answering


class _HandedBack(Exception):
    """The worker is to stop, and a batch has not entered its engine."""


async def _in(pool: ThreadPoolExecutor, function: Any, *arguments: Any) -> Any:
    return await asyncio.get_running_loop().run_in_executor(pool, function, *arguments)
