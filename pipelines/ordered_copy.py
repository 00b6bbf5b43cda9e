"""Copies of the rows of an input in another order, in files of the run folder that the batches of a plan lie in.

A copy holds the columns that the run uses as their readers store them, and says of each row where it comes from. It is made
in two passes, whatever the number of rows: each goes into the bucket of its place, a temporary file, and then each bucket is
put in order. In memory are one bucket, or 64 MiB on their way to the buckets.
"""

import tempfile
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from pipelines.config import InputConfig
from pipelines.errors import RunFailed
from pipelines.readers import for_file, read_stored
from pipelines.readers.parquet import NUMBER, ORIGIN, SOURCE, SOURCE_ROW
from pipelines.rows import Batch
from pipelines.sizing import BatchSize
from pipelines.sources import check_unchanged, read_each
from pipelines.storage import Folder

_FILE_ROWS = 16384  # one row group: workers decode it from its start
_FILE_TOKENS = 2**24  # some 64 MiB of text
_MOST_BUCKETS = 256
_WAITING_BYTES = 64 * 2**20
_NUMBERED = ("jsonl", "csv")  # their rows are stored with the line that they have in their source

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Kind:
    """What rows must have in common to lie in one file: how they are read, and their columns' types."""

    format: str
    schema: pa.Schema


@dataclass(frozen=True, slots=True)
class Layout:
    """The rows in their new order (as numbers in the whole input), and where batches and files begin in it."""

    order: Ints
    first_of_batch: Ints
    first_of_file: Ints
    """Batches do not cross them."""
    kinds: Sequence[Kind]
    """Of each file."""

    @property
    def ends_of_files(self) -> Ints:
        """Where each file ends."""
        return np.append(self.first_of_file[1:], len(self.order))


def kinds_of(config: InputConfig, batches: Sequence[Batch], columns: Sequence[str]) -> tuple[list[Kind], list[int]]:
    """The kinds of rows that there are, and that of each batch; the first batch of a source speaks for the others."""
    kinds: dict[Kind, int] = {}
    of_source: dict[str, int] = {}
    for batch in batches:
        if batch.source not in of_source:
            stored = next(read_stored(config, [batch], columns))
            kind = Kind(for_file(config, batch.source).format, stored.schema.remove_metadata())
            of_source[batch.source] = kinds.setdefault(kind, len(kinds))
    return list(kinds), [of_source[batch.source] for batch in batches]


def lay_out(order: Ints, kind_of_row: Ints, kinds: Sequence[Kind], num_tokens: Ints, size: BatchSize) -> Layout:
    """Cut ordered rows, those of each kind together, into batches of about the same number of tokens, and these into files.

    A batch has twice the usual number of rows at most: short prompts may have long answers.
    """
    before = np.concatenate(([0], np.cumsum(np.maximum(num_tokens[order], 1))))
    mean = before[-1] / len(order)
    first_of_batch: list[int] = []
    first_of_file: list[int] = []
    first = 0
    for end in [*(np.flatnonzero(np.diff(kind_of_row[order])) + 1).tolist(), len(order)]:
        first_of_file.append(first)
        while first < end:
            start = first_of_file[-1]
            if first - start >= _FILE_ROWS or before[first] - before[start] >= _FILE_TOKENS:
                first_of_file.append(first)
            first_of_batch.append(first)
            usual = size.at(len(order) - first)
            full = int(np.searchsorted(before, before[first] + mean * usual))
            first = min(max(full, first + 1), first + 2 * usual, end)
    of_files = [kinds[kind] for kind in kind_of_row[order[first_of_file]]]
    return Layout(order, np.array(first_of_batch), np.array(first_of_file), of_files)


def copy_rows(
    config: InputConfig, batches: Sequence[Batch], columns: Sequence[str], layout: Layout, folder: Folder
) -> list[dict[str, object]]:
    """Copy the rows of the given batches into files of the folder; returns the lines of a plan for them."""
    unique = uuid.uuid4().hex[:8]  # what a driver that was killed wrote in another order is no part of this plan
    names = [f"spool/ordered-{unique}-{number:05d}.{kind.format}" for number, kind in enumerate(layout.kinds)]
    with tempfile.TemporaryDirectory() as temporary:
        buckets = _Buckets(Path(temporary), layout)
        for rows in _stored(config, batches, columns):
            buckets.add(rows)
        for name, rows in zip(names, buckets.files(), strict=True):
            with folder.create(name) as target:
                pq.write_table(rows, target, compression="zstd", row_group_size=len(rows), write_page_checksum=True)
    return _lines(layout, [str(folder.fs.unstrip_protocol(folder.path(name))) for name in names])


