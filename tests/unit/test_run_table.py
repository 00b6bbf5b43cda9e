"""The row that a finished run leaves for its history, from real runs on the echo engine."""

from collections.abc import Callable
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from pipelines.compose import compose_settings
from pipelines.config import BatchConfig
from pipelines.run import identity_of, workload_of
from pipelines.schema import RUN, RUN_TABLE
from pipelines.sources import list_sources
from pipelines.summary import finish
from pipelines.totals import Summary
from tests.unit.story import answer, echo

Config = Callable[..., BatchConfig]
Jsonl = Callable[..., Path]


def finished(config: BatchConfig) -> tuple[dict[str, Any], Summary]:
    run, plan, _ = answer(config)
    summary = finish(run, plan, config)
    table = pq.read_table(run.folder.path(RUN_TABLE), filesystem=run.folder.arrow, partitioning=None)
    assert table.schema.equals(RUN)
    (row,) = table.to_pylist()
    return row, summary


def test_a_run_leaves_its_totals_in_one_row(batch_config: Config, jsonl: Jsonl, tmp_path: Path) -> None:
    before = datetime.now(UTC)
    path = jsonl([*({"id": f"r{i}", "prompt": "one two three"} for i in range(30)), {"id": "null", "prompt": None}])
    command = echo(path, str(tmp_path / "run"), "experiment=nightly", "run_date=2026-11-30", "engine.seconds_per_token=0.001")
    row, summary = finished(batch_config(*command, "pricing=h100"))

    assert (row["run_date"], row["experiment"], row["engine"], row["input_format"]) == (
        date(2026, 11, 30), "nightly", "echo", "jsonl",
    )  # fmt: skip
    assert (row["num_files"], row["input_bytes"]) == (1, path.stat().st_size)
    assert (row["num_rows"], row["num_ok"], row["num_failed"]) == (31, 30, 1)
    assert before <= row["started_at"] <= row["finished_at"] <= datetime.now(UTC)
    for name in set(RUN.names) & set(Summary.model_fields):
        assert row[name] == getattr(summary, name), name
    assert row["latency_s_p95"] == summary.latencies["latency_s"].p95
    assert row["cost"] == summary.costs.total
    assert row["cost_per_million_uncached_tokens"] == summary.costs.per_million_uncached_tokens
    assert sum(row[name] for name in row if name.endswith("_cost")) == pytest.approx(row["cost"])
    assert (row["accelerator"], row["num_accelerators"], row["currency"]) == ("H100", 1, "USD")
    assert (row["model"], row["model_digest"], row["vllm_version"]) == (None, None, None)  # the echo engine has none


@pytest.mark.parametrize("prompts", [[], [None, " "]], ids=["no rows", "all failed"])
def test_what_has_nothing_to_divide_by_is_null(
    batch_config: Config, jsonl: Jsonl, tmp_path: Path, prompts: list[str | None]
) -> None:
    path = jsonl([{"id": str(i), "prompt": prompt} for i, prompt in enumerate(prompts)])
    row, _ = finished(batch_config(*echo(path, str(tmp_path / "run"))))
    assert row["num_rows"] == len(prompts)
    assert row["run_date"] is row["experiment"] is None
    for name in ("output_tokens_per_s", "busy_output_tokens_per_s", "ttft_s_p95", "cost_per_million_output_tokens"):
        assert row[name] is None, name


def test_failed_rows_that_are_answered_later_are_counted_again(batch_config: Config, jsonl: Jsonl, tmp_path: Path) -> None:
    path = jsonl([{"id": str(i), "prompt": "two words"} for i in range(20)])
    command = echo(path, str(tmp_path / "run"))
    first, _ = finished(batch_config(*command))
    again, _ = finished(batch_config(*command, "retry_failed=true"))
    assert (again["num_attempts"], again["started_at"]) == (2, first["started_at"])
    assert again["finished_at"] > first["finished_at"]


def workload(config: BatchConfig) -> str:
    return workload_of(identity_of(config, list_sources(config.input)))


def test_the_same_job_on_other_rows_is_the_same_workload(batch_config: Config, jsonl: Jsonl) -> None:
    monday, tuesday = jsonl([{"prompt": "hi"}], "monday.jsonl"), jsonl([{"prompt": "ho"}] * 3, "tuesday.jsonl")
    command = ["engine=echo", "input=jsonl"]
    usual = workload(batch_config(*command, f"input.path={monday}"))
    assert workload(batch_config(*command, f"input.path=[{monday},{tuesday}]", "run_date=2026-11-30", "pricing=h100")) == usual
    for change in ("sampling.max_tokens=5", "prompt.system=Short.", "input.limit=1", "input.id_column=id"):
        assert workload(batch_config(*command, f"input.path={monday}", change)) != usual, change


@pytest.mark.parametrize(
    ("overrides", "name"), [([], None), (["experiment=pirate_demo"], "pirate_demo"), (["+experiment=overhead"], "overhead")]
)
def test_the_settings_name_the_experiment(overrides: list[str], name: str | None) -> None:
    assert compose_settings("batch", overrides)["experiment"] == name
