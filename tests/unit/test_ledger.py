"""Every second of every worker has one use, whatever its heartbeats and its parts say, and the costs add up to the bill."""

from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelines.config import HostedPrice
from pipelines.costs import Tokens, costs_of
from pipelines.errors import RunFailed
from pipelines.ledger import PHASES, check_ledger, worker_table
from pipelines.schema import BATCH
from pipelines.statistics import batch_table
from tests.unit.conftest import PRICING


def beat(
    worker: str, *, lifetime_s: float, loading_s: float, busy_s: float, price: float = 3600.0, **more: Any
) -> dict[str, Any]:
    return {
        "worker": worker, "attempt": 1, "node": "n", "pid": 1, "accelerator": "H100", "num_accelerators": 1,
        "started_at": 0, "lifetime_s": lifetime_s, "loading_s": loading_s, "busy_s": busy_s, "request_s": 2 * busy_s,
        "num_batches": 0, "num_generated_tokens": 0, "num_flops": 0, "num_moved_bytes": 0, "starved_s": {},
        "price_per_accelerator_hour": price, "currency": "USD", "hardware": "", "engine": '{"max_num_seqs": 4}',
        "in_flight": [], "death": None, **more,
    }  # fmt: skip


def share(worker: str, prefill_s: float, decode_s: float, lifetime_s: float, price: float = 3600.0) -> dict[str, Any]:
    busy_s = prefill_s + decode_s
    return {
        "worker": worker, "prefill_s": prefill_s, "decode_s": decode_s, "cost": busy_s * price / 3600,
        "lifetime_s": lifetime_s, "busy_s": busy_s,
    }  # fmt: skip


def batches(*shares: list[dict[str, Any]]) -> pa.Table:
    lines = []
    for number, some in enumerate(shares):
        names = ("finish_reasons", "error_kinds", "error_examples", "flags")
        sums = {name: sum(one[name] for one in some) for name in ("prefill_s", "decode_s", "cost")}
        last = {"worker": some[-1]["worker"], "node": "n", "accelerator": "H100", "num_accelerators": 1, "attempt": 1}
        zeros = {field.name: 0 for field in BATCH if field.type in (pa.int64(), pa.float64()) and not field.nullable}
        lines.append(
            {**zeros, "batch_id": number, "started_at": 0, "shares": some, "currency": "USD", **sums, **last}
            | {name: {} for name in names}
        )
    return batch_table(lines)


def phases(workers: pa.Table, worker: str) -> dict[str, float]:
    (line,) = (line for line in workers.to_pylist() if line["worker"] == worker)
    return {name.removesuffix("_s"): line[name] for name in (*PHASES, "lifetime_s")}


def test_what_was_not_committed_is_lost_and_what_is_left_is_idle() -> None:
    committed = batches([share("a", 1, 3, lifetime_s=20)], [share("a", 2, 4, lifetime_s=30)])
    workers = worker_table([beat("a", lifetime_s=40, loading_s=10, busy_s=15)], committed)
    check_ledger(workers, committed)
    assert phases(workers, "a") == {"loading": 10, "prefill": 3, "decode": 7, "idle": 15, "lost": 5, "lifetime": 40}


def test_a_commit_after_the_last_heartbeat_extends_the_life_of_a_killed_worker() -> None:
    committed = batches([share("a", 1, 3, lifetime_s=44)])
    workers = worker_table([beat("a", lifetime_s=40, loading_s=10, busy_s=2)], committed)
    check_ledger(workers, committed)
    assert phases(workers, "a") == {"loading": 10, "prefill": 1, "decode": 3, "idle": 30, "lost": 0, "lifetime": 44}


def test_a_worker_that_died_while_it_loaded_did_nothing_else() -> None:
    workers = worker_table([beat("a", lifetime_s=40, loading_s=40, busy_s=0, engine=None)], batches())
    check_ledger(workers, batches())
    assert phases(workers, "a") == {"loading": 40, "prefill": 0, "decode": 0, "idle": 0, "lost": 0, "lifetime": 40}


