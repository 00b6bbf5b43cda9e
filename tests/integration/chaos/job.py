"""A run under test: the same command, started as often as it takes until it ends well."""

import hashlib
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pyarrow.parquet as pq

from pipelines.errors import ExitCode
from tests.integration.chaos.cluster import RayCluster

_POLL_S = 0.05
_IN_VAIN = 4
_IMPORTS_S = 20  # with two cores and as many clusters
_SHOWN_BYTES = 4000


class Broken(AssertionError):
    """A promise that was not kept."""


@dataclass(frozen=True, slots=True)
class Part:
    """A part as it was seen at some moment."""

    written_ns: int
    rows: str
    """A digest of what stands in it."""
    worker: str
    attempt: int
    began_at: int
    """With the worker, what tells one commit from another."""


class Job:
    """The drivers of one run folder, one after the other, and the parts that were seen in it."""

    def __init__(self, cluster: RayCluster, folder: Path, overrides: Sequence[str], limit_s: float):
        self.cluster = cluster
        self.folder = folder
        self.run = folder / "disk" / "run"
        self.codes: list[int] = []
        """How each driver has ended."""
        self.failures: list[str] = []
        """What those said last that have failed."""
        self.seen: dict[str, Part] = {}
        self.rewritten: list[tuple[str, Part, Part]] = []
        self.has_company = False
        """Whether two writers may have worked on the same batch, so that its part may be written twice within an attempt."""
        self._command = [sys.executable, "-m", "jobs.cli", "batch", f"output.path={self.run}", *overrides]
        self._deadline = time.monotonic() + limit_s
        self._driver: subprocess.Popen[bytes] | None = None
        self._killed: set[int] = set()
        self._num_started = 0
        self._started = 0.0
        self._parts_at_start: list[int] = []

    # Drivers

    def start(self) -> subprocess.Popen[bytes]:
        """Start a driver beside those that run; what it says goes to a file, which never blocks."""
        self._parts_at_start.append(self.num_parts())
        if len(set(self._parts_at_start[-_IN_VAIN:])) == 1 and self.codes[-_IN_VAIN:] == [ExitCode.FAILED] * _IN_VAIN:
            raise Broken(f"{_IN_VAIN} attempts have failed without a new part; the last said:\n{self.said()}")
        self._num_started += 1
        self._started = time.monotonic()
        with self._log(self._num_started).open("wb") as log:
            return subprocess.Popen(
                self._command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env=self.cluster.environment
            )

    def resume(self) -> None:
        """Start the driver, if none runs."""
        if not self.is_running:
            self._driver = self.start()

    @property
    def is_running(self) -> bool:
        """Whether the driver runs."""
        self._look_at_driver()
        return self._driver is not None

    @property
    def is_finished(self) -> bool:
        """Whether a driver has ended well."""
        self._look_at_driver()
        return ExitCode.OK in self.codes

    def _look_at_driver(self) -> None:
        """Note down the exit code of a driver that has ended."""
        if self._driver is not None and self._driver.poll() is not None:
            ended, self._driver = self._driver, None
            self.note(ended)

    @property
    def driver(self) -> subprocess.Popen[bytes]:
        """The driver, which runs."""
        assert self._driver is not None
        return self._driver

    def send(self, number: signal.Signals) -> None:
        """Send the driver a signal."""
        if number == signal.SIGKILL:
            self._killed.add(self.driver.pid)
        self.driver.send_signal(number)

    def ended(self, within_s: float) -> int:
        """Wait for the driver's end, and return its exit code. Raises Broken where it takes too long."""
        self.until(lambda: not self.is_running, within_s, "the driver did not end")
        return self.codes[-1]

    def note(self, driver: subprocess.Popen[bytes], *, expected: Sequence[int] = (0, 1, 4)) -> int:
        """Note down how a driver has ended. Raises Broken for an exit code that is not documented or makes no sense here."""
        code = int(driver.returncode)
        self.look()
        self.codes.append(code)
        is_killed = code == -signal.SIGKILL and driver.pid in self._killed
        # Before the job has handlers of its own, and while Ray has taken them, a signal ends the process by itself.
        is_early = code in (-signal.SIGTERM, -signal.SIGINT, signal.SIGTERM) and time.monotonic() - self._started < _IMPORTS_S
        if code == ExitCode.FAILED:
            self.failures.append(self.said().strip().rpartition("\n")[2])
        is_homeless = code == ExitCode.BAD_CONFIG and "no Ray cluster answers there" in self.said()
        if not (code in expected or is_killed or is_early or is_homeless):
            raise Broken(f"exit code {code} was not expected; the driver said:\n{self.said()}")
        return code

    def said(self) -> str:
        """The end of what the last driver has said."""
        return self._log(self._num_started).read_text(errors="replace")[-_SHOWN_BYTES:]

    def until(self, happened: Callable[[], bool], within_s: float, otherwise: str) -> None:
        """Wait for something. Raises Broken where it takes longer than it may, or than the run has left."""
        deadline = min(self._deadline, time.monotonic() + within_s)
        while not happened():
            if time.monotonic() > deadline:
                raise Broken(f"{otherwise} in time; the driver said:\n{self.said()}")
            time.sleep(_POLL_S)

    # What is in the run folder

    def num_parts(self) -> int:
        """How many batches are committed."""
        return len(self._places())

    def _places(self) -> dict[str, Path]:
        """Where each batch is, by the name of its part: in a file of several batches, if it has come so far."""
        # Parts first: they go when their file is there.
        own = {path.name: path for path in self.run.glob("*/part-*.parquet") if path.name.count("-") == 1}
        files = {name: path for path in self.run.glob("results/part-*-*.parquet") for name in _parts_in(path)}
        return own | files

    def look(self) -> None:
        """Take note of the parts there are, and of those written again. Raises Broken where one has changed or is gone."""
        now = self._places()
        if gone := self.seen.keys() - now.keys():
            raise Broken(f"parts that were committed are gone: {sorted(gone)}")
        for name, path in now.items():
            before = self.seen.get(name)
            try:
                if before is not None and path.stat().st_mtime_ns == before.written_ns:
                    continue
                part = _read(path, name)
            except FileNotFoundError:  # its file has just taken its place; the next look will tell
                continue
            self.seen[name] = part
            if before is None or (part.worker, part.began_at) == (before.worker, before.began_at):
                continue
            if part.rows != before.rows:
                raise Broken(f"{name} was committed, and then written again with other rows")
            if part.attempt == before.attempt and not self.has_company:
                raise Broken(
                    f"{name} was committed by worker {before.worker} and answered again by {part.worker} of the same attempt"
                )
            self.rewritten.append((name, before, part))

    def beats(self) -> list[dict[str, Any]]:
        """The last sign of life of every worker so far."""
        return [json.loads(path.read_text()) for path in sorted(self.run.glob("attempts/worker-*.json"))]

    def workers(self) -> list[psutil.Process]:
        """The worker processes that are alive, stopped ones included."""
        return [process for process in map(_process_of, self.beats()) if process is not None]

    def drivers(self) -> list[psutil.Process]:
        """The driver processes that are alive."""
        return [one for one in psutil.process_iter(["cmdline"]) if f"output.path={self.run}" in (one.info["cmdline"] or ())]

    def _log(self, number: int) -> Path:
        return self.folder / f"driver-{number}.log"


