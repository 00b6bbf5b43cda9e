"""Per-key usage lies where the history looks for runs, adds up, and says who asked."""

from datetime import date
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from pipelines.history import History
from pipelines.schema import BATCH, RUN
from pipelines.serving.answering import Tally
from pipelines.serving.endpoint import endpoint_of
from pipelines.serving.usage import Usage
from tests.unit.conftest import HandClock
from tests.unit.serving import KEY, config_of


def usage_in(tmp_path: Path, clock: HandClock) -> Usage:
    overrides = [f"serve.folder={tmp_path}", "pricing.price_per_accelerator_hour=3600.0", "pricing.overhead_per_hour=0.0"]
    return Usage(endpoint_of(config_of(*overrides), {"FOURNEE_API_KEYS": f"alice:{KEY}"}), num_accelerators=2, clock=clock)


def asked(key: str, at_s: float, **values: float | str | None) -> Tally:
    tally = Tally(key, at_s, num_prompt_tokens=10, num_output_tokens=5, queue_s=0.0, ttft_s=1.0, generation_s=3.0)
    tally.finish_reason = "stop"
    for name, value in values.items():
        setattr(tally, name, value)
    return tally


@pytest.fixture
def clocks(engine_time: HandClock) -> HandClock:
    """One clock for the day and for the engine."""
    return engine_time


def test_the_history_sums_up_what_each_key_used(tmp_path: Path, clocks: HandClock) -> None:
    usage = usage_in(tmp_path, clocks)
    first, second = asked("alice", clocks.now), asked("bob", clocks.now, error_kind="engine_error")
    usage.began(first)
    clocks.now += 4  # alice alone
    usage.began(second)
    clocks.now += 2  # both
    usage.answered(first)
    usage.answered(second)
    clocks.now += 4  # idle
    usage.write(1)
    lines = {line["client"]: line for line in History(str(tmp_path)).lines(["client"]).to_pylist()}
    assert {name: (line["num_rows"], line["num_output_tokens"], line["failed_share"]) for name, line in lines.items()} == {
        "alice": (1, 5, 0.0),
        "bob": (1, 0, 1.0),
    }
    assert (lines["alice"]["cost"], lines["bob"]["cost"]) == (pytest.approx(10.0), pytest.approx(2.0))
    (whole,) = History(str(tmp_path)).lines(["date"]).to_pylist()
    assert (whole["num_rows"], whole["cost"]) == (2, pytest.approx(20.0))  # ten seconds of two accelerators, idle ones too


def test_the_tables_are_those_of_a_batch_job_and_the_day_adds_up(tmp_path: Path, clocks: HandClock) -> None:
    usage = usage_in(tmp_path, clocks)
    for key in ("alice", "bob", "alice"):
        tally = asked(key, clocks.now)
        usage.began(tally)
        clocks.now += 4
        usage.answered(tally)
        usage.write(2)
    (folder,) = (tmp_path / "usage").iterdir()
    batches = pq.read_table(folder / "stats" / "batches.parquet")
    (run,) = pq.read_table(folder / "stats" / "run.parquet").to_pylist()
    assert batches.schema.equals(BATCH) and set(run) == set(RUN.names)
    assert batches["client"].to_pylist() == ["alice", "bob", "alice"]
    assert [line["prefill_s"] / line["decode_s"] for line in batches.to_pylist()] == pytest.approx([1 / 3] * 3)
    assert run["worker_s"] == pytest.approx(24.0)  # twelve seconds of two replicas
    assert run["worker_s"] == pytest.approx(sum(run[f"{part}_s"] for part in ("loading", "prefill", "decode", "idle", "lost")))
    assert run["cost"] == pytest.approx(sum(run[f"{part}_cost"] for part in ("prefill", "decode", "idle", "overhead")))
    assert (run["ttft_s_p50"], run["num_output_tokens"], run["num_workers"]) == (1.0, 15, 2)


def test_each_day_has_a_folder_of_its_own(tmp_path: Path, clocks: HandClock) -> None:
    usage = usage_in(tmp_path, clocks)
    for _ in range(2):
        tally = asked("alice", clocks.now)
        usage.began(tally)
        usage.answered(tally)
        usage.write(1)
        clocks.now += 86400
        usage.write(1)
    days = [line["date"] for line in History(str(tmp_path)).lines(["date"]).to_pylist()]
    assert days == [date(1970, 1, 1), date(1970, 1, 2)]


def test_a_day_without_a_request_costs_what_its_replicas_do(tmp_path: Path, clocks: HandClock) -> None:
    usage = usage_in(tmp_path, clocks)
    for is_asked in (True, False, True):
        if is_asked:
            tally = asked("alice", clocks.now)
            usage.began(tally)
            clocks.now += 100
            usage.answered(tally)
            usage.write(1)
            clocks.now -= 100
        clocks.now += 86400
        usage.write(1)
    days = History(str(tmp_path)).lines(["date"]).to_pylist()
    assert [(line["num_rows"], line["cost"]) for line in days] == [(rows, pytest.approx(2 * 86400)) for rows in (1, 0, 1)]
    shares = [
        share
        for folder in sorted((tmp_path / "usage").iterdir())
        for share in pq.read_table(folder / "stats" / "batches.parquet")["shares"].combine_chunks().flatten().to_pylist()
    ]
    assert [share["busy_s"] for share in shares] == pytest.approx([100, 100])


def test_a_server_that_nobody_asks_writes_nothing(tmp_path: Path, clocks: HandClock) -> None:
    usage = usage_in(tmp_path, clocks)
    clocks.now += 60
    usage.write(1)
    assert not list(tmp_path.iterdir())


def test_a_client_that_left_before_anything_came_is_counted_without_speeds(tmp_path: Path, clocks: HandClock) -> None:
    usage = usage_in(tmp_path, clocks)
    tally = Tally("alice", clocks.now, finish_reason="left")
    usage.began(tally)
    usage.answered(tally)
    usage.write(0)
    (line,) = History(str(tmp_path)).lines(["client"]).to_pylist()
    assert (line["num_rows"], line["output_tokens_per_s"], line["cost_per_million_output_tokens"]) == (1, None, None)


def test_a_refused_request_is_no_usage(tmp_path: Path, clocks: HandClock) -> None:
    usage = usage_in(tmp_path, clocks)
    tally = Tally("alice", clocks.now, error_kind="queue_full", is_refused=True)
    usage.began(tally)
    usage.answered(tally)
    usage.write(1)
    assert not list(tmp_path.iterdir())
