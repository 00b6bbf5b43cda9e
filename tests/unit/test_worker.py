"""A worker without Ray: what it reads, answers and commits, on local folders and on an fsspec file system."""

import asyncio
import json
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipelines import lifeline, worker
from pipelines.batch import job_of
from pipelines.config import BatchConfig
from pipelines.engines import Ticket
from pipelines.engines.fair_clock import FairClock
from pipelines.errors import ConfigError, EngineDead, ExitCode, RunFailed
from pipelines.handover import check_folder
from pipelines.heartbeat import deaths
from pipelines.ledger import PHASES
from pipelines.lifeline import Order
from pipelines.parts import Parts, part_name
from pipelines.placement import Placement
from pipelines.plan import make_shards
from pipelines.rows import EngineWork, Request
from pipelines.run import Run
from pipelines.schema import BATCH, RESULT, WORKER
from pipelines.storage import Folder
from pipelines.summary import finish, read_summary, verify
from pipelines.totals import Summary
from tests.unit.story import QuietLine, answer, echo, hand, results

Config = Callable[..., BatchConfig]


@pytest.fixture(params=["local", "memory"])
def run_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "local":
        yield str(tmp_path / "run")
        return
    name = f"/runs/{uuid.uuid4().hex}"
    yield f"memory:/{name}"
    fsspec.filesystem("memory").rm(name, recursive=True)


def test_every_row_comes_out_once_answered_or_failed_with_a_reason(
    batch_config: Config, jsonl: Callable[..., Path], run_url: str
) -> None:
    good = [{"id": f"r{i}", "prompt": f"hello world {i}", "topic": "a"} for i in range(40)]
    bad = ["{broken", "[1, 2]", {"id": "null", "prompt": None}, {"id": "blank", "prompt": "  "}, {"id": "number", "prompt": 7}]
    config = batch_config(*echo(jsonl([*good[:20], *bad, *good[20:]]), run_url, "input.carry_columns=[topic]"))

    run, plan, reported = answer(config)
    summary = finish(run, plan, config)

    rows = results(run)
    assert len(rows) == 45
    assert [row["source_row"] for row in rows] == list(range(45))
    assert [row["text"] for row in rows if row["status"] == "ok"] == [row["prompt"] for row in good]
    failed = {row["source_row"]: row["error_kind"] for row in rows if row["status"] == "failed"}
    assert failed == {20: "malformed_row", 21: "malformed_row", 22: "missing_value", 23: "empty_prompt", 24: "invalid_text"}
    assert {row["id"]: row["topic"] for row in rows if row["status"] == "ok"} == dict.fromkeys((r["id"] for r in good), "a")
    assert (summary.num_rows, summary.num_ok, summary.num_failed) == (45, 40, 5)
    assert summary.exit_code == ExitCode.ROWS_FAILED
    assert sum(line["num_ok"] + line["num_failed"] for line in reported) == 45


def test_ids_without_a_column_are_row_numbers_and_repeated_ids_lose_no_row(
    batch_config: Config, jsonl: Callable[..., Path], run_url: str
) -> None:
    same = jsonl([{"id": "x", "prompt": f"p {i}"} for i in range(25)])
    run, _, _ = answer(batch_config(*echo(same, run_url)))
    assert [row["id"] for row in results(run)] == ["x"] * 25
    assert len({row["request_key"] for row in results(run)}) == 25

    numbered = batch_config(*echo(same, run_url, "input.id_column=null", "output.on_existing=replace"))
    run, _, _ = answer(numbered)
    assert [row["id"] for row in results(run)] == [str(i) for i in range(25)]


