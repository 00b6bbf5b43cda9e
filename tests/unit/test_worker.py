"""A worker without Ray: what it reads, answers and commits, on local folders and on an fsspec file system."""

import asyncio
import json
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipelines.batch import open_plan
from pipelines.config import BatchConfig
from pipelines.errors import ExitCode, RunFailed
from pipelines.parts import committed, part_name
from pipelines.plan import Plan, make_shards
from pipelines.run import Run, begin_attempt, open_run
from pipelines.schema import BATCH, RESULT, WORKER
from pipelines.sources import list_sources
from pipelines.summary import Summary, finish, read_summary, verify
from pipelines.worker import Job, Worker

Config = Callable[..., BatchConfig]


@pytest.fixture(params=["local", "memory"])
def run_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "local":
        yield str(tmp_path / "run")
        return
    name = f"/runs/{uuid.uuid4().hex}"
    yield f"memory:/{name}"
    fsspec.filesystem("memory").rm(name, recursive=True)


def answer(config: BatchConfig, *, most_shards: int | None = None) -> tuple[Run, Plan, list[dict[str, Any]]]:
    """Do what the story does, with one worker in this process; stop after `most_shards` as a crash would."""
    sources = list_sources(config.input)
    run = open_run(config, sources)
    plan = open_plan(config, sources, run.folder)
    begin_attempt(run)
    reported: list[dict[str, Any]] = []
    job = Job(
        config=config,
        run=run.folder,
        attempt=run.attempt,
        carried=plan.carried,
        rows_per_batch=10,
        device="cpu",
        num_accelerators=1,
    )

    async def work() -> None:
        worker = Worker(job, reported.append)
        shards = make_shards(plan.without(committed(run.folder)), num_workers=1)[:most_shards]
        await asyncio.gather(*(worker(shard) for shard in shards))

    asyncio.run(work())
    return run, plan, reported


def results(run: Run) -> list[dict[str, Any]]:
    names = [f"results/{name}" for name in run.folder.names("results")]
    tables = [pq.read_table(run.folder.path(name), filesystem=run.folder.arrow, partitioning=None) for name in names]
    return [row for table in tables for row in table.to_pylist()]


def echo(path: Path, run_url: str, *more: str) -> list[str]:
    return [
        "engine=echo", "engine.rows_per_batch=10", "input=jsonl", f"input.path={path}", "input.id_column=id",
        f"output.path={run_url}", *more,
    ]  # fmt: skip


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
    assert sum(line["num_rows"] for line in reported) == 45


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
    before = committed(run.folder)
    assert 0 < len(before) < plan.num_batches

    run, plan, reported = answer(config)
    assert {line["batch_id"] for line in reported} == set(range(plan.num_batches)) - set(before)
    summary = finish(run, plan, config)
    assert summary.num_rows == 95
    assert summary.num_attempts == 2
    assert sorted(row["id"] for row in results(run)) == sorted(f"r{i}" for i in range(95))
    assert run.is_finished
    assert read_summary(run) == summary


def test_statistics_have_their_schema_and_add_up(batch_config: Config, jsonl: Callable[..., Path], run_url: str) -> None:
    path = jsonl([{"id": f"r{i}", "prompt": "one two three"} for i in range(50)])
    config = batch_config(*echo(path, run_url, "engine.seconds_per_token=0.002", "pricing.price_per_accelerator_hour=3600"))
    run, plan, _ = answer(config)
    summary = finish(run, plan, config)

    batches = read(run, "stats/batches.parquet")
    workers = read(run, "stats/workers.parquet")
    assert batches.schema.equals(BATCH)
    assert workers.schema.equals(WORKER)
    for name in ("num_rows", "num_ok", "num_failed", "num_prompt_tokens", "num_output_tokens"):
        assert sum(batches[name].to_pylist()) == getattr(summary, name), name
    assert sum(batches["engine_s"].to_pylist()) == pytest.approx(summary.engine_s)
    assert summary.engine_s == pytest.approx(workers["busy_s"].to_pylist()[0], rel=0.01)
    assert summary.engine_s < summary.worker_s
    assert summary.cost == pytest.approx(summary.worker_s)  # 3600 an hour is 1 a second
    assert sum(batches["cost"].to_pylist()) == pytest.approx(summary.engine_s)
    assert summary.cost_per_million_output_tokens == pytest.approx(summary.cost * 1e6 / 150)
    assert summary.latencies["ttft_s"].p50 == pytest.approx(0.002)
    assert batches["finish_reasons"].to_pylist()[0] == [("stop", 10)]


def test_a_run_without_rows_is_a_success_with_nulls_for_rates(batch_config: Config, tmp_path: Path, run_url: str) -> None:
    empty = tmp_path / "empty.parquet"
    pq.write_table(pa.table({"id": pa.array([], pa.string()), "prompt": pa.array([], pa.string())}), empty)
    config = batch_config(*echo(empty, run_url, "input=parquet"))
    run, plan, _ = answer(config)
    summary = finish(run, plan, config)
    assert summary.exit_code == ExitCode.OK
    assert (summary.num_rows, summary.output_tokens_per_s, summary.cost_per_million_output_tokens) == (0, None, None)
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
    with pytest.raises(RunFailed, match=r"1 of 3 batches have no part, the first is results/part-00000001\.parquet"):
        verify(run, plan)
    run.folder.write(part_name(1), run.folder.read(part_name(2)))
    with pytest.raises(RunFailed, match=r"part-00000001\.parquet does not match the plan: batch 2"):
        verify(run, plan)
    run.folder.write(part_name(1), whole[: len(whole) // 2])
    with pytest.raises(RunFailed, match=r"part-00000001\.parquet cannot be read"):
        verify(run, plan)
    run.folder.write(part_name(1), whole)
    run.folder.write(part_name(7), whole)
    with pytest.raises(RunFailed, match=r"1 parts are in no plan, the first is results/part-00000007\.parquet"):
        verify(run, plan)


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
