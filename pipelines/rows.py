"""What travels through a worker: batches, the rows read for them, requests, and answers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

import pyarrow as pa

from pipelines.config import SamplingConfig
from pipelines.errors import Flag, RowError

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

    @property
    def is_ordered(self) -> bool:
        """Whether its rows lie in an ordered copy (`ordered_copy`), where each says which row of the input it is."""
        return self.source == self.spooled


BATCH_FIELDS = tuple(one.name for one in fields(Batch))


@dataclass(frozen=True, slots=True)
class Block:
    """The rows of one batch, in order, and the columns to copy into its results."""

    rows: Sequence[Row]
    source_rows: Sequence[int]
    carried: pa.Table
    offsets: Sequence[int] | None = None
    """Which rows of the batch these are; None for all of them."""
    sources: Sequence[str] | None = None
    """The source of each row, where the batch is of an ordered copy; as the next, which go with it."""
    numbers: Sequence[int] | None = None
    """The number of each row in the whole input."""

    @property
    def places(self) -> Sequence[int]:
        """The place of each row in its batch."""
        return range(len(self.rows)) if self.offsets is None else self.offsets

    def sources_in(self, batch: Batch) -> Sequence[str]:
        """The source of each row."""
        return [batch.source] * len(self.rows) if self.sources is None else self.sources

    def number_of(self, batch: Batch, index: int) -> int:
        """The number of a row in the whole input."""
        return batch.rows_before + self.places[index] if self.numbers is None else self.numbers[index]

    def take(self, offsets: Sequence[int]) -> "Block":
        """Only the rows at the given places."""
        return Block(
            rows=[self.rows[offset] for offset in offsets],
            source_rows=[self.source_rows[offset] for offset in offsets],
            carried=self.carried.take(list(offsets)),
            offsets=offsets,
            sources=None if self.sources is None else [self.sources[offset] for offset in offsets],
            numbers=None if self.numbers is None else [self.numbers[offset] for offset in offsets],
        )


@dataclass(frozen=True, slots=True)
class Request:
    """A row rendered for the model: a text, or the messages of a conversation, and how to answer it."""

    key: str
    prompt: str | list[dict[str, Any]]
    sampling: SamplingConfig
    """The run's parameters, or those with the row's own merged over them."""
    embeds: bool = False
    """Whether the row asks for an embedding of its text."""
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Variables for the chat template that this row adds to the run's."""
    flags: tuple[Flag, ...] = ()
    own_sampling: str | None = None
    """JSON text of the effective parameters, where the row has some of its own."""


@dataclass(frozen=True, slots=True)
class Completion:
    """One of the answers to a request, and what post-processing made of it."""

    text: str
    finish_reason: str
    stop_reason: str | None
    num_output_tokens: int
    logprobs: list[list[dict[str, Any]]] | None = None
    reasoning: str | None = None
    tool_calls: str | None = None
    """JSON text: a list of {id, type, function: {name, arguments}}."""
    embedding: list[float] | None = None
    """Where the model embeds instead of answering; `text` is empty then."""
    parsed: str | None = None
    """JSON text: the structured output, or what the post-processing steps made of the text."""
    filtered_by: str | None = None
    """The name of the post-processing filter that the answer ran into."""
    error: RowError | None = None
    """Why the answer is no good, although the model gave one."""


@dataclass(frozen=True, slots=True)
class EngineTime:
    """When a request came to the engine (seconds since the epoch), and its share of the engine's time (`fair_clock`)."""

    arrived_at_s: float
    prefill_s: float
    decode_s: float


@dataclass(frozen=True, slots=True)
class Answer:
    """What an engine gave for one request; times in seconds."""

    completions: Sequence[Completion]
    num_prompt_tokens: int
    num_cached_tokens: int
    queue_s: float
    ttft_s: float
    generation_s: float
    engine_time: EngineTime
    num_truncated_tokens: int = 0
    """Tokens that were cut from the prompt."""
    prompt_logprobs: list[list[dict[str, Any]]] | None = None

    @property
    def error(self) -> RowError | None:
        """Why the row failed although the model answered it: its first completion decides."""
        return self.completions[0].error


Outcome = Answer | RowError


class EngineWork(NamedTuple):
    """What an engine has done so far, whatever became of it."""

    num_generated_tokens: int = 0
    num_flops: int = 0
    """Floating-point operations of each accelerator, as the engine estimates them; 0 where it does not."""
    num_moved_bytes: int = 0
    """Bytes that each accelerator read from its memory and wrote to it, likewise."""


@dataclass(frozen=True, slots=True)
class Settled:
    """A row at the end of its way: what it was rendered to, if it came that far, and what came of it."""

    request: Request | None
    outcome: Outcome
    is_correct: bool | None = None
    """Whether its answer is the expected one, where the input says what that is."""

    @property
    def answer(self) -> Answer | None:
        """What the model gave, also for a row that failed afterwards."""
        return self.outcome if isinstance(self.outcome, Answer) else None

    @property
    def error(self) -> RowError | None:
        """Why the row failed."""
        return self.outcome.error if isinstance(self.outcome, Answer) else self.outcome

    @property
    def flags(self) -> list[Flag]:
        """What is worth knowing about the row all the same."""
        flags, answer = [] if self.request is None else list(self.request.flags), self.answer
        if answer is not None and answer.num_truncated_tokens:
            flags.append(Flag.PROMPT_TRUNCATED)
        if answer is not None and answer.completions[0].filtered_by is not None:
            flags.append(Flag.FILTERED)
        return flags
