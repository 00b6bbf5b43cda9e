"""Answering the failed rows again: still one row per input row."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from pipelines.batch import find_todo
from pipelines.config import BatchConfig
from pipelines.parts import Parts
from pipelines.run import Run
from pipelines.summary import finish
from tests.unit.story import answer, echo, results

Config = Callable[..., BatchConfig]
Jsonl = Callable[..., Path]
FUNCTION = "def shout(text):\n    if 'bad' in text and {broken}:\n        raise KeyError(text)\n    return text.upper()\n"


@pytest.fixture
def function(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """A user's own function, broken or not, as it stands on disk when a worker starts."""
    monkeypatch.syspath_prepend(str(tmp_path / "own"))
    (tmp_path / "own").mkdir()

    def write(broken: bool) -> None:
        import sys

        (tmp_path / "own" / "mine.py").write_text(FUNCTION.format(broken=broken))
        sys.modules.pop("mine", None)

    return write


def with_function(path: Path, folder: Path, *more: str) -> list[str]:
    return [*echo(path, str(folder)), "postprocess.steps=[{kind: function, function: 'mine:shout'}]", *more]


def by_id(run: Run) -> dict[str, dict[str, Any]]:
    return {row["id"]: row for row in results(run)}


def test_only_the_failed_rows_are_answered_again_and_take_their_own_places(
    batch_config: Config, jsonl: Jsonl, tmp_path: Path, function: Callable[[bool], None]
) -> None:
    path = jsonl([{"id": f"r{i}", "prompt": f"bad {i}" if i in (3, 7, 25) else f"good {i}"} for i in range(40)])
    command = with_function(path, tmp_path / "run", "errors.max_failed_fraction=1")
    function(broken=True)
    run, plan, _ = answer(batch_config(*command))
    first = finish(run, plan, batch_config(*command))
    assert (first.num_failed, first.error_kinds) == (3, {"postprocess_error": 3})
    assert by_id(run)["r3"]["text"] == "bad 3"  # the model's answer is kept
    before = {name: run.folder.read(f"results/{name}") for name in run.folder.names("results")}

    function(broken=False)
    config = batch_config(*command, "retry_failed=true")
    run.folder.delete("_SUCCESS")
    todo = find_todo(config, replace(run, attempt=2), plan)
    assert (todo.num_rows, sorted(todo.batches["batch_id"].to_pylist())) == (3, [0, 2])
    run, plan, lines = answer(config)
    second = finish(run, plan, config)

    assert sorted(line["batch_id"] for line in lines) == [0, 2]
    assert [row["source_row"] for row in results(run)] == list(range(40))
    assert (second.num_rows, second.num_ok, second.num_failed) == (40, 40, 0)
    assert json.loads(by_id(run)["r25"]["parsed"]) == "BAD 25"
    assert {row["id"]: row["attempts"] for row in results(run) if row["attempts"] != 1} == {"r3": 2, "r7": 2, "r25": 2}
    kept = {name: run.folder.read(f"results/{name}") for name in ("part-00000001.parquet", "part-00000003.parquet")}
    assert kept == {name: before[name] for name in kept}
    assert second.num_output_tokens == first.num_output_tokens + 6
    shares = {
        line["batch_id"]: [share["worker"] for share in line["shares"]]
        for line in pq.read_table(run.folder.path("stats/batches.parquet")).to_pylist()
    }
    assert [len(set(shares[batch_id])) for batch_id in range(4)] == [2, 1, 2, 1]  # both workers are paid for
    assert second.prefill_s + second.decode_s > first.prefill_s + first.decode_s


def test_rows_that_fail_again_stay_failed_and_are_counted_once(batch_config: Config, jsonl: Jsonl, tmp_path: Path) -> None:
    path = jsonl([{"id": f"r{i}", "prompt": None if i == 4 else "fine"} for i in range(20)])
    command = [*echo(path, str(tmp_path / "run")), "errors.max_failed_fraction=1"]
    run, plan, _ = answer(batch_config(*command))
    for attempts in (2, 3):
        run, plan, _ = answer(batch_config(*command, "retry_failed=true"))
        summary = finish(run, plan, batch_config(*command))
        assert (summary.num_rows, summary.num_failed, summary.error_examples) == (20, 1, {"missing_value": "r4"})
        assert by_id(run)["r4"]["attempts"] == attempts
        run.folder.delete("_SUCCESS")


def test_a_stopped_run_that_is_retried_answers_what_failed_and_what_is_missing(
    batch_config: Config, jsonl: Jsonl, tmp_path: Path
) -> None:
    path = jsonl([{"id": f"r{i}", "prompt": None if i == 4 else "fine"} for i in range(95)])
    command = [*echo(path, str(tmp_path / "run")), "errors.max_failed_fraction=1"]
    run, plan, _ = answer(batch_config(*command), most_shards=2)
    assert Parts(run.folder).failures(range(2), before_attempt=2) == {0: 1}
    run, plan, _ = answer(batch_config(*command, "retry_failed=true"))
    assert finish(run, plan, batch_config(*command)).num_rows == 95
    assert sorted(by_id(run)) == sorted(f"r{i}" for i in range(95))
