"""Who used the engine how long, and for what, when many requests share it."""

from dataclasses import dataclass
from threading import Lock
from time import perf_counter


@dataclass(slots=True, eq=False)
class Share:
    """A request's part of an engine's time, in seconds: until its first token, and from then on. Final once it has left."""

    num_requests: int = 1
    """How many requests go the same way together, each with this part."""
    prefill_s: float = 0.0
    decode_s: float = 0.0
    has_first_token: bool = False
    mark: float = 0.0
    """The virtual time at which its present phase began."""


class FairClock:
    """Shares every moment of a busy engine equally among the requests that run in it.

    Virtual time, as in fair queueing (Demers, Keshav and Shenker, 1989), advances by dt / n while n requests run. A request's
    share is the virtual time between its start and its end, so the shares of all requests add up to the engine's busy time
    exactly, and each event costs the same however many requests there are.

    Time passes with `advance` only: who is found to have run during a step is entered before the step's time is shared out.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._num_running = 0
        self._virtual_s = 0.0
        self._busy_s = 0.0
        self._request_s = 0.0
        self._last = perf_counter()

    def advance(self) -> None:
        """Share out the time since the last call among the requests that run."""
        with self._lock:
            now = perf_counter()
            if self._num_running:
                self._virtual_s += (now - self._last) / self._num_running
                self._busy_s += now - self._last
                self._request_s += (now - self._last) * self._num_running
            self._last = now

    def enter(self, share: Share) -> None:
        """A request runs from now on."""
        with self._lock:
            self._num_running += share.num_requests
            share.mark = self._virtual_s

    def first_token(self, share: Share) -> None:
        """Its prefill is over, and its decode begins."""
        with self._lock:
            share.prefill_s, share.mark, share.has_first_token = self._virtual_s - share.mark, self._virtual_s, True

    def leave(self, share: Share) -> None:
        """A request is finished. Without a first token, all of its time was prefill."""
        with self._lock:
            self._num_running -= share.num_requests
            if share.has_first_token:
                share.decode_s = self._virtual_s - share.mark
            else:
                share.prefill_s = self._virtual_s - share.mark

    @property
    def num_running(self) -> int:
        """How many requests run now."""
        return self._num_running

    def busy_s(self) -> float:
        """Seconds so far in which at least one request ran."""
        with self._lock:
            return self._busy_s + self._since_s()

    def request_s(self) -> float:
        """The same, with each second counted once for every request that ran in it."""
        with self._lock:
            return self._request_s + self._since_s() * self._num_running

    def _since_s(self) -> float:
        return perf_counter() - self._last if self._num_running else 0.0
