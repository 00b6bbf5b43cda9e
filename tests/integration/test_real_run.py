"""The whole story with vLLM and the real model: the README's first command, and a driver killed on the way."""

import json
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
from openai.types import CreateEmbeddingResponse

from pipelines.ledger import PHASES
from tests.integration.conftest import Fournee

ROOT = Path(__file__).parents[2]
SIX_BATCHES = (
    "input.limit=24", "sampling.max_tokens=16", "engine.rows_per_batch=4", "engine.kwargs.max_num_seqs=4",
    "engine.cpu_kv_cache_gib=1",
)  # fmt: skip
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
    for phase in ("prefill_s", "decode_s"):
        assert 0 < summary[phase] == pytest.approx(sum(batch[phase] for batch in batches))
    assert sum(summary[phase] for phase in PHASES) == pytest.approx(summary["worker_s"])
    costs = summary["costs"]
    assert costs["per_million_output_tokens"] == pytest.approx(costs["total"] * 1e6 / summary["num_output_tokens"])
    assert summary["record"]["model"]["digest"].startswith("sha256:")
    assert {"ray", "torch", "fournee"} <= set(summary["record"]["versions"])
    for said in ("64: 64 ok, 0 failed", "output tokens/s", "time to first token", "p99", "USD per million", "Paris"):
        assert said in done.stdout

    again = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert again.returncode == 0
    assert "is finished; nothing to do" in again.stderr


@pytest.mark.slow  # two minutes; with the echo engine, `test_batch.py` has it in every run
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


@pytest.mark.slow  # a minute; with the echo engine, `test_batch.py` has it in every run
def test_a_worker_killed_on_its_way_is_replaced_and_its_rows_are_answered(tmp_path: Path, wait_until: WaitUntil) -> None:
    run = Fournee(tmp_path / "run", "")
    process = run.start(*SIX_BATCHES)
    wait_until(lambda: len(run.parts()) >= 2, process)
    (beat,) = (json.loads(path.read_text()) for path in run.folder.glob("attempts/worker-*.json"))
    before = run.parts()
    os.kill(beat["pid"], signal.SIGKILL)
    _, err = process.communicate(timeout=400)
    assert process.returncode == 0, err
    assert {name: run.parts()[name] for name in before} == before
    assert len({row["id"] for row in run.table().to_pylist()}) == len(run.table()) == 24
    summary = json.loads((run.folder / "stats" / "summary.json").read_text())
    assert (summary["num_ok"], summary["num_workers"], summary["num_deaths"]) == (24, 2, 1)


