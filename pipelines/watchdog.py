"""Notice that a worker has work and gets nowhere."""

import threading
import time
from collections.abc import Callable, Hashable

_CHECKS_PER_LIMIT = 20
_LONGEST_PAUSE_S = 5.0


class Watchdog:
    """Calls `stuck` where `progress` stands still for `limit_s`; None means that there is nothing to do."""

    def __init__(self, limit_s: float, progress: Callable[[], Hashable], stuck: Callable[[float], None]):
        self._limit_s = limit_s
        self._progress = progress
        self._stuck = stuck
        self._is_over = threading.Event()
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    def close(self) -> None:
        """Watch no longer."""
        self._is_over.set()

    def _watch(self) -> None:
        seen, since = None, time.monotonic()
        while not self._is_over.wait(min(_LONGEST_PAUSE_S, self._limit_s / _CHECKS_PER_LIMIT)):
            now, progress = time.monotonic(), self._progress()
            if progress is None or progress != seen:
                seen, since = progress, now
            elif now - since > self._limit_s:
                self._stuck(now - since)
                return
