"""JSON lines: planned by finding line ends, read by byte range; compressed files are spooled to Parquet first.

A row is a line that is not empty. Rows are numbered by their line, so that `source_row` + 1 is the line an editor shows.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import IO, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pipelines.errors import ErrorKind, RowError
from pipelines.file_systems import arrow_file_system, file_system
from pipelines.readers import parquet
from pipelines.readers.compressed import open_text
from pipelines.rows import Batch, Block, Row

SPOOL = pa.schema([("line", pa.large_binary()), ("number", pa.int64())])
"""The columns of a spooled file: its lines as they are, and their numbers."""

_Lines = tuple[list[int], list[bytes], dict[str, list[Any]]]  # numbers, lines, and what a block says of their origins

_CHUNK_BYTES = 16 * 2**20
_PEEK_ROWS = 100  # rows looked at to know a file's keys
_MAX_DEPTH = 200  # of a row's nesting: what Python reads at its own limit it cannot write any more
_BLANK = (b"", b"\r")  # lines that are no rows
_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class Cut:
    """Where a batch lies in its file."""

    first_row: int
    num_rows: int
    first_byte: int
    num_bytes: int
    row_group: None = None


@dataclass(frozen=True, slots=True)
class Outline:
    """The position of every `stride`-th row of a file."""

    num_rows: int
    columns: pa.Schema
    stride: int
    lines: Sequence[int]
    offsets: Sequence[int]
    """One longer than `lines`: the last is the file's end."""

    @property
    def num_bytes(self) -> int:
        """Of all rows."""
        return self.offsets[-1]

    def cut(self, sizes: Sequence[int]) -> list[Cut]:
        """Cut the first rows into contiguous batches of the given numbers of rows, each a multiple of `stride` but the last."""
        cuts = []
        for first, size in zip(accumulate(sizes, initial=0), sizes, strict=False):
            mark, after = first // self.stride, -(-(first + size) // self.stride)
            start, end = self.offsets[mark], self.offsets[after]
            cuts.append(Cut(self.lines[mark], size, start, end - start))
        return cuts


