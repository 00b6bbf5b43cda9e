"""Input formats. Each has an outline (what is in a file, without reading more than it must) and `read` (its batches)."""

from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Protocol

import pyarrow as pa

from pipelines.config import InputConfig
from pipelines.errors import ErrorKind, RowError
from pipelines.readers import csv, jsonl, parquet
from pipelines.rows import Batch, Block
from pipelines.storage import file_system


class Cut(Protocol):
    """Where a batch lies in its source; the fields mean what `schema.PLAN` says."""

    @property
    def first_row(self) -> int: ...
    @property
    def num_rows(self) -> int: ...
    @property
    def first_byte(self) -> int | None: ...
    @property
    def num_bytes(self) -> int | None: ...
    @property
    def row_group(self) -> int | None: ...


class Outline(Protocol):
    """What planning needs to know of one source."""

    @property
    def num_rows(self) -> int: ...
    @property
    def columns(self) -> pa.Schema: ...

    def cut(self, rows_per_batch: int, limit: int) -> Sequence[Cut]:
        """Cut the first `limit` rows into contiguous batches."""


_READERS: dict[str, ModuleType] = {"jsonl": jsonl, "csv": csv}


def outline(config: InputConfig, path: str, spooled: str | None, stride: int) -> Outline:
    """What is in a source or its copy; of JSON lines, the position of every `stride`-th row."""
    fs, place = file_system(spooled or path)
    match config.format:
        case "jsonl" if spooled is None:
            return jsonl.outline(fs, place, stride, config.limit)
        case "jsonl":
            return jsonl.outline_of_spooled(fs, place)
        case "csv":
            return csv.outline(fs, place)
        case _:  # tables are copied to Parquet
            return parquet.outline(fs, place)


def read_batches(config: InputConfig, batches: Sequence[Batch], columns: Sequence[str], carried: pa.Schema) -> Iterator[Block]:
    """Yield the rows of neighbouring batches of one source, in order, decoding the source once.

    What it raises for a damaged file is told by `sources.is_bad_file`; another call reads the batches after the damage.
    """
    reader = _READERS.get(config.format, parquet)  # tables are copied to Parquet
    blocks: Iterator[Block] = reader.read(tuple(batches), columns, carried)  # the caller's own list may shrink meanwhile
    return blocks


def unreadable(batch: Batch, error: Exception, carried: pa.Schema) -> Block:
    """The rows of a batch whose file is damaged, as errors; the lines of a text file are counted from the batch's first."""
    problem = RowError(ErrorKind.UNREADABLE_FILE, f"{batch.source} cannot be read here: {str(error) or type(error).__name__}")
    return Block(
        rows=[problem] * batch.num_rows,
        source_rows=range(batch.first_row, batch.end_row),
        carried=pa.Table.from_arrays([pa.nulls(batch.num_rows, field.type) for field in carried], schema=carried),
    )
