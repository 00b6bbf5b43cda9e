"""What is to be known of a run's rows: how long they took, when, which stick out, and how some failed.

One pass over the rows of all parts, in flat memory.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipelines.histograms import SECONDS, TOKENS, Counter, Histogram, Quantiles
from pipelines.ledger import attempt_spans
from pipelines.parts import Parts
from pipelines.schema import LATENCIES
from pipelines.statistics import latencies_of
from pipelines.storage import Folder
from pipelines.timeline import Timeline, TimelineCounter

_ROWS_AT_ONCE = 20_000  # counted together: a table costs 2 ms, however few rows it has
_NUM_NOTABLE = 10
_NUM_EXAMPLES = 3
_MESSAGE_CHARACTERS = 500
_TOKENS = ("num_prompt_tokens", "num_output_tokens")
_TIMES = ("arrived_at", "queue_s", "ttft_s", "generation_s")
_COLUMNS = [*_TOKENS, *_TIMES, "id", "source", "source_row", "finish_reason", "error_kind", "error_message"]


@dataclass(frozen=True, slots=True)
class NotableRow:
    """A row that took long, or is large."""

    name: str
    """Its id, or its place in the input where it has none."""
    num_prompt_tokens: int
    num_output_tokens: int
    latency_s: float | None
    finish_reason: str | None


@dataclass(frozen=True, slots=True)
class ErrorExample:
    """A row that failed."""

    name: str
    message: str


@dataclass(frozen=True, slots=True)
class RowProfile:
    """The rows of a run, summed up. What a row was before it was answered again is not in it."""

    histograms: Mapping[str, Histogram]
    """Of the rows that the model answered: `num_prompt_tokens`, `num_output_tokens`, and the latencies of schema.LATENCIES."""
    timeline: Timeline
    slowest: tuple[NotableRow, ...]
    largest: tuple[NotableRow, ...]
    """By prompt and output tokens together."""
    errors: Mapping[str, tuple[ErrorExample, ...]]
    """The first rows of each kind."""

    @property
    def latencies(self) -> dict[str, Quantiles]:
        """Seconds below which half, 95 % and 99 % of the rows lie."""
        return {name: self.histograms[name].quantiles for name in LATENCIES}


def profile_rows(run: Folder, batch_ids: Sequence[int], workers: pa.Table) -> RowProfile:
    """Read the rows of all parts once; `workers` is `stats/workers.parquet`, and says when the attempts were."""
    counters = {**{name: Counter(TOKENS) for name in _TOKENS}, **{name: Counter(SECONDS) for name in LATENCIES}}
    timeline = TimelineCounter(attempt_spans(workers))
    slowest, largest = _Top(), _Top()
    errors: dict[str, list[ErrorExample]] = {}
    for rows in _gathered(Parts(run).read(batch_ids, _COLUMNS)):
        _take_errors(rows, errors)
        answered = rows.filter(pc.is_valid(rows["num_output_tokens"])) if rows["num_output_tokens"].null_count else rows
        prompt, output = (answered[name].to_numpy() for name in _TOKENS)
        values = {"num_prompt_tokens": prompt, "num_output_tokens": output, **latencies_of(answered)}
        for name, counter in counters.items():
            counter.add(values[name])
        slowest.add(pc.add(answered["ttft_s"], answered["generation_s"]).to_numpy(), answered)
        largest.add(prompt + output, answered)
        _take_times(answered, timeline)
    return RowProfile(
        histograms={name: counter.histogram() for name, counter in counters.items()},
        timeline=timeline.timeline(),
        slowest=slowest.rows(),
        largest=largest.rows(),
        errors={kind: tuple(examples) for kind, examples in errors.items()},
    )


class _Top:
    """The rows with the greatest values, the first of equals first."""

    def __init__(self) -> None:
        self._found: list[tuple[float, NotableRow]] = []

    def add(self, values: np.ndarray, rows: pa.Table) -> None:
        """Enter rows with their values; one that is no number stands out in nothing."""
        least = self._found[-1][0] if len(self._found) == _NUM_NOTABLE else -np.inf
        places = np.flatnonzero(values > least)
        places = places[np.argsort(-values[places], kind="stable")[:_NUM_NOTABLE]]
        if len(places):
            lines = rows.take(pa.array(places)).to_pylist()
            found = zip(values[places].tolist(), map(_notable, lines), strict=True)
            self._found = sorted([*self._found, *found], key=lambda one: -one[0])[:_NUM_NOTABLE]

    def rows(self) -> tuple[NotableRow, ...]:
        return tuple(row for _, row in self._found)


def _gathered(parts: Iterator[pa.Table]) -> Iterator[pa.Table]:
    """The same rows in the same order, but in tables that are worth the while."""
    some: list[pa.Table] = []
    for part in parts:
        some.append(part)
        if sum(map(len, some)) >= _ROWS_AT_ONCE:
            yield pa.concat_tables(some)
            some = []
    if some:
        yield pa.concat_tables(some)


def _take_times(answered: pa.Table, timeline: TimelineCounter) -> None:
    known = answered.select([*_TIMES, "num_output_tokens"]).drop_null()
    arrived_s = known["arrived_at"].cast(pa.int64()).to_numpy() / 1e6
    queue_s, ttft_s, generation_s = (known[name].to_numpy() for name in ("queue_s", "ttft_s", "generation_s"))
    first_token_s = arrived_s + ttft_s
    timeline.add(arrived_s + queue_s, first_token_s, first_token_s + generation_s, known["num_output_tokens"].to_numpy())


def _take_errors(rows: pa.Table, errors: dict[str, list[ErrorExample]]) -> None:
    if rows["error_kind"].null_count == len(rows):
        return
    for kind in pc.unique(rows["error_kind"].drop_null()).to_pylist():
        examples = errors.setdefault(kind, [])
        if missing := _NUM_EXAMPLES - len(examples):
            lines = rows.filter(pc.equal(rows["error_kind"], kind)).slice(0, missing).to_pylist()
            examples += [ErrorExample(_name(line), (line["error_message"] or "")[:_MESSAGE_CHARACTERS]) for line in lines]


def _notable(line: dict[str, Any]) -> NotableRow:
    ttft_s, generation_s = line["ttft_s"], line["generation_s"]
    return NotableRow(
        name=_name(line),
        num_prompt_tokens=line["num_prompt_tokens"],
        num_output_tokens=line["num_output_tokens"],
        latency_s=None if ttft_s is None or generation_s is None else ttft_s + generation_s,
        finish_reason=line["finish_reason"],
    )


def _name(line: dict[str, Any]) -> str:
    return line["id"] or f"{line['source']} row {line['source_row']}"
