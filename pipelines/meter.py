"""What a run has cost and how long it has taken, while it goes on; and what it may."""

from collections.abc import Mapping, Sequence
from typing import Any

from pipelines.config import BudgetConfig, PricingConfig
from pipelines.errors import Stopped
from pipelines.ledger import cost_of, wall_s_of, worker_table


def cost_so_far(pricing: PricingConfig, beats: Sequence[dict[str, Any]]) -> float:
    """What a run has cost, as far as its workers' heartbeats say: its workers, and its overheads."""
    workers = worker_table(beats)
    return cost_of(workers) + pricing.overhead_per_run + wall_s_of(workers) / 3600 * pricing.overhead_per_hour


class Meter:
    """Adds the workers of this attempt, as the board counts them, to what the heartbeats of earlier ones say."""

    def __init__(
        self, pricing: PricingConfig, *, num_workers: int, num_accelerators: int, beats_before: Sequence[dict[str, Any]]
    ):
        self.currency = pricing.currency
        self._overhead_per_s = pricing.overhead_per_hour / 3600
        self.wall_s = self._wall_before_s = wall_s_of(worker_table(beats_before))
        self.cost = self._cost_before = cost_so_far(pricing, beats_before)
        self._worker_cost_per_s = pricing.paid_per_accelerator_hour * num_accelerators / 3600
        self.cost_per_s = num_workers * self._worker_cost_per_s + self._overhead_per_s
        """At the present number of workers; at first, at the number that is to be started."""

    def update(self, totals: Mapping[str, float]) -> None:
        """Take the board's sums."""
        self.wall_s = self._wall_before_s + totals["wall_s"]
        workers, overhead = totals["worker_s"] * self._worker_cost_per_s, totals["wall_s"] * self._overhead_per_s
        self.cost = self._cost_before + workers + overhead
        self.cost_per_s = totals["num_workers"] * self._worker_cost_per_s + self._overhead_per_s


class SpendingLimit:
    """Stops a run before it goes past its budget: early enough to finish what is in its engines."""

    def __init__(self, budget: BudgetConfig, drain_s: float):
        self._budget = budget
        self._drain_s = drain_s

    def check(self, meter: Meter) -> None:
        """Raises Stopped where finishing what is in the engines may cost or take all that is left."""
        most, hours = self._budget.max_cost, self._budget.max_hours
        if most is not None and meter.cost + meter.cost_per_s * self._drain_s >= most:
            raise Stopped(f"budget.max_cost={most:g}: {meter.cost:.4f} {meter.currency} are spent; raise it to go on")
        if hours is not None and meter.wall_s + self._drain_s >= hours * 3600:
            raise Stopped(f"budget.max_hours={hours:g}: {meter.wall_s / 3600:.3f} hours are gone; raise it to go on")
