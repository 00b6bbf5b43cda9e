"""Input formats. Each has an outline (what is in a file, without reading more than it must) and `read` (its batches)."""

from collections.abc import Iterator, Sequence
from pathlib import PurePosixPath
from types import ModuleType
from typing import Any, Protocol

import pyarrow as pa

from pipelines.config import AnyInput, CsvInput, FilesInput, InputConfig, JsonlInput, ParquetInput
from pipelines.errors import ConfigError, ErrorKind, RowError
from pipelines.file_systems import file_system
from pipelines.readers import csv, jsonl, parquet
from pipelines.readers.compressed import compression_of
from pipelines.rows import Batch, Block


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
    def num_bytes(self) -> int:
        """Of all rows, where nothing compresses them."""

    @property
    def columns(self) -> pa.Schema: ...

    def cut(self, sizes: Sequence[int]) -> Sequence[Cut]:
        """Cut the first rows into contiguous batches of the given numbers of rows."""


SUFFIXES = {
    **dict.fromkeys((".parquet", ".pq"), "parquet"),
    **dict.fromkeys((".jsonl", ".ndjson", ".json"), "jsonl"),
    **dict.fromkeys((".csv", ".tsv"), "csv"),
}
_READERS: dict[str, ModuleType] = {"jsonl": jsonl, "csv": csv}


def suffix_of(path: str) -> str:
    """What a file's name says about its format, whatever compresses it."""
    name = PurePosixPath(path)
    return (name.with_suffix("") if compression_of(path) is not None else name).suffix.lower()


def for_file(config: InputConfig, path: str) -> InputConfig:
    """The settings with which one file is read: where there are several formats, those of its own.

    Raises ConfigError where its ending tells none.
    """
    if not isinstance(config, FilesInput):
        return config
    shared = {name: getattr(config, name) for name in ("path", *AnyInput.model_fields)}
    match SUFFIXES.get(suffix_of(path)):
        case "parquet":
            return ParquetInput(format="parquet", **shared)
        case "jsonl":
            return JsonlInput(format="jsonl", **shared)
        case "csv":
            tabs = suffix_of(path) == ".tsv"
            style: dict[str, Any] = {"delimiter": "\t" if tabs else ",", "quote": None if tabs else '"', "columns": None}
            return CsvInput(format="csv", encoding=config.encoding, **style, **shared)
        case _:
            raise ConfigError(
                f"input.path: the ending of {path} tells no format (known are {', '.join(SUFFIXES)}); "
                "rename it, or name its format: input=parquet, input=jsonl or input=csv"
            )


def outline(config: InputConfig, path: str, spooled: str | None, stride: int) -> Outline:
    """What is in a source or its copy; of JSON lines, the position of every `stride`-th row."""
    fs, place = file_system(spooled or path)
    match for_file(config, path).format:
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
    reader = _READERS.get(for_file(config, batches[0].source).format, parquet)  # tables are copied to Parquet
    blocks: Iterator[Block] = reader.read(tuple(batches), columns, carried)  # the caller's own list may shrink meanwhile
    return blocks


def read_stored(config: InputConfig, batches: Sequence[Batch], columns: Sequence[str]) -> Iterator[pa.Table]:
    """Yield the rows of neighbouring batches of one source as a copy holds them, to be put into another copy; raises alike."""
    reader = _READERS.get(for_file(config, batches[0].source).format, parquet)
    stored: Iterator[pa.Table] = reader.read_stored(tuple(batches), columns)
    return stored


def unreadable(batch: Batch, error: Exception, carried: pa.Schema) -> Block:
    """The rows of a batch whose file is damaged, as errors; the lines of a text file are counted from the batch's first."""
    problem = RowError(ErrorKind.UNREADABLE_FILE, f"{batch.source} cannot be read here: {str(error) or type(error).__name__}")
    return Block(
        rows=[problem] * batch.num_rows,
        source_rows=range(batch.first_row, batch.end_row),
        carried=pa.Table.from_arrays([pa.nulls(batch.num_rows, field.type) for field in carried], schema=carried),
    )
