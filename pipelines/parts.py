"""Parts: the Parquet file that a batch commits, its rows and its statistics in one object; and where each batch's rows are.

A run keeps its parts in `results/`, or, where they are to be put together at the end (`compaction`), in `parts/` until then.
A file of several batches holds them whole and in the plan's order, with the statistics of all of them. Readers need not know:
`Parts` finds a batch in either folder and in either kind of file.
"""

import io
import json
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from itertools import groupby
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pipelines.config import OutputConfig
from pipelines.errors import RunFailed
from pipelines.schema import SUCCESS_FILE
from pipelines.sources import is_bad_file
from pipelines.storage import Folder

T = TypeVar("T")

RESULTS = "results"
PARTS = "parts"
ALL_STATISTICS = b"fournee.batches"
_STATISTICS = b"fournee.batch"
_NAME = re.compile(r"part-(\d{8,})(?:-(\d{8,}))?\.parquet")
_FOOTER_THREADS = 64  # where a request takes 30 ms, 16 threads read 150 footers a second, 64 read 550; on a disk all the same
_READ_THREADS = 32  # each holds a part of which it may have read more than it needs
_PARTS_AHEAD = 2 * _READ_THREADS  # that many are in memory at once
_WHOLE_PARTS_AHEAD = 8  # with all their columns
_FOOTERS_AT_ONCE = 1000


def part_name(batch_id: int, folder: str = RESULTS) -> str:
    """The name of a batch's part follows from its number alone."""
    return f"{folder}/part-{batch_id:08d}.parquet"


def file_name(first: int, last: int) -> str:
    """The name of a file that holds all batches from the first to the last."""
    return f"{RESULTS}/part-{first:08d}-{last:08d}.parquet"


def commit(run: Folder, table: pa.Table, statistics: dict[str, Any], compression: str, folder: str = RESULTS) -> None:
    """Write a batch's part, whole or not at all; a second writer replaces it with answers to the same rows."""
    sink = io.BytesIO()
    pq.write_table(table.replace_schema_metadata({_STATISTICS: json.dumps(statistics)}), sink, compression=compression)
    run.write(part_name(statistics["batch_id"], folder), sink.getvalue())


def statistics_in(part: pa.Table) -> dict[str, Any]:
    """The statistics that ride with the rows of a part."""
    statistics: dict[str, Any] = json.loads(part.schema.metadata[_STATISTICS])
    return statistics


class Desk:
    """Where a worker commits, and what it finds there."""

    def __init__(self, run: Folder, output: OutputConfig):
        self._run = run
        self._folder = folder_of(output)
        self._compression = output.compression

    @cached_property
    def _files(self) -> "Parts":
        """What stands in `results/`, if that is not where parts are committed: no worker changes it."""
        return Parts(self._run, [] if self._folder == RESULTS else [RESULTS])

    def has(self, batch_id: int) -> bool:
        """Whether a batch has its part now."""
        return self._run.exists(part_name(batch_id, self._folder))

    def find(self, batch_id: int) -> pa.Table | None:
        """The rows of a batch as they are now, with its statistics in their metadata; None where there are none."""
        if self.has(batch_id):
            return _read_part(self._run, part_name(batch_id, self._folder))
        return next(self._files.read([batch_id])) if batch_id in self._files else None

    def commit(self, table: pa.Table, statistics: dict[str, Any]) -> None:
        """Write a batch's part."""
        commit(self._run, table, statistics, self._compression, self._folder)


def folder_of(output: OutputConfig) -> str:
    """Where parts are committed: what is to be put together stays out of the sight of whoever reads `results/`."""
    return RESULTS if output.rows_per_file is None else PARTS


