"""Copies of the sources that cannot be read by position: compressed text, delimited text, tables.

A copy is one Parquet file in the run folder, which every worker can read wherever it runs.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import IO, Any

import pyarrow as pa
import pyarrow.parquet as pq

from pipelines import tables
from pipelines.config import CsvInput, FileInput, FilesInput, InputConfig, JsonlInput, ParquetInput
from pipelines.file_systems import file_system
from pipelines.readers import csv, for_file, jsonl
from pipelines.readers.compressed import compression_of, open_text
from pipelines.sources import Source
from pipelines.storage import Folder

_FOLDER = "spool"
_GROUP_ROWS = 16384  # rows in a row group of a copy; fewer where they are long
_GROUP_BYTES = 64 * 2**20
_CONTENT = {"format", "limit", "delimiter", "quote", "encoding", "columns"}  # the settings that a copy's content depends on

Row = tuple[Any, ...]


def check_settings(config: InputConfig) -> None:
    """Raises ConfigError for settings with which no source can be copied."""
    if isinstance(config, FilesInput):
        config = for_file(config, "any.csv")
    if isinstance(config, CsvInput):
        csv.check_settings(config)


def spool(source: Source, config: InputConfig, run: Folder) -> str | None:
    """Copy a source into the run folder, if it is none that can be read by position, and return the copy's place."""
    config = for_file(config, source.path)
    match config:
        case ParquetInput():
            return None
        case JsonlInput() if compression_of(source.path) is None:
            return None
    name = f"{_FOLDER}/{_digest(source, config)}.parquet"
    if not run.exists(name):
        with run.create(name) as target:
            _copy(source, config, target)
    return str(run.fs.unstrip_protocol(run.path(name)))


def _digest(source: Source, config: InputConfig) -> str:
    """A name that no other content has: a copy may outlive the settings that it was made with."""
    content = f"{source.path}\0{source.num_bytes}\0{source.version}\0{config.model_dump_json(include=_CONTENT)}"
    return hashlib.sha256(content.encode()).hexdigest()[:16]


def _copy(source: Source, config: InputConfig, target: IO[bytes]) -> None:
    if isinstance(config, FileInput):
        fs, path = file_system(source.path)
        with open_text(fs, path) as stream:
            if isinstance(config, CsvInput):
                _copy_csv(stream, config, target)
            else:
                _copy_jsonl(stream, config.limit, target)
    else:
        tables.spool(config, target, source.version)


def _copy_jsonl(stream: IO[bytes], limit: int | None, target: IO[bytes]) -> None:
    rows = ((line, number) for number, line in enumerate(jsonl.split_lines(stream)) if line)
    _write(islice(rows, limit), jsonl.SPOOL, lambda row: len(row[0]), target)


def _copy_csv(stream: IO[bytes], config: CsvInput, target: IO[bytes]) -> None:
    columns, records = csv.records(stream, config)
    rows = (csv.spool_row(record, len(columns)) for record in records)
    _write(islice(rows, config.limit), csv.spool_schema(columns), lambda row: sum(map(len, filter(None, row[3:]))), target)


def _write(rows: Iterable[Row], schema: pa.Schema, size_of: Callable[[Row], int], target: IO[bytes]) -> None:
    with pq.ParquetWriter(target, schema, compression="zstd", write_page_checksum=True) as writer:
        for group in _groups(rows, size_of):
            arrays = [pa.array(column, field.type) for column, field in zip(zip(*group, strict=True), schema, strict=True)]
            writer.write_table(pa.Table.from_arrays(arrays, schema=schema))


def _groups(rows: Iterable[Row], size_of: Callable[[Row], int]) -> Iterator[list[Row]]:
    """Put neighbouring rows together, as many as fit into memory whatever their length."""
    group: list[Row] = []
    num_bytes = 0
    for row in rows:
        group.append(row)
        num_bytes += size_of(row)
        if len(group) >= _GROUP_ROWS or num_bytes >= _GROUP_BYTES:
            yield group
            group, num_bytes = [], 0
    if group:
        yield group
