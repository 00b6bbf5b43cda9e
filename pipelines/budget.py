"""How many rows may fail, watched while the job runs."""

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction

from pipelines.config import ErrorsConfig
from pipelines.errors import TooManyFailures

_NEARLY_DONE = 0.1  # of the rows are left


def allowed_failures(errors: ErrorsConfig, num_rows: int) -> int:
    """The most rows that may fail: the stricter of the two settings."""
    by_fraction = math.floor(Fraction(str(errors.max_failed_fraction)) * num_rows)  # 0.29 of 100 is 28.999... in floating point
    return by_fraction if errors.max_failed_rows is None else min(by_fraction, errors.max_failed_rows)


class ErrorBudget:
    """The failed rows of a whole run against what is allowed of all its rows.

    A job is stopped when it can no longer end well, so what a doomed job wastes is bounded by what was allowed anyway. One
    that is nearly done is finished all the same: its answers are worth more than its last tenth costs.
    `count_before` counts the failures of earlier attempts; it may take a while, so it runs beside the job.
    """

    def __init__(self, errors: ErrorsConfig, num_rows: int, count_before: Callable[[], int]):
        self._errors = errors
        self._num_rows = num_rows
        self._allowed = allowed_failures(errors, num_rows)
        pool = ThreadPoolExecutor(1, thread_name_prefix="failed-before")
        self._failed_before = pool.submit(count_before)
        pool.shutdown(wait=False)

    @property
    def num_failed_before(self) -> int:
        """The failures of earlier attempts; 0 until they are counted."""
        return self._failed_before.result() if self._failed_before.done() else 0

    def check(self, num_failed: int, num_left: int) -> None:
        """Raises TooManyFailures where so many failures of this attempt are too many, with so many rows still to do."""
        if num_left <= self._num_rows * _NEARLY_DONE:
            return
        total = num_failed + self.num_failed_before
        if total > self._allowed:
            limit = f"errors.max_failed_fraction={self._errors.max_failed_fraction:g}"
            if self._errors.max_failed_rows is not None:
                limit += f", errors.max_failed_rows={self._errors.max_failed_rows}"
            raise TooManyFailures(
                f"{total:,} of {self._num_rows:,} rows have failed, and {limit} allows {self._allowed:,}: the job was stopped"
            )
