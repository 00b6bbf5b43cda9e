"""The faults: each breaks something of a run, and says what it did; None where the run has ended well before.

Some wait for what must follow.
"""

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from random import Random

import psutil

from pipelines.errors import ExitCode
from tests.integration.chaos.job import Broken, Job

_STOP_S = 60  # a driver that is told to stop has ended by then
_ALONE_S = 150  # a driver whose cluster is gone has found out by then
_LATE_S = 5
_WAIT_S = 240  # a run that is resumed goes on by then


def kill_driver(job: Job, rng: Random) -> str:
    """SIGKILL the driver: nobody says goodbye."""
    job.send(signal.SIGKILL)
    return f"exit {job.ended(_STOP_S)}"


def stop_driver(job: Job, rng: Random) -> str:
    """SIGTERM or SIGINT to the driver, as a scheduler or a person stops it."""
    number = rng.choice([signal.SIGTERM, signal.SIGINT])
    job.send(number)
    code = job.ended(_STOP_S)
    if code not in (ExitCode.STOPPED, ExitCode.OK, -number):
        raise Broken(f"{number.name} ended the driver with exit code {code}; it said:\n{job.said()}")
    return f"{number.name}, exit {code}"


def kill_worker(job: Job, rng: Random) -> str | None:
    """SIGKILL a worker, as the kernel does when memory is short."""
    return _signal_worker(job, rng, signal.SIGKILL)


def terminate_worker(job: Job, rng: Random) -> str | None:
    """SIGTERM a worker."""
    return _signal_worker(job, rng, signal.SIGTERM)


def hang_worker(job: Job, rng: Random) -> str | None:
    """Stop a worker for good: it neither answers nor dies, and the run must go on without it."""
    job.has_company = True
    return _signal_worker(job, rng, signal.SIGSTOP)


def pause_worker(job: Job, rng: Random) -> str | None:
    """Stop a worker for two seconds: no more than a hiccup."""
    worker = _a_worker(job, rng)
    if worker is None:
        return None
    _send(worker, signal.SIGSTOP)
    time.sleep(2)
    _send(worker, signal.SIGCONT)
    return f"worker {worker.pid}"


def kill_node(job: Job, rng: Random) -> str:
    """Kill a whole node, and start another one some seconds later."""
    node = _a_node(job, rng)
    job.cluster.kill_node(node)
    time.sleep(rng.uniform(0, 4))
    job.cluster.add_node()
    return f"node {node[:8]}"


def drain_node(job: Job, rng: Random) -> str:
    """Announce the end of a node, as clouds do for spot machines, and kill it at the deadline; then start another one."""
    job.has_company = True
    node, deadline_s = _a_node(job, rng), rng.uniform(2, 8)
    job.cluster.drain_node(node, deadline_s)
    time.sleep(deadline_s)
    job.cluster.kill_node(node)
    job.cluster.add_node()
    return f"node {node[:8]}, {deadline_s:.1f} s notice"


def kill_cluster(job: Job, rng: Random) -> str:
    """Kill the head and all nodes: the driver must notice and end; then start another cluster."""
    job.cluster.kill()
    started = time.monotonic()
    code = job.ended(_ALONE_S)
    alone_s = time.monotonic() - started
    job.cluster.replace()
    return f"exit {code} after {alone_s:.0f} s"


def second_driver(job: Job, rng: Random) -> str:
    """Start the same command while the driver runs; sometimes the first one dies just then."""
    job.has_company = True
    dies = rng.random() < 0.3
    second = job.start()
    time.sleep(rng.uniform(0, 4))
    if dies and job.is_running:
        job.send(signal.SIGKILL)
    job.until(lambda: second.poll() is not None, _WAIT_S, "the second driver did not end")
    code = job.note(second, expected=(0, 1, 2))
    return f"exit {code}{', the first was killed' if dies else ''}"


def zombie(job: Job, rng: Random) -> str | None:
    """Freeze a node, and sometimes kill the driver; when others have done its work, let its worker go on and commit late."""
    worker = _a_worker(job, rng)
    node = None if worker is None else job.cluster.node_of(worker)
    if worker is None or node is None:
        return None
    job.has_company = True
    for process in job.cluster.processes(node):
        _send(process, signal.SIGSTOP)
    if job.is_running and rng.random() < 0.5:
        kill_driver(job, rng)
    enough = job.num_parts() + rng.randint(5, 60)
    _wait(job, lambda: job.num_parts() >= enough, "no progress without the zombie")
    job.look()
    before = len(job.rewritten)
    _send(worker, signal.SIGCONT)
    time.sleep(_LATE_S)
    job.look()
    job.cluster.kill_node(node)
    job.cluster.add_node()
    return f"worker {worker.pid}, {len(job.rewritten) - before} late commits"


