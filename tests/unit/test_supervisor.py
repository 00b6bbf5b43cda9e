"""What a lost round of workers leaves is run again, as long as rounds get anywhere."""

import time
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any, cast

import pyarrow as pa
import pytest

from pipelines import supervisor
from pipelines.board import Board
from pipelines.cluster import HeadSilent, RoundLost, drain_limit_s
from pipelines.config import BatchConfig
from pipelines.errors import RunFailed
from pipelines.supervisor import Watch, answer_in_rounds


def batches(count: int) -> pa.Table:
    return pa.table({"batch_id": range(count)})


class Rounds:
    """Rounds of workers, each leaving so many batches; a reason says that it was lost."""

    def __init__(self, *rounds: tuple[int, str | None]):
        self._rounds: Iterator[tuple[int, str | None]] = iter(rounds)
        self.given: list[int] = []
        self._left = 0

    def answer(self, batches: pa.Table) -> None:
        self.given.append(len(batches))
        self._left, reason = next(self._rounds)
        if reason is not None:
            raise RoundLost(reason)

    def left(self) -> pa.Table:
        return batches(self._left)


def test_one_good_round_is_enough() -> None:
    rounds = Rounds((0, None))
    answer_in_rounds(batches(5), rounds.left, rounds.answer)
    assert rounds.given == [5]


def test_lost_rounds_are_followed_by_others_over_what_they_left() -> None:
    rounds = Rounds((9, "node lost"), (4, None), (0, "lost at its very end"))
    answer_in_rounds(batches(20), rounds.left, rounds.answer)
    assert rounds.given == [20, 9, 4]


def test_a_round_that_commits_nothing_is_the_last_and_its_reason_is_told() -> None:
    rounds = Rounds((9, "node lost"), (9, "CUDA out of memory"))
    with pytest.raises(RunFailed, match="CUDA out of memory"):
        answer_in_rounds(batches(20), rounds.left, rounds.answer)
    assert rounds.given == [20, 9]


@pytest.mark.parametrize(
    ("environment", "limit_s"),
    [
        ({}, 60),  # no Ray job: nobody kills us
        ({"RAY_JOB_CONFIG_JSON_ENV_VAR": "{}"}, 0),  # Ray's default of 3 s leaves no time
        ({"RAY_JOB_CONFIG_JSON_ENV_VAR": "{}", "RAY_JOB_STOP_WAIT_TIME_S": "45"}, 40),
        ({"RAY_JOB_CONFIG_JSON_ENV_VAR": "{}", "RAY_JOB_STOP_WAIT_TIME_S": "600"}, 60),
    ],
)
def test_a_drain_ends_before_ray_kills_the_job(environment: dict[str, str], limit_s: float) -> None:
    assert drain_limit_s(60, environment) == limit_s


class StandIn:
    """A board on which nothing changes."""

    def __init__(self, num_workers: int, idle_s: float):
        self._num_workers = num_workers
        self._idle_s = idle_s

    def num_alive(self, within_s: float) -> int:
        return self._num_workers

    def idle_s(self) -> float:
        return self._idle_s

    def silent(self, limit_s: float) -> list[Any]:
        return []


@pytest.fixture
def watch(batch_config: Callable[..., BatchConfig], monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Watch a board until something is wrong, for ten seconds at most."""
    settings = batch_config(
        "cluster.heartbeat_s=0.1", "cluster.hang_timeout_s=0.4", "cluster.start_timeout_s=0.4", "engine=echo"
    ).cluster
    monkeypatch.setattr(supervisor, "_LOOK_S", 0.05)
    monkeypatch.setattr(supervisor, "_HEAD_PATIENCE_S", 0.4)

    def look(board: StandIn, nodes: Callable[[], list[str]] = list) -> None:
        monkeypatch.setattr(supervisor, "draining_nodes", nodes)
        with closing(Watch(settings, cast("Board", board), lambda: None)) as one:
            for _ in range(200):
                one.check()
                time.sleep(0.05)

    return look


def test_a_round_whose_workers_are_given_nothing_is_lost(watch: Callable[..., None]) -> None:
    with pytest.raises(RoundLost, match="no worker was given anything for"):
        watch(StandIn(num_workers=2, idle_s=1000))


def test_a_cluster_without_room_for_a_worker_is_waited_for_and_given_up(watch: Callable[..., None]) -> None:
    with pytest.raises(RunFailed, match=r"no room for a worker .*cluster\.start_timeout_s"):
        watch(StandIn(num_workers=0, idle_s=0))


def test_a_head_that_does_not_answer_is_given_up(watch: Callable[..., None]) -> None:
    def silent() -> list[str]:
        raise HeadSilent

    with pytest.raises(RunFailed, match="head of the Ray cluster has not answered"):
        watch(StandIn(num_workers=2, idle_s=0), silent)


def test_busy_workers_are_left_in_peace(watch: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor.time, "sleep", lambda seconds, sleep=time.sleep: sleep(seconds / 5))
    watch(StandIn(num_workers=2, idle_s=0.1))
