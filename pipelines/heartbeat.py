"""What a worker has cost so far, noted down again and again, so that a killed worker is not forgotten."""

import json
import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil

from pipelines.engines import Engine
from pipelines.machine import describe_hardware
from pipelines.poison import Cell, Suspicions
from pipelines.rows import EngineWork
from pipelines.run import ATTEMPTS
from pipelines.starvation import Starvation
from pipelines.statistics import Age, Origin
from pipelines.storage import Folder

logger = logging.getLogger(__name__)

_READ_THREADS = 32  # one after the other, the files of 200 workers took seven seconds at 30 ms for each request


class Heartbeat:
    """Writes one small file for one worker's lifetime, at its start and every `interval_s` from then on."""

    def __init__(self, run: Folder, origin: Origin, interval_s: float):
        self._run = run
        self._origin = origin
        self._started_at_s = time.time()
        self._started = time.perf_counter()  # a clock that is set right must not change what a lifetime is
        self._loading_s: float | None = None
        self._engine: Engine | None = None
        self._starved_s: Callable[[], dict[str, float]] = dict
        self._death: str | None = None
        self._hardware = describe_hardware()
        self._num_batches = 0
        self._in_flight: set[Cell] = set()
        self._lock = threading.Lock()
        self._known_names: list[str] | None = None
        self._suspicions = Suspicions()
        self._interval_s = interval_s
        self.beat()
        threading.Thread(target=self._beat_forever, name="heartbeat", daemon=True).start()

    def ready(self, engine: Engine, starvation: Starvation) -> None:
        """The engine is loaded; from now on it tells how long it worked, and how long it might have worked on more."""
        self._loading_s = time.perf_counter() - self._started
        self._engine = engine
        self._starved_s = starvation.seconds

    def died(self, reason: str) -> None:
        """The engine is dead, and so will be the worker: leave the reason behind."""
        self._death = reason
        self.beat()

    def enter(self, cell: Cell) -> None:
        """Note down what is about to be in the engine: if the process dies, nobody can ask it any more."""
        self._in_flight.add(cell)
        self.beat()

    def leave(self, cell: Cell) -> None:
        """The engine has survived it."""
        self._in_flight.discard(cell)

    def suspicions(self, since_attempt: int) -> Suspicions:
        """What the dead workers of the run have had in their engines, from an attempt on.

        A worker that was killed could not leave a reason; those of this attempt that are found dead are given one here, so
        that the next attempt knows it too. Whoever stops a driver kills its workers with it: no reason to suspect a row.
        """
        names = self._run.names(ATTEMPTS)
        if names == self._known_names:  # a death is followed by a restart, and that by a new file
            return self._suspicions
        beats = _beats(self._run, "worker-")
        for beat in beats:
            is_ours = beat["attempt"] == self._origin.attempt and beat["worker"] != self._origin.worker
            if is_ours and beat["death"] is None and beat["in_flight"] and _is_gone(beat, 3 * self._interval_s):
                beat["death"] = "its process ended without a word: killed, out of memory, or a crash in native code"
                self._run.write(_name(beat), json.dumps(beat).encode())
        dead = [beat for beat in beats if beat["death"] is not None and beat["attempt"] >= since_attempt]
        self._known_names = names
        self._suspicions = Suspicions([Cell(*cell) for cell in beat["in_flight"]] for beat in dead)
        return self._suspicions

    def committed(self) -> None:
        """One more batch is committed."""
        self._num_batches += 1

    def age(self) -> Age:
        """How old and how busy the worker is; the engine is asked first, so that it never was busier than it is old."""
        busy_s = self._engine.clock.busy_s() if self._engine else 0.0
        return Age(time.perf_counter() - self._started, busy_s)

    def phases(self) -> dict[str, float]:
        """How the worker's lifetime has passed so far, in seconds."""
        age = self.age()
        loading_s = age.lifetime_s if self._loading_s is None else self._loading_s
        return {"loading": loading_s, "busy": age.busy_s, "idle": age.lifetime_s - loading_s - age.busy_s}

    def _beat_forever(self) -> None:
        while True:
            time.sleep(self._interval_s)
            self.beat()

    def beat(self) -> None:
        """Note down the cost so far."""
        with self._lock:  # beats come from several threads, and an older one must not replace a newer
            self._write()

    def _write(self) -> None:
        engine, age = self._engine, self.age()
        line = {
            "worker": self._origin.worker,
            "attempt": self._origin.attempt,
            "node": self._origin.node,
            "pid": os.getpid(),
            "accelerator": self._origin.accelerator,
            "num_accelerators": self._origin.num_accelerators,
            "started_at": int(self._started_at_s * 1e6),
            **age._asdict(),
            "loading_s": age.lifetime_s if self._loading_s is None else self._loading_s,
            "request_s": engine.clock.request_s() if engine else 0.0,
            "starved_s": self._starved_s(),
            "num_batches": self._num_batches,
            **(engine.work() if engine else EngineWork())._asdict(),
            "price_per_accelerator_hour": self._origin.pricing.paid_per_accelerator_hour,
            "currency": self._origin.pricing.currency,
            "hardware": self._hardware,
            "engine": json.dumps(engine.describe()) if engine else None,
            "in_flight": sorted(self._in_flight.copy()),
            "death": self._death,
        }
        name = _name(line)
        try:
            self._run.write(name, json.dumps(line).encode())
        except Exception:
            logger.warning("%s could not be written", name, exc_info=True)


def heartbeats(run: Folder) -> list[dict[str, Any]]:
    """The last heartbeats of all workers of all attempts."""
    return _beats(run, "worker-")


def deaths(run: Folder, attempt: int) -> list[str]:
    """Why engines died in an attempt, in the order of their workers' starts."""
    beats = sorted(_beats(run, f"worker-{attempt:04d}-"), key=lambda beat: beat["started_at"])
    return [beat["death"] for beat in beats if beat["death"] is not None]


def _is_gone(beat: dict[str, Any], silent_s: float) -> bool:
    """Whether a worker's process is no longer there; on another node, whether it has been silent for too long."""
    if beat["node"] != socket.gethostname():
        silence_s: float = time.time() - (beat["started_at"] / 1e6 + beat["lifetime_s"])
        return silence_s > silent_s
    try:
        status: str = psutil.Process(beat["pid"]).status()
    except psutil.NoSuchProcess:
        return True
    return status == str(psutil.STATUS_ZOMBIE)


def _name(beat: dict[str, Any]) -> str:
    return f"{ATTEMPTS}/worker-{beat['attempt']:04d}-{beat['worker']}.json"


def _beats(run: Folder, prefix: str) -> list[dict[str, Any]]:
    names = [f"{ATTEMPTS}/{name}" for name in run.names(ATTEMPTS) if name.startswith(prefix)]
    with ThreadPoolExecutor(_READ_THREADS) as pool:
        return [json.loads(content) for content in pool.map(run.read, names)]