def change_input(job: Job, rng: Random) -> str | None:
    """Change an input file between two attempts: the run must refuse it, and go on when it is what it was."""
    if not _wait(job, lambda: job.num_parts() > 0, "no part was committed"):
        return None
    stopped = stop_driver(job, rng)
    path = job.folder / "rows.jsonl"
    content, before = path.read_bytes(), path.stat()
    path.write_bytes(content + b'{"id": "new", "prompt": "one more"}\n')
    driver = job.start()
    job.until(lambda: driver.poll() is not None, _STOP_S, "the driver did not refuse the input")
    if not job.is_finished:
        job.note(driver, expected=(ExitCode.BAD_CONFIG,))
    path.write_bytes(content)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    return f"{stopped}, then refused"


def fill_disk(job: Job, rng: Random) -> str:
    """Leave no room on the disk of the run folder for some seconds."""
    filler, full_s = job.run.parent / "filler", rng.uniform(1, 15)
    try:
        _fill(filler)
        deadline = time.monotonic() + full_s
        while job.is_running and time.monotonic() < deadline:
            time.sleep(0.2)
            _fill(filler)
    finally:
        filler.unlink()
    return f"{full_s:.0f} s" if job.is_running else f"exit {job.codes[-1]}"


FAULTS: dict[str, Callable[[Job, Random], str | None]] = {
    "driver killed": kill_driver,
    "driver stopped": stop_driver,
    "worker killed": kill_worker,
    "worker terminated": terminate_worker,
    "worker hangs": hang_worker,
    "worker paused": pause_worker,
    "node killed": kill_node,
    "node drained": drain_node,
    "cluster killed": kill_cluster,
    "second driver": second_driver,
    "zombie": zombie,
    "input changed": change_input,
    "disk full": fill_disk,
}
# How often each strikes: what takes a minute less often than what takes a second.
WEIGHTS: dict[str, float] = {
    **dict.fromkeys(FAULTS, 1.0),
    "driver killed": 2.0,
    "worker killed": 2.0,
    "node killed": 2.0,
    "second driver": 0.5,
    "zombie": 0.5,
    "input changed": 0.5,
    "cluster killed": 0.2,
}


def _signal_worker(job: Job, rng: Random, number: signal.Signals) -> str | None:
    worker = _a_worker(job, rng)
    if worker is None:
        return None
    _send(worker, number)
    return f"worker {worker.pid}"


def _a_worker(job: Job, rng: Random) -> psutil.Process | None:
    """A worker that runs, as soon as there is one; None where the run ends well before."""
    _wait(job, lambda: bool(_workers(job)), "no worker was started")
    workers = _workers(job)
    return rng.choice(workers) if workers else None


def _a_node(job: Job, rng: Random) -> str:
    """A node with a worker of the run, if there is one."""
    nodes = {node for node in map(job.cluster.node_of, _workers(job)) if node is not None}
    return rng.choice(sorted(nodes or job.cluster.nodes))


def _workers(job: Job) -> list[psutil.Process]:
    return [worker for worker in job.workers() if not _is_stopped(worker)]


def _is_stopped(process: psutil.Process) -> bool:
    try:
        return bool(process.status() == psutil.STATUS_STOPPED)
    except psutil.NoSuchProcess:
        return True


def _send(process: psutil.Process, number: signal.Signals) -> None:
    with suppress(psutil.NoSuchProcess):  # it may have ended by itself just now
        process.send_signal(number)


def _wait(job: Job, happened: Callable[[], bool], otherwise: str) -> bool:
    """Wait for something, resuming the run where it ends before; False where it ends well."""

    def is_there() -> bool:
        if not (job.is_running or job.is_finished):
            job.resume()
        return job.is_finished or happened()

    job.until(is_there, _WAIT_S, otherwise)
    return not job.is_finished


def _fill(filler: Path) -> None:
    """Write until there is no room."""
    try:
        with filler.open("ab", buffering=0) as file:
            while True:
                file.write(b"\0" * 4096)
    except OSError:
        return
