"""One driver at a time on a run: its lease is a small file that it refreshes, and that the next one watches.

Only money depends on it. Parts are idempotent, so two drivers lose and double no row, but they pay for batches twice; hence no
locks and no renames, which object storage does not have, and no clocks, which differ from node to node: a lease is alive if
it changes while somebody watches it. Of two drivers that take a free one at the same moment, the last to write has it, and
the other finds out at its next refresh.
"""

import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import psutil
from pydantic import BaseModel, ConfigDict, ValidationError

from pipelines.errors import RunFailed
from pipelines.run import ATTEMPTS
from pipelines.storage import Folder

logger = logging.getLogger(__name__)

LEASE_FILE = f"{ATTEMPTS}/driver.json"
_MISSED = 3  # refreshes; after so many the holder is taken for dead
_LOOK_S = 1.0  # between two looks at a lease, and no more than a quarter of its heartbeat
_FAREWELL_S = 5.0  # to give a lease back: the storage may be what hangs
_PID_NAMESPACE = Path("/proc/self/ns/pid")


class Holder(BaseModel):
    """Who works on a run: `attempts/driver.json`."""

    model_config = ConfigDict(frozen=True)

    attempt: int
    node: str
    processes: str
    """What the process number counts in: containers may share a node's name, but not its processes."""
    pid: int
    token: str
    heartbeat_s: float
    refreshed_at: datetime
    """By the holder's own clock: for people to read, and to be compared on its own node only."""

    def __str__(self) -> str:
        return f"attempt {self.attempt} on node {self.node}, pid {self.pid}, last heard of at {self.refreshed_at:%F %T} UTC"


@contextmanager
def hold(run: Folder, attempt: int, heartbeat_s: float) -> Iterator["Lease"]:
    """Hold the lease of a run for the block, refreshing it every `heartbeat_s`.

    Raises RunFailed where another driver is at work on the run; finding out may take three of its heartbeats.
    """
    wait_until_free(run)
    lease = Lease(run, attempt, heartbeat_s)
    try:
        yield lease
    finally:
        lease.give_back()


def wait_until_free(run: Folder) -> None:
    """Return when no driver holds the run: at once if none does or its process has ended here, else when it stays silent.

    Raises RunFailed at its first sign of life.
    """
    first = _holder(run)
    if first is None or _has_ended(first):
        return
    silence_s = _MISSED * first.heartbeat_s
    logger.info("%s is held by %s; watching it for up to %g s", run.url, first, silence_s)
    started = time.perf_counter()
    while time.perf_counter() - started < silence_s:
        time.sleep(min(_LOOK_S, first.heartbeat_s / 4))
        now = _holder(run)
        if now is None or _has_ended(now):
            return
        if now != first:
            raise RunFailed(f"another driver works on {run.url}: {now}; wait for it or stop it")
    logger.warning("%s: %s is silent and taken for dead; going on in its place", run.url, first)


class Lease:
    """A lease that is held, until `give_back` or until another driver takes it."""

    def __init__(self, run: Folder, attempt: int, heartbeat_s: float):
        self._run = replace(run, patience_s=0.0)  # the next refresh is the next try
        self._held = Holder(
            attempt=attempt,
            node=socket.gethostname(),
            processes=_process_space(),
            pid=os.getpid(),
            token=uuid.uuid4().hex,
            heartbeat_s=heartbeat_s,
            refreshed_at=datetime.now(UTC),
        )
        self._lost: str | None = None
        self._is_away = False
        self._done = threading.Event()
        _write(run, self._held)
        self._thread = threading.Thread(target=self._keep, name="lease", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise RunFailed where another driver has taken the run over. Asks no storage."""
        if self._lost is not None:
            raise RunFailed(f"another driver has taken {self._run.url} over ({self._lost}); this one leaves it to it")

    def give_back(self) -> None:
        """Stop refreshing, and delete the file unless it is another's by now."""
        self._done.set()
        self._thread.join(_FAREWELL_S)

    def _keep(self) -> None:
        while not self._done.wait(self._held.heartbeat_s):
            self._try()
            if self._lost is not None:
                return
        self._try()

    def _try(self) -> None:
        """Refresh the lease, or delete it when done; storage that is away for a while takes nothing away."""
        try:
            self._refresh()
        except Exception as error:  # noqa: BLE001 - storage clients raise kinds of their own
            if not self._is_away:
                logger.warning("%s/%s is not refreshed: %s", self._run.url, LEASE_FILE, error)
            self._is_away = True
            return
        if self._is_away:
            logger.info("%s/%s is refreshed again", self._run.url, LEASE_FILE)
        self._is_away = False

    def _refresh(self) -> None:
        holder = _holder(self._run)
        if holder is None or holder.token != self._held.token:
            self._lost = str(holder or "its lease has ended since")
        elif self._done.is_set():
            self._run.delete(LEASE_FILE)
        else:
            _write(self._run, self._held.model_copy(update={"refreshed_at": datetime.now(UTC)}))


def _holder(run: Folder) -> Holder | None:
    try:
        return Holder.model_validate_json(run.read(LEASE_FILE))
    except FileNotFoundError:
        return None
    except ValidationError:  # no driver of this version wrote it, and a lease is worth no more than its holder's word
        return None


def _write(run: Folder, holder: Holder) -> None:
    run.write(LEASE_FILE, holder.model_dump_json(indent=2).encode())


def _has_ended(holder: Holder) -> bool:
    """Whether the holder's process was here, and is no more; its number may have gone to a process that started later."""
    if holder.processes != _process_space():
        return False
    try:
        process = psutil.Process(holder.pid)
        return bool(process.status() == psutil.STATUS_ZOMBIE or process.create_time() > holder.refreshed_at.timestamp())
    except psutil.NoSuchProcess:
        return True


def _process_space() -> str:
    space = _PID_NAMESPACE.readlink().name if _PID_NAMESPACE.is_symlink() else ""
    return f"{socket.gethostname()} {space}".rstrip()
