"""The experiments that ship, each over a few rows with the real model: what comes out has the form that they promise."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from pipelines.batch import open_plan
from pipelines.compose import compose_settings, conf_folder
from pipelines.config import BatchConfig
from pipelines.engines import Engine
from pipelines.parse import parse_config
from pipelines.poison import Suspicions
from pipelines.rows import BATCH_FIELDS, Batch
from pipelines.run import begin_attempt, open_run
from pipelines.sources import list_sources
from pipelines.statistics import Age, Origin, Timing
from pipelines.steps import Steps, Work
from tests.integration.conftest import Fournee
from tests.unit.story import results

GSM8K = Path(os.environ.get("FOURNEE_GSM8K", Path(__file__).parents[2] / "../shared/data/gsm8k_test.jsonl"))
OF_ROWS = {"classify", "extract", "gsm8k", "summarise", "synthetic", "translate"}
OTHERS = {"nightly", "overhead", "pirate_demo"}  # other tests run them
NUM_ROWS = 3


def command_of(experiment: str) -> list[str]:
    if experiment != "gsm8k":
        return [f"experiment={experiment}", f"input.limit={NUM_ROWS}"]
    if not GSM8K.exists():
        pytest.skip(f"{GSM8K} is not there; FOURNEE_GSM8K may name another place of GSM8K's test.jsonl")
    return ["experiment=gsm8k", f"input.path={GSM8K}", f"input.limit={NUM_ROWS}", "sampling.max_tokens=64"]


def answered(config: BatchConfig, engine: Engine) -> list[dict[str, Any]]:
    """Take all rows through every step of a worker, with an engine that is loaded already."""
    sources = list_sources(config.input)
    run = open_run(config, sources)
    plan = open_plan(config, sources, run.folder)
    begin_attempt(run)
    origin = Origin(run.fingerprint, "w", "node", "cpu", 1, run.attempt, config.pricing)
    steps = Steps(config, run.folder, plan.carried, origin, engine)
    batches = [Batch(**line) for line in plan.batches.select(BATCH_FIELDS).to_pylist()]
    for batch, block in zip(batches, steps.blocks(batches), strict=True):
        work = Work(batch, block, None, Suspicions())
        (cell,) = work.cells
        entries = steps.prepare(work, cell)
        ticket = engine.submit([entry.prepared for entry in entries if entry.error is None])
        ticket.outcomes(300)
        steps.commit(work, steps.finish(entries, ticket), Timing(0.0, 1.0), Age(1.0, 1.0))
    return results(run)


def check_classify(row: dict[str, Any]) -> None:
    assert json.loads(row["parsed"])["topic"] in ("delivery", "billing", "product", "other")
    assert row["correct"] in (True, False)


def check_extract(row: dict[str, Any]) -> None:
    assert set(json.loads(row["parsed"])) == {"name", "number", "amount"}


def check_synthetic(row: dict[str, Any]) -> None:
    assert len({row["text"], *(one["text"] for one in row["completions"])}) == 3


def check_gsm8k(row: dict[str, Any]) -> None:
    assert row["correct"] in (True, False)
    assert (row["parsed"] is None) == (row["error_kind"] == "postprocess_error")


CHECKS = {"classify": check_classify, "extract": check_extract, "synthetic": check_synthetic, "gsm8k": check_gsm8k}


def test_every_experiment_is_run_by_a_test() -> None:
    assert {path.stem for path in (conf_folder() / "experiment").glob("*.yaml")} == OF_ROWS | OTHERS


@pytest.mark.parametrize("experiment", sorted(OF_ROWS))
def test_an_experiment_gives_what_it_promises(experiment: str, tmp_path: Path, vllm_engine: Engine) -> None:
    overrides = [*command_of(experiment), "model.max_model_len=256", f"output.path={tmp_path / 'run'}"]
    rows = answered(parse_config(compose_settings("batch", overrides)), vllm_engine)
    assert len(rows) == NUM_ROWS
    for row in rows:
        assert row["text"] and row["num_output_tokens"] > 0
        if experiment != "gsm8k":  # an answer without a number fails its row
            assert row["status"] == "ok", row["error_message"]
        CHECKS.get(experiment, lambda row: None)(row)


@pytest.mark.slow  # three minutes: each loads the model
@pytest.mark.parametrize("experiment", sorted(OF_ROWS))
def test_the_command_of_an_experiment_runs(experiment: str, fournee: Fournee) -> None:
    done = fournee.run(*command_of(experiment))
    assert done.code in (0, 3), done.err  # a model this small may find no number in half of its answers
    assert fournee.table().num_rows == NUM_ROWS
    assert ("correct " in done.out) == (experiment in ("classify", "gsm8k")), done.out
