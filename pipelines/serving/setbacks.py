"""The runs of batches that failed one after the other: when each batch may be run again, and when it is given up."""

import time
from dataclasses import dataclass

MOST_FAILED_RUNS = 5


@dataclass(frozen=True, slots=True)
class _Setback:
    num_runs: int
    again_at: float
    """By the monotonic clock."""


class Setbacks:
    """Of all batches since the server started; after each failed run of a batch its next one waits twice as long."""

    def __init__(self, first_pause_s: float):
        self._first_pause_s = first_pause_s
        self._setbacks: dict[str, _Setback] = {}

    def is_due(self, batch_id: str) -> bool:
        """Whether a batch may be run now."""
        setback = self._setbacks.get(batch_id)
        return setback is None or setback.again_at <= time.monotonic()

    def add(self, batch_id: str) -> bool:
        """Note a run that failed; returns whether it was one too many."""
        before = self._setbacks.get(batch_id)
        num_runs = 1 if before is None else before.num_runs + 1
        pause_s = self._first_pause_s * 2 ** (num_runs - 1)
        self._setbacks[batch_id] = _Setback(num_runs, time.monotonic() + pause_s)
        return num_runs >= MOST_FAILED_RUNS

    def forget(self, batch_id: str) -> None:
        """A batch has got further, or has come to its end."""
        self._setbacks.pop(batch_id, None)
