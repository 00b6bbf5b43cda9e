"""Parquet: planned from the footers alone, read by row range."""

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from pipelines.errors import ErrorKind, RowError
from pipelines.file_systems import arrow_file_system, file_system
from pipelines.rows import Batch, Block, Row

DECODE_ROWS = 4096  # rows decoded at a time
SOURCE, SOURCE_ROW, NUMBER = "fournee:source", "fournee:source_row", "fournee:number"
ORIGIN = pa.schema([(SOURCE, pa.dictionary(pa.int32(), pa.string())), (SOURCE_ROW, pa.int64()), (NUMBER, pa.int64())])
"""What an ordered copy says of each row: its source, its row there, and its number in the whole input."""

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
    num_bytes: int
    columns: pa.Schema
    group_starts: Sequence[int]

    def cut(self, sizes: Sequence[int]) -> list[Cut]:
        """Cut the first rows into contiguous batches of the given numbers of rows."""
        starts = accumulate(sizes, initial=0)
        return [
            Cut(first, size, bisect_right(self.group_starts, first) - 1) for first, size in zip(starts, sizes, strict=False)
        ]


def outline(fs: Any, path: str) -> Outline:
    """Read the footer of a file; raises ArrowInvalid or OSError where it is not a whole Parquet file."""
    with pq.ParquetFile(path, filesystem=arrow_file_system(fs)) as file:
        metadata = file.metadata
        groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
        starts = accumulate((group.num_rows for group in groups), initial=0)
        num_bytes = sum(group.total_byte_size for group in groups)
        return Outline(metadata.num_rows, num_bytes, file.schema_arrow, list(starts)[: len(groups)])


def read(batches: Sequence[Batch], columns: Sequence[str], carried: pa.Schema) -> Iterator[Block]:
    """Yield the rows of neighbouring batches of one file; their row groups are decoded once.

    Raises where a page is damaged. That costs the batches of its row group which are decoded with it or after it; a new call
    reads those of all other row groups.
    """
    for batch, table in tables(batches, list(dict.fromkeys([*columns, *carried.names]))):
        numbers = table[SOURCE_ROW].to_pylist() if batch.is_ordered else range(batch.first_row, batch.end_row)
        yield Block(rows_of(table, columns, numbers), numbers, conform(table, carried), **origins_of(batch, table))


def read_stored(batches: Sequence[Batch], columns: Sequence[str]) -> Iterator[pa.Table]:
    """Yield some columns of neighbouring batches as the file holds them."""
    for _, table in tables(batches, columns):
        yield table


def tables(batches: Sequence[Batch], columns: Sequence[str]) -> Iterator[tuple[Batch, pa.Table]]:
    """Yield each batch with its rows of the given columns, those that the file has; of an ordered copy with `ORIGIN`."""
    fs, path = file_system(batches[0].spooled or batches[0].source)
    columns = [*columns, *ORIGIN.names] if batches[0].is_ordered else columns
    # Without its checksums, which not all writers add, damage in a page that is not compressed passes for data.
    options = {"buffer_size": BUFFER_BYTES, "page_checksum_verification": True}
    with pq.ParquetFile(path, filesystem=arrow_file_system(fs), **options) as file:
        pieces = _pieces(file, batches, [name for name in columns if name in file.schema_arrow.names])
        piece_start, piece = next(pieces)
        for batch in batches:
            taken, row = [], batch.first_row
            while row < batch.end_row:
                if row >= piece_start + len(piece):
                    piece_start, piece = next(pieces)
                    continue
                taken.append(piece.slice(row - piece_start, batch.end_row - row))
                row += len(taken[-1])
            yield batch, pa.Table.from_batches(taken)


def origins_of(batch: Batch, table: pa.Table) -> dict[str, list[Any]]:
    """What a block says of where its rows come from."""
    if not batch.is_ordered:
        return {}
    return {"sources": table[SOURCE].to_pylist(), "numbers": table[NUMBER].to_pylist()}


def plain_type(data_type: pa.DataType) -> pa.DataType:
    """The type in which a column is carried: how a file encodes text must not split a run's schema or stop Arrow."""
    return _with_leaves(data_type, _plain_leaf)


def rows_of(table: pa.Table, columns: Sequence[str], numbers: Sequence[int]) -> list[Row]:
    """The rows of some columns, numbered as their source has them, as plain Python values at every depth.

    A map becomes a dict. A row that Python cannot hold becomes an error, and its neighbours stay.
    """
    return _rows(table.select([name for name in columns if name in table.column_names]), numbers)


