"""When a job stops because too many of its rows fail."""

import threading
import time

import pytest

from pipelines.budget import ErrorBudget, allowed_failures
from pipelines.config import ErrorsConfig
from pipelines.errors import TooManyFailures


@pytest.mark.parametrize(
    ("fraction", "rows", "num_rows", "allowed"),
    [
        (0.01, None, 1000, 10),
        (0.01, None, 99, 0),
        (0.0, None, 10, 0),
        (1.0, None, 10, 10),
        (1.0, 3, 10, 3),
        (0.1, 3, 10, 1),
        (0.29, None, 100, 29),
    ],
)
def test_the_stricter_limit_counts(fraction: float, rows: int | None, num_rows: int, allowed: int) -> None:
    errors = ErrorsConfig(max_failed_fraction=fraction, max_failed_rows=rows)
    assert allowed_failures(errors, num_rows) == allowed


def test_a_job_is_stopped_as_soon_as_it_cannot_end_well() -> None:
    budget = ErrorBudget(ErrorsConfig(max_failed_fraction=0.5, max_failed_rows=3), 1000, lambda: 0)
    budget.check(3, num_left=900)
    with pytest.raises(TooManyFailures, match=r"4 of 1,000 rows have failed.*max_failed_rows=3 allows 3"):
        budget.check(4, num_left=900)


def test_a_job_that_is_nearly_done_is_finished() -> None:
    budget = ErrorBudget(ErrorsConfig(max_failed_fraction=0.01, max_failed_rows=None), 1000, lambda: 0)
    budget.check(500, num_left=100)
    with pytest.raises(TooManyFailures):
        budget.check(500, num_left=101)


def test_failures_of_earlier_attempts_count_once_they_are_known() -> None:
    known = threading.Event()

    def count() -> int:
        known.wait(10)
        return 9

    budget = ErrorBudget(ErrorsConfig(max_failed_fraction=0.01, max_failed_rows=None), 1000, count)
    budget.check(2, num_left=900)
    known.set()
    with pytest.raises(TooManyFailures, match="11 of 1,000"):
        for _ in range(1000):
            budget.check(2, num_left=900)
            time.sleep(0.01)
