"""Ranges that hold the true value nine times out of ten."""

import math
from statistics import NormalDist

import numpy as np
from pydantic import BaseModel, ConfigDict

LEVEL = 0.9
_Z = NormalDist().inv_cdf((1 + LEVEL) / 2)
_T = {1: 6.314, 2: 2.920, 3: 2.353, 4: 2.132}  # of Student's distribution; from five on, a series is good to 0.001


class Interval(BaseModel):
    """What is expected, and the range that holds it nine times out of ten."""

    model_config = ConfigDict(frozen=True)
    value: float
    low: float
    high: float

    def times(self, factor: float) -> "Interval":
        """The same of something so many times as large."""
        return Interval(value=self.value * factor, low=self.low * factor, high=self.high * factor)

    @property
    def relative_error(self) -> float:
        """Half of the range over the value."""
        return (self.high - self.low) / 2 / self.value if self.value else 0.0


def mean_of_rows(values: np.ndarray, places: np.ndarray, num_places: float) -> Interval | None:
    """The mean over all rows, from rows at places drawn without replacement (`sample.draw`); None for no rows."""
    if not len(values):
        return None
    _, at = np.unique(places, return_inverse=True)
    return mean_of_places(np.bincount(at, values), np.bincount(at), num_places)


def mean_of_places(sums: np.ndarray, sizes: np.ndarray, num_places: float) -> Interval:
    """The mean over all rows from the sums over places (some, drawn without replacement) and how many rows each has.

    What varies are whole places, so that rows which are like their neighbours do not pass for independent ones (a ratio
    estimator of clusters; Cochran, Sampling Techniques, 1977, chapters 6 and 9A).
    """
    mean, num_drawn = float(sums.sum() / sizes.sum()), len(sums)
    if num_drawn >= num_places:
        return Interval(value=mean, low=mean, high=mean)
    if num_drawn == 1:  # one says nothing of how they vary
        return Interval(value=mean, low=0.0, high=2 * mean)
    deviation = float((sums - mean * sizes).std(ddof=1)) / float(sizes.mean())
    half = t_quantile(num_drawn - 1) * deviation * math.sqrt((1 - num_drawn / num_places) / num_drawn)
    return Interval(value=mean, low=max(0.0, mean - half), high=mean + half)


def share_interval(num: int, total: int) -> Interval | None:
    """The share of a kind among rows of which so many have it (Wilson, 1927); None for no rows."""
    if not total:
        return None
    share, z2 = num / total, _Z**2
    centre = (share + z2 / (2 * total)) / (1 + z2 / total)
    half = _Z / (1 + z2 / total) * math.sqrt(share * (1 - share) / total + z2 / (4 * total**2))
    # The ends of 0 and 1 are 0 and 1 but for rounding.
    return Interval(value=share, low=min(share, max(0.0, centre - half)), high=max(share, min(1.0, centre + half)))


def drift_of(paces: np.ndarray) -> float:
    """How far the mean pace of a stretch may lie from that of another one as long, relative to it, from the paces in slices."""
    mean = float(paces.mean())
    return t_quantile(len(paces) - 1) * float(paces.std(ddof=1)) / mean * math.sqrt(2 / len(paces)) if mean > 0 else 0.0


def t_quantile(freedom: int) -> float:
    """Half the width of a 90 % interval in standard errors (Student; Abramowitz and Stegun, 1964, 26.7.5)."""
    if freedom in _T:
        return _T[freedom]
    z, n = _Z, freedom
    return (
        z
        + (z**3 + z) / (4 * n)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * n**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * n**3)
    )