def test_rows_that_are_answered_again_are_paid_for_by_both_workers() -> None:
    again = batches([share("a", 1, 3, lifetime_s=20), share("b", 2, 2, lifetime_s=9, price=7200)])
    beats = [
        beat("a", lifetime_s=20, loading_s=10, busy_s=4),
        beat("b", lifetime_s=10, loading_s=5, busy_s=4, price=7200.0, attempt=2),
    ]
    workers = worker_table(beats, again)
    check_ledger(workers, again)
    assert phases(workers, "a")["decode"] == 3
    assert costs_of(workers, PRICING, Tokens(0, 0, 0), 0).total == pytest.approx(20 + 2 * 10)


def test_a_worker_whose_heartbeats_are_gone_is_known_from_its_batches() -> None:
    committed = batches([share("a", 1, 3, lifetime_s=20)])
    workers = worker_table([], committed)
    check_ledger(workers, committed)
    assert phases(workers, "a") == {"loading": 16, "prefill": 1, "decode": 3, "idle": 0, "lost": 0, "lifetime": 20}


def test_a_ledger_that_does_not_add_up_is_refused() -> None:
    committed = batches([share("a", 1, 3, lifetime_s=20)])
    workers = worker_table([beat("a", lifetime_s=40, loading_s=10, busy_s=4)], committed)
    for wrong in ("idle_s", "cost"):
        column = pc.add(workers[wrong], 1.0)
        changed = workers.set_column(workers.schema.get_field_index(wrong), workers.schema.field(wrong), column)
        with pytest.raises(RunFailed, match="add up"):
            check_ledger(changed, committed)


seconds = st.floats(0, 1e5)


@given(
    st.lists(
        st.tuples(seconds, seconds, seconds, seconds, st.lists(st.tuples(seconds, seconds, seconds), max_size=4)),
        max_size=6,
    )
)
def test_whatever_was_noted_down_the_parts_make_up_the_whole_to_the_cent(
    lives: list[tuple[float, float, float, float, list[tuple[float, float, float]]]],
) -> None:
    beats, shares = [], []
    for number, (loading_s, busy_s, idle_s, price, parts) in enumerate(lives):
        lifetime_s = loading_s + busy_s + idle_s
        beats.append(beat(f"w{number}", lifetime_s=lifetime_s, loading_s=loading_s, busy_s=busy_s, price=price))
        shares += [[share(f"w{number}", *part, price=price)] for part in parts]
    committed = batches(*shares)
    workers = worker_table(beats, committed)
    check_ledger(workers, committed)
    costs = costs_of(workers, PRICING, Tokens(prompt=1000, cached=0, output=1000), wall_s=0)
    assert costs.total == pytest.approx(pc.sum(workers["cost"]).as_py() or 0.0)
    if costs.prefill + costs.decode:
        apart = costs.input_per_million_tokens + costs.output_per_million_tokens  # type: ignore[operator]
        assert apart == pytest.approx(costs.per_million_output_tokens)


def test_overheads_and_hosted_prices_and_what_the_cache_saved() -> None:
    pricing = PRICING.model_copy(
        update={
            "overhead_per_hour": 2.0,
            "overhead_per_run": 0.5,
            "hosted": (HostedPrice(name="x", input_per_million_tokens=1.0, output_per_million_tokens=3.0, source="s"),),
        }
    )
    committed = batches([share("a", 10, 30, lifetime_s=100)])
    workers = worker_table([beat("a", lifetime_s=100, loading_s=50, busy_s=40)], committed)
    costs = costs_of(workers, pricing, Tokens(prompt=3_000_000, cached=1_000_000, output=500_000), wall_s=1800)
    assert (costs.total, costs.overhead) == pytest.approx((101.5, 1.5))
    assert costs.saved_by_caching == pytest.approx(10 / 2)  # 10 for two million tokens that were prefilled
    assert costs.per_million_uncached_tokens == pytest.approx(101.5 / 2.5)
    assert costs.input_per_million_tokens == pytest.approx(101.5 / 4 / 3)
    assert costs.output_per_million_tokens == pytest.approx(101.5 * 3 / 4 / 0.5)
    assert [one.cost for one in costs.hosted] == pytest.approx([3 + 1.5])


def test_without_tokens_there_are_nulls_and_no_zeros() -> None:
    workers = worker_table([beat("a", lifetime_s=40, loading_s=40, busy_s=0, engine=None)], batches())
    costs = costs_of(workers, PRICING, Tokens(0, 0, 0), wall_s=40)
    assert costs.total == pytest.approx(40)
    assert {value for name, value in costs if "million" in name} == {None}
    assert costs.saved_by_caching is None
