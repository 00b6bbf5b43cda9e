"""What the progress line says."""

import pytest

from pipelines import progress
from pipelines.progress import Pace
from tests.unit.conftest import HandClock


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> HandClock:
    clock = HandClock()
    monkeypatch.setattr(progress.time, "perf_counter", clock)
    return clock


def totals(rows: int, tokens: int, failed: int = 0, workers: int = 1) -> dict[str, int]:
    return {"num_rows": rows, "num_output_tokens": tokens, "num_failed": failed, "num_workers": workers}


def test_loading_counts_for_the_cost_and_not_for_the_speed(time: HandClock) -> None:
    pace = Pace(total_rows=1000, done_rows=100, num_workers=1, cost_per_worker_s=0.5)
    for _ in range(40):
        time.now += 1
        pace.update(totals(0, 0, workers=0))
    assert pace.describe("EUR") == "100 / 1,000 rows · 0.0 output tokens/s · 20.0000 EUR · loading · 0 failed"
    time.now += 10
    pace.update(totals(100, 600, failed=2))
    assert pace.describe("EUR") == "200 / 1,000 rows · 60.0 output tokens/s · 25.0000 EUR · 1 min 20 s left · 2 failed"


def test_the_cost_follows_the_workers_that_have_joined(time: HandClock) -> None:
    pace = Pace(total_rows=10, done_rows=0, num_workers=2, cost_per_worker_s=1.0)
    time.now += 10
    pace.update(totals(1, 1, workers=1))
    assert " 20.0000 USD " in pace.describe("USD")
    pace.update(totals(2, 2, workers=5))
    assert " 50.0000 USD " in pace.describe("USD")


def test_the_speed_is_that_of_the_last_minute(time: HandClock) -> None:
    pace = Pace(total_rows=100_000, done_rows=0, num_workers=1, cost_per_worker_s=0.0)
    done = 0
    for rows, tokens in enumerate([1000] * 30 + [10] * 70, start=1):
        time.now += 1
        done += tokens
        pace.update(totals(rows, done))
    assert " 10.0 output tokens/s " in pace.describe("USD")
    assert "27 h 45 min left" in pace.describe("USD")


def test_a_minute_without_a_batch_is_said(time: HandClock) -> None:
    pace = Pace(total_rows=100, done_rows=0, num_workers=1, cost_per_worker_s=0.0)
    for _ in range(70):
        time.now += 1
        pace.update(totals(10, 100))
    assert "no batch for a minute" in pace.describe("USD")
