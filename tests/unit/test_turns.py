"""Who ran in a step is told from its counts, and whatever they say, all shares add up."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelines.engines import fair_clock
from pipelines.engines.fair_clock import Share
from pipelines.engines.vllm.turns import Turns
from tests.unit.conftest import HandClock


def test_a_long_prefill_is_charged_for_all_of_its_steps(engine_time: HandClock) -> None:
    turns, short, long = Turns(), Share(), Share()
    turns.add([short, long])
    for num_first_tokens in (1, 0, 1, 0):  # the long one's prompt takes three steps
        engine_time.now += 1
        turns.stepped(num_running=2, num_first_tokens=num_first_tokens, finished=[])
    engine_time.now += 1
    turns.stepped(num_running=0, num_first_tokens=0, finished=[short, long])
    assert (short.prefill_s, short.decode_s) == pytest.approx((0.5, 2))
    assert (long.prefill_s, long.decode_s) == pytest.approx((1.5, 1))


def test_who_waits_in_the_queue_is_not_charged(engine_time: HandClock) -> None:
    turns, first, second = Turns(), Share(), Share()
    turns.add([first, second])
    engine_time.now += 1
    turns.stepped(num_running=1, num_first_tokens=1, finished=[])
    engine_time.now += 4
    turns.stepped(num_running=0, num_first_tokens=0, finished=[first])
    engine_time.now += 2
    turns.stepped(num_running=0, num_first_tokens=1, finished=[second])  # its first token is its last
    assert (first.prefill_s, first.decode_s) == pytest.approx((1, 4))
    assert (second.prefill_s, second.decode_s) == pytest.approx((2, 0))


def test_time_without_requests_is_nobodys(engine_time: HandClock) -> None:
    turns, only = Turns(), Share()
    engine_time.now += 10
    turns.add([only])
    engine_time.now += 1
    turns.stepped(num_running=0, num_first_tokens=1, finished=[only])
    engine_time.now += 10
    turns.add([])
    assert turns.clock.busy_s() == pytest.approx(1)


@given(st.integers(0, 2**32), st.integers(1, 40))
def test_whatever_the_counts_say_the_shares_add_up_to_the_busy_time(seed: int, num_sequences: int) -> None:
    rng, now = Random(seed), HandClock()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fair_clock, "perf_counter", now)
        turns, waiting, all_shares = Turns(), [], []
        for _ in range(num_sequences):
            share = Share()
            waiting.append(share)
            all_shares.append(share)
            turns.add([share])
            now.now += rng.random()
            finished = [share for share in waiting if rng.random() < 0.3]
            waiting = [share for share in waiting if share not in finished]
            turns.stepped(num_running=rng.randint(0, 5), num_first_tokens=rng.randint(0, 3), finished=finished)
        now.now += 1
        turns.stepped(num_running=0, num_first_tokens=0, finished=waiting)
        shared_s = sum(share.prefill_s + share.decode_s for share in all_shares)
        assert shared_s == pytest.approx(turns.clock.busy_s())
        assert min(min(share.prefill_s, share.decode_s) for share in all_shares) >= 0
