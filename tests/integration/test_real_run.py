"""The whole story with vLLM and the real model: the README's first command, and a driver killed on the way."""

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest

from tests.integration.conftest import Fournee

ROOT = Path(__file__).parents[2]
WaitUntil = Callable[[Callable[[], bool], "subprocess.Popen[str]"], None]


def test_make_demo_answers_the_prompts_that_ship(tmp_path: Path) -> None:
    folder = tmp_path / "demo"
    environment = {**os.environ, "RAY_ADDRESS": "", "COLUMNS": "160"}
    command = ["make", "demo", f"DEMO={folder}"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr

    rows = ds.dataset(folder / "results").to_table().to_pylist()
    assert len({row["id"] for row in rows}) == len(rows) == 64
    assert all(row["status"] == "ok" and row["text"].strip() for row in rows)
    answers = {row["id"]: row for row in rows}
    assert "Paris" in answers["demo-01"]["text"]
    assert all(0 < row["num_output_tokens"] <= 128 for row in rows)
    assert all(row["queue_s"] <= row["ttft_s"] for row in rows)

    summary = json.loads((folder / "stats" / "summary.json").read_text())
    batches = pq.read_table(folder / "stats" / "batches.parquet").to_pylist()
    for name in ("num_prompt_tokens", "num_output_tokens"):
        assert summary[name] == sum(row[name] for row in rows) == sum(batch[name] for batch in batches)
    assert summary["engine_s"] == pytest.approx(sum(batch["engine_s"] for batch in batches))
    assert summary["engine_s"] + summary["loading_s"] <= summary["worker_s"]
    assert summary["cost_per_million_output_tokens"] == pytest.approx(summary["cost"] * 1e6 / summary["num_output_tokens"])
    assert summary["record"]["model"]["digest"].startswith("sha256:")
    assert {"ray", "torch", "fournee"} <= set(summary["record"]["versions"])
    for said in ("64: 64 ok, 0 failed", "output tokens/s", "time to first token", "p99", "per million tokens", "Paris"):
        assert said in done.stdout

    again = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert again.returncode == 0
    assert "is finished; nothing to do" in again.stderr


def test_a_killed_driver_and_a_rerun_give_the_answers_of_an_undisturbed_run(tmp_path: Path, wait_until: WaitUntil) -> None:
    command = (
        "input.limit=32", "sampling.max_tokens=16", "engine.rows_per_batch=4", "engine.kwargs.max_num_seqs=4",
        "engine.cpu_kv_cache_gib=1",
    )  # fmt: skip
    calm, rough = Fournee(tmp_path / "calm", ""), Fournee(tmp_path / "rough", "")
    assert calm.run(*command).code == 0

    process = rough.start(*command)
    wait_until(lambda: len(rough.parts()) >= 2, process)
    process.kill()
    process.communicate()
    survived = rough.parts()
    assert len(survived) < 8
    assert rough.run(*command).code == 0

    assert {name: rough.parts()[name] for name in survived} == survived
    texts = [{row["id"]: row["text"] for row in run.table().to_pylist()} for run in (calm, rough)]
    assert len(rough.table()) == len(texts[1]) == 32
    assert texts[0] == texts[1]


def test_a_value_that_only_vllm_can_judge_is_a_configuration_error(tmp_path: Path) -> None:
    done = Fournee(tmp_path / "run", "").run("engine.kwargs.max_num_seqs=-5")
    assert done.code == 2, done.err
    assert "vLLM refuses the options" in done.err
    assert "max_num_seqs" in done.err
    assert not list((tmp_path / "run").glob("results/*"))
