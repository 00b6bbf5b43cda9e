"""A worker: one Ray actor with one engine. It reads, renders, generates and commits the batches of its shards.

Reading and rendering run ahead of the engine in threads of their own, commits behind it, so that the engine never waits
for either. Shards are read in order, one after the other, but their batches overlap in the engine, so there is no barrier
between batches or shards.
"""

import asyncio
import json
import logging
import os
import socket
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Protocol

import pyarrow as pa

from pipelines.config import BatchConfig, Device, EchoEngineConfig
from pipelines.engines import Ticket, build_engine
from pipelines.errors import ConfigError, EngineDead, ErrorKind, RowError, RunFailed
from pipelines.heartbeat import Heartbeat
from pipelines.model import model_folder
from pipelines.parts import failed_offsets
from pipelines.plan import batches_of
from pipelines.poison import Cell
from pipelines.rows import Batch, Settled
from pipelines.run import RUN_FILE
from pipelines.statistics import Origin
from pipelines.steps import Entry, Steps, Work
from pipelines.storage import Folder

logger = logging.getLogger(__name__)

_SUMMARY = pa.schema(
    [
        ("batch_id", pa.int64()),
        ("num_ok", pa.int64()),
        ("num_failed", pa.int64()),
        ("failure", pa.string()),  # instead of a batch: why the worker cannot go on, a name in _FAILURES and a message
        ("message", pa.string()),
    ]
)
_FAILURES: dict[str, type[Exception]] = {"config": ConfigError, "run": RunFailed}
_COMMIT_THREADS = 4
_BATCHES_AHEAD = 4  # read and rendered while the engine, which holds twice what it runs, has no room for them yet
_OPEN_BATCHES = 64  # read and not yet committed: a batch waits for its longest answer, and its rows for it in memory


class Tally(Protocol):
    """Where a worker reports what it has committed: how many rows, failures and tokens are new."""

    def __call__(self, worker: str, numbers: dict[str, int]) -> None: ...


@dataclass(frozen=True, slots=True)
class Job:
    """What a worker must know; travels to it once."""

    config: BatchConfig
    run: Folder
    attempt: int
    fingerprint: str
    model_revision: str | None
    carried: pa.Schema
    device: Device
    num_accelerators: int