def test_a_resumed_run_answers_only_what_is_missing_and_gives_the_same_rows(
    batch_config: Config, jsonl: Callable[..., Path], run_url: str
) -> None:
    path = jsonl([{"id": f"r{i}", "prompt": f"word {i} " * (i % 7 + 1)} for i in range(95)])
    config = batch_config(*echo(path, run_url))
    run, plan, _ = answer(config, most_shards=4)
    before = Parts(run.folder).batch_ids
    assert 0 < len(before) < plan.num_batches

    run, plan, reported = answer(config)
    assert {line["batch_id"] for line in reported} == set(range(plan.num_batches)) - set(before)
    summary = finish(run, plan, config)
    assert summary.num_rows == 95
    assert summary.num_attempts == 2
    assert sorted(row["id"] for row in results(run)) == sorted(f"r{i}" for i in range(95))
    assert run.is_finished
    assert read_summary(run, config) == summary


def test_statistics_have_their_schema_and_add_up(batch_config: Config, jsonl: Callable[..., Path], run_url: str) -> None:
    path = jsonl([{"id": f"r{i}", "prompt": "word " * 12} for i in range(50)])
    config = batch_config(*echo(path, run_url, "engine.seconds_per_token=0.002", "pricing.price_per_accelerator_hour=3600"))
    run, plan, _ = answer(config)
    summary = finish(run, plan, config)

    batches = read(run, "stats/batches.parquet")
    workers = read(run, "stats/workers.parquet")
    assert batches.schema.equals(BATCH)
    assert workers.schema.equals(WORKER)
    for name in ("num_rows", "num_ok", "num_failed", "num_prompt_tokens", "num_output_tokens"):
        assert sum(batches[name].to_pylist()) == getattr(summary, name), name
    for phase in ("prefill_s", "decode_s"):
        assert sum(batches[phase].to_pylist()) == pytest.approx(sum(workers[phase].to_pylist())) == getattr(summary, phase)
    assert sum(getattr(summary, phase) for phase in PHASES) == pytest.approx(summary.worker_s)
    assert 0 < summary.prefill_s < summary.decode_s  # one word, and eleven more
    assert summary.lost_s == pytest.approx(0, abs=1e-6)
    assert summary.costs.total == pytest.approx(summary.worker_s)  # 3600 an hour is 1 a second
    assert sum(batches["cost"].to_pylist()) == pytest.approx(summary.prefill_s + summary.decode_s)
    assert summary.costs.per_million_output_tokens == pytest.approx(summary.costs.total * 1e6 / 600)
    assert summary.num_generated_tokens == summary.num_output_tokens
    assert summary.latencies["ttft_s"].p50 == pytest.approx(0.002, rel=0.005)
    assert batches["finish_reasons"].to_pylist()[0] == [("stop", 10)]


def test_a_run_without_rows_is_a_success_with_nulls_for_rates(batch_config: Config, tmp_path: Path, run_url: str) -> None:
    empty = tmp_path / "empty.parquet"
    pq.write_table(pa.table({"id": pa.array([], pa.string()), "prompt": pa.array([], pa.string())}), empty)
    config = batch_config(*echo(empty, run_url, "input=parquet"))
    run, plan, _ = answer(config)
    summary = finish(run, plan, config)
    assert summary.exit_code == ExitCode.OK
    assert (summary.num_rows, summary.output_tokens_per_s, summary.costs.per_million_output_tokens) == (0, None, None)
    assert summary.latencies["ttft_s"].p99 is None


def test_every_part_has_the_one_schema_whatever_its_rows(
    batch_config: Config, jsonl: Callable[..., Path], run_url: str
) -> None:
    rows = [{"id": f"r{i}", "prompt": None if i < 10 else "fine", "tag": i} for i in range(20)]
    config = batch_config(*echo(jsonl(rows), run_url, "input.carry_columns=[tag]"))
    run, plan, _ = answer(config)
    schemas = [
        pq.read_schema(run.folder.path(part_name(i)), filesystem=run.folder.arrow).remove_metadata()
        for i in range(plan.num_batches)
    ]
    assert schemas == [pa.schema([*RESULT, pa.field("tag", pa.string())])] * 2


