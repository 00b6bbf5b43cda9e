"""What ties a worker to its driver besides its work: signs of life, orders, and how its process ends."""

import logging
import os
import threading
import time
from collections.abc import Callable
from typing import Literal, NoReturn, Protocol

from pipelines.heartbeat import Heartbeat

logger = logging.getLogger(__name__)

_DRAIN_POLL_S = 0.1
_FAREWELL_S = 5.0  # to leave the reason of a death behind: the storage may be what hangs

Order = Literal["stop", "leave"]
"""What a worker may be told: to hand back what is not in its engine and commit the rest; and then to leave its node, too."""


class Line(Protocol):
    """A worker's line to its driver (`pipelines.board.Board`)."""

    def ready(self) -> None:
        """Say that the engine is loaded."""

    def committed(self, numbers: dict[str, int]) -> None:
        """Report a batch: how many rows, failures and tokens are new."""

    def alive(self, worker: str, *, is_busy: bool) -> None:
        """Give a sign of life, and say whether there is anything to do."""

    def order(self) -> Order | None:
        """Wait for an order; None where there is nobody to give one any more."""

    def drained(self, worker: str) -> None:
        """Say that nothing is left to commit, and that no more signs of life are to be expected."""


class Lifeline:
    """Gives signs of life from the start, whatever the storage does; hears an order once the worker is ready to obey."""

    def __init__(self, line: Line, worker: str, interval_s: float, is_busy: Callable[[], bool]):
        self._line = line
        self._worker = worker
        self._interval_s = interval_s
        self._is_busy = is_busy
        self.order: Order | None = None
        threading.Thread(target=self._live, name="live", daemon=True).start()

    def obey(self, is_idle: Callable[[], bool], heartbeat: Heartbeat) -> None:
        """The engine is loaded. From now on, wait for an order in a thread: see `order`, and what an idle worker does then."""
        self._line.ready()
        threading.Thread(target=self._obey, args=(is_idle, heartbeat), name="obey", daemon=True).start()

    def end(self, reason: str, heartbeat: Heartbeat) -> NoReturn:
        """End a process that is of no more use: Ray starts another one and hands its shards on, which it does for no error."""
        logger.error("worker %s ends: %s", self._worker, reason)
        farewell = threading.Thread(target=heartbeat.died, args=(reason,), daemon=True)
        farewell.start()
        farewell.join(_FAREWELL_S)
        os._exit(1)

    def _live(self) -> None:
        while True:
            self._line.alive(self._worker, is_busy=self._is_busy())
            time.sleep(self._interval_s)

    def _obey(self, is_idle: Callable[[], bool], heartbeat: Heartbeat) -> None:
        self.order = self._line.order()
        while not is_idle():
            time.sleep(_DRAIN_POLL_S)
        if self.order is not None:
            self._line.drained(self._worker)
        if self.order == "leave":
            logger.warning("worker %s leaves its node, which is to go", self._worker)
            heartbeat.beat()
            os._exit(1)  # no error, but Ray starts only those again that end with one