class Worker:
    """The callable that Ray Data runs: a shard descriptor in, one summary row for each of its batches out."""

    def __init__(self, job: Job, tally: Tally):
        self._job = job
        self._tally = tally
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
        self._ahead = asyncio.Semaphore(_BATCHES_AHEAD)
        self._open = asyncio.Semaphore(_OPEN_BATCHES)
        self._answering: set[asyncio.Task[Any]] = set()
        self._refusal: ConfigError | None = None
        try:
            self._load()
        except ConfigError as error:  # raised by the first shard: Ray would start an actor that fails here over and over
            self._refusal = error

    async def __call__(self, shard: pa.Table) -> pa.Table:
        """Answer those of a shard's batches that are not settled yet; see `raise_failure` for what else may come."""
        try:
            lines = await self._work(batches_of(shard))
        except ConfigError as error:
            lines = [{"failure": "config", "message": str(error)}]
        except RunFailed as error:
            lines = [{"failure": "run", "message": str(error)}]
        except OSError as error:
            lines = [{"failure": "run", "message": f"{type(error).__name__}: {error}"}]
        return pa.Table.from_pylist(lines, schema=_SUMMARY)

    def _load(self) -> None:
        job = self._job
        _check_folder(job)
        self._heartbeat = Heartbeat(job.run, self._origin, job.config.cluster.heartbeat_s)
        folder = "" if isinstance(job.config.engine, EchoEngineConfig) else model_folder(job.config.model)
        self._engine = build_engine(job.config, folder=folder, revision=job.model_revision, device=job.device)
        self._steps = Steps(job.config, job.run, job.carried, self._origin, self._engine)
        self._heartbeat.ready(self._engine)

    async def _work(self, batches: Sequence[Batch]) -> list[dict[str, Any]]:
        """Keep the batches of a shard moving, and commit each as soon as it is done."""
        if self._refusal is not None:
            raise self._refusal
        tasks: list[asyncio.Task[dict[str, Any]]] = []
        try:
            async with asyncio.TaskGroup() as group, self._turn:
                async for work in self._read(batches):
                    if work.is_suspect:  # it gets the engine to itself: should it die again, nothing dies with it
                        await self._drained()
                    tasks.append(group.create_task(self._answer(work)))
                    self._answering.add(tasks[-1])
                    tasks[-1].add_done_callback(self._answering.discard)
                    if work.is_suspect:
                        await self._drained()
        except ExceptionGroup as errors:
            self._leave_if_dead(errors)
            raise errors.exceptions[0] from None
        await _in(self._committers, self._heartbeat.beat)
        return [task.result() for task in tasks]

    async def _read(self, batches: Sequence[Batch]) -> AsyncIterator[Work]:
        """Read batch after batch, as long as there is room for one more ahead of the engine."""
        unsettled = await _in(self._reader, self._steps.unsettled, batches)
        since_attempt = self._job.attempt if self._job.config.retry_failed else 1  # who asks for a row again gets it run again
        suspicions = await _in(self._reader, self._heartbeat.suspicions, since_attempt)
        for _, group in groupby(unsettled, key=lambda pair: pair[0].source):
            neighbours = list(group)
            blocks = self._steps.blocks([batch for batch, _ in neighbours])
            for batch, part in neighbours:
                await self._open.acquire()
                await self._ahead.acquire()
                block = await _in(self._reader, next, blocks)
                work = Work(batch, block if part is None else block.take(failed_offsets(part)), part, suspicions)
                if work.is_suspect:  # nothing is read ahead of it
                    self._ahead.release()
                yield work

    async def _answer(self, work: Work) -> dict[str, Any]:
        """Take one batch from its rows to its part."""
        try:
            started_at_s, started = time.time(), time.perf_counter()
            settled: list[Settled] = []
            for cell in work.cells:
                settled += await self._settle(work, cell)
            wall_s = time.perf_counter() - started
            statistics: dict[str, Any] = await _in(self._committers, self._commit, work, settled, started_at_s, wall_s)
            return statistics
        finally:
            self._open.release()

    async def _settle(self, work: Work, cell: Cell) -> list[Settled]:
        """Answer the rows of a cell, together; a row that is known to kill engines is failed instead."""
        if work.suspicions.is_convicted(cell):
            deaths = work.suspicions.num_deaths(cell.batch_id)
            return [Settled(None, RowError(ErrorKind.ENGINE_KILLED, f"engines died {deaths} times until this row was found"))]
        if not work.rows_in(cell):
            return []
        await _in(self._committers, self._heartbeat.enter, cell)
        entries, ticket = await self._enter(work, cell)
        await asyncio.wrap_future(ticket.answered)
        self._heartbeat.leave(cell)
        settled: list[Settled] = await _in(self._committers, self._steps.finish, entries, ticket)
        return settled

    async def _enter(self, work: Work, cell: Cell) -> tuple[list[Entry], Ticket]:
        """Make rows ready and see all of their requests into the engine; then there is room to read another batch."""
        try:
            entries = await _in(self._preparer, self._steps.prepare, work, cell)
            ticket = self._engine.submit([entry.prepared for entry in entries if entry.error is None])
            await asyncio.wrap_future(ticket.admitted)
            return entries, ticket
        finally:
            if not work.is_suspect:
                self._ahead.release()

    def _commit(self, work: Work, settled: Sequence[Settled], started_at_s: float, wall_s: float) -> dict[str, Any]:
        statistics, progress = self._steps.commit(work, settled, started_at_s, wall_s)
        self._heartbeat.committed()
        self._tally(self._origin.worker, progress)
        return statistics

    async def _drained(self) -> None:
        """Wait until no batch is being answered, of whatever shard."""
        if self._answering:
            await asyncio.wait(self._answering)

    def _leave_if_dead(self, errors: ExceptionGroup[Exception]) -> None:
        """End a process whose engine is dead: Ray starts another one and hands its shards on, which it does for no error."""
        deaths, _ = errors.split(EngineDead)
        if deaths is not None:
            reason = str(deaths.exceptions[0])
            logger.error("worker %s ends: %s", self._origin.worker, reason)
            self._heartbeat.died(reason)
            os._exit(1)


def raise_failure(summary: pa.Table) -> None:
    """Raise what a worker could not: of an exception, Ray hands on no more than a text."""
    for line in summary.to_pylist():
        if line["failure"] is not None:
            raise _FAILURES[line["failure"]](line["message"])


def _check_folder(job: Job) -> None:
    """Refuse to write where the driver will not look: a local path is another folder on each node of a cluster."""
    try:
        record = json.loads(job.run.read(RUN_FILE))
    except (OSError, ValueError):
        record = {}
    if record.get("fingerprint") != job.fingerprint:
        raise ConfigError(
            f"output.path={job.run.url} is another folder on the node {socket.gethostname()}; "
            "name object storage, or a folder that all nodes mount"
        )


async def _in(pool: ThreadPoolExecutor, function: Any, *arguments: Any) -> Any:
    return await asyncio.get_running_loop().run_in_executor(pool, function, *arguments)
