"""What reading a table takes, whatever kind it is."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias
from urllib.parse import urlsplit

import pyarrow as pa

Rows: TypeAlias = pa.Table | pa.RecordBatch

READ_ROWS = 1024  # rows read at a time where a package lets us choose


@dataclass(frozen=True, slots=True)
class Table:
    """A table at one version."""

    name: str
    """Without any secret."""
    version: str
    """Changes when the rows do."""
    read: Callable[[], tuple[pa.Schema, Iterable[Rows]]]
    """Its columns, as the table itself declares them, and its rows in its own order."""


def place_of(path: str) -> str:
    """A URL as it is, a local path from the root."""
    return path if "://" in path else str(Path(path).expanduser().absolute())


def name_of(path: str) -> str:
    """The place without user, password and signature."""
    place = place_of(path)
    if "://" not in place:
        return place
    parts = urlsplit(place)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
