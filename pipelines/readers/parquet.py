"""Parquet: planned from the footers alone, read by row range."""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from pipelines.errors import ErrorKind, RowError
from pipelines.rows import Batch, Block, Row
from pipelines.storage import arrow_file_system, file_system

DECODE_ROWS = 4096  # rows decoded at a time
BUFFER_BYTES = 8 * 2**20  # bytes read at a time: without it, a whole column of the row group is held in memory


@dataclass(frozen=True, slots=True)
class Cut:
    """Where a batch lies in its file."""

    first_row: int
    num_rows: int
    row_group: int
    first_byte: None = None
    num_bytes: None = None


@dataclass(frozen=True, slots=True)
class Outline:
    """A file's footer: its columns and the first row of each row group."""

    num_rows: int
    columns: pa.Schema
    group_starts: Sequence[int]

    def cut(self, rows_per_batch: int, limit: int) -> list[Cut]:
        """Cut the first `limit` rows into contiguous batches."""
        num_rows = min(self.num_rows, limit)
        return [
            Cut(first, min(rows_per_batch, num_rows - first), bisect_right(self.group_starts, first) - 1)
            for first in range(0, num_rows, rows_per_batch)
        ]


def outline(fs: Any, path: str) -> Outline:
    """Read the footer of a file; raises ArrowInvalid or OSError where it is not a whole Parquet file."""
    with pq.ParquetFile(path, filesystem=arrow_file_system(fs)) as file:
        metadata = file.metadata
        rows = [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]
        return Outline(metadata.num_rows, file.schema_arrow, [0, *accumulate(rows)][: len(rows)])


def read(batches: Sequence[Batch], columns: Sequence[str], carried: pa.Schema) -> Iterator[Block]:
    """Yield the rows of neighbouring batches of one file; their row groups are decoded once."""
    wanted = [*columns, *(name for name in carried.names if name not in columns)]
    for batch, table in tables(batches, wanted):
        yield Block(
            rows=_rows(table.select([name for name in columns if name in table.column_names]), batch.first_row),
            source_rows=range(batch.first_row, batch.end_row),
            carried=_conform(table, carried),
        )


def tables(batches: Sequence[Batch], columns: Sequence[str]) -> Iterator[tuple[Batch, pa.Table]]:
    """Yield each batch with its rows of the given columns, those that the file has."""
    fs, path = file_system(batches[0].spooled or batches[0].source)
    with pq.ParquetFile(path, filesystem=arrow_file_system(fs), buffer_size=BUFFER_BYTES) as file:
        sizes = [file.metadata.row_group(i).num_rows for i in range(file.metadata.num_row_groups)]
        starts = [0, *accumulate(sizes)]
        first_group = bisect_right(starts, batches[0].first_row) - 1
        end_group = bisect_right(starts, batches[-1].end_row - 1)
        stream = file.iter_batches(
            batch_size=DECODE_ROWS,
            row_groups=range(first_group, end_group),
            columns=[name for name in columns if name in file.schema_arrow.names],
            use_threads=False,
        )
        piece, piece_start = next(stream), starts[first_group]
        for batch in batches:
            pieces, row = [], batch.first_row
            while row < batch.end_row:
                if row >= piece_start + len(piece):
                    piece_start += len(piece)
                    piece = next(stream)
                    continue
                taken = piece.slice(row - piece_start, batch.end_row - row)
                pieces.append(taken)
                row += len(taken)
            yield batch, pa.Table.from_batches(pieces)


def plain_type(data_type: pa.DataType) -> pa.DataType:
    """The type in which a column is carried: how a file encodes text must not split a run's schema."""
    if pa.types.is_dictionary(data_type):
        data_type = data_type.value_type
    if pa.types.is_large_string(data_type) or pa.types.is_string_view(data_type):
        return pa.string()
    return data_type


def _rows(table: pa.Table, first_row: int) -> list[Row]:
    """The rows as Python values; one that Python cannot hold becomes an error, and its neighbours stay."""
    if not table.num_columns:
        return [{} for _ in range(len(table))]
    try:
        rows: list[Row] = table.to_pylist()
    except (ValueError, OverflowError) as error:  # text that is not UTF-8, a date after the year 9999
        if len(table) == 1:
            kind = ErrorKind.INVALID_TEXT if isinstance(error, UnicodeError) else ErrorKind.MALFORMED_ROW
            return [RowError(kind, f"row {first_row} cannot be read: {error}")]
        half = len(table) // 2
        return _rows(table.slice(0, half), first_row) + _rows(table.slice(half), first_row + half)
    return rows


def _conform(table: pa.Table, schema: pa.Schema) -> pa.Table:
    columns = [
        table[field.name].cast(field.type) if field.name in table.column_names else pa.nulls(len(table), field.type)
        for field in schema
    ]
    return pa.Table.from_arrays(columns, schema=schema)
