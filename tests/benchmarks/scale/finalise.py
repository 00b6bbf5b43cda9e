"""What a run asks for when all of its batches have their parts: it is verified, looked through, summed up and shown."""

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from shutil import rmtree

from pipelines import summary
from pipelines.parts import Parts
from pipelines.row_profile import profile_rows
from pipelines.schema import SUCCESS_FILE
from pipelines.storage import Folder
from pipelines.summary import verify
from tests.benchmarks.scale.apart import Numbers, peak_mib, timed
from tests.benchmarks.scale.driver import noting
from tests.benchmarks.scale.inputs import write_rows
from tests.benchmarks.scale.parts import Made, make_run, settings_of
from tests.benchmarks.scale.slow import SlowFileSystem, register


def finalise(folder: Path, num_rows: int, num_parts: int) -> Numbers:
    """A run of so many parts on a local disk."""
    made = _made(folder, num_rows, num_parts)
    found: Numbers = {"rows": num_rows, "parts": num_parts}
    with timed(found, "listing_s"):
        Parts(made.run.folder)
    moments: dict[str, float] = {}
    summary.verify = noting("verified", summary.verify, moments)
    summary.profile_rows = noting("profiled", summary.profile_rows, moments)
    started = time.time()
    summary.finish(made.run, made.plan, made.config)
    found["verify_s"] = moments["verified"] - started
    found["row_pass_s"] = moments["profiled"] - moments["verified"]
    found["tables_and_report_s"] = time.time() - moments["profiled"]
    return {**found, "peak_mib": peak_mib(), "cpu_s": time.process_time()}


def far_away(folder: Path, num_rows: int, num_parts: int, request_ms: float) -> Numbers:
    """The same parts where each request takes its time: how long, and how many requests."""
    made = _made(folder, num_rows, num_parts)
    register()
    SlowFileSystem.request_s = request_ms / 1000
    there = Folder(f"slow://{made.run.folder.path()}")
    batches, workers = verify(made.run, made.plan, Parts(made.run.folder))
    batch_ids = batches["batch_id"].to_pylist()
    found: Numbers = {"rows": num_rows, "parts": num_parts, "request_ms": request_ms}
    with _asked(found, "listing"):
        parts = Parts(there)
    with _asked(found, "footers"):
        deque(parts.statistics(batch_ids), maxlen=0)
    with _asked(found, "row_pass"):
        profile_rows(there, batch_ids, workers)
    return found


def _made(folder: Path, num_rows: int, num_parts: int) -> Made:
    """A run with all of its parts; one that is there already is taken."""
    place, rows = folder / f"parts-{num_rows}-{num_parts}", write_rows(folder, num_rows)
    overrides = settings_of(rows, place, -(-num_rows // num_parts), f"input.limit={num_rows}")
    is_whole = place / "made"
    if is_whole.exists():
        (place / SUCCESS_FILE).unlink(missing_ok=True)
        return make_run(overrides, num_left=num_parts)
    rmtree(place, ignore_errors=True)
    made = make_run(overrides, num_left=0)
    is_whole.touch()
    return made


@contextmanager
def _asked(found: Numbers, name: str) -> Iterator[None]:
    SlowFileSystem.asked.clear()
    with timed(found, f"{name}_s"):
        yield
    found |= {f"{name}_{kind}": count for kind, count in sorted(SlowFileSystem.asked.items())}
