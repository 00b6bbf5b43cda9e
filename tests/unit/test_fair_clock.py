"""Interval sharing: what requests are charged adds up to the engine's busy time."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelines.engines import fair_clock
from pipelines.engines.fair_clock import FairClock
from tests.unit.conftest import HandClock


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> HandClock:
    clock = HandClock()
    monkeypatch.setattr(fair_clock, "perf_counter", clock)
    return clock


def test_two_requests_share_the_instants_in_which_both_run(time: HandClock) -> None:
    clock = FairClock()
    first = clock.start()
    time.now += 2
    second = clock.start()
    time.now += 4
    assert clock.end(first) == pytest.approx(2 + 4 / 2)
    time.now += 3
    assert clock.end(second) == pytest.approx(4 / 2 + 3)
    assert clock.busy_s() == pytest.approx(9)


def test_an_idle_engine_is_not_busy(time: HandClock) -> None:
    clock = FairClock()
    time.now += 5
    mark = clock.start(3)
    time.now += 6
    assert clock.end(mark, 3) == pytest.approx(2)
    time.now += 7
    assert clock.busy_s() == pytest.approx(6)


@given(st.lists(st.tuples(st.floats(0, 100), st.floats(0, 100)), min_size=1, max_size=30))
def test_the_shares_of_any_requests_add_up_to_the_busy_time(intervals: list[tuple[float, float]]) -> None:
    now = HandClock()
    events = sorted(
        [(start, 0, index) for index, (start, _) in enumerate(intervals)]
        + [(start + length, 1, index) for index, (start, length) in enumerate(intervals)]
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fair_clock, "perf_counter", now)
        clock = FairClock()
        marks: dict[int, float] = {}
        total = 0.0
        for at, is_end, index in events:
            now.now = 1000.0 + at
            if is_end:
                total += clock.end(marks[index])
            else:
                marks[index] = clock.start()
        assert total == pytest.approx(clock.busy_s(), abs=1e-6)
