"""What happens before Ray starts: list the files, read their footers, cut the rows into batches and these into shards."""

from pathlib import Path

from pipelines.batch import plan_input
from pipelines.compose import compose_settings
from pipelines.parse import parse_config
from pipelines.plan import PLAN_FILE, Plan, make_shards
from pipelines.sources import list_sources
from pipelines.storage import Folder
from tests.benchmarks.scale.apart import Numbers, peak_mib, timed
from tests.benchmarks.scale.parts import settings_of

_MANY_WORKERS = (2, 200, 1000)
_DONE = 0.99


def planning(inputs: Path, run: Path, rows_per_batch: int) -> Numbers:
    """From a folder of files to shards, and what a resume does instead."""
    found: Numbers = {"rows_per_batch": rows_per_batch}
    config = parse_config(compose_settings("batch", settings_of(inputs, run, rows_per_batch), None))
    with timed(found, "listing_s"):
        sources = list_sources(config.input)
    with timed(found, "plan_s"):
        plan = plan_input(config, sources, Folder(str(run)))
    with timed(found, "save_s"):
        plan.save(Folder(str(run)))
    found |= {"files": len(sources), "rows": plan.num_rows, "batches": plan.num_batches, "plan_peak_mib": peak_mib()}
    found["plan_file_mib"] = (run / PLAN_FILE).stat().st_size / 2**20
    found["plan_table_mib"] = plan.batches.nbytes / 2**20
    for num_workers in _MANY_WORKERS:
        with timed(found, f"shards_for_{num_workers}_s"):
            found[f"shards_for_{num_workers}"] = len(make_shards(plan.batches, num_workers))
    with timed(found, "load_s"):
        Plan.load(Folder(str(run)))
    done = range(int(plan.num_batches * _DONE))
    with timed(found, "without_done_s"):
        plan.without(done)
    return {**found, "peak_mib": peak_mib()}
