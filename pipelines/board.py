"""The board between a driver and its workers: what was committed, who is alive, who is to stop.

An actor of its own, because Ray Data gives a driver no way to speak to the actors of its pool. It lives on the driver's node.
"""

import asyncio
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import psutil
import ray
from ray.actor import ActorHandle
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from pipelines.lifeline import Order

_PATIENCE_S = 10.0
_ORDER_S = 2.0  # to wait for an order before asking again
_MOST_CALLS = 100_000  # at once: each worker has one waiting for an order; at Ray's 1,000, as many workers shut all others out
_KILL_S = 30.0  # a process of Ray's must start for it: three seconds on a node with nothing to do
_SUMMED = ("num_rows", "num_failed", "num_output_tokens")


@dataclass(frozen=True, slots=True)
class Life:
    """A worker's process. The start tells it from a later process of the same number."""

    worker: str
    node_id: str
    pid: int
    started_at_s: float


class BoardLost(RuntimeError):
    """Ray has lost the process or the node that the board lived on."""


class _Board:
    """Runs in an event loop of its own, so that many workers can wait for an order at once."""

    def __init__(self) -> None:
        self._totals = dict.fromkeys(_SUMMED, 0)
        self._num_ready = 0
        self._lives: dict[Life, tuple[float, float]] = {}
        self._last_sign_s: dict[Life, float] = {}
        self._last_busy_s = time.monotonic()
        self._drained: set[str] = set()
        self._is_stopping = False
        self._leaving: frozenset[str] = frozenset()
        self._orders = asyncio.Condition()

    async def ready(self) -> None:
        self._num_ready += 1

    async def committed(self, numbers: dict[str, int]) -> None:
        for name in _SUMMED:
            self._totals[name] += numbers[name]

    async def alive(self, life: Life, is_busy: bool) -> None:
        now = time.monotonic()
        self._lives[life] = (self._lives.get(life, (now, now))[0], now)
        if is_busy:
            self._last_busy_s = now
        if life.worker not in self._drained:
            self._last_sign_s[life] = now

    async def drained(self, worker: str) -> None:
        self._drained.add(worker)
        self._last_sign_s = {life: last for life, last in self._last_sign_s.items() if life.worker != worker}

    async def order(self, node_id: str) -> Order | None:
        with suppress(TimeoutError):
            async with asyncio.timeout(_ORDER_S), self._orders:
                await self._orders.wait_for(lambda: self._is_stopping or node_id in self._leaving)
                return "stop" if self._is_stopping else "leave"
        return None

    async def stop(self) -> None:
        async with self._orders:
            self._is_stopping = True
            self._orders.notify_all()

    async def leave(self, node_ids: frozenset[str]) -> None:
        async with self._orders:
            self._leaving = node_ids
            self._orders.notify_all()

    async def totals(self) -> dict[str, float]:
        since = min((first for first, _ in self._lives.values()), default=time.monotonic())
        return {
            **self._totals,
            "worker_s": sum(last - first for first, last in self._lives.values()),
            "wall_s": time.monotonic() - since,
            "num_workers": len(self._last_sign_s),
            "num_ready": self._num_ready,
        }

    async def idle_s(self) -> float:
        return time.monotonic() - self._last_busy_s

    async def num_alive(self, within_s: float) -> int:
        now = time.monotonic()
        return sum(now - last <= within_s for last in self._last_sign_s.values())

    async def silent(self, limit_s: float) -> list[Life]:
        now = time.monotonic()
        silent = [life for life, last in self._last_sign_s.items() if now - last > limit_s]
        for life in silent:
            del self._last_sign_s[life]
        return silent


class Board:
    """A hold on the board, for the driver and, sent along, for its workers."""

    def __init__(self) -> None:
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        board = ray.remote(num_cpus=0, max_concurrency=_MOST_CALLS)(_Board)
        self._actor: ActorHandle = board.options(scheduling_strategy=here).remote()

    # What a worker says and hears.

    def ready(self) -> None:
        """Say that the engine is loaded. Does not wait."""
        self._actor.ready.remote()

    def committed(self, numbers: dict[str, int]) -> None:
        """Report a batch: how many rows, failures and tokens are new. Does not wait."""
        self._actor.committed.remote(numbers)

    def alive(self, worker: str, *, is_busy: bool) -> None:
        """Give a sign of life, and say whether there is anything to do. Does not wait."""
        process = psutil.Process()
        node_id = ray.get_runtime_context().get_node_id()
        self._actor.alive.remote(Life(worker, node_id, process.pid, process.create_time()), is_busy)

    def drained(self, worker: str) -> None:
        """Say that nothing is left to commit, and that no more signs of life are to be expected."""
        ray.wait([self._actor.drained.remote(worker)], timeout=_PATIENCE_S)

    def order(self) -> Order | None:
        """Wait for an order; None where the driver is gone, which ends this process too."""
        order: Order | None = None
        try:
            # Again and again: a process that is told to end waits for the answers that it has asked for.
            while order is None:
                order = ray.get(self._actor.order.remote(ray.get_runtime_context().get_node_id()))
        except ray.exceptions.RayError:
            return None
        return order

    # What the driver asks and says; each raises TimeoutError where it takes too long, and BoardLost.

    def totals(self) -> dict[str, float]:
        """What was committed; for how long there were workers, and how long each, added up; how many there are, and loaded."""
        totals: dict[str, float] = _wait(self._actor.totals.remote())
        return totals

    def num_alive(self, within_s: float) -> int:
        """How many workers have given a sign of life within so many seconds, and have not said that they are drained."""
        num_alive: int = _wait(self._actor.num_alive.remote(within_s))
        return num_alive

    def idle_s(self) -> float:
        """For how long no worker has had anything to do, loading included."""
        idle_s: float = _wait(self._actor.idle_s.remote())
        return idle_s

    def stop(self) -> None:
        """Tell all workers to hand back what is not in their engines, and to commit the rest."""
        _wait(self._actor.stop.remote())

    def leave(self, node_ids: Sequence[str]) -> None:
        """Tell the workers on these nodes to do the same, and to leave."""
        _wait(self._actor.leave.remote(frozenset(node_ids)))

    def silent(self, limit_s: float) -> list[Life]:
        """The workers that have given no sign of life for so long; each is told once."""
        silent: list[Life] = _wait(self._actor.silent.remote(limit_s))
        return silent


def _wait(answer: Any) -> Any:
    try:
        return ray.get(answer, timeout=_PATIENCE_S)
    except TimeoutError:
        raise
    except ray.exceptions.RayError as error:
        raise BoardLost(str(error).strip().partition("\n")[0]) from None


def end_process(life: Life) -> bool:
    """End a worker's process, whatever state it is in, by a task on its node; returns whether it was still there."""
    there = NodeAffinitySchedulingStrategy(life.node_id, soft=False)
    try:
        was_there: bool = ray.get(
            ray.remote(num_cpus=0, max_retries=0)(_kill).options(scheduling_strategy=there).remote(life), timeout=_KILL_S
        )
    except ray.exceptions.RayError:  # the node is gone, and the process with it
        return False
    return was_there


def _kill(life: Life) -> bool:
    try:
        process = psutil.Process(life.pid)
        if process.create_time() != life.started_at_s:
            return False
        process.kill()
    except psutil.NoSuchProcess:
        return False
    return True
