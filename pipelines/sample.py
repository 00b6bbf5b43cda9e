"""Rows of an input, drawn at random across all of its files, and read from where they lie."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from pipelines.config import InputConfig
from pipelines.plan import Plan
from pipelines.rows import BATCH_FIELDS, Batch
from pipelines.sources import read_each

_MOST_PLACES = 256  # each may be in another row group, which is decoded for its sake

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Sample:
    """Places of equally many neighbouring rows; each place of the input is as likely to be drawn as any other."""

    rows: np.ndarray
    """Their numbers in the whole input, ascending."""
    places: np.ndarray
    """The place that each lies in: neighbours are more alike than rows from anywhere."""
    num_places: int
    """Of the whole input."""


def draw(num_rows: int, size: int, seed: int) -> Sample:
    """Draw so many of the rows, or all where there are no more."""
    size = min(size, num_rows)
    run = max(1, -(-size // _MOST_PLACES))
    num_places = -(-num_rows // run)
    drawn = np.sort(np.random.default_rng(seed).choice(num_places, -(-size // run), replace=False))
    rows = (drawn[:, None] * run + np.arange(run)).ravel()
    rows = rows[rows < num_rows][:size]
    return Sample(rows, rows // run, num_places)


def read_sample(
    plan: Plan, sample: Sample, config: InputConfig, read: Callable[[Sequence[Batch]], Iterator[T]]
) -> Iterator[tuple[Batch, list[int], T | None]]:
    """Read the batches that hold the sample; yields each with the sampled rows' places in it, and None where it is damaged.

    `read` is given neighbouring batches of one source, so that it decodes the source once.
    """
    batches, offsets = _batches_of(plan, sample)
    for (batch, found), some in zip(read_each(batches, config, read), offsets, strict=True):
        yield batch, some, found


def _batches_of(plan: Plan, sample: Sample) -> tuple[list[Batch], list[list[int]]]:
    """The batches that hold the sampled rows, and the rows' places in each."""
    starts = plan.batches["rows_before"].to_numpy()
    holders = np.searchsorted(starts, sample.rows, side="right") - 1
    chosen, first = np.unique(holders, return_index=True)
    lines = plan.batches.select(BATCH_FIELDS).take(chosen).to_pylist()
    offsets = np.split(sample.rows - starts[holders], first[1:]) if len(chosen) else []
    return [Batch(**line) for line in lines], [some.tolist() for some in offsets]