class _Buckets:
    """Temporary files, each of the rows of neighbouring files of one kind."""

    def __init__(self, folder: Path, layout: Layout):
        self._folder = folder
        self._layout = layout
        self._place = np.zeros(int(layout.order.max()) + 1, np.int64)
        self._place[layout.order] = np.arange(len(layout.order))
        files_at_once = -(-len(layout.kinds) // _MOST_BUCKETS)
        is_new = [
            number % files_at_once == 0 or kind is not layout.kinds[number - 1] for number, kind in enumerate(layout.kinds)
        ]
        self._bucket_of_file = np.cumsum(is_new) - 1
        self._waiting: dict[pa.Schema, list[pa.Table]] = {}
        self._num_bytes = 0

    def add(self, rows: pa.Table) -> None:
        """Take rows, in whatever order they come."""
        self._waiting.setdefault(rows.schema, []).append(rows)
        self._num_bytes += rows.nbytes
        if self._num_bytes >= _WAITING_BYTES:
            self._flush()

    def files(self) -> Iterator[pa.Table]:
        """The rows of one file after the other, in their order."""
        self._flush()
        ends = self._layout.ends_of_files
        for bucket in range(int(self._bucket_of_file[-1]) + 1):
            rows = self._read(bucket)
            places = self._place[rows[NUMBER].to_numpy()]
            by_place = np.argsort(places)
            done = 0
            for number in np.flatnonzero(self._bucket_of_file == bucket).tolist():
                size = int(ends[number] - self._layout.first_of_file[number])
                yield rows.take(by_place[done : done + size])
                done += size
            assert done == len(rows), f"{len(rows)} rows were copied where {done} were expected"

    def _flush(self) -> None:
        for tables in self._waiting.values():
            rows = pa.concat_tables(tables)
            files = np.searchsorted(self._layout.first_of_file, self._place[rows[NUMBER].to_numpy()], side="right") - 1
            buckets = self._bucket_of_file[files]
            by_bucket = np.argsort(buckets, kind="stable")
            rows, buckets = rows.take(by_bucket), buckets[by_bucket]
            bounds = [0, *(np.flatnonzero(np.diff(buckets)) + 1).tolist(), len(buckets)]
            for start, end in pairwise(bounds):
                self._append(int(buckets[start]), rows.slice(start, end - start))
        self._waiting, self._num_bytes = {}, 0

    def _append(self, bucket: int, rows: pa.Table) -> None:
        """A whole stream more: a file that stayed open for each bucket would be one too many for some systems."""
        options = pa.ipc.IpcWriteOptions(compression="lz4")
        with (self._folder / str(bucket)).open("ab") as file, pa.ipc.new_stream(file, rows.schema, options=options) as stream:
            stream.write_table(rows)

    def _read(self, bucket: int) -> pa.Table:
        tables = []
        path = self._folder / str(bucket)
        with path.open("rb") as file:
            while file.tell() < path.stat().st_size:
                tables.append(pa.ipc.open_stream(file).read_all())
        path.unlink()
        return pa.concat_tables(tables)


def _stored(config: InputConfig, batches: Sequence[Batch], columns: Sequence[str]) -> Iterator[pa.Table]:
    """The rows of all batches as they are stored, and where they come from."""

    def read(neighbours: Sequence[Batch]) -> Iterator[pa.Table]:
        check_unchanged(neighbours[0])
        return read_stored(config, neighbours, columns)

    for batch, stored in read_each(batches, config, read):
        if stored is None:
            raise RunFailed(
                f"{batch.source}, rows from {batch.first_row}, could be read a moment ago and cannot now; try again"
            )
        is_numbered = for_file(config, batch.source).format in _NUMBERED
        origin = {
            SOURCE: pa.DictionaryArray.from_arrays(np.zeros(len(stored), np.int32), [batch.source]),
            SOURCE_ROW: stored["number"] if is_numbered else pa.array(range(batch.first_row, batch.end_row), pa.int64()),
            NUMBER: pa.array(range(batch.rows_before, batch.rows_before + len(stored)), pa.int64()),
        }
        rows = stored.replace_schema_metadata()
        for field in ORIGIN:
            rows = rows.append_column(field, origin[field.name])
        yield rows


def _lines(layout: Layout, places: Sequence[str]) -> list[dict[str, object]]:
    """The lines of a plan, but for the numbers of its batches."""
    ends = np.append(layout.first_of_batch[1:], len(layout.order))
    files = np.searchsorted(layout.first_of_file, layout.first_of_batch, side="right") - 1
    return [
        {
            "source": places[file],
            "spooled": places[file],
            "source_bytes": 0,
            "source_version": "",
            "first_row": first - int(layout.first_of_file[file]),
            "num_rows": end - first,
            "rows_before": first,
            "row_group": 0,
        }
        for first, end, file in zip(layout.first_of_batch.tolist(), ends.tolist(), files.tolist(), strict=True)
    ]