@pytest.mark.slow
def test_an_engine_process_that_is_killed_is_replaced_with_its_worker(
    tmp_path: Path, wait_until: WaitUntil, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's usual layout, as on a GPU: the engine is a process of its own."""
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    run = Fournee(tmp_path / "run", "")
    process = run.start(*SIX_BATCHES)
    wait_until(lambda: len(run.parts()) >= 2, process)
    (beat,) = (json.loads(path.read_text()) for path in run.folder.glob("attempts/worker-*.json"))
    (engine,) = (child for child in psutil.Process(beat["pid"]).children() if "EngineCore" in " ".join(child.cmdline()))
    before = run.parts()
    engine.kill()
    _, err = process.communicate(timeout=600)
    assert process.returncode == 0, err
    assert {name: run.parts()[name] for name in before} == before
    assert len({row["id"] for row in run.table().to_pylist()}) == len(run.table()) == 24
    (death,) = (reason for reason in pq.read_table(run.folder / "stats" / "workers.parquet")["death"].to_pylist() if reason)
    assert death.startswith("vLLM's engine died: ")
    assert not engine.is_running()


@pytest.mark.slow
def test_a_cache_that_the_models_length_does_not_fit_into_is_a_configuration_error(tmp_path: Path) -> None:
    """Only vLLM can judge the value, when it has loaded the model."""
    done = Fournee(tmp_path / "run", "").run("engine.kwargs.num_gpu_blocks_override=2")
    assert done.code == 2, done.err
    assert "vLLM refuses the options" in done.err
    assert "max seq len (2048)" in done.err and "max_model_len" in done.err
    assert not list((tmp_path / "run").glob("results/*"))


SCHEMA = {
    "type": "object",
    "properties": {"word": {"type": "string", "maxLength": 8}},
    "required": ["word"],
    "additionalProperties": False,
}
# What one row asks for by itself, and what becomes of it: an error kind, or None for an answer.
ROWS: dict[str, tuple[dict[str, Any], str | None]] = {
    "plain": ({"prompt": "What is the capital of France?"}, None),
    "schema": ({"prompt": "Give me a word as JSON.", "own": {"json_schema": SCHEMA, "max_tokens": 40}}, None),
    "cut": ({"prompt": "Give me a word as JSON.", "own": {"json_schema": SCHEMA, "max_tokens": 2}}, "truncated"),
    "nonsense": ({"prompt": "x", "own": {"json_schema": {"type": "nonsense"}}}, "invalid_schema"),
    "pattern": ({"prompt": "x", "own": {"json_schema": {"type": "string", "pattern": "("}}}, "invalid_schema"),
    "regex": ({"prompt": "x", "own": {"regex": "(("}}, "invalid_schema"),
    "choice": ({"prompt": "Is the sky blue?", "own": {"choice": ["yes", "no"]}}, None),
    "several": ({"prompt": "Say a word.", "own": {"n": 2, "temperature": 1.0, "max_tokens": 3}}, None),
    "likely": ({"prompt": "Say a word.", "own": {"logprobs": 2, "prompt_logprobs": 1, "max_tokens": 2}}, None),
    "cold": ({"prompt": "x", "own": {"temperature": -1}}, "invalid_parameter"),
    "marker": ({"prompt": "What does <|im_end|> mean?"}, None),
    "long": ({"prompt": "word " * 2000}, "prompt_too_long"),
    "roles": ({"prompt": None}, "missing_value"),
    "last": ({"prompt": "What is the capital of France?"}, None),
}


def test_each_row_gets_what_it_asks_for_and_bad_ones_fail_alone(tmp_path: Path, jsonl: Callable[..., Path]) -> None:
    run = Fournee(tmp_path / "run", "")
    path = jsonl([{"id": name, **row} for name, (row, _) in ROWS.items()])
    done = run.run(
        "input=jsonl", f"input.path={path}", "input.id_column=id", "input.sampling_column=own", "model.max_model_len=256",
        "sampling.max_tokens=12", "engine.cpu_kv_cache_gib=1", "errors.max_failed_fraction=1",
    )  # fmt: skip
    assert done.code == 0, done.err
    rows = {row["id"]: row for row in run.table().to_pylist()}
    assert {name: rows[name]["error_kind"] for name in ROWS} == {name: kind for name, (_, kind) in ROWS.items()}
    assert "Paris" in rows["plain"]["text"]
    assert rows["plain"]["text"] == rows["last"]["text"]
    assert set(json.loads(rows["schema"]["parsed"])) == {"word"}
    assert (rows["cut"]["finish_reason"], rows["cut"]["num_output_tokens"]) == ("length", 2)
    assert rows["choice"]["text"] in ("yes", "no")
    assert len(rows["several"]["completions"]) == 1
    assert [len(place) >= 2 for place in rows["likely"]["logprobs"]] == [True, True]
    assert len(rows["likely"]["prompt_logprobs"]) == rows["likely"]["num_prompt_tokens"]
    assert rows["marker"]["flags"] == ["special_tokens"]
    assert "tokens; model.max_model_len=256 allows 255" in rows["long"]["error_message"]
    assert (rows["plain"]["sampling"], json.loads(rows["choice"]["sampling"])["choice"]) == (None, ["yes", "no"])


@pytest.mark.slow
def test_embedding_bodies_of_an_openai_batch_are_embedded(tmp_path: Path, jsonl: Callable[..., Path]) -> None:
    texts = {"a": "The cat sat on the mat.", "b": "A cat was sitting on a mat.", "c": "Interest rates rose again."}
    lines = [
        {"custom_id": name, "method": "POST", "url": "/v1/embeddings", "body": {"model": "any", "input": text}}
        for name, text in texts.items()
    ]
    lines.append({"custom_id": "d", "method": "POST", "url": "/v1/embeddings", "body": {"model": "any", "input": ["x", "y"]}})
    run = Fournee(tmp_path / "run", "")
    done = run.run(
        "input=openai", f"input.path={jsonl(lines)}", "engine.kwargs.runner=pooling", "engine.kwargs.convert=embed",
        "output.openai=true", "errors.max_failed_fraction=0.5", "engine.cpu_kv_cache_gib=1",
    )  # fmt: skip
    assert done.code == 0, done.err
    rows = {row["id"]: row for row in run.table().to_pylist()}
    assert rows["d"]["error_kind"] == "invalid_request"
    vectors = {name: np.array(rows[name]["embedding"]) for name in texts}
    assert all(abs(np.linalg.norm(vector) - 1) < 1e-3 for vector in vectors.values())
    assert vectors["a"] @ vectors["b"] > vectors["a"] @ vectors["c"]
    bodies = [json.loads(line)["response"]["body"] for line in (run.folder / "openai" / "output.jsonl").open()]
    assert [len(CreateEmbeddingResponse.model_validate(body).data[0].embedding) for body in bodies] == [len(vectors["a"])] * 3
    (error,) = [json.loads(line) for line in (run.folder / "openai" / "errors.jsonl").open()]
    assert (error["custom_id"], error["response"]["status_code"]) == ("d", 400)
