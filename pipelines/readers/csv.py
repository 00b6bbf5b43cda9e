"""Delimited text: spooled to Parquet, since a line end may stand within a value and no position says so.

Every value is text, character for character. A row is a record that is not blank, and is numbered by the line on which it
begins, so that `source_row` + 1 is the line an editor shows.
"""

import codecs
import csv
import io
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import IO, Any

import pyarrow as pa

from pipelines.config import CsvInput
from pipelines.errors import ConfigError, ErrorKind, RowError
from pipelines.readers import parquet
from pipelines.rows import Batch, Block

Record = tuple[int, list[str] | RowError]
"""The number of a record's first line, and its values or why it has none."""

_MAX_VALUE_CHARACTERS = 16 * 2**20  # a quote that nobody closes would otherwise read the rest of the file into memory
_COLUMN = "="  # before the input's own columns in a copy, so that none of them can be taken for one of ours
_OURS = {"number": pa.int64(), "error_kind": pa.string(), "error_message": pa.string()}


def _mark(error: UnicodeError) -> tuple[str, int]:
    """What does not decode becomes half an emoji: no text holds one, so that the line can be told from all others."""
    if not isinstance(error, UnicodeDecodeError):
        raise error
    return "\udcff", error.end


codecs.register_error("pipelines.readers.csv", _mark)


def check_settings(config: CsvInput) -> None:
    """Raises ConfigError for an encoding that does not exist, and for marks that cannot be told apart."""
    try:
        io.TextIOWrapper(io.BytesIO(), encoding=config.encoding)
    except (LookupError, ValueError) as error:
        raise ConfigError(f"input.encoding={config.encoding}: {error}; name one such as utf-8 or cp1252") from None
    for key, mark in {"delimiter": config.delimiter, "quote": config.quote}.items():
        if mark is not None and mark in "\r\n":
            raise ConfigError(f"input.{key} is a line end; set it to another character")
    if config.delimiter == config.quote:
        raise ConfigError(f"input.delimiter and input.quote are both {config.quote!r}; change one of them")


def records(stream: IO[bytes], config: CsvInput) -> tuple[list[str], Iterator[Record]]:
    """Return the columns of a file, and its records one by one; raises ArrowInvalid where its header is no header."""
    csv.field_size_limit(_MAX_VALUE_CHARACTERS)
    text = io.TextIOWrapper(stream, encoding=config.encoding, errors="pipelines.readers.csv", newline="")
    found = _records(_Lines(text), config)
    if config.columns is not None:
        return list(config.columns), _of_width(found, len(config.columns))
    _, header = next(found, (0, []))
    if isinstance(header, RowError):
        raise pa.ArrowInvalid(f"its header, {header.message}")
    return header, _of_width(found, len(header))


def spool_schema(columns: Sequence[str]) -> pa.Schema:
    """The columns of a copy: the record's line, why it could not be read, and its values."""
    return pa.schema([*_OURS.items(), *((_COLUMN + name, pa.string()) for name in columns)])


def spool_row(record: Record, num_columns: int) -> tuple[Any, ...]:
    """A record as a row of its file's copy."""
    number, values = record
    if isinstance(values, RowError):
        return number, values.kind, values.message, *[None] * num_columns
    return number, None, None, *values


def outline(fs: Any, path: str) -> parquet.Outline:
    """What is in a copy."""
    found = parquet.outline(fs, path)
    names = [name.removeprefix(_COLUMN) for name in found.columns.names[len(_OURS) :]]
    return replace(found, columns=pa.schema([(name, pa.string()) for name in names]))


def read(batches: Sequence[Batch], columns: Sequence[str], carried: pa.Schema) -> Iterator[Block]:
    """Yield the rows of neighbouring batches of one file's copy."""
    wanted = list(dict.fromkeys([*columns, *carried.names]))
    for batch, table in parquet.tables(batches, _stored(wanted)):
        values = table.select([name for name in table.column_names if name.startswith(_COLUMN)])
        values = values.rename_columns([name.removeprefix(_COLUMN) for name in values.column_names])
        numbers = table["number"].to_pylist()
        rows = parquet.rows_of(values, columns, numbers)
        for place, kind in enumerate(table["error_kind"].to_pylist()):
            if kind is not None:
                rows[place] = RowError(ErrorKind(kind), table["error_message"][place].as_py())
        yield Block(rows, numbers, parquet.conform(values, carried), **parquet.origins_of(batch, table))


def read_stored(batches: Sequence[Batch], columns: Sequence[str]) -> Iterator[pa.Table]:
    """Yield some columns of neighbouring batches as the file's copy holds them."""
    return parquet.read_stored(batches, _stored(columns))


def _stored(columns: Sequence[str]) -> list[str]:
    return [*_OURS, *(_COLUMN + name for name in columns)]


class _Lines:
    """The lines of a file, with their ends. Those of a record stay at hand: one with a stray quote swallows its neighbours."""

    def __init__(self, text: io.TextIOWrapper):
        self._text = text
        self._ahead: deque[str] = deque()
        self.number = 0
        self.taken: list[str] = []

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        line = self._ahead.popleft() if self._ahead else self._text.readline()
        if not line:
            raise StopIteration
        if self.number == 0 and not self.taken:
            line = line.removeprefix("\ufeff")
        self.taken.append(line)
        return line

    def go_on_after(self, num_lines: int) -> None:
        """Be done with the first so many of the lines taken; the others come again."""
        if num_lines < len(self.taken):
            self._ahead.extendleft(reversed(self.taken[num_lines:]))
        self.number += num_lines
        self.taken = []


def _records(lines: _Lines, config: CsvInput) -> Iterator[Record]:
    """Yield each record that is not blank; where quotes do not close, the line that opens them fails alone."""
    quoting = {"quoting": csv.QUOTE_NONE} if config.quote is None else {"quotechar": config.quote}
    reader = csv.reader(lines, delimiter=config.delimiter, strict=True, **quoting)
    while True:
        try:
            values = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            yield lines.number, RowError(ErrorKind.MALFORMED_ROW, f"line {lines.number + 1} is not delimited text: {error}")
            lines.go_on_after(1)
            continue
        if values:
            yield lines.number, values if _is_text(lines.taken) else _no_text(lines.number, config)
        lines.go_on_after(len(lines.taken))


def _of_width(found: Iterator[Record], num_columns: int) -> Iterator[Record]:
    for number, values in found:
        if isinstance(values, RowError) or len(values) == num_columns:
            yield number, values
        else:
            problem = f"line {number + 1} has {len(values)} values where {num_columns} were expected"
            yield number, RowError(ErrorKind.MALFORMED_ROW, problem)


def _is_text(lines: Sequence[str]) -> bool:
    text = "".join(lines)
    try:
        return text.isascii() or bool(text.encode())
    except UnicodeEncodeError:
        return False


def _no_text(number: int, config: CsvInput) -> RowError:
    return RowError(ErrorKind.INVALID_TEXT, f"line {number + 1} is not {config.encoding} text; see input.encoding")
