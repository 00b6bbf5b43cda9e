"""What a run survives on a cluster of several nodes: the short set; the long one is `make chaos`.

Of every run that ends here, everything is counted (`chaos/check.py`): each row once and with its own answer, statistics that
add up, committed parts unchanged, nothing and nobody left behind.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.integration.chaos.case import Case, Moment, draw_case, draw_rows, settings_for
from tests.integration.chaos.check import Counts
from tests.integration.chaos.cluster import RayCluster, ray_cluster
from tests.integration.chaos.faults import WEIGHTS
from tests.integration.chaos.play import play, run_folder

SEED = 5
HALF_WAY = Moment(num_parts=20)

Play = Callable[..., tuple[Counts, list[dict[str, Any]]]]


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    """Three nodes of one CPU and a head without."""
    with ray_cluster() as cluster:
        yield cluster


@pytest.fixture
def played(cluster: RayCluster, tmp_path: Path) -> Play:
    """Play a case to its end; returns what it came to, and the lines of its log."""

    def run(case: Case) -> tuple[Counts, list[dict[str, Any]]]:
        log: list[dict[str, Any]] = []
        with run_folder(tmp_path / "case"):
            counts = play(case, cluster, tmp_path / "case", Random(SEED), log.append)
        return counts, log

    return run


def case(*faults: str, workers: int = 2, moment: Moment = HALF_WAY, seconds_per_token: float = 0.1) -> Case:
    """800 rows in 100 batches, and faults when some of them are committed."""
    return Case(
        rows=draw_rows(Random(SEED), 800),
        settings={
            "engine.rows_per_batch": 8,
            "engine.max_num_seqs": 8,
            "engine.seconds_per_token": seconds_per_token,
            **settings_for(workers),
        },
        faults=[(fault, moment) for fault in faults],
    )


def happened(log: Sequence[dict[str, Any]]) -> list[str]:
    return [line["fault"] for line in log if "fault" in line]


@pytest.mark.slow
def test_a_killed_node_is_done_without_and_costs_at_most_what_it_had_in_flight(played: Play) -> None:
    counts, log = played(case("node killed", workers=1))
    assert happened(log) == ["node killed"]
    assert log[-1]["codes"] == [0], log
    assert 0 < counts.wasted_batches <= 20  # an echo engine works on 16, and 4 more may be ready for it


def test_a_worker_on_a_node_that_is_about_to_go_finishes_what_it_has_and_wastes_nothing(played: Play) -> None:
    counts, log = played(case("node drained"))
    assert happened(log) == ["node drained"]
    assert (log[-1]["codes"], counts.wasted_batches) == ([0], 0), log


def test_a_worker_that_pauses_goes_on_and_one_that_hangs_is_replaced(played: Play) -> None:
    counts, log = played(case("worker paused", "worker hangs", workers=1))
    assert happened(log) == ["worker paused", "worker hangs"]
    assert (log[-1]["codes"], counts.workers, counts.deaths) == ([0], 2, 1), log


def test_a_zombie_that_commits_late_changes_no_row(played: Play) -> None:
    counts, log = played(case("zombie"))
    assert happened(log) == ["zombie"]
    assert counts.rows == 800


@pytest.mark.slow
def test_a_changed_input_and_a_second_driver_are_refused(played: Play) -> None:
    counts, log = played(case("input changed", "second driver", moment=Moment(num_parts=10), seconds_per_token=0.8))
    assert happened(log) == ["input changed", "second driver"]
    assert log[0]["what"].endswith("then refused")
    assert log[1]["what"] == "exit 1"  # the first one goes on
    assert counts.rows == 800


def test_random_faults_lose_and_double_nothing(played: Play) -> None:
    kinds = ("driver killed", "driver stopped", "worker killed", "worker terminated", "node killed", "disk full")
    drawn = draw_case(Random(SEED), {kind: WEIGHTS[kind] for kind in kinds})
    slow = {**drawn.settings, "engine.seconds_per_token": 0.25}  # so that none comes too late
    counts, log = played(replace(drawn, settings=slow, faults=drawn.faults[:3]))
    assert len(happened(log)) == 3
    assert (counts.lost, counts.doubled) == (0, 0)


@pytest.mark.slow  # a minute and a half
def test_a_driver_whose_cluster_is_gone_ends_by_itself_and_the_run_goes_on_on_another_one(played: Play) -> None:
    _, log = played(case("cluster killed"))
    assert happened(log) == ["cluster killed"]
    assert log[0]["what"].startswith("exit 1 ")
    assert log[-1]["codes"] == [1, 0], log
