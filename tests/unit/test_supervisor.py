"""What a lost round of workers leaves is run again, as long as rounds get anywhere."""

from collections.abc import Iterator

import pyarrow as pa
import pytest

from pipelines.cluster import RoundLost, drain_limit_s
from pipelines.errors import RunFailed
from pipelines.supervisor import answer_in_rounds


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
