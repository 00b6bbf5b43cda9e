"""The whole command: how long each of its phases takes, how fast its workers are, and what its driver holds in memory."""

import time
from collections.abc import Sequence
from pathlib import Path
from shutil import rmtree

from tests.benchmarks.scale.apart import Numbers
from tests.benchmarks.scale.command import run_command
from tests.benchmarks.scale.inputs import write_rows
from tests.benchmarks.scale.parts import make_run, settings_of

_START_S, _LEAST_ROWS_PER_S = 560.0, 2000  # on a machine that does much else


def end_to_end(folder: Path, num_rows: int, rows_per_batch: int, workers: int, more: Sequence[str] = ()) -> Numbers:
    """A run from its first batch to its last."""
    run = folder / "run"
    rmtree(run, ignore_errors=True)
    overrides = settings_of(write_rows(folder, num_rows), run, rows_per_batch, *_workers(workers), *more)
    return {"rows": num_rows, "rows_per_batch": rows_per_batch, "workers": workers, **_timed(run, overrides, num_rows)}


def resume(folder: Path, num_rows: int, rows_per_batch: int, workers: int, more: Sequence[str] = ()) -> Numbers:
    """The last hundredth of a run whose other parts are there."""
    run = folder / "resumed"
    rmtree(run, ignore_errors=True)
    overrides = settings_of(write_rows(folder, num_rows), run, rows_per_batch, *_workers(workers), *more)
    num_left = -(-num_rows // rows_per_batch // 100)
    make_run(overrides, num_left)
    left = num_left * rows_per_batch
    return {"rows": num_rows, "rows_left": left, "workers": workers, **_timed(run, overrides, left)}


def _workers(number: int) -> list[str]:
    """More workers than cores share them: Ray takes a fraction of one."""
    return [f"cluster.workers={number}", f"cluster.cpus_per_worker={min(1.0, 2 / number):.3f}"]


def _timed(run: Path, overrides: Sequence[str], num_rows: int) -> Numbers:
    before = time.time()
    told = run_command(overrides, timeout_s=_START_S + num_rows / _LEAST_ROWS_PER_S)
    moments = told.moments
    parts = sorted(stamp for path in (run / "results").glob("part-*") if (stamp := path.stat().st_mtime) > before)
    beats = sorted(path.stat().st_ctime for path in (run / "attempts").glob("worker-*"))
    first, last = parts[0], parts[-1]
    return {
        "imports_s": moments["imported"] - moments["started"],
        "plan_s": moments["todo_found"] - moments["imported"],
        "ray_start_s": moments["ray_up"] - moments["todo_found"],
        "shards_s": moments["shards_cut"] - moments["ray_up"],
        "first_batch_after_ray_s": first - moments["ray_up"],
        "batches_s": last - first,
        "last_batch_to_ray_left_s": moments["answered"] - last,
        "finalise_s": moments["ended"] - moments["answered"],
        "whole_s": moments["ended"] - moments["started"],
        "num_new_parts": len(parts),
        "num_worker_files": len(beats),
        "rows_per_s_of_workers": num_rows / max(last - first, 1e-3),
        "rows_per_s_overall": num_rows / (moments["ended"] - moments["started"]),
        "driver_cpu_s": told.driver_cpu_s,
        "workers_cpu_s": told.workers_cpu_s,
        "driver_peak_mib": told.peak_mib,
        **{f"driver_mib_until_{name}": _most(told.memory_mib, moments[name]) for name in ("ray_up", "answered", "ended")},
        "workers_own_mib": told.workers_mib,
    }


def _most(memory_mib: Sequence[tuple[float, float]], until_s: float) -> float:
    return max(mib for moment_s, mib in memory_mib if moment_s <= until_s)
