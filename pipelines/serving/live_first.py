"""Live requests first: rows of batches get what these leave of the replicas."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http import HTTPStatus

from pipelines.serving.faults import ApiError


class LiveFirst:
    """Counts what runs, and lets rows of batches in only where live requests would not miss the room."""

    def __init__(self, target_running: int, idle_s: float, clock: Callable[[], float] = time.monotonic):
        self._target = target_running
        self._idle_s = idle_s
        self._clock = clock
        self._num_running = 0
        self._crowded_at_s = -idle_s

    @contextmanager
    def taken(self, *, is_background: bool, num_ready: int) -> Iterator[None]:
        """A request runs for the block; raises ApiError (429) where it is a row of a batch and there is no room for it."""
        now, capacity = self._clock(), self._target * num_ready
        if is_background and (self._num_running >= capacity or now - self._crowded_at_s < self._idle_s):
            message = "live requests need the replicas; come again later"
            raise ApiError(HTTPStatus.TOO_MANY_REQUESTS, message, code="no_room", retry_after_s=self._idle_s)
        self._num_running += 1
        if not is_background and self._num_running >= capacity:
            self._crowded_at_s = now
        try:
            yield
        finally:
            self._num_running -= 1
