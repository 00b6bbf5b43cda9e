"""What the progress line says."""

import pytest

from pipelines import progress
from pipelines.meter import Meter
from pipelines.progress import Progress
from tests.unit.conftest import PRICING, HandClock


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> HandClock:
    clock = HandClock()
    monkeypatch.setattr(progress.time, "perf_counter", clock)
    return clock


def totals(rows: int, tokens: int, *, failed: int = 0, worker_s: float = 0.0, ready: int = 1) -> dict[str, float]:
    return {
        "num_rows": rows, "num_output_tokens": tokens, "num_failed": failed,
        "worker_s": worker_s, "wall_s": worker_s, "num_workers": 1, "num_ready": ready,
    }  # fmt: skip


def progress_of(total_rows: int, done_rows: int = 0, failed_before: int = 0) -> Progress:
    """At 1800 an hour, half a unit a second."""
    pricing = PRICING.model_copy(update={"price_per_accelerator_hour": 1800.0, "currency": "EUR"})
    meter = Meter(pricing, num_workers=1, num_accelerators=1, beats_before=[])
    return Progress(total_rows, done_rows, meter, lambda: failed_before)


def test_loading_counts_for_the_cost_and_not_for_the_speed(time: HandClock) -> None:
    done = progress_of(total_rows=1000, done_rows=100)
    for _ in range(40):
        time.now += 1
        done.update(totals(0, 0, worker_s=40, ready=0))
    assert done.describe() == "100 / 1,000 rows · 0.0 output tokens/s · 20.0000 EUR · loading · 0 failed"
    time.now += 10
    done.update(totals(100, 600, failed=2, worker_s=50))
    assert done.describe() == "200 / 1,000 rows · 60.0 output tokens/s · 25.0000 EUR · 1 min 20 s left · 2 failed"


def test_the_speed_of_the_first_minute_counts_from_the_loaded_engine(time: HandClock) -> None:
    shown = progress_of(total_rows=1000)
    for second in range(41):
        shown.update(totals(0, 0, ready=second // 20))
        time.now += 1
    assert shown.describe() == "0 / 1,000 rows · 0.0 output tokens/s · 0.0000 EUR · no batch yet · 0 failed"
    time.now += 3
    shown.update(totals(100, 2500, ready=2))
    assert shown.describe() == "100 / 1,000 rows · 100.0 output tokens/s · 0.0000 EUR · 3 min 45 s left · 0 failed"


def test_the_speed_is_that_of_the_last_minute(time: HandClock) -> None:
    shown, done = progress_of(total_rows=100_000), 0
    for rows, tokens in enumerate([1000] * 30 + [10] * 70, start=1):
        time.now += 1
        done += tokens
        shown.update(totals(rows, done))
    assert " 10.0 output tokens/s " in shown.describe()
    assert "27 h 45 min left" in shown.describe()


def test_a_minute_without_a_batch_is_said(time: HandClock) -> None:
    shown = progress_of(total_rows=100)
    for _ in range(70):
        time.now += 1
        shown.update(totals(10, 100))
    assert "no batch for a minute" in shown.describe()


def test_batches_that_take_minutes_count_for_as_long_as_they_take(time: HandClock) -> None:
    shown, lines = progress_of(total_rows=1000), []
    for second in range(901):
        shown.update(totals(second // 300 * 10, second // 300 * 3000, ready=min(second, 1)))
        lines.append(shown.describe())
        time.now += 1
    assert " 10.0 output tokens/s " in lines[300] and "8 h 15 min left" in lines[300]
    assert "no batch for a minute, 11 h " in lines[400]
    assert " 10.0 output tokens/s " in lines[900] and "8 h 05 min left" in lines[900]


def test_failures_of_earlier_attempts_are_shown_beside_the_rows_of_earlier_attempts(time: HandClock) -> None:
    shown = progress_of(total_rows=1000, done_rows=500, failed_before=40)
    shown.update(totals(10, 100, failed=2))
    assert "510 / 1,000 rows" in shown.describe() and shown.describe().endswith("42 failed")
    assert (shown.numbers()["failed_rows"], shown.num_failed) == (42, 2)
