"""Input formats. Each has `outline` (what is in a file, without reading more than it must) and `read` (its batches)."""

from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Protocol

import pyarrow as pa

from pipelines.readers import jsonl, parquet
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
    def columns(self) -> pa.Schema: ...

    def cut(self, rows_per_batch: int, limit: int) -> Sequence[Cut]:
        """Cut the first `limit` rows into contiguous batches."""


_FORMATS: dict[str, ModuleType] = {"parquet": parquet, "jsonl": jsonl}


def read_batches(format_name: str, batches: Sequence[Batch], columns: Sequence[str], carried: pa.Schema) -> Iterator[Block]:
    """Yield the rows of neighbouring batches of one source, in order, decoding the source once."""
    blocks: Iterator[Block] = _FORMATS[format_name].read(batches, columns, carried)
    return blocks