def _parts_in(file: Path) -> Iterator[str]:
    first, last = map(int, file.stem.split("-")[1:])
    return (f"part-{batch_id:08d}.parquet" for batch_id in range(first, last + 1))


def _read(path: Path, name: str) -> Part:
    """Read a part, or what a file of several batches holds instead of it."""
    written_ns = path.stat().st_mtime_ns
    file = pq.ParquetFile(path)
    told = file.metadata.metadata
    lines = json.loads(told[b"fournee.batches"]) if path.name != name else [json.loads(told[b"fournee.batch"])]
    place = list(_parts_in(path)).index(name) if path.name != name else 0
    start, statistics = sum(line["num_rows"] for line in lines[:place]), lines[place]
    table = file.read(["id", "source_row", "status", "text", "error_kind"]).slice(start, statistics["num_rows"])
    digest = hashlib.sha256(json.dumps(table.to_pylist()).encode()).hexdigest()
    return Part(written_ns, digest, statistics["worker"], statistics["attempt"], statistics["started_at"])


def _process_of(beat: dict[str, Any]) -> psutil.Process | None:
    """The process of a worker, unless it has ended and its number belongs to another one now."""
    try:
        process = psutil.Process(beat["pid"])
        is_it = process.create_time() <= beat["started_at"] / 1e6 and process.status() != psutil.STATUS_ZOMBIE
        return process if is_it and process.cmdline()[0].startswith("ray::") else None
    except (psutil.NoSuchProcess, IndexError):  # a process that is ending has no command line any more
        return None
