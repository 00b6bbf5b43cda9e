"""How numbers are spread: quantiles and bars of any number of values, counted in fixed bins."""

from dataclasses import dataclass

import numpy as np
from pydantic import BaseModel, ConfigDict

_QUANTILES = {"p50": 0.5, "p95": 0.95, "p99": 0.99}
_MOST_BARS = 40
_NEARLY_ALL = 0.995  # of the values: the few beyond would squeeze the others into one bar ...
_STRETCH = 1.5  # ... where they lie further out than half again as far


class Quantiles(BaseModel):
    """Values below which half, 95 % and 99 % of the rows lie; null where there are none."""

    model_config = ConfigDict(frozen=True)
    p50: float | None
    p95: float | None
    p99: float | None


@dataclass(frozen=True, slots=True)
class Histogram:
    """Bars of equal width, ready to draw."""

    quantiles: Quantiles
    num_values: int
    edges: tuple[float, ...]
    """One more than bars; none where there are no values."""
    counts: tuple[float, ...]
    """Not always whole: a fine bin may lie in two bars."""
    num_above: int
    """How many values lie above the last bar."""


@dataclass(frozen=True, slots=True)
class Bins:
    """Where fine bins begin and end, one more than there are; `step` is the least width of a bar that makes sense."""

    edges: np.ndarray
    step: float


# Each ends 1 % above the one before, so a quantile is off by half a percent at most: from a microsecond to two weeks.
_SECONDS = 1e-6 * 1.01 ** np.arange(2800)
SECONDS = Bins(np.append(-_SECONDS[0], _SECONDS), 0.0)
"""The first holds what is no time at all."""
# One for each number where a tenth of a percent is less than one, up to more than any model reads.
_TOKENS = np.arange(-0.5, 8192)
TOKENS = Bins(np.append(_TOKENS, _TOKENS[-1] * 1.001 ** np.arange(1, 7700)), 1.0)
"""Whole numbers, exactly up to 8,191."""


class Counter:
    """Counts values in fine bins: always of the same size, however many values come."""

    def __init__(self, bins: Bins):
        self._bins = bins
        self._counts = np.zeros(len(bins.edges) - 1, np.int64)

    def add(self, values: np.ndarray) -> None:
        """Count some values."""
        places = np.searchsorted(self._bins.edges[1:-1], values)
        some = np.bincount(places)
        self._counts[: len(some)] += some

    def quantiles(self) -> Quantiles:
        """The middles of the bins that hold the quantiles."""
        found = {name: self._bin_of(share) for name, share in _QUANTILES.items()}
        edges = self._bins.edges
        return Quantiles(**{name: None if at is None else float(edges[at] + edges[at + 1]) / 2 for name, at in found.items()})

    def histogram(self) -> Histogram:
        """Bars from the least value to the greatest, but for a few that lie far out."""
        first, last = self._bin_of(0.0), self._bin_of(_NEARLY_ALL)
        if first is None or last is None:
            return Histogram(self.quantiles(), 0, (), (), 0)
        edges, total = self._bins.edges, int(self._counts.sum())
        low, top = edges[first], edges[np.flatnonzero(self._counts)[-1] + 1]
        high = min(top, low + _STRETCH * (edges[last + 1] - low))
        width = max((high - low) / _MOST_BARS, edges[first + 1] - low)
        if self._bins.step:
            width = np.ceil(width / self._bins.step) * self._bins.step
        bars = low + width * np.arange(max(1, int(np.ceil((high - low) / width - 1e-9))) + 1)
        below = np.interp(bars, edges, np.append(0, np.cumsum(self._counts)))
        return Histogram(
            self.quantiles(), total, tuple(bars.tolist()), tuple(np.diff(below).tolist()), total - round(float(below[-1]))
        )

    def _bin_of(self, share: float) -> int | None:
        """The bin that holds the value below which this share of all lies."""
        total = self._counts.sum()
        return int(np.searchsorted(np.cumsum(self._counts), max(1, share * total))) if total else None