class Parts:
    """The committed batches and where the rows of each are, as a listing of each folder showed it.

    A batch that stands in both counts as it stands in `parts/`: compaction has not come to its end, or failed rows were
    answered again. In a finished run nothing in `parts/` counts: a worker that outlived the run has left it.
    """

    def __init__(self, run: Folder, folders: Iterable[str] = (PARTS, RESULTS)):
        self._run = run
        self._places: dict[int, str] = {}  # the file of several batches, or the folder of a part
        self._open: _File | None = None
        for folder in folders:  # parts first: they go when their file is there
            names = run.names(folder)
            if folder == PARTS and names and run.exists(SUCCESS_FILE):
                continue
            for match in filter(None, map(_NAME.fullmatch, names)):
                first, last = int(match[1]), int(match[2] or match[1])
                self._note(range(first, last + 1), folder if match[2] is None else f"{folder}/{match[0]}")

    def _note(self, batch_ids: Iterable[int], place: str) -> None:
        for batch_id in batch_ids:
            before = self._places.setdefault(batch_id, place)
            if before not in (place, PARTS):
                raise RunFailed(f"batch {batch_id} stands twice in {RESULTS}/, in {before} and {place}; move one of them away")

    @property
    def batch_ids(self) -> list[int]:
        """The batches that are committed."""
        return sorted(self._places)

    def __contains__(self, batch_id: int) -> bool:
        return batch_id in self._places

    def name(self, batch_id: int) -> str:
        """The file that holds a batch."""
        if batch_id not in self._places:
            raise RunFailed(f"batch {batch_id} has no part; resume the run")
        place = self._places[batch_id]
        return part_name(batch_id, place) if place in (RESULTS, PARTS) else place

    def read(self, batch_ids: Iterable[int], columns: Sequence[str] | None = None) -> Iterator[pa.Table]:
        """Yield the rows of each batch, with its statistics in their metadata; parts are read ahead.

        From files of several batches each row group is read once, if the batches come in order. Raises RunFailed where a
        file is damaged or gone.
        """
        ahead: deque[Future[pa.Table]] = deque()
        most = _WHOLE_PARTS_AHEAD if columns is None else _PARTS_AHEAD
        with ThreadPoolExecutor(_READ_THREADS) as pool:
            for batch_id in batch_ids:
                name = self.name(batch_id)
                if name == self._places[batch_id]:
                    while ahead:
                        yield ahead.popleft().result()
                    yield self._read_slice(name, batch_id, columns)
                    continue
                ahead.append(pool.submit(_read_part, self._run, name, columns))
                if len(ahead) == most:
                    yield ahead.popleft().result()
            while ahead:
                yield ahead.popleft().result()

    def _read_slice(self, name: str, batch_id: int, columns: Sequence[str] | None) -> pa.Table:
        def read() -> pa.Table:
            if self._open is None or self._open.name != name:
                self._open = _File(self._run, name)
            return self._open.read(batch_id, columns)

        return _read(self._run, name, read)

    def statistics(self, batch_ids: Sequence[int]) -> Iterator[list[dict[str, Any]]]:
        """Yield the statistics of batches from their files' footers, some at a time; `num_rows_written` is what each holds.

        Raises RunFailed where a file is damaged or gone.
        """
        with ThreadPoolExecutor(_FOOTER_THREADS) as pool:
            for start in range(0, len(batch_ids), _FOOTERS_AT_ONCE):
                some = groupby(batch_ids[start : start + _FOOTERS_AT_ONCE], self.name)
                files = [(name, list(group)) for name, group in some]
                yield [line for lines in pool.map(lambda file: _read_footer(self._run, *file), files) for line in lines]

    def failures(self, batch_ids: Sequence[int], before_attempt: int) -> dict[int, int]:
        """How many rows failed in each of the given batches that an earlier attempt committed, those of none left out."""
        earlier = (one for some in self.statistics(batch_ids) for one in some if one["attempt"] < before_attempt)
        return {line["batch_id"]: line["num_failed"] for line in earlier if line["num_failed"]}


class _File:
    """A file of several batches, open: which rows are whose, and the row groups that were read last."""

    def __init__(self, run: Folder, name: str):
        self.name = name
        self._file = pq.ParquetFile(run.path(name), filesystem=run.arrow, pre_buffer=True)
        self._lines = {line["batch_id"]: line for line in _lines_in(self._file.metadata)}
        groups = range(self._file.num_row_groups)
        self._group_ends = np.cumsum([self._file.metadata.row_group(group).num_rows for group in groups])
        self._ends = dict(zip(self._lines, np.cumsum([line["num_rows"] for line in self._lines.values()]), strict=True))
        self._held: dict[tuple[int, Sequence[str] | None], pa.Table] = {}

    def read(self, batch_id: int, columns: Sequence[str] | None) -> pa.Table:
        line = self._lines[batch_id]
        end, num_rows = int(self._ends[batch_id]), line["num_rows"]
        first = int(np.searchsorted(self._group_ends, end - num_rows, side="right"))
        last = int(np.searchsorted(self._group_ends, end, side="left"))
        wanted = [(group, None if columns is None else tuple(columns)) for group in range(first, last + 1)]
        self._held = {
            key: self._held[key] if key in self._held else self._file.read_row_group(key[0], columns=columns) for key in wanted
        }
        before = int(self._group_ends[first - 1]) if first else 0
        rows = pa.concat_tables(self._held.values()).slice(end - num_rows - before, num_rows)
        return rows.replace_schema_metadata({_STATISTICS: json.dumps(line)})


def _read(run: Folder, name: str, action: Callable[[], T]) -> T:
    try:
        return run.patiently(action, name)
    except FileNotFoundError:
        raise RunFailed(f"{name} is gone since the folder was listed; try again, or resume the run") from None
    except Exception as error:
        if not is_bad_file(error):
            raise
        raise RunFailed(f"{name} cannot be read: {error}; delete it and resume the run") from None


def _read_part(run: Folder, name: str, columns: Sequence[str] | None = None) -> pa.Table:
    def read() -> pa.Table:
        # All of it takes one request.
        source = run.path(name) if columns is not None else pa.BufferReader(run.fs.cat_file(run.path(name)))
        with pq.ParquetFile(source, filesystem=None if columns is None else run.arrow) as file:
            return file.read(columns=columns, use_threads=False)

    return _read(run, name, read)


def _read_footer(run: Folder, name: str, batch_ids: Sequence[int]) -> list[dict[str, Any]]:
    metadata = _read(run, name, lambda: pq.read_metadata(run.path(name), filesystem=run.arrow))
    lines = _lines_in(metadata)
    if ALL_STATISTICS not in (metadata.metadata or {}):
        return [{**lines[0], "num_rows_written": metadata.num_rows}]
    told = {line["batch_id"]: line for line in lines}
    if sum(line["num_rows"] for line in lines) != metadata.num_rows or not told.keys() >= set(batch_ids):
        raise RunFailed(f"{name} does not hold the batches that its name and its footer tell of; delete it and resume the run")
    return [{**told[batch_id], "num_rows_written": told[batch_id]["num_rows"]} for batch_id in batch_ids]


def _lines_in(metadata: pq.FileMetaData) -> list[dict[str, Any]]:
    told = metadata.metadata or {}
    lines: list[dict[str, Any]] = json.loads(told.get(ALL_STATISTICS) or b"[%s]" % told.get(_STATISTICS, b"{}"))
    return lines
