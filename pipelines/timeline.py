"""What went on when: tokens, finished rows and running requests over the time in which a run had workers."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

_MOST_BINS = 240
_FEWEST_BINS = 24
_MOMENT_S = 1e-6  # clocks are read in microseconds: what is shorter has no length


@dataclass(frozen=True, slots=True)
class Timeline:
    """Means over bins of equal length. Attempts are laid end to end: the time between them, without workers, is left out."""

    bin_s: float
    """0 where there were no workers at all."""
    attempts: tuple[tuple[int, float], ...]
    """The number of each attempt, and where it begins."""
    output_tokens_per_s: tuple[float, ...]
    finished_rows_per_s: tuple[float, ...]
    running_requests: tuple[float, ...]


class TimelineCounter:
    """Adds up rows bin by bin, from when each came and went; always of the same size.

    A row's tokens are spread evenly over its generation. What an unsynchronised clock puts outside of all attempts counts at
    the nearest end of one.
    """

    def __init__(self, spans: Mapping[int, tuple[float, float]]):
        """`spans` says when each attempt had workers, in seconds since the epoch."""
        self._clock_s, self._axis_s, self._attempts = _axis(spans)
        total_s = self._axis_s[-1] if len(self._axis_s) else 0.0
        num_bins = int(min(_MOST_BINS, max(_FEWEST_BINS, total_s))) if total_s > 0 else 0
        self._edges = np.linspace(0.0, total_s, num_bins + 1)
        self._tokens, self._finished, self._running = (_Spread(self._edges) for _ in range(3))

    def add(self, running_s: np.ndarray, first_token_s: np.ndarray, finished_s: np.ndarray, num_tokens: np.ndarray) -> None:
        """Enter rows: when each was first scheduled, had its first token and its last (since the epoch), and its tokens."""
        if len(self._edges) < 2:
            return
        running, first, finished = (
            np.interp(times, self._clock_s, self._axis_s) for times in (running_s, first_token_s, finished_s)
        )
        self._running.add(running, finished, finished - running)
        self._tokens.add(first, finished, num_tokens)
        self._finished.add(finished, finished, np.ones(len(finished)))

    def timeline(self) -> Timeline:
        """The means."""
        means = [spread.per_second() for spread in (self._tokens, self._finished, self._running)]
        return Timeline(float(self._edges[1]) if len(self._edges) > 1 else 0.0, self._attempts, *means)


class _Spread:
    """Amounts spread evenly over intervals, added up bin by bin."""

    def __init__(self, edges: np.ndarray):
        self._edges = edges
        self._inside = np.zeros(len(edges) - 1)  # what a flow that begins in a bin brings by the bin's end, or a moment's all
        self._flow = np.zeros(len(edges) - 1)  # per second, in all later bins

    def add(self, start_s: np.ndarray, end_s: np.ndarray, amount: np.ndarray) -> None:
        lasting = end_s - start_s > _MOMENT_S
        flow = np.divide(amount, end_s - start_s, out=np.zeros(len(amount)), where=lasting)
        start, end = self._bin(start_s), self._bin(end_s)
        for bins, times, sign in ((start, start_s, 1), (end, end_s, -1)):
            left_s = self._edges[bins + 1] - times
            self._inside += self._sum(bins, sign * flow * left_s)
            self._flow += self._sum(bins, sign * flow)
        self._inside += self._sum(end, np.where(lasting, 0.0, amount))

    def per_second(self) -> tuple[float, ...]:
        width_s = np.diff(self._edges)
        going_on = np.append(0.0, np.cumsum(self._flow)[:-1]) if len(width_s) else self._flow
        amounts = (self._inside + going_on * width_s) / width_s
        return tuple(np.maximum(amounts, 0.0).tolist())  # sums of floating-point numbers end just below zero, too

    def _bin(self, times: np.ndarray) -> np.ndarray:
        return np.clip(np.searchsorted(self._edges, times, side="right") - 1, 0, len(self._inside) - 1)

    def _sum(self, bins: np.ndarray, amounts: np.ndarray) -> np.ndarray:
        return np.bincount(bins, amounts, len(self._inside))


def _axis(spans: Mapping[int, tuple[float, float]]) -> tuple[np.ndarray, np.ndarray, tuple[tuple[int, float], ...]]:
    """Pairs of clock time and place on the axis, and where attempts begin. A worker that outlived its attempt overlaps."""
    clock_s: list[float] = []
    axis_s: list[float] = []
    attempts = []
    for attempt, (start, end) in sorted(spans.items(), key=lambda item: item[1]):
        begin = max(start, clock_s[-1]) if clock_s else start
        at = axis_s[-1] if axis_s else 0.0
        attempts.append((attempt, at))
        clock_s += [begin, max(begin, end)]
        axis_s += [at, at + max(0.0, end - begin)]
    return np.array(clock_s), np.array(axis_s), tuple(attempts)
