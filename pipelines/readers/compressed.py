"""Compressed text files: known by their names' ending, decompressed as they are read."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import PurePosixPath
from typing import IO, Any

import pyarrow as pa

_COMPRESSIONS = {".gz": "gzip", ".zst": "zstd", ".bz2": "bz2"}


def compression_of(path: str) -> str | None:
    """The compression that a file's name tells, as Arrow spells it."""
    return _COMPRESSIONS.get(PurePosixPath(path).suffix.lower())


@contextmanager
def open_text(fs: Any, path: str) -> Iterator[IO[bytes]]:
    """Open a file for its text as bytes, decompressed where its name says so."""
    compression = compression_of(path)
    with fs.open(path, "rb") as raw:
        if compression is None:
            yield raw
            return
        if fs.size(path) == 0:  # Arrow takes it for an empty text, but what no writer has closed is cut short
            raise EOFError("the file is empty")
        with pa.CompressedInputStream(pa.PythonFile(raw, mode="r"), compression) as stream:
            yield stream
