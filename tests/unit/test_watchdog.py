"""A worker that has work and gets nowhere is noticed, and no other."""

import threading
import time
from collections.abc import Callable, Hashable, Iterator
from itertools import count

import pytest

from pipelines.watchdog import Watchdog

LIMIT_S = 0.3


@pytest.fixture
def watch() -> Iterator[Callable[[Callable[[], Hashable]], threading.Event]]:
    """Watch over some progress; the event tells that it was found stuck."""
    dogs = []

    def start(progress: Callable[[], Hashable]) -> threading.Event:
        stuck = threading.Event()
        dogs.append(Watchdog(LIMIT_S, progress, lambda silent_s: stuck.set() if silent_s > LIMIT_S else None))
        return stuck

    yield start
    for dog in dogs:
        dog.close()


def test_progress_that_stands_still_is_noticed(watch: Callable[[Callable[[], Hashable]], threading.Event]) -> None:
    started = time.monotonic()
    assert watch(lambda: (7, 3)).wait(30)
    assert time.monotonic() - started > LIMIT_S


def test_progress_that_goes_on_and_having_nothing_to_do_are_no_reason(
    watch: Callable[[Callable[[], Hashable]], threading.Event],
) -> None:
    steps = count()
    moving, idle = watch(lambda: next(steps)), watch(lambda: None)
    assert not moving.wait(4 * LIMIT_S)
    assert not idle.is_set()


def test_nothing_is_noticed_after_the_end() -> None:
    stuck = threading.Event()
    Watchdog(LIMIT_S, lambda: "loading", lambda silent_s: stuck.set()).close()
    assert not stuck.wait(3 * LIMIT_S)
