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
from collections.abc import AsyncIterator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Protocol

import pyarrow as pa

from pipelines.config import BatchConfig, Device, EchoEngineConfig
from pipelines.engines import Ticket, build_engine
from pipelines.errors import ConfigError, EngineDead, RowError, RunFailed
from pipelines.heartbeat import Heartbeat
from pipelines.model import model_folder
from pipelines.parts import Origin, Timing, commit, part_name, request_key, result_table, statistics_of
from pipelines.plan import batches_of
from pipelines.prompts import Renderer
from pipelines.readers import read_batches
from pipelines.readers.jsonl import as_text
from pipelines.rows import Batch, Block, Outcome, Request, Row
from pipelines.run import RUN_FILE
from pipelines.sources import check_unchanged
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
    """Where a worker reports each committed batch."""

    def __call__(self, statistics: dict[str, Any]) -> None: ...


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
        self._renderer = Renderer(job.config.prompt, job.config.input)
        self._id_column = job.config.input.id_column
        self._columns = list(dict.fromkeys([*self._renderer.columns, *([self._id_column] if self._id_column else [])]))
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
        self._refusal: ConfigError | None = None
        try:
            self._load()
        except ConfigError as error:  # raised by the first shard: Ray would start an actor that fails here over and over
            self._refusal = error

    async def __call__(self, shard: pa.Table) -> pa.Table:
        """Answer those of a shard's batches that have no part yet; see `raise_failure` for what else may come."""
        try:
            lines = await self._work(batches_of(shard))
        except ConfigError as error:
            lines = [{"failure": "config", "message": str(error)}]
        except RunFailed as error:
            lines = [{"failure": "run", "message": str(error)}]
        except OSError as error:
            lines = [{"failure": "run", "message": f"{type(error).__name__}: {error}"}]
        return pa.Table.from_pylist(lines, schema=_SUMMARY)

    async def _work(self, batches: Sequence[Batch]) -> list[dict[str, Any]]:
        """Keep the batches of a shard moving, and commit each as soon as it is done."""
        if self._refusal is not None:
            raise self._refusal
        tasks: list[asyncio.Task[dict[str, Any]]] = []
        try:
            async with asyncio.TaskGroup() as group, self._turn:
                async for batch, block in self._blocks(batches):
                    tasks.append(group.create_task(self._answer(batch, block)))
        except ExceptionGroup as errors:
            self._leave_if_dead(errors)
            raise errors.exceptions[0] from None
        await _in(self._committers, self._heartbeat.beat)
        return [task.result() for task in tasks]

    def _load(self) -> None:
        job = self._job
        _check_folder(job)
        self._heartbeat = Heartbeat(job.run, self._origin, job.config.cluster.heartbeat_s)
        folder = "" if isinstance(job.config.engine, EchoEngineConfig) else model_folder(job.config.model)
        self._engine = build_engine(job.config, folder=folder, revision=job.model_revision, device=job.device)
        self._heartbeat.ready(self._engine)

    async def _blocks(self, batches: Sequence[Batch]) -> AsyncIterator[tuple[Batch, Block]]:
        """Read batch after batch, as long as there is room for one more ahead of the engine."""
        config = self._job.config.input
        for _, neighbours in groupby(await _in(self._reader, self._uncommitted, batches), key=lambda batch: batch.source):
            batches = list(neighbours)
            await _in(self._reader, check_unchanged, batches[0])
            blocks = read_batches(config.format, batches, self._columns, self._job.carried)
            for batch in batches:
                await self._open.acquire()
                await self._ahead.acquire()
                yield batch, await _in(self._reader, next, blocks)

    def _uncommitted(self, batches: Sequence[Batch]) -> list[Batch]:
        """Leave out what a worker before this one has committed: Ray hands a dead worker's shards on as they were."""
        return [batch for batch in batches if not self._job.run.exists(part_name(batch.batch_id))]

    async def _answer(self, batch: Batch, block: Block) -> dict[str, Any]:
        """Take one batch from its rows to its part."""
        try:
            started_at_s, started = time.time(), time.perf_counter()
            requests, ticket = await self._enter(batch, block)
            answered = await asyncio.wrap_future(ticket.answered)
            timing = Timing(started_at_s, time.perf_counter() - started)
            coming = iter(answered)
            outcomes: list[Outcome] = [one if isinstance(one, RowError) else next(coming) for one in requests]
            statistics: dict[str, Any] = await _in(self._committers, self._commit, batch, block, outcomes, timing)
            return statistics
        finally:
            self._open.release()

    async def _enter(self, batch: Batch, block: Block) -> tuple[list[Any], Ticket]:
        """Make a batch ready and see all of its requests into the engine; then there is room to read another."""
        try:
            requests = await _in(self._preparer, self._prepare, batch, block)
            ticket = self._engine.submit([request for request in requests if not isinstance(request, RowError)])
            await asyncio.wrap_future(ticket.admitted)
            return requests, ticket
        finally:
            self._ahead.release()

    def _leave_if_dead(self, errors: ExceptionGroup[Exception]) -> None:
        """End a process whose engine is dead: Ray starts another one and hands its shards on, which it does for no error."""
        deaths, _ = errors.split(EngineDead)
        if deaths is not None:
            reason = str(deaths.exceptions[0])
            logger.error("worker %s ends: %s", self._origin.worker, reason)
            self._heartbeat.died(reason)
            os._exit(1)

    def _prepare(self, batch: Batch, block: Block) -> list[Any]:
        """Render and tokenise each row; a row that cannot be is replaced by its error."""
        return [self._prepare_row(row, request_key(batch, offset)) for offset, row in enumerate(block.rows)]

    def _prepare_row(self, row: Row, key: str) -> Any:
        if isinstance(row, RowError):
            return row
        try:
            return self._engine.prepare(Request(key, self._renderer.render(row)))
        except RowError as error:
            return error

    def _commit(self, batch: Batch, block: Block, outcomes: Sequence[Outcome], timing: Timing) -> dict[str, Any]:
        statistics = statistics_of(batch, outcomes, timing, self._origin)
        table = result_table(batch, block, list(self._ids(batch, block)), outcomes)
        commit(self._job.run, table, statistics, self._job.config.output.compression)
        self._heartbeat.committed()
        self._tally(statistics)
        return statistics

    def _ids(self, batch: Batch, block: Block) -> Iterator[str | None]:
        """Each row's id as text: from its column, else its number in the whole input."""
        for offset, row in enumerate(block.rows):
            if self._id_column is None:
                yield str(batch.rows_before + offset)
            else:
                yield None if isinstance(row, RowError) else as_text(row.get(self._id_column))


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
