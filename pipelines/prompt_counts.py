"""What a sample of the rows tells of all prompts: their tokens, and how many rows would fail before the model sees them."""

import math
from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from itertools import takewhile
from typing import Any

import numpy as np
import pyarrow as pa
from pydantic import BaseModel, ConfigDict

from pipelines.config import EstimateConfig
from pipelines.errors import ErrorKind, RowError
from pipelines.intervals import Interval, mean_of_rows
from pipelines.plan import Plan
from pipelines.prompt_tokens import tokens_for
from pipelines.readers import read_batches
from pipelines.requests import RequestBuilder
from pipelines.sample import Sample, draw, read_sample


class Prompts(BaseModel):
    """The prompts' tokens, as far as a sample tells."""

    model_config = ConfigDict(frozen=True)
    num_sampled_rows: int
    failing: dict[str, int]
    """How many of the sampled rows would fail before the model sees them, by kind of error."""
    num_tokens: Interval | None
    """In all rows; null for no rows."""
    mean: float | None
    """Of the rows that do not fail, as the next three."""
    p50: float | None
    p95: float | None
    max: int | None
    shared_prefix_share: float | None
    """The part of all prompt tokens with which every prompt begins: what prefix caching need not compute."""
    most_output_tokens: Interval | None
    """In all rows, if no answer ended before its limit."""


@dataclass(slots=True)
class _Counts:
    """What became of the sampled rows, in their order."""

    num_tokens: list[int] = field(default_factory=list)
    most_output_tokens: list[int] = field(default_factory=list)
    failing: Counter[str] = field(default_factory=Counter)
    prefix: list[Any] | None = None
    """The tokens with which every prompt begins."""

    def fail(self, kind: ErrorKind) -> None:
        self.failing[kind.value] += 1
        self.num_tokens.append(0)
        self.most_output_tokens.append(0)

    def shorten_prefix(self, tokens: list[Any]) -> None:
        known = tokens if self.prefix is None else self.prefix
        self.prefix = [one for one, _ in takewhile(lambda pair: pair[0] == pair[1], zip(known, tokens, strict=False))]


def count_prompts(config: EstimateConfig, plan: Plan) -> Prompts:
    """Render and tokenise a sample of the rows."""
    sample = draw(plan.num_rows, config.estimate.sample_rows, config.estimate.seed)
    counts = _count(config, plan, sample)
    tokens, most_output = np.array(counts.num_tokens, float), np.array(counts.most_output_tokens, float)

    def in_all(values: np.ndarray) -> Interval | None:
        mean = mean_of_rows(values, sample.places, sample.num_places)
        return None if mean is None else mean.times(plan.num_rows)

    good = tokens[tokens > 0]
    median, p95 = np.quantile(good, (0.5, 0.95)).tolist() if len(good) else (None, None)
    return Prompts(
        num_sampled_rows=len(tokens),
        failing=dict(counts.failing.most_common()),
        num_tokens=in_all(tokens),
        mean=float(good.mean()) if len(good) else None,
        p50=median,
        p95=p95,
        max=int(good.max()) if len(good) else None,
        shared_prefix_share=len(counts.prefix or ()) * len(good) / good.sum() if len(good) > 1 else None,
        most_output_tokens=in_all(most_output),
    )


def _count(config: EstimateConfig, plan: Plan, sample: Sample) -> _Counts:
    tokens = tokens_for(config)
    requests, counts = RequestBuilder(config, tokens.special_tokens), _Counts()
    read = partial(read_batches, config.input, columns=requests.columns, carried=pa.schema([]))
    for batch, offsets, block in read_sample(plan, sample, config.input, read):
        for place in offsets:
            row = RowError(ErrorKind.UNREADABLE_FILE, batch.source) if block is None else block.rows[place]
            try:
                if isinstance(row, RowError):
                    raise row
                request = requests.build(row, key="", row_number=batch.rows_before + place, attempt=1)
                found = list(tokens.of(request))
            except RowError as error:
                counts.fail(error.kind)
                continue
            room = math.inf if tokens.max_model_len is None else tokens.max_model_len - len(found)
            most = 0 if request.embeds else int(min(request.sampling.max_tokens, room)) * request.sampling.n
            counts.num_tokens.append(len(found))
            counts.most_output_tokens.append(most)
            counts.shorten_prefix(found)
    return counts
