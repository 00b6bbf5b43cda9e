"""What a worker does to a batch, each step in a thread of its own kind; `worker.py` says when.

A batch is read, prepared (rendered and tokenised, which a row may fail), answered by the engine, finished (parsed and
post-processed, which a row may fail too) and committed.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from operator import is_not
from typing import Any

import pyarrow as pa

from pipelines.config import BatchConfig
from pipelines.engines import Engine, Ticket
from pipelines.errors import RowError, RunFailed
from pipelines.marking import is_correct
from pipelines.parts import Desk, statistics_in
from pipelines.patience import patiently
from pipelines.poison import Cell, Suspicions
from pipelines.postprocess import Postprocessor
from pipelines.readers import read_batches, unreadable
from pipelines.readers.jsonl import as_text
from pipelines.requests import RequestBuilder
from pipelines.result_rows import failed_offsets, merged, request_key, result_table
from pipelines.rows import Answer, Batch, Block, Outcome, Request, Row, Settled
from pipelines.sources import check_unchanged, is_bad_file
from pipelines.statistics import Age, Origin, Timing, share_of, statistics_of
from pipelines.storage import Folder


@dataclass(frozen=True, slots=True)
class Work:
    """A batch, or those of its rows that failed before, and what is known about it."""

    batch: Batch
    block: Block
    part: pa.Table | None
    suspicions: Suspicions

    @property
    def is_suspect(self) -> bool:
        """Whether an engine died while it worked on this batch."""
        return self.suspicions.num_deaths(self.batch.batch_id) > 0

    @property
    def cells(self) -> list[Cell]:
        """What runs together, one after the other: all of it, unless an engine died while it had the batch alone."""
        return self.suspicions.cells(self.batch.batch_id, self.batch.num_rows)

    def rows_in(self, cell: Cell) -> list[int]:
        """Which rows of the block a cell holds."""
        return [i for i, place in enumerate(self.block.places) if cell.first <= place < cell.first + cell.num_rows]

    def attempts_before(self, place: int) -> int:
        """How often a row was handed to an engine before this run of it."""
        return 0 if self.part is None else self.part["attempts"][place].as_py()


@dataclass(frozen=True, slots=True)
class Entry:
    """A row on its way to the engine: its request, what the engine made of it, or why it comes no further."""

    expected: str | None = None
    """The answer that it should have."""
    request: Request | None = None
    prepared: Any = None
    error: RowError | None = None


class Steps:
    """Takes the rows of batches through everything but the engine itself."""

    def __init__(self, config: BatchConfig, run: Folder, carried: pa.Schema, origin: Origin, engine: Engine):
        self._config = config
        self._desk = Desk(run, config.output)
        self._carried = carried
        self._origin = origin
        self._engine = engine
        self._id_column = config.input.id_column
        self._expected_column = config.input.expected_column
        self._requests = RequestBuilder(config, engine.special_tokens)
        self._postprocessor = Postprocessor(config.postprocess)
        self._columns = list(dict.fromkeys([*self._requests.columns, *([self._id_column] if self._id_column else [])]))

    def unsettled(self, batches: Sequence[Batch]) -> list[tuple[Batch, pa.Table | None]]:
        """Leave out what is settled: Ray hands a dead worker's shards on as they were. A part comes along for its good rows."""
        unsettled: list[tuple[Batch, pa.Table | None]] = []
        for batch in batches:
            if not self._config.retry_failed:
                unsettled += [] if self._desk.has(batch.batch_id) else [(batch, None)]
                continue
            part = self._desk.find(batch.batch_id)
            if part is None or (statistics_in(part)["attempt"] != self._origin.attempt and failed_offsets(part)):
                unsettled.append((batch, part))
        return unsettled

    def blocks(self, batches: Sequence[Batch]) -> Iterator[Block]:
        """The rows of neighbouring batches; what cannot be read any more becomes failed rows, if the settings allow it."""
        left = list(batches)
        reading: Iterator[Block] | None = None

        def following() -> Block:
            nonlocal reading
            try:
                if reading is None:
                    check_unchanged(left[0])
                    reading = read_batches(self._config.input, tuple(left), self._columns, self._carried)
                return next(reading)
            except Exception:
                reading = None  # the next try opens the file again, at the batch that this one was at
                raise

        while left:
            try:
                yield patiently(following, left[0].source, self._config.output.patience_s)
                left.pop(0)
            except Exception as error:
                if not is_bad_file(error):
                    raise
                batch = left.pop(0)
                if batch.is_ordered:  # which rows it held, nothing else says
                    raise RunFailed(f"{batch.source}, the run's own copy, cannot be read: {error}; put it back") from None
                if self._config.input.on_bad_file == "fail":
                    raise RunFailed(
                        f"{batch.source}, rows from {batch.first_row}, cannot be read: {error}; "
                        "put the file right, or set input.on_bad_file=skip"
                    ) from None
                yield unreadable(batch, error, self._carried)

    def prepare(self, work: Work, cell: Cell) -> list[Entry]:
        """Render and tokenise each row of a cell; a row that cannot be is replaced by its error."""
        return [self._prepare_row(work, index) for index in work.rows_in(cell)]

    def _prepare_row(self, work: Work, index: int) -> Entry:
        row, place = work.block.rows[index], work.block.places[index]
        if isinstance(row, RowError):
            return Entry(error=row)
        expected, request = self._expected(row), None
        try:
            request = self._requests.build(
                row,
                key=request_key(work.batch, place),
                row_number=work.block.number_of(work.batch, index),
                attempt=1 + work.attempts_before(place),
            )
            return Entry(expected, request, self._engine.prepare(request))
        except RowError as error:
            return Entry(expected, request, error=error)

    def convict(self, work: Work, cell: Cell, error: RowError) -> list[Settled]:
        """Fail what must not be run again."""
        entries = [Entry(self._expected(work.block.rows[index]), error=error) for index in work.rows_in(cell)]
        return [Settled(None, error, self._is_correct(entry, error)) for entry in entries]

    def finish(self, entries: Sequence[Entry], ticket: Ticket) -> list[Settled]:
        """Make of each answer what the settings ask for."""
        coming = iter(ticket.outcomes())
        settled = []
        for entry in entries:
            outcome = entry.error or next(coming)
            if isinstance(outcome, Answer) and entry.request is not None:
                sampling = entry.request.sampling
                made = [self._postprocessor.apply(one, sampling) for one in outcome.completions]
                if any(map(is_not, made, outcome.completions)):  # a copy of an answer costs as much as all else here
                    outcome = replace(outcome, completions=made)
            settled.append(Settled(entry.request, outcome, self._is_correct(entry, outcome)))
        return settled

    def _expected(self, row: Row) -> str | None:
        if self._expected_column is None or isinstance(row, RowError):
            return None
        return as_text(row.get(self._expected_column)) or None

    def _is_correct(self, entry: Entry, outcome: Outcome) -> bool | None:
        if entry.expected is None:
            return None
        if entry.request is None or not isinstance(outcome, Answer):
            return False
        return is_correct(outcome.completions[0], entry.expected, entry.request.sampling, self._postprocessor)

    def commit(self, work: Work, settled: Sequence[Settled], timing: Timing, age: Age) -> tuple[dict[str, Any], pa.Table]:
        """Write the batch's part; returns its statistics, and the rows that are new."""
        batch, block, part = work.batch, work.block, work.part
        answers = [one.answer for one in settled if one.answer is not None]
        shares = [share_of(answers, self._origin, age)]
        deaths = work.suspicions.num_deaths(batch.batch_id)
        attempts = [1 + deaths + work.attempts_before(place) for place in block.places]
        table = fresh = result_table(batch, block, list(self._ids(batch, block)), settled, attempts)
        if part is not None:
            before = statistics_in(part)
            table = merged(part, fresh, block.places)
            timing = Timing(before["started_at"] / 1e6, before["wall_s"] + timing.wall_s)
            shares = [*before["shares"], *shares]
        statistics = statistics_of(batch, table, timing, shares, self._origin)
        self._desk.commit(table, statistics)
        return statistics, fresh

    def _ids(self, batch: Batch, block: Block) -> Iterator[str | None]:
        """Each row's id as text: from its column, else its number in the whole input."""
        for index, row in enumerate(block.rows):
            if self._id_column is None:
                yield str(block.number_of(batch, index))
            else:
                yield None if isinstance(row, RowError) else as_text(row.get(self._id_column))
