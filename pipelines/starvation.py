"""Notice that an engine has room and gets no requests, and what it waits for."""

import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Literal

from pipelines.metrics import Load

logger = logging.getLogger(__name__)

Cause = Literal["input", "rendering", "long answers"]
REMEDIES: Mapping[Cause, str] = {
    "input": "rows are read too slowly: bring the input nearer, or write it with smaller row groups",
    "rendering": "prompts are rendered and tokenised too slowly: raise cluster.cpus_per_worker, or simplify the template",
    "long answers": "batches wait for their longest answers: lower engine.rows_per_batch",
}
_LOOK_S = 1.0
_FED = 0.5  # of what an engine can run: below it, and with none waiting, it starves
_PATIENCE_S = 30.0


class Starvation:
    """Looks at an engine every second. `cause` tells what it waits for; None where there is nothing more to come."""

    def __init__(self, load: Callable[[], Load], cause: Callable[[], Cause | None], look_s: float = _LOOK_S):
        self._load = load
        self._cause = cause
        self._look_s = look_s
        self._total_s: defaultdict[str, float] = defaultdict(float)
        self._since: tuple[Cause | None, float] = (None, 0.0)
        self._warned: set[Cause] = set()
        threading.Thread(target=self._look_forever, name="starvation", daemon=True).start()

    def seconds(self) -> dict[str, float]:
        """How long the engine starved so far, by what it waited for."""
        return dict(self._total_s)

    def _look_forever(self) -> None:
        last = time.perf_counter()
        while True:
            time.sleep(self._look_s)
            now = time.perf_counter()
            self.look(now, now - last)
            last = now

    def look(self, now: float, took_s: float) -> None:
        """Take the engine for as it is now during the seconds since the last look."""
        load = self._load()
        is_fed = load.waiting > 0 or load.running >= _FED * load.capacity
        cause = None if is_fed else self._cause()
        if cause is not None:
            self._total_s[cause] += took_s
        if cause != self._since[0]:
            self._since = (cause, now)
        elif cause is not None and cause not in self._warned and now - self._since[1] >= _PATIENCE_S:
            self._warned.add(cause)
            logger.warning("the engine runs %d requests and has room for %d: %s", load.running, load.capacity, REMEDIES[cause])
