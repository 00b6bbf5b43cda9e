"""What a worker has cost so far, noted down again and again, so that a killed worker is not forgotten."""

import json
import logging
import os
import threading
import time
from collections.abc import Callable
from typing import Any

import pyarrow as pa

from pipelines.engines import Engine
from pipelines.machine import describe_hardware
from pipelines.parts import Origin
from pipelines.run import ATTEMPTS
from pipelines.schema import WORKER
from pipelines.storage import Folder

logger = logging.getLogger(__name__)


class Heartbeat:
    """Writes one small file for one worker's lifetime, at its start and every `interval_s` from then on."""

    def __init__(self, run: Folder, origin: Origin, interval_s: float):
        self._run = run
        self._origin = origin
        self._started_at_s = time.time()
        self._ready_at_s: float | None = None
        self._busy_s: Callable[[], float] = lambda: 0.0
        self._engine: str | None = None
        self._death: str | None = None
        self._hardware = describe_hardware()
        self._num_batches = 0
        self._interval_s = interval_s
        self.beat()
        threading.Thread(target=self._beat_forever, name="heartbeat", daemon=True).start()

    def ready(self, engine: Engine) -> None:
        """The engine is loaded; from now on it tells how long it worked."""
        self._ready_at_s = time.time()
        self._busy_s = engine.busy_s
        self._engine = json.dumps(engine.describe())

    def died(self, reason: str) -> None:
        """The engine is dead, and so will be the worker: leave the reason behind."""
        self._death = reason
        self.beat()

    def committed(self) -> None:
        """One more batch is committed."""
        self._num_batches += 1

    def _beat_forever(self) -> None:
        while True:
            time.sleep(self._interval_s)
            self.beat()

    def beat(self) -> None:
        """Note down the cost so far."""
        now = time.time()
        lifetime_s = now - self._started_at_s
        line = {
            "worker": self._origin.worker,
            "attempt": self._origin.attempt,
            "node": self._origin.node,
            "pid": os.getpid(),
            "accelerator": self._origin.accelerator,
            "num_accelerators": self._origin.num_accelerators,
            "started_at": int(self._started_at_s * 1e6),
            "lifetime_s": lifetime_s,
            "loading_s": (self._ready_at_s or now) - self._started_at_s,
            "busy_s": self._busy_s(),
            "num_batches": self._num_batches,
            "currency": self._origin.pricing.currency,
            "cost": self._origin.cost(lifetime_s),
            "hardware": self._hardware,
            "engine": self._engine,
            "death": self._death,
        }
        name = f"{ATTEMPTS}/worker-{self._origin.attempt:04d}-{self._origin.worker}.json"
        try:
            self._run.write(name, json.dumps(line).encode())
        except Exception:
            logger.warning("%s could not be written", name, exc_info=True)


def worker_table(run: Folder) -> pa.Table:
    """`stats/workers.parquet` from the last heartbeats of all attempts."""
    return pa.Table.from_pylist(_beats(run, "worker-"), schema=WORKER)


def deaths(run: Folder, attempt: int) -> list[str]:
    """Why engines died in an attempt, in the order of their workers' starts."""
    beats = sorted(_beats(run, f"worker-{attempt:04d}-"), key=lambda beat: beat["started_at"])
    return [beat["death"] for beat in beats if beat["death"] is not None]


def num_alive(run: Folder, within_s: float) -> int:
    """How many workers have given a sign of life within so many seconds."""
    ends = (beat["started_at"] / 1e6 + beat["lifetime_s"] for beat in _beats(run, "worker-"))
    return sum(time.time() - end < within_s for end in ends)


def _beats(run: Folder, prefix: str) -> list[dict[str, Any]]:
    names = [name for name in run.names(ATTEMPTS) if name.startswith(prefix)]
    return [json.loads(run.read(f"{ATTEMPTS}/{name}")) for name in names]
