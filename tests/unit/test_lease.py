"""One driver at a time: who gets a run's lease, who is refused, and who notices that it was taken."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from pipelines.errors import RunFailed
from pipelines.lease import LEASE_FILE, hold
from pipelines.storage import Folder

BEAT_S = 0.1
LONG_S = 60.0  # nothing that takes this long goes unnoticed
DRIVER = """
import sys, time
from pipelines.lease import hold
from pipelines.storage import Folder
with hold(Folder(sys.argv[1]), 3, float(sys.argv[2])):
    print("held", flush=True)
    sys.stdin.read()
"""


class AwayFileSystem(MemoryFileSystem):  # type: ignore[misc]
    """Storage that can go away and come back."""

    protocol = "away"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    is_away: ClassVar[bool] = False

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(super()._strip_protocol(path.replace("away://", "memory://")))

    def cat_file(self, path: str, **kwargs: Any) -> bytes:
        self._answer()
        content: bytes = super().cat_file(path, **kwargs)
        return content

    def pipe_file(self, path: str, value: bytes, **kwargs: Any) -> None:
        self._answer()
        super().pipe_file(path, value, **kwargs)

    def _answer(self) -> None:
        if self.is_away:
            raise ConnectionError("no route to the bucket")


@pytest.fixture
def away() -> Iterator[type[AwayFileSystem]]:
    fsspec.register_implementation("away", AwayFileSystem, clobber=True)
    yield AwayFileSystem
    AwayFileSystem.is_away = False


@pytest.fixture(params=["local", "memory"])
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Folder:
    return Folder(str(tmp_path / "run") if request.param == "local" else f"memory://{uuid.uuid4().hex}")


@pytest.fixture
def driver(tmp_path: Path) -> Iterator[Callable[[float], "subprocess.Popen[str]"]]:
    """Start another process that holds the lease of `tmp_path / "run"`."""
    started = []

    def start(heartbeat_s: float) -> "subprocess.Popen[str]":
        command = [sys.executable, "-c", DRIVER, str(tmp_path / "run"), str(heartbeat_s)]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        started.append(process)
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def holder(run: Folder) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(run.read(LEASE_FILE))
    return found


def leave(run: Folder, **changes: Any) -> dict[str, Any]:
    """Leave a lease as a driver on another node would."""
    lease = {
        "attempt": 3, "node": "other", "processes": "other pid:[1]", "pid": 1, "token": uuid.uuid4().hex,
        "heartbeat_s": BEAT_S, "refreshed_at": "2026-11-30T00:00:00Z", **changes,
    }  # fmt: skip
    run.write(LEASE_FILE, json.dumps(lease).encode())
    return lease


def until(condition: Callable[[], bool]) -> None:
    deadline = time.perf_counter() + 20
    while not condition():
        assert time.perf_counter() < deadline, "it did not happen"
        time.sleep(BEAT_S / 10)


def has_lost(lease: Any) -> bool:
    try:
        lease.check()
    except RunFailed:
        return True
    return False


def test_a_free_run_is_held_at_once_refreshed_and_given_back(run: Folder) -> None:
    with hold(run, 2, BEAT_S) as lease:
        first = holder(run)
        assert (first["attempt"], first["pid"]) == (2, os.getpid())
        until(lambda: holder(run)["refreshed_at"] != first["refreshed_at"])
        lease.check()
    assert not run.exists(LEASE_FILE)


def test_a_job_that_fails_gives_its_lease_back(run: Folder) -> None:
    with pytest.raises(KeyError), hold(run, 1, LONG_S):
        raise KeyError
    assert not run.exists(LEASE_FILE)


def test_a_second_driver_is_refused_at_the_first_sign_of_life_and_told_who_works(run: Folder) -> None:
    with hold(run, 3, BEAT_S) as lease:
        with pytest.raises(RunFailed, match=rf"another driver works on .*: attempt 3 on node .+, pid {os.getpid()}, "):
            hold(run, 4, BEAT_S).__enter__()
        assert holder(run)["attempt"] == 3
        lease.check()


def test_a_driver_in_another_process_is_seen(tmp_path: Path, driver: Callable[[float], "subprocess.Popen[str]"]) -> None:
    process = driver(BEAT_S)
    with pytest.raises(RunFailed, match=rf"attempt 3 on node .+, pid {process.pid}, .*; wait for it or stop it"):
        hold(Folder(str(tmp_path / "run")), 4, BEAT_S).__enter__()
    process.communicate("")
    with hold(Folder(str(tmp_path / "run")), 4, LONG_S) as lease:
        lease.check()


@pytest.mark.parametrize("is_reaped", [True, False])
def test_the_lease_of_a_killed_process_of_this_node_is_taken_at_once(
    tmp_path: Path, driver: Callable[[float], "subprocess.Popen[str]"], is_reaped: bool
) -> None:
    process = driver(LONG_S)
    process.send_signal(signal.SIGKILL)
    if is_reaped:
        process.wait()
    started = time.perf_counter()
    run = Folder(str(tmp_path / "run"))
    with hold(run, 4, LONG_S):
        assert holder(run)["attempt"] == 4
    assert time.perf_counter() - started < LONG_S / 10


def test_a_process_that_was_given_the_holders_number_later_is_not_the_holder(run: Folder) -> None:
    with hold(run, 1, LONG_S):
        here = holder(run)
    leave(run, **{**here, "heartbeat_s": LONG_S, "refreshed_at": "2001-01-01T00:00:00Z"})
    started = time.perf_counter()
    with hold(run, 2, LONG_S):
        assert holder(run)["attempt"] == 2
    assert time.perf_counter() - started < LONG_S / 10


def test_a_stopped_process_of_this_node_is_watched_like_any_other(
    tmp_path: Path, driver: Callable[[float], "subprocess.Popen[str]"]
) -> None:
    process = driver(BEAT_S)
    process.send_signal(signal.SIGSTOP)
    started = time.perf_counter()
    with hold(Folder(str(tmp_path / "run")), 4, BEAT_S):
        assert time.perf_counter() - started >= 3 * BEAT_S


@pytest.mark.parametrize("clock", ["2001-01-01T00:00:00Z", "2126-11-30T00:00:00+05:00"])
def test_a_silent_lease_of_another_node_is_taken_after_three_of_its_heartbeats_whatever_its_clock_says(
    run: Folder, clock: str
) -> None:
    leave(run, heartbeat_s=3 * BEAT_S, refreshed_at=clock)
    started = time.perf_counter()
    with hold(run, 4, BEAT_S):
        assert time.perf_counter() - started >= 9 * BEAT_S
        assert holder(run)["attempt"] == 4


def test_a_lease_that_is_given_back_while_it_is_watched_is_taken_at_once(run: Folder) -> None:
    leave(run, heartbeat_s=1.0)
    threading.Timer(BEAT_S, run.delete, [LEASE_FILE]).start()
    started = time.perf_counter()
    with hold(run, 4, BEAT_S):
        assert time.perf_counter() - started < 2.0


def test_a_file_that_no_driver_wrote_is_no_lease(run: Folder) -> None:
    run.write(LEASE_FILE, b'{"attempt": 1}')
    with hold(run, 2, LONG_S):
        assert holder(run)["attempt"] == 2


def test_a_driver_whose_run_was_taken_over_notices_and_leaves_the_file_to_the_other(run: Folder) -> None:
    with hold(run, 2, BEAT_S) as lease:
        theirs = leave(run)
        until(lambda: has_lost(lease))
        with pytest.raises(RunFailed, match=r"another driver has taken .* over \(attempt 3 on node other, pid 1, "):
            lease.check()
    assert holder(run) == theirs


def test_a_driver_whose_job_ends_before_it_notices_leaves_the_file_to_the_other(run: Folder) -> None:
    with hold(run, 2, LONG_S):
        theirs = leave(run)
    assert holder(run) == theirs


def test_a_driver_whose_run_was_replaced_or_finished_by_another_notices(run: Folder) -> None:
    with hold(run, 2, BEAT_S) as lease:
        run.remove()
        until(lambda: has_lost(lease))
    assert not run.exists(LEASE_FILE)


def test_of_many_drivers_that_start_at_once_one_goes_on(run: Folder) -> None:
    together = threading.Barrier(6)
    leases: list[Any] = []

    def start(attempt: int) -> None:
        together.wait()
        try:
            leases.append(stack.enter_context(hold(run, attempt, BEAT_S)))
        except RunFailed:
            return

    with ExitStack() as stack:
        threads = [threading.Thread(target=start, args=(attempt,)) for attempt in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        until(lambda: sum(not has_lost(lease) for lease in leases) == 1)
        time.sleep(5 * BEAT_S)
        assert sum(not has_lost(lease) for lease in leases) == 1
    assert not run.exists(LEASE_FILE)


def test_storage_that_is_away_for_a_while_takes_no_lease_away(
    away: type[AwayFileSystem], caplog: pytest.LogCaptureFixture
) -> None:
    run = Folder(f"away://{uuid.uuid4().hex}")
    with hold(run, 1, BEAT_S) as lease:
        before = holder(run)["refreshed_at"]
        away.is_away = True
        until(lambda: "is not refreshed: " in caplog.text)
        time.sleep(5 * BEAT_S)
        lease.check()
        assert caplog.text.count("is not refreshed: ") == 1
        away.is_away = False
        until(lambda: holder(run)["refreshed_at"] > before)
        lease.check()
    assert not run.exists(LEASE_FILE)


def test_a_driver_that_was_cut_off_from_the_storage_yields_to_the_one_that_took_its_place(away: type[AwayFileSystem]) -> None:
    run = Folder(f"away://{uuid.uuid4().hex}")
    with hold(run, 1, BEAT_S) as lease:
        away.is_away = True
        time.sleep(2 * BEAT_S)
        path = f"{run.path()}/{LEASE_FILE}"
        MemoryFileSystem.pipe_file(
            run.fs, path, json.dumps({**json.loads(MemoryFileSystem.cat_file(run.fs, path)), "token": "b"}).encode()
        )
        away.is_away = False
        until(lambda: has_lost(lease))
    assert holder(run)["token"] == "b"
