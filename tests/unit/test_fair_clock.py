"""Interval sharing: what requests are charged adds up to the engine's busy time."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelines.engines import fair_clock
from pipelines.engines.fair_clock import FairClock, Share
from tests.unit.conftest import HandClock


def test_two_requests_share_the_moments_in_which_both_run(engine_time: HandClock) -> None:
    clock, first, second = FairClock(), Share(), Share()
    clock.enter(first)
    engine_time.now += 2
    clock.advance()
    clock.first_token(first)
    clock.enter(second)
    engine_time.now += 4
    clock.advance()
    clock.leave(first)
    engine_time.now += 3
    clock.advance()
    clock.leave(second)
    assert (first.prefill_s, first.decode_s) == pytest.approx((2, 4 / 2))
    assert (second.prefill_s, second.decode_s) == pytest.approx((4 / 2 + 3, 0))  # it has given no token
    assert clock.busy_s() == pytest.approx(9)
    assert clock.request_s() == pytest.approx(2 + 2 * 4 + 3)


def test_who_is_found_to_have_run_is_charged_from_the_last_time_that_was_shared_out(engine_time: HandClock) -> None:
    clock, known, found = FairClock(), Share(), Share()
    clock.enter(known)
    engine_time.now += 2
    clock.enter(found)
    clock.advance()
    clock.leave(known)
    clock.leave(found)
    assert (known.prefill_s, found.prefill_s) == pytest.approx((1, 1))


def test_an_idle_engine_is_not_busy_and_one_that_hangs_is(engine_time: HandClock) -> None:
    clock, group = FairClock(), Share(3)
    engine_time.now += 5
    clock.advance()
    clock.enter(group)
    engine_time.now += 6
    assert (clock.busy_s(), clock.request_s()) == pytest.approx((6, 18))
    clock.advance()
    clock.leave(group)
    engine_time.now += 7
    clock.advance()
    assert (clock.busy_s(), clock.request_s()) == pytest.approx((6, 18))
    assert group.prefill_s == pytest.approx(2)  # of each


@given(st.lists(st.tuples(st.floats(0, 100), st.floats(0, 50), st.floats(0, 50)), min_size=1, max_size=30))
def test_the_shares_of_any_requests_add_up_to_the_busy_time(ways: list[tuple[float, float, float]]) -> None:
    now = HandClock()
    events = []
    for index, (start, prefill, decode) in enumerate(ways):
        events += [(start, 0, index), (start + prefill, 1, index), (start + prefill + decode, 2, index)]
    shares = [Share() for _ in ways]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fair_clock, "perf_counter", now)
        clock = FairClock()
        for at, kind, index in sorted(events):
            now.now = 1000.0 + at
            clock.advance()
            (clock.enter, clock.first_token, clock.leave)[kind](shares[index])
        assert sum(share.prefill_s + share.decode_s for share in shares) == pytest.approx(clock.busy_s(), abs=1e-6)
        assert clock.request_s() == pytest.approx(sum(prefill + decode for _, prefill, decode in ways), abs=1e-6)