def conform(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """The carried columns in the types of the run; null where a file lacks one."""
    columns = [
        table[field.name].cast(field.type) if field.name in table.column_names else pa.nulls(len(table), field.type)
        for field in schema
    ]
    return pa.Table.from_arrays(columns, schema=schema)


def _pieces(file: pq.ParquetFile, batches: Sequence[Batch], columns: Sequence[str]) -> Iterator[tuple[int, pa.RecordBatch]]:
    """Decode the row groups of the batches piece by piece; each piece with its first row.

    One row group at a time: Arrow would put the end of one and the start of the next into one piece, and damage in one
    would take rows of its neighbour along.
    """
    sizes = [file.metadata.row_group(i).num_rows for i in range(file.metadata.num_row_groups)]
    starts = [0, *accumulate(sizes)]
    wanted = [range(bisect_right(starts, one.first_row) - 1, bisect_right(starts, one.end_row - 1)) for one in batches]
    for group in sorted({group for groups in wanted for group in groups if sizes[group]}):
        row = starts[group]
        for piece in file.iter_batches(DECODE_ROWS, row_groups=[group], columns=columns, use_threads=False):
            yield row, piece
            row += len(piece)
        if row != starts[group + 1]:
            raise pa.ArrowInvalid(f"row group {group} has {row - starts[group]} rows where {sizes[group]} were expected")


def _rows(table: pa.Table, numbers: Sequence[int]) -> list[Row]:
    if not table.num_columns:
        return [{} for _ in range(len(table))]
    try:
        # The setting takes Arrow six times as long, even where there is no map.
        maps = "strict" if any(_has_map(data_type) for data_type in table.schema.types) else None
        rows: list[Row] = _in_microseconds(table).to_pylist(maps_as_pydicts=maps)
    except (ValueError, OverflowError, KeyError, TypeError) as error:  # no UTF-8, the year 10000, a map with a key twice
        if len(table) == 1:
            kind = ErrorKind.INVALID_TEXT if isinstance(error, UnicodeError) else ErrorKind.MALFORMED_ROW
            return [RowError(kind, f"row {numbers[0]} cannot be read: {error}")]
        half = len(table) // 2
        return _rows(table.slice(0, half), numbers[:half]) + _rows(table.slice(half), numbers[half:])
    return rows


def _has_map(data_type: pa.DataType) -> bool:
    return pa.types.is_map(data_type) or any(_has_map(data_type.field(i).type) for i in range(data_type.num_fields))


def _in_microseconds(table: pa.Table) -> pa.Table:
    """Times as Python holds them: of nanoseconds Arrow makes pandas objects. Raises ArrowInvalid where digits would be lost."""
    schema = pa.schema([(field.name, _with_leaves(field.type, _coarser_leaf)) for field in table.schema])
    return table if schema.types == table.schema.types else table.cast(schema)


def _with_leaves(data_type: pa.DataType, leaf: Callable[[pa.DataType], pa.DataType]) -> pa.DataType:
    """The same type with others in the place of those that hold no more types."""
    types = pa.types

    def deeper(field: pa.Field) -> pa.Field:
        return field.with_type(_with_leaves(field.type, leaf))

    if types.is_struct(data_type):
        return pa.struct([deeper(field) for field in data_type])
    if types.is_map(data_type):
        return pa.map_(deeper(data_type.key_field), deeper(data_type.item_field))
    if types.is_fixed_size_list(data_type):
        return pa.list_(deeper(data_type.value_field), data_type.list_size)
    if types.is_list(data_type) or types.is_list_view(data_type):
        return pa.list_(deeper(data_type.value_field))
    if types.is_large_list(data_type) or types.is_large_list_view(data_type):
        return pa.large_list(deeper(data_type.value_field))
    return leaf(data_type)


def _plain_leaf(data_type: pa.DataType) -> pa.DataType:
    types = pa.types
    if types.is_dictionary(data_type):
        return plain_type(data_type.value_type)
    if types.is_large_string(data_type) or types.is_string_view(data_type):
        return pa.string()
    return pa.binary() if types.is_binary_view(data_type) else data_type


def _coarser_leaf(data_type: pa.DataType) -> pa.DataType:
    if getattr(data_type, "unit", None) != "ns":
        return data_type
    if pa.types.is_timestamp(data_type):
        return pa.timestamp("us", data_type.tz)
    return pa.duration("us") if pa.types.is_duration(data_type) else pa.time64("us")
