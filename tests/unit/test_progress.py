"""What the progress line says."""

import pytest

from pipelines import progress
from pipelines.meter import Meter
from pipelines.progress import Pace
from tests.unit.conftest import PRICING, HandClock


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> HandClock:
    clock = HandClock()
    monkeypatch.setattr(progress.time, "perf_counter", clock)
    return clock


def totals(rows: int, tokens: int, *, failed: int = 0, worker_s: float = 0.0) -> dict[str, float]:
    return {
        "num_rows": rows, "num_output_tokens": tokens, "num_failed": failed,
        "worker_s": worker_s, "wall_s": worker_s, "num_workers": 1,
    }  # fmt: skip


def pace(total_rows: int, done_rows: int = 0) -> Pace:
    """At 1800 an hour, half a unit a second."""
    pricing = PRICING.model_copy(update={"price_per_accelerator_hour": 1800.0, "currency": "EUR"})
    return Pace(total_rows, done_rows, Meter(pricing, num_workers=1, num_accelerators=1, beats_before=[]))


def test_loading_counts_for_the_cost_and_not_for_the_speed(time: HandClock) -> None:
    done = pace(total_rows=1000, done_rows=100)
    for _ in range(40):
        time.now += 1
        done.update(totals(0, 0, worker_s=40))
    assert done.describe() == "100 / 1,000 rows · 0.0 output tokens/s · 20.0000 EUR · loading · 0 failed"
    time.now += 10
    done.update(totals(100, 600, failed=2, worker_s=50))
    assert done.describe() == "200 / 1,000 rows · 60.0 output tokens/s · 25.0000 EUR · 1 min 20 s left · 2 failed"


def test_the_speed_is_that_of_the_last_minute(time: HandClock) -> None:
    shown, done = pace(total_rows=100_000), 0
    for rows, tokens in enumerate([1000] * 30 + [10] * 70, start=1):
        time.now += 1
        done += tokens
        shown.update(totals(rows, done))
    assert " 10.0 output tokens/s " in shown.describe()
    assert "27 h 45 min left" in shown.describe()


def test_a_minute_without_a_batch_is_said(time: HandClock) -> None:
    shown = pace(total_rows=100)
    for _ in range(70):
        time.now += 1
        shown.update(totals(10, 100))
    assert "no batch for a minute" in shown.describe()
