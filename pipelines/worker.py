"""A worker: one Ray actor with one engine. It reads, renders, generates and commits the batches of its shards.

Reading and rendering run ahead of the engine in threads of their own, commits behind it, so that the engine never waits
for either. The batches of a shard overlap, and so do shards.
"""

import asyncio
import socket
import time
import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import pyarrow as pa

from pipelines.config import BatchConfig, EchoEngineConfig
from pipelines.engines import Engine, build_engine
from pipelines.errors import ConfigError, RowError
from pipelines.heartbeat import Heartbeat
from pipelines.model import model_folder
from pipelines.parts import Origin, Timing, commit, request_key, result_table, statistics_of
from pipelines.plan import batches_of
from pipelines.prompts import Renderer
from pipelines.readers import read_batches
from pipelines.readers.jsonl import as_text
from pipelines.rows import Batch, Block, Outcome, Request, Row
from pipelines.storage import Folder

_SUMMARY = pa.schema([("batch_id", pa.int64()), ("num_ok", pa.int64()), ("num_failed", pa.int64())])
_READ_THREADS = 2
_COMMIT_THREADS = 4


class Tally(Protocol):
    """Where a worker reports each committed batch."""

    def __call__(self, statistics: dict[str, Any]) -> None: ...


@dataclass(frozen=True, slots=True)
class Job:
    """What a worker must know; travels to it once."""

    config: BatchConfig
    run: Folder
    attempt: int
    carried: pa.Schema
    rows_per_batch: int
    device: Literal["cpu", "gpu"]
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
            worker=uuid.uuid4().hex[:8],
            node=socket.gethostname(),
            accelerator=job.config.pricing.accelerator,
            num_accelerators=job.num_accelerators,
            attempt=job.attempt,
            pricing=job.config.pricing,
        )
        self._heartbeat = Heartbeat(job.run, self._origin, job.config.cluster.heartbeat_s)
        self._readers = ThreadPoolExecutor(_READ_THREADS, thread_name_prefix="read")
        self._preparer = ThreadPoolExecutor(1, thread_name_prefix="prepare")  # tokenizers are not safe to share
        self._committers = ThreadPoolExecutor(_COMMIT_THREADS, thread_name_prefix="commit")
        self._refusal: ConfigError | None = None
        try:
            self._engine = self._load()
        except ConfigError as error:  # raised by the first shard: Ray would start an actor that fails here over and over
            self._refusal = error

    async def __call__(self, shard: pa.Table) -> pa.Table:
        """Answer a shard's batches and commit each as soon as it is done."""
        if self._refusal is not None:
            raise self._refusal
        batches = batches_of(shard)
        config = self._job.config.input
        blocks = read_batches(config.format, batches, self._columns, self._job.carried)
        tasks: list[asyncio.Task[dict[str, Any]]] = []
        try:
            async with asyncio.TaskGroup() as group:
                for batch in batches:
                    block = await self._read(blocks)
                    tasks.append(group.create_task(self._answer(batch, block)))
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        await _in(self._committers, self._heartbeat.beat)
        return pa.Table.from_pylist([task.result() for task in tasks], schema=_SUMMARY)

    def _load(self) -> Engine:
        folder = "" if isinstance(self._job.config.engine, EchoEngineConfig) else model_folder(self._job.config.model)
        engine = build_engine(self._job.config, folder, self._job.device)
        self._heartbeat.ready(engine)
        self._in_flight = asyncio.Semaphore(_batches_in_flight(engine.max_num_seqs, self._job.rows_per_batch))
        return engine

    async def _read(self, blocks: Iterator[Block]) -> Block:
        """Read the next batch once there is room for it; `_answer` gives the room back."""
        await self._in_flight.acquire()
        try:
            block: Block = await _in(self._readers, next, blocks)
        except BaseException:
            self._in_flight.release()
            raise
        return block

    async def _answer(self, batch: Batch, block: Block) -> dict[str, Any]:
        """Take one batch from its rows to its part."""
        try:
            requests = await _in(self._preparer, self._prepare, batch, block)
            good = [request for request in requests if not isinstance(request, RowError)]
            started_at_s, started = time.time(), time.perf_counter()
            answered = await asyncio.wrap_future(self._engine.submit(good))
            timing = Timing(started_at_s, time.perf_counter() - started)
            coming = iter(answered)
            outcomes: list[Outcome] = [one if isinstance(one, RowError) else next(coming) for one in requests]
            statistics: dict[str, Any] = await _in(self._committers, self._commit, batch, block, outcomes, timing)
            return statistics
        finally:
            self._in_flight.release()

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


def _batches_in_flight(max_num_seqs: int, rows_per_batch: int) -> int:
    """Enough to hold twice what the engine runs at once, and one more being made ready."""
    return max(3, -(-2 * max_num_seqs // rows_per_batch) + 1)


async def _in(pool: ThreadPoolExecutor, function: Any, *arguments: Any) -> Any:
    return await asyncio.get_running_loop().run_in_executor(pool, function, *arguments)
