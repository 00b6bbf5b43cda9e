"""Play a case: start the run, let its faults strike, resume it until it ends well, and count."""

import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

from tests.integration.chaos.case import Case, Moment
from tests.integration.chaos.check import Counts, check
from tests.integration.chaos.cluster import RayCluster
from tests.integration.chaos.faults import FAULTS
from tests.integration.chaos.job import Job

Log = Callable[[dict[str, Any]], None]

LIMIT_S = 900
_ATTEMPT_S = 300


def play(case: Case, cluster: RayCluster, folder: Path, rng: Random, log: Log) -> Counts:
    """Play a case in an empty folder; returns what it came to. Raises Broken where a promise was not kept."""
    job = Job(cluster, folder, case.write(folder), LIMIT_S)
    started = time.monotonic()
    try:
        job.resume()
        for kind, moment in case.faults:
            if not _reach(job, moment):
                break
            job.look()
            line = {
                "fault": kind,
                "moment": str(moment),
                "at_s": _since(started),
                "parts": job.num_parts(),
                "attempt": len(job.codes),
            }
            what = FAULTS[kind](job, rng)
            if what is None:
                break
            log({**line, "what": what})
        while not job.is_finished:
            job.resume()
            job.ended(_ATTEMPT_S)
        job.until(lambda: not job.is_running, _ATTEMPT_S, "a driver of a finished run did not end")
        counts = check(case, job)
    finally:
        for process in [*job.drivers(), *job.workers()]:
            process.kill()
    log({"codes": job.codes, "failures": job.failures, "seconds": _since(started), **vars(counts)})
    return counts


def _reach(job: Job, moment: Moment) -> bool:
    """Wait for a moment, resuming the run where it ends before; False where it ends well."""
    enough, deadline = job.num_parts() + (moment.num_parts or 0), time.monotonic() + (moment.seconds or 0)

    def is_there() -> bool:
        if job.is_running:
            return job.num_parts() >= enough and time.monotonic() >= deadline
        if not job.is_finished:
            job.resume()
        return job.is_finished

    job.until(is_there, _ATTEMPT_S, "the run did not go on")
    return job.is_running


@contextmanager
def run_folder(folder: Path) -> Iterator[bool]:
    """A folder for a case, its disk a small one of its own where that is allowed (which is given); kept only on failure."""
    disk = folder / "disk"
    disk.mkdir(parents=True)
    mount = ["mount", "-t", "tmpfs", "-o", "size=32m", "tmpfs", str(disk)]
    is_small = subprocess.run(mount, capture_output=True, check=False).returncode == 0
    try:
        yield is_small
    except BaseException:
        if is_small:
            shutil.copytree(disk, folder / "kept", dirs_exist_ok=True)
        raise
    else:
        shutil.rmtree(disk / "run", ignore_errors=True)
    finally:
        if is_small:
            subprocess.run(["umount", "--lazy", disk], check=True)
    shutil.rmtree(folder)


def _since(started: float) -> float:
    return round(time.monotonic() - started, 1)