def test_verify_names_a_missing_a_foreign_and_a_wrong_part(
    batch_config: Config, jsonl: Callable[..., Path], run_url: str
) -> None:
    config = batch_config(*echo(jsonl([{"id": str(i), "prompt": "hi"} for i in range(30)]), run_url))
    run, plan, _ = answer(config)
    whole = run.folder.read(part_name(1))

    run.folder.fs.rm(run.folder.path(part_name(1)))
    with pytest.raises(RunFailed, match=r"1 of 3 batches have no part, the first is batch 1"):
        verify(run, plan, Parts(run.folder))
    run.folder.write(part_name(1), run.folder.read(part_name(2)))
    with pytest.raises(
        RunFailed, match=r"part-00000001\.parquet does not match the plan: batch_id 2 instead of 1, first_row 20 instead of 10"
    ):
        verify(run, plan, Parts(run.folder))
    run.folder.write(part_name(1), whole[: len(whole) // 2])
    with pytest.raises(RunFailed, match=r"part-00000001\.parquet cannot be read"):
        verify(run, plan, Parts(run.folder))
    run.folder.write(part_name(1), whole)
    run.folder.write(part_name(7), whole)
    with pytest.raises(RunFailed, match=r"1 parts are in no plan, the first is results/part-00000007\.parquet"):
        verify(run, plan, Parts(run.folder))


def test_a_part_of_another_run_is_never_counted(batch_config: Config, jsonl: Callable[..., Path], run_url: str) -> None:
    """A worker that outlived its run may commit into the run that replaced it."""
    command = echo(jsonl([{"id": str(i), "prompt": "one two three"} for i in range(30)]), run_url)
    run, _, _ = answer(batch_config(*command, "sampling.max_tokens=1"))
    late = run.folder.read(part_name(1))
    run, plan, _ = answer(batch_config(*command, "output.on_existing=replace"))
    run.folder.write(part_name(1), late)
    with pytest.raises(RunFailed, match=r"part-00000001\.parquet belongs to another run"):
        verify(run, plan, Parts(run.folder))


def test_a_shard_that_is_handed_on_is_not_answered_twice(
    batch_config: Config, jsonl: Callable[..., Path], run_url: str
) -> None:
    """What Ray does with the shards of a dead worker."""
    config = batch_config(*echo(jsonl([{"id": str(i), "prompt": "hi"} for i in range(60)]), run_url))
    run, plan, first = answer(config, most_shards=3)
    again = asyncio.run(hand(config, run, plan, make_shards(plan.batches, num_workers=1)))
    assert sorted(line["batch_id"] for line in first + again) == list(range(plan.num_batches))


def test_an_input_that_changed_after_planning_stops_the_worker(
    batch_config: Config, jsonl: Callable[..., Path], run_url: str
) -> None:
    config = batch_config(*echo(jsonl([{"id": str(i), "prompt": "hi"} for i in range(30)]), run_url))
    run, plan, _ = answer(config, most_shards=0)
    jsonl([{"id": str(i), "prompt": "ho"} for i in range(31)])
    with pytest.raises(RunFailed, match="changed since the run was planned"):
        asyncio.run(hand(config, run, plan, make_shards(plan.batches, num_workers=1)))
    assert not Parts(run.folder).batch_ids


def test_an_input_that_is_gone_after_planning_is_a_bad_file_like_any_other(
    batch_config: Config, jsonl: Callable[..., Path], run_url: str
) -> None:
    path = jsonl([{"id": str(i), "prompt": "hi"} for i in range(30)])
    command = echo(path, run_url)
    run, plan, _ = answer(batch_config(*command), most_shards=0)
    path.unlink()
    shards = make_shards(plan.batches, num_workers=1)
    with pytest.raises(RunFailed, match=r"is gone since the run was planned.*set input\.on_bad_file=skip"):
        asyncio.run(hand(batch_config(*command), run, plan, shards))
    asyncio.run(hand(batch_config(*command, "input.on_bad_file=skip"), run, plan, shards))
    assert [row["error_kind"] for row in results(run)] == ["unreadable_file"] * 30


def test_a_folder_that_is_another_one_on_the_workers_node_is_refused(
    batch_config: Config, jsonl: Callable[..., Path], tmp_path: Path
) -> None:
    config = batch_config(*echo(jsonl([{"id": "a", "prompt": "hi"}]), str(tmp_path / "run")))
    run, plan, _ = answer(config, most_shards=0)
    elsewhere = replace(run, folder=Folder(str(tmp_path / "elsewhere")))
    with pytest.raises(ConfigError, match=r"is another folder on the node"):
        asyncio.run(hand(config, elsewhere, plan, make_shards(plan.batches, num_workers=1)))
    assert not (tmp_path / "elsewhere").exists()


def test_a_commit_that_fails_is_reported_as_what_it_is(
    batch_config: Config, jsonl: Callable[..., Path], tmp_path: Path
) -> None:
    config = batch_config(*echo(jsonl([{"id": str(i), "prompt": "hi"} for i in range(100)]), str(tmp_path / "run")))
    run, plan, _ = answer(config, most_shards=0)
    (tmp_path / "run" / "results").write_text("a file where the folder should be")
    with pytest.raises(RunFailed, match="FileExistsError"):
        asyncio.run(hand(config, run, plan, make_shards(plan.batches, num_workers=1)))


def test_rows_with_several_answers_count_all_their_tokens(
    batch_config: Config, jsonl: Callable[..., Path], run_url: str
) -> None:
    config = batch_config(
        *echo(jsonl([{"id": "a", "prompt": "one two three"}]), run_url),
        "sampling=creative", "sampling.n=2", "engine.seconds_per_token=0.01",
    )  # fmt: skip
    run, plan, _ = answer(config)
    summary = finish(run, plan, config)
    (row,) = results(run)
    assert (row["num_output_tokens"], len(row["completions"])) == (6, 1)
    (batch,) = read(run, "stats/batches.parquet").to_pylist()
    assert batch["time_per_output_token_s_p50"] == pytest.approx(0.02 / 5)
    assert summary.latencies["time_per_output_token_s"].p50 == pytest.approx(0.02 / 5, rel=0.005)


def test_a_finished_run_is_judged_by_the_error_budget_of_now(
    batch_config: Config, jsonl: Callable[..., Path], run_url: str
) -> None:
    command = echo(jsonl([{"id": "a", "prompt": "hi"}, {"id": "b", "prompt": None}]), run_url)
    config = batch_config(*command)
    run, plan, _ = answer(config)
    assert finish(run, plan, config).exit_code == ExitCode.ROWS_FAILED
    assert read_summary(run, batch_config(*command, "errors.max_failed_fraction=0.5")).exit_code == ExitCode.OK


def test_a_worker_whose_engine_is_dead_ends_and_leaves_the_reason(
    batch_config: Config, jsonl: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class DeadEngine:
        """Takes a batch and dies."""

        special_tokens = ()

        def prepare(self, request: Request) -> Request:
            return request

        def submit(self, prepared: list[Request]) -> Ticket:
            ticket = Ticket(prepared)
            ticket.fail(EngineDead("CUDA error: an illegal memory access was encountered"))
            return ticket

        clock = FairClock()

        def work(self) -> EngineWork:
            return EngineWork()

        def describe(self) -> dict[str, Any]:
            return {"max_num_seqs": 1}

    class Ended(Exception):
        """Stands for the end of the process."""

    def end(code: int) -> None:
        raise Ended(code)

    config = batch_config(*echo(jsonl([{"id": "a", "prompt": "hi"}]), str(tmp_path / "run")))
    run, plan, _ = answer(config, most_shards=0)
    monkeypatch.setattr(worker, "build_engine", lambda *arguments, **options: DeadEngine())
    monkeypatch.setattr(lifeline.os, "_exit", end)
    with pytest.raises(Ended):
        asyncio.run(hand(config, run, plan, make_shards(plan.batches, num_workers=1)))
    assert deaths(run.folder, attempt=1) == ["CUDA error: an illegal memory access was encountered"]


def test_what_killed_writers_left_is_swept_by_a_finished_run(
    batch_config: Config, jsonl: Callable[..., Path], tmp_path: Path
) -> None:
    config = batch_config(*echo(jsonl([{"id": "a", "prompt": "hi"}]), str(tmp_path / "run")))
    run, plan, _ = answer(config)
    (tmp_path / "run" / "results" / ".part-00000000.parquet.abc.tmp").write_bytes(b"half")
    finish(run, plan, config)
    assert not list((tmp_path / "run").rglob("*.tmp"))


def test_a_worker_notes_down_its_cost_before_its_first_batch(
    batch_config: Config, jsonl: Callable[..., Path], run_url: str
) -> None:
    config = batch_config(*echo(jsonl([{"id": "a", "prompt": "hi"}]), run_url))
    run, _, _ = answer(config, most_shards=0)
    (name,) = [name for name in run.folder.names("attempts") if name.startswith("worker-")]
    beat = json.loads(run.folder.read(f"attempts/{name}"))
    assert (beat["attempt"], beat["num_batches"]) == (1, 0)


def read(run: Run, name: str) -> pa.Table:
    return pq.read_table(run.folder.path(name), filesystem=run.folder.arrow)


def test_the_record_says_that_the_echo_engine_is_no_model(
    batch_config: Config, jsonl: Callable[..., Path], run_url: str
) -> None:
    config = batch_config(*echo(jsonl([{"id": "a", "prompt": "hi"}]), run_url))
    run, plan, _ = answer(config)
    summary: Summary = finish(run, plan, config)
    assert summary.engine == "echo"
    assert summary.record["model"] == "none: the echo engine repeats prompts"
    assert {"python", "ray", "fournee", "pyarrow"} <= set(summary.record["versions"])


class StoppingLine(QuietLine):
    """Tells the worker to stop as soon as it has committed a batch."""

    def __init__(self) -> None:
        self._has_committed = threading.Event()
        self.is_drained = threading.Event()

    def committed(self, numbers: dict[str, int]) -> None:
        self._has_committed.set()

    def order(self) -> Order | None:
        self._has_committed.wait()
        return "stop"

    def drained(self, worker: str) -> None:
        self.is_drained.set()


def test_a_worker_that_is_told_to_stop_commits_what_is_in_its_engine_and_hands_back_the_rest(
    batch_config: Config, jsonl: Callable[..., Path], tmp_path: Path
) -> None:
    rows = [{"id": f"r{i}", "prompt": "one two three"} for i in range(1000)]
    config = batch_config(*echo(jsonl(rows), str(tmp_path / "run"), "engine.seconds_per_token=0.05", "engine.max_num_seqs=40"))
    run, plan, _ = answer(config, most_shards=0)
    line = StoppingLine()
    lines = asyncio.run(hand(config, run, plan, make_shards(plan.batches, num_workers=1), line))
    assert line.is_drained.wait(10)
    assert 0 < len(lines) < 100
    assert sorted(one["batch_id"] for one in lines) == Parts(run.folder).batch_ids

    answer(config)
    assert sorted(row["id"] for row in results(run)) == sorted(row["id"] for row in rows)


@pytest.mark.parametrize(
    ("refusal", "raised"),
    [
        (
            PermissionError("403 Forbidden"),
            pytest.raises(ConfigError, match=r"cannot be read on the node .*its own credentials"),
        ),
        (TimeoutError("given up after 300 s"), pytest.raises(TimeoutError, match="given up")),
    ],
)
def test_a_node_that_may_not_read_the_run_is_told_from_storage_that_stays_away(
    batch_config: Config,
    jsonl: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    refusal: Exception,
    raised: AbstractContextManager[Any],
) -> None:
    config = batch_config(*echo(jsonl([{"id": "a", "prompt": "hi"}]), str(tmp_path / "run")))
    run, plan, _ = answer(config, most_shards=0)

    def refuse(folder: Folder, name: str) -> bytes:
        raise refusal

    monkeypatch.setattr(Folder, "read", refuse)
    with raised:
        check_folder(job_of(config, run, plan, Placement("cpu", 1, {})))