def outline(fs: Any, path: str, stride: int, limit: int | None) -> Outline:
    """Find every `stride`-th row of a plain file; stops after `limit` rows."""
    lines: list[int] = []
    offsets: list[int] = []
    num_rows = num_lines = position = 0
    head, rest = b"", b""
    with fs.open(path, "rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            head = head or chunk
            buffer = rest + chunk
            whole = buffer.rfind(b"\n") + 1
            rows, starts = _rows_of(buffer[:whole])
            marked = rows[-num_rows % stride :: stride]
            lines.extend((marked + num_lines).tolist())
            offsets.extend((starts[marked] + position).tolist())
            num_rows, num_lines = num_rows + len(rows), num_lines + len(starts)
            position, rest = position + whole, buffer[whole:]
            if limit is not None and num_rows > limit:
                break
        else:
            if rest not in _BLANK:
                if num_rows % stride == 0:
                    lines.append(num_lines)
                    offsets.append(position)
                num_rows += 1
            position += len(rest)
    return Outline(num_rows, _peek(head), stride, lines, [*offsets, position])


def read(batches: Sequence[Batch], columns: Sequence[str], carried: pa.Schema) -> Iterator[Block]:
    """Yield the rows of neighbouring batches of one file."""
    for numbers, lines, origins in _lines(batches):
        rows = [_parse(line, number) for number, line in zip(numbers, lines, strict=True)]
        yield Block(rows, numbers, _carry(rows, carried), **origins)


def read_stored(batches: Sequence[Batch], columns: Sequence[str]) -> Iterator[pa.Table]:
    """Yield the lines of neighbouring batches as a spooled file holds them, whatever the columns."""
    for numbers, lines, _ in _lines(batches):
        yield pa.table([pa.array(lines, pa.large_binary()), pa.array(numbers, pa.int64())], schema=SPOOL)


def split_lines(stream: IO[bytes]) -> Iterator[bytes]:
    """Split a stream into lines without their ends."""
    rest = b""
    while chunk := stream.read(_CHUNK_BYTES):
        *whole, rest = (rest + chunk).split(b"\n")
        yield from (line.removesuffix(b"\r") for line in whole)
    yield rest.removesuffix(b"\r")


def mentions(path: str, key: str) -> bool:
    """Whether a key stands anywhere in a file; a text that looks like it counts too."""
    spellings = {json.dumps(key).encode(), json.dumps(key, ensure_ascii=False).encode()}
    fs, place = file_system(path)
    with open_text(fs, place) as stream:
        return any(spelling in line for line in split_lines(stream) for spelling in spellings)


def outline_of_spooled(fs: Any, path: str) -> parquet.Outline:
    """What is in a spooled file, and the keys of its first rows."""
    found = parquet.outline(fs, path)
    with pq.ParquetFile(path, filesystem=arrow_file_system(fs)) as file:
        head = next(file.iter_batches(batch_size=_PEEK_ROWS, columns=["line"]), None)
    columns = _peek(b"\n".join(head["line"].to_pylist()) if head is not None else b"")
    return replace(found, columns=columns)


def _rows_of(buffer: bytes) -> tuple[np.ndarray, np.ndarray]:
    """Return which lines of a buffer of whole lines are rows, and where each line starts."""
    data = np.frombuffer(buffer, dtype=np.uint8)
    ends = np.flatnonzero(data == ord("\n"))
    starts = np.concatenate(([0], ends[:-1] + 1)) if len(ends) else ends
    lengths = ends - starts
    is_row = (lengths > 1) | ((lengths == 1) & (data[starts] != ord("\r")))
    return np.flatnonzero(is_row), starts


def _peek(head: bytes) -> pa.Schema:
    """The keys of the rows at the start of a file; all are carried as text."""
    keys: dict[str, None] = {}
    for number, line in enumerate(head.split(b"\n", _PEEK_ROWS)[:_PEEK_ROWS]):
        row = _parse(line, number)
        if not isinstance(row, RowError):
            keys.update(dict.fromkeys(row))
    return pa.schema([(key, pa.string()) for key in keys])


def _lines(batches: Sequence[Batch]) -> Iterator[_Lines]:
    """What each batch's rows are read from."""
    return _spooled_lines(batches) if batches[0].spooled else _plain_lines(batches)


def _plain_lines(batches: Sequence[Batch]) -> Iterator[_Lines]:
    fs, path = file_system(batches[0].source)
    with fs.open(path, "rb") as file:
        for batch in batches:
            file.seek(batch.first_byte)
            lines = file.read(batch.num_bytes).split(b"\n")
            numbered = [(n, line) for n, line in enumerate(lines, batch.first_row) if line not in _BLANK]
            numbered = numbered[: batch.num_rows]
            if len(numbered) < batch.num_rows:
                raise EOFError(f"{len(numbered)} rows from line {batch.first_row + 1} where {batch.num_rows} were expected")
            yield [n for n, _ in numbered], [line for _, line in numbered], {}


def _spooled_lines(batches: Sequence[Batch]) -> Iterator[_Lines]:
    for batch, table in parquet.tables(batches, ["line", "number"]):
        yield table["number"].to_pylist(), table["line"].to_pylist(), parquet.origins_of(batch, table)


def _parse(line: bytes, number: int) -> Row:
    if number == 0:
        line = line.removeprefix(_BOM)
    try:
        value = json.loads(line.decode("utf-8"))
        if b"\\ud" in line or b"\\uD" in line:
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeError as error:
        return RowError(ErrorKind.INVALID_TEXT, f"line {number + 1} is not Unicode text: {error}")
    except (ValueError, RecursionError) as error:
        return RowError(ErrorKind.MALFORMED_ROW, f"line {number + 1} is not JSON: {error}")
    if not isinstance(value, dict):
        return RowError(ErrorKind.MALFORMED_ROW, f"line {number + 1} is a JSON {type(value).__name__}, not an object")
    if line.count(b"[") + line.count(b"{") > _MAX_DEPTH and _is_too_deep(value):
        return RowError(ErrorKind.MALFORMED_ROW, f"line {number + 1} is nested more than {_MAX_DEPTH} levels deep")
    return value


def _is_too_deep(value: dict[str, Any]) -> bool:
    level: list[Any] = [value]
    for _ in range(_MAX_DEPTH):
        level = [
            inner
            for one in level
            for inner in (one.values() if isinstance(one, dict) else one)
            if isinstance(inner, dict | list)
        ]
        if not level:
            return False
    return True


def _carry(rows: Sequence[Row], schema: pa.Schema) -> pa.Table:
    columns = [[None if isinstance(row, RowError) else as_text(row.get(name)) for row in rows] for name in schema.names]
    return pa.table(columns, schema=schema) if columns else pa.table({})


def as_text(value: Any) -> str | None:
    """A value as text, character for character: text as it is, null as null, numbers and dates as they print, else JSON."""
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, bytes):
        return value.decode("utf-8", "backslashreplace")
    if isinstance(value, bool | float | dict | list):
        return json.dumps(value, ensure_ascii=False, default=str)
    return str(value)
