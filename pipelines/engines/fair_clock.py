"""Who used the engine how long, when many requests share it."""

from threading import Lock
from time import perf_counter


class FairClock:
    """Shares every instant of a busy engine equally among the requests in it.

    Virtual time, as in fair queueing, advances by dt / n while n requests are in the engine. A request's share is the
    virtual time between its start and its end, so the shares of all requests add up to the engine's busy time exactly,
    and each event costs the same however many requests there are.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._num_running = 0
        self._virtual_s = 0.0
        self._busy_s = 0.0
        self._last = perf_counter()

    def start(self, num_requests: int = 1) -> float:
        """Note that requests entered the engine; returns the mark to give to `end`."""
        with self._lock:
            self._advance()
            self._num_running += num_requests
            return self._virtual_s

    def end(self, mark: float, num_requests: int = 1) -> float:
        """Note that requests left the engine; returns the share of each in seconds."""
        with self._lock:
            self._advance()
            self._num_running -= num_requests
            return self._virtual_s - mark

    def busy_s(self) -> float:
        """Seconds so far in which at least one request was in the engine."""
        with self._lock:
            self._advance()
            return self._busy_s

    def _advance(self) -> None:
        now = perf_counter()
        if self._num_running:
            self._virtual_s += (now - self._last) / self._num_running
            self._busy_s += now - self._last
        self._last = now
