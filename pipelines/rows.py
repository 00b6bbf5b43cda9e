"""What travels through a worker: batches, the rows read for them, requests, and answers."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import pyarrow as pa

from pipelines.errors import RowError

Row = dict[str, Any] | RowError
"""One input record as plain Python values, or why it could not be read."""


@dataclass(frozen=True, slots=True)
class Batch:
    """A line of the plan: a fixed, contiguous set of rows of one source."""

    batch_id: int
    source: str
    spooled: str | None
    source_bytes: int
    source_version: str
    first_row: int
    num_rows: int
    rows_before: int
    first_byte: int | None
    num_bytes: int | None
    row_group: int | None

    @property
    def end_row(self) -> int:
        """The row after the last, within the source; Parquet only, since JSONL may have blank lines."""
        return self.first_row + self.num_rows


BATCH_FIELDS = tuple(field.name for field in fields(Batch))


@dataclass(frozen=True, slots=True)
class Block:
    """The rows of one batch, in order, and the columns to copy into its results."""

    rows: Sequence[Row]
    source_rows: Sequence[int]
    carried: pa.Table


@dataclass(frozen=True, slots=True)
class Request:
    """A row rendered for the model: a text, or the messages of a conversation."""

    key: str
    prompt: str | list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Completion:
    """One of the answers to a request."""

    text: str
    finish_reason: str
    stop_reason: str | None
    num_output_tokens: int
    logprobs: list[list[dict[str, Any]]] | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """What an engine gave for one request; times in seconds."""

    completions: Sequence[Completion]
    num_prompt_tokens: int
    num_cached_tokens: int
    queue_s: float
    ttft_s: float
    generation_s: float
    engine_s: float
    """Its share of the engine's busy time."""


Outcome = Answer | RowError
