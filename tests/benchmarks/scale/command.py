"""Run the real command as a process of its own, and watch it from outside."""

import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

_LOOK_S = 0.1
_WORKERS_EVERY = 10


@dataclass(frozen=True, slots=True)
class Told:
    """What a command left behind."""

    moments: dict[str, float]
    """Seconds since the epoch."""
    peak_mib: float
    """Memory of the driver's own process, at most."""
    memory_mib: Sequence[tuple[float, float]]
    """The same at moments, in seconds since the epoch."""
    workers_mib: float
    """Memory that was in use by nobody but the worker processes, all together, at most."""
    driver_cpu_s: float
    workers_cpu_s: float
    """Of all of them, their start included."""
    log: str


def run_command(overrides: Sequence[str], timeout_s: float) -> Told:
    """Run `fournee batch`; raises where it ends with anything but success."""
    with tempfile.NamedTemporaryFile("w+") as moments, tempfile.NamedTemporaryFile("w+") as log:
        command = [sys.executable, "-m", "tests.benchmarks.scale.driver", moments.name, *overrides]
        process = subprocess.Popen(command, stdout=log, stderr=log)
        eye = _Eye(process.pid)
        try:
            code = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            process.terminate()
            process.wait()
            raise
        finally:
            eye.close()
        log.seek(0)
        said = log.read()
        if code:
            raise RuntimeError(f"exit code {code}:\n{said}")
        noted = json.loads(Path(moments.name).read_text())
        return Told(noted, eye.peak_mib, eye.memory_mib, eye.workers_mib, eye.driver_cpu_s, eye.workers_cpu_s, said)


class _Eye:
    """Looks at a process and its workers now and then."""

    def __init__(self, pid: int):
        self._process = psutil.Process(pid)
        self.peak_mib = self.workers_mib = self.driver_cpu_s = 0.0
        self.memory_mib: list[tuple[float, float]] = []
        self._cpu_s: dict[int, float] = {}
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._is_over.set()
        self._thread.join()

    @property
    def workers_cpu_s(self) -> float:
        return sum(self._cpu_s.values())

    def _look(self) -> None:
        looks = 0
        while not self._is_over.wait(_LOOK_S):
            try:
                status = Path(f"/proc/{self._process.pid}/status").read_text()
                self.peak_mib = int(status.partition("VmHWM:")[2].split()[0]) / 1024
                self.memory_mib.append((time.time(), self._process.memory_info().rss / 2**20))
                self.driver_cpu_s = sum(self._process.cpu_times()[:2])
                looks += 1
                if looks % _WORKERS_EVERY == 0:
                    self._look_at_workers()
            except (OSError, IndexError, psutil.Error):
                continue

    def _look_at_workers(self) -> None:
        workers = [one for one in self._process.children(recursive=True) if "MapWorker" in " ".join(one.cmdline()[:1])]
        self._cpu_s |= {one.pid: sum(one.cpu_times()[:2]) for one in workers}
        self.workers_mib = max(self.workers_mib, sum(one.memory_full_info().uss for one in workers) / 2**20)
