"""The measurements of scale that need no Ray run, and count what they should."""

from pathlib import Path

from pipelines.report import example_report
from pipelines.storage import Folder
from tests.benchmarks.scale.crowd import beats
from tests.benchmarks.scale.finalise import far_away, finalise
from tests.benchmarks.scale.inputs import write_footers
from tests.benchmarks.scale.planning import planning
from tests.benchmarks.scale.slow import SlowFileSystem, register


def test_planning_counts_files_rows_batches_and_shards(tmp_path: Path) -> None:
    found = planning(write_footers(tmp_path, 3, 3000), tmp_path / "run", 100)
    assert (found["files"], found["rows"], found["batches"], found["shards_for_1000"]) == (3, 3000, 30, 30)


def test_a_made_run_is_verified_summed_up_and_seen_from_afar(tmp_path: Path) -> None:
    assert finalise(tmp_path, 100, 4)["parts"] == 4
    assert (tmp_path / "parts-100-4" / "_SUCCESS").exists()
    found = far_away(tmp_path, 100, 4, request_ms=0.0)
    assert (found["listing_LIST"], found["footers_GET"]) == (1, 4)


def test_one_example_of_a_run_is_shown_without_opening_all_of_its_files(tmp_path: Path) -> None:
    finalise(tmp_path, 100, 4)
    register()
    SlowFileSystem.asked.clear()
    shown = str(example_report(Folder(f"slow://{tmp_path}/parts-100-4")))
    assert "row-0" in shown
    assert (SlowFileSystem.asked["LIST"], SlowFileSystem.asked["HEAD"]) == (1, 1)


def test_heartbeats_are_read_here_and_from_afar(tmp_path: Path) -> None:
    assert beats(tmp_path, 3, 0.0)["workers"] == 3
