"""Look after the workers: see that they start, that none falls silent, and that what a lost round left is run again."""

import logging
import threading
import time
from collections.abc import Callable

import pyarrow as pa

from pipelines.board import Board, BoardLost, end_process
from pipelines.cluster import HeadSilent, RoundLost, draining_nodes
from pipelines.config import ClusterConfig
from pipelines.errors import RunFailed

logger = logging.getLogger(__name__)

_LOOK_S = 1.0
_FAREWELL_S = 10.0
_HEAD_PATIENCE_S = 30.0  # after 60 s without its head, Ray ends the process without a word to anybody


def answer_in_rounds(batches: pa.Table, find_left: Callable[[], pa.Table], answer_round: Callable[[pa.Table], None]) -> None:
    """Run workers over the batches, and over what they leave, until nothing is left.

    Raises RunFailed with the reason where a round has committed nothing.
    """
    while len(batches):
        reason = "batches were handed back"
        try:
            answer_round(batches)
        except RoundLost as lost:
            reason = str(lost)
        left = find_left()
        if len(left) >= len(batches):
            raise RunFailed(reason)
        if len(left):
            logger.warning("%s; starting new workers for the %d batches that are left", reason, len(left))
        batches = left


class Watch:
    """What the driver keeps an eye on in a round, in a thread: asking a cluster that is gone takes long."""

    def __init__(self, settings: ClusterConfig, board: Board, check_more: Callable[[], None]):
        self._settings = settings
        self._board = board
        self._failure: RunFailed | None = None
        self._check_more = check_more
        self._started = self._last_alive = self._head_answered = time.monotonic()
        self._draining: list[str] = []
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._look_forever, name="watch", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raises RunFailed where there is no room for a worker or the cluster's head is gone; RoundLost where all are idle."""
        if self._failure is not None:
            raise self._failure
        self._check_more()

    def close(self) -> None:
        """Look no longer: the cluster is about to be left."""
        self._is_over.set()
        self._thread.join(_FAREWELL_S)

    def _look_forever(self) -> None:
        while self._failure is None and not self._is_over.wait(_LOOK_S):
            try:
                self._look_at_nodes()
                self._look_at_workers()
            except (TimeoutError, HeadSilent):
                silent_s = time.monotonic() - self._head_answered
                if silent_s > _HEAD_PATIENCE_S:
                    self._failure = RunFailed(
                        f"the head of the Ray cluster has not answered for {silent_s:.0f} s; start the cluster again"
                    )
            except BoardLost as error:
                self._failure = RunFailed(f"Ray has lost the board that workers report to: {error}")

    def _look_at_nodes(self) -> None:
        draining = draining_nodes()
        self._head_answered = time.monotonic()
        if new := set(draining) - set(self._draining):
            logger.warning("%d node(s) are about to go: their workers finish what is in their engines and move", len(new))
            self._board.leave(draining)
        self._draining = draining

    def _look_at_workers(self) -> None:
        limit_s = self._settings.hang_timeout_s
        for life in self._board.silent(limit_s):
            if end_process(life):
                logger.error("worker %s gave no sign of life for %.0f s (cluster.hang_timeout_s): ended", life.worker, limit_s)
        now = time.monotonic()
        if self._board.num_alive(within_s=3 * self._settings.heartbeat_s):
            self._last_alive = now
            idle_s = min(self._board.idle_s(), now - self._started)
            if idle_s > limit_s:
                self._failure = RoundLost(f"no worker was given anything for {idle_s:.0f} s (cluster.hang_timeout_s)")
        elif now - self._last_alive > self._settings.start_timeout_s:
            self._failure = RunFailed(
                f"the cluster had no room for a worker for {now - self._last_alive:.0f} s (cluster.start_timeout_s); "
                "lower cluster.cpus_per_worker or the engine's GPUs, or let the cluster grow"
            )
