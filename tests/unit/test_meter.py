"""What a run has cost so far, and when it is stopped for it."""

from typing import Any

import pytest

from pipelines.config import BudgetConfig
from pipelines.errors import Stopped
from pipelines.meter import Meter, SpendingLimit
from tests.unit.conftest import PRICING
from tests.unit.test_ledger import beat

UNLIMITED = {"max_cost": None, "max_hours": None}


def meter(**totals: float) -> Meter:
    """At one unit a second for each worker, after an attempt of two workers of 30 s, the second of which began 10 s later."""
    pricing = PRICING.model_copy(update={"overhead_per_hour": 360.0, "overhead_per_run": 5.0})
    before = [beat(f"w{i}", lifetime_s=30, loading_s=10, busy_s=20, started_at=i * 10_000_000) for i in range(2)]
    running = Meter(pricing, num_workers=1, num_accelerators=2, beats_before=before)
    if totals:
        running.update(totals)
    return running


def test_earlier_attempts_and_overheads_count() -> None:
    assert (meter().cost, meter().wall_s) == pytest.approx((5 + 60 + 0.1 * 40, 40))
    now = meter(worker_s=70, wall_s=50, num_workers=3)
    assert now.cost == pytest.approx(5 + 60 + 0.1 * (40 + 50) + 2 * 70)  # two accelerators a worker
    assert now.wall_s == pytest.approx(90)
    assert now.cost_per_s == pytest.approx(2 * 3 + 0.1)


def test_a_run_whose_budget_is_used_up_starts_no_worker() -> None:
    with pytest.raises(Stopped, match="max_cost=80"):  # 69 are spent, and 10 s of a worker cost 21
        SpendingLimit(BudgetConfig(max_cost=80, max_hours=None), drain_s=10).check(meter())


@pytest.mark.parametrize(
    ("budget", "said"),
    [
        ({"max_cost": 214.0 + 61.0 - 0.1}, r"budget\.max_cost=274\.9: 214\.0000 USD are spent"),
        ({"max_hours": (90 + 10 - 0.1) / 3600}, r"budget\.max_hours=0\.02775: 0\.025 hours are gone"),
    ],
)
def test_a_run_is_stopped_while_it_can_still_finish_what_is_in_its_engines(budget: dict[str, Any], said: str) -> None:
    now = meter(worker_s=70, wall_s=50, num_workers=3)  # 214 spent, and 6.1 a second
    SpendingLimit(BudgetConfig(**UNLIMITED), drain_s=10).check(now)
    SpendingLimit(BudgetConfig(max_cost=275.1, max_hours=100.1 / 3600), drain_s=10).check(now)
    with pytest.raises(Stopped, match=said):
        SpendingLimit(BudgetConfig(**{**UNLIMITED, **budget}), drain_s=10).check(now)
