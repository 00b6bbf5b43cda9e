"""Many runs at once: what the lines say, whatever lies in the folder, and when a night is worse than those before it."""

import json
import os
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from datetime import date, timedelta
from pathlib import Path
from statistics import median
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import settings as settings_of_hypothesis
from hypothesis import strategies as st

from jobs import cli
from pipelines.compose import compose_settings
from pipelines.config import BatchConfig, HistoryConfig
from pipelines.errors import ConfigError, ExitCode
from pipelines.history import History
from pipelines.history.check import Judgement, judge
from pipelines.parse import parse_history
from pipelines.schema import BATCH, BATCH_TABLE
from pipelines.summary import finish
from tests.unit.nights import night
from tests.unit.story import answer, echo

DAY = date(2026, 11, 30)
BY = ("date", "model", "experiment")


def days(folder: Path, *changes: dict[str, Any]) -> Path:
    """One usual night for each, changed; the last one is `DAY`."""
    for back, change in enumerate(reversed(changes)):
        day = DAY - timedelta(days=back)
        night(folder / str(day), day, **change)
    return folder


def lines(folder: Path, *by: str, **days: date) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = History(str(folder)).lines(by or BY, **days).to_pylist()
    return found


def test_each_night_is_a_line_with_its_change_against_those_before(tmp_path: Path) -> None:
    days(tmp_path, {}, {"cost": 3.0}, {"cost": 5.0}, {"cost": 4.5, "wall_s": 500.0, "num_failed": 20})
    first, *_, last = lines(tmp_path)
    assert (first["date"], first["model"], first["experiment"]) == (DAY - timedelta(days=3), "qwen3-8b", "nightly")
    assert (first["num_runs"], first["num_rows"], first["failed_share"], first["input_bytes"]) == (1, 1000, 0, 2**20)
    assert (first["cost"], first["cost_per_million_output_tokens"], first["cost_per_million_total_tokens"]) == (2.0, 2.0, 1.0)
    assert first["cost_per_million_output_tokens_change"] is None
    assert last["failed_share"] == 0.02
    assert last["cost_per_million_output_tokens_change"] == pytest.approx(0.5)  # 4.5 against 3
    assert last["output_tokens_per_s_change"] == pytest.approx(1.0)


def test_lines_of_several_runs_weigh_them_by_what_they_did(tmp_path: Path) -> None:
    days(tmp_path, {"num_output_tokens": 3_000_000}, {"num_output_tokens": 1_000_000, "cost": 6.0, "wall_s": 3000.0})
    (week,) = lines(tmp_path, "model")
    assert (week["num_runs"], week["num_rows"], week["cost"]) == (2, 2000, 8.0)
    assert week["cost_per_million_output_tokens"] == pytest.approx(2.0)
    assert week["output_tokens_per_s"] == pytest.approx(1000.0)
    assert "cost_per_million_output_tokens_change" not in week


def test_weeks_models_and_currencies_are_kept_apart(tmp_path: Path) -> None:
    days(tmp_path, {}, {"model": "llama"}, {"experiment": None}, {"currency": "EUR"})  # Friday to Monday
    assert [line["week"] for line in lines(tmp_path, "week")] == [date(2026, 11, 23), DAY]
    assert [(line["model"], line["currency"], line["num_runs"]) for line in lines(tmp_path, "model")] == [
        ("llama", "USD", 1), ("qwen3-8b", "EUR", 1), ("qwen3-8b", "USD", 2),
    ]  # fmt: skip
    assert [line["num_runs"] for line in lines(tmp_path, since=DAY - timedelta(days=2), until=DAY - timedelta(days=1))] == [
        1,
        1,
    ]


def test_nights_without_answers_are_null_and_never_zero_or_infinite(tmp_path: Path) -> None:
    nothing = {"num_output_tokens": 0, "num_prompt_tokens": 0, "prefill_s": 0.0, "decode_s": 0.0}
    days(tmp_path, {}, {**nothing, "num_failed": 1000}, {**nothing, "num_rows": 0, "wall_s": 0.0, "cost": 0.0}, {})
    _, failed, empty, last = lines(tmp_path)
    for line in (failed, empty):
        for name in ("cost_per_million_output_tokens", "cost_per_million_total_tokens", "busy_output_tokens_per_s"):
            assert line[name] is None, name
            assert line.get(f"{name}_change") is None
    assert (failed["failed_share"], empty["failed_share"], empty["output_tokens_per_s"]) == (1.0, None, None)
    assert last["cost_per_million_output_tokens_change"] == 0.0


def test_what_is_no_finished_run_is_left_out(tmp_path: Path) -> None:
    days(tmp_path, {}, {}, {})
    (tmp_path / str(DAY) / "_SUCCESS").unlink()
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "run.json").touch()
    (tmp_path / "notes.txt").write_text("no run")
    night(tmp_path / "deep" / "down" / "run", DAY - timedelta(days=3))
    night(tmp_path / str(DAY) / "results" / "inside", DAY - timedelta(days=9))  # a run's folder is not looked through
    (tmp_path / "round").symlink_to(tmp_path)
    night(tmp_path / "[a]*?", DAY - timedelta(days=4))
    (tmp_path / "before" / "stats").mkdir(parents=True)  # finished before there was such a table
    for name in ("run.json", "_SUCCESS"):
        (tmp_path / "before" / name).touch()
    assert [(DAY - line["date"]).days for line in lines(tmp_path)] == [4, 3, 2, 1]


def test_columns_that_older_runs_do_not_have_are_null(tmp_path: Path) -> None:
    night(tmp_path / "old", DAY - timedelta(days=1), without=("input_bytes", "experiment", "finished_at", "num_prompt_tokens"))
    old, *new = lines(tmp_path)
    assert (old["experiment"], old["input_bytes"], old["cost_per_million_total_tokens"], new) == (None, None, None, [])
    night(tmp_path / "new", DAY)
    old, new = lines(tmp_path)
    assert (old["input_bytes"], new["input_bytes"]) == (None, 2**20)
    (both,) = lines(tmp_path, "model")
    assert (both["num_rows"], both["input_bytes"]) == (2000, None)  # half a sum would be a wrong one
    assert judge(History(str(tmp_path)), settings(), str(tmp_path / "old")).num_comparable == 0


def test_nodes_are_summed_up_from_the_batches(
    batch_config: Callable[..., BatchConfig], jsonl: Callable[..., Path], tmp_path: Path
) -> None:
    path = jsonl([{"id": f"r{i}", "prompt": "one two three"} for i in range(25)])
    for name in ("a", "b"):
        config = batch_config(*echo(path, str(tmp_path / "runs" / name), "engine.seconds_per_token=0.001"))
        run, plan, _ = answer(config)
        finish(run, plan, config)
    (node,) = lines(tmp_path / "runs", "node")
    batches = pa.concat_tables([pq.read_table(tmp_path / "runs" / name / BATCH_TABLE) for name in ("a", "b")])
    assert batches.schema.equals(BATCH)
    busy_s = sum(batches["prefill_s"].to_pylist()) + sum(batches["decode_s"].to_pylist())
    assert (node["node"], node["num_runs"], node["num_rows"]) == (batches["node"][0].as_py(), 2, 50)
    assert node["cost"] == pytest.approx(sum(batches["cost"].to_pylist()))
    assert node["busy_output_tokens_per_s"] == pytest.approx(node["num_output_tokens"] / busy_s)
    assert node["input_bytes"] is node["output_tokens_per_s"] is None
    (whole,) = lines(tmp_path / "runs")
    assert (whole["model"], whole["num_runs"], whole["num_output_tokens"]) == (None, 2, node["num_output_tokens"])


@pytest.fixture
def bucket(tmp_path: Path) -> Iterator[str]:
    """Three nights on a file system that only fsspec knows."""
    name = f"/nights/{uuid.uuid4().hex}"
    days(tmp_path / "nights", {}, {}, {"cost": 3.0})
    fsspec.filesystem("memory").put(f"{tmp_path / 'nights'}/", name, recursive=True)
    yield f"memory:/{name}"
    fsspec.filesystem("memory").rm(name, recursive=True)


def test_runs_are_read_where_they_are(bucket: str) -> None:
    history = History(bucket)
    assert [line["cost"] for line in history.lines(BY).to_pylist()] == [2.0, 2.0, 3.0]
    assert judge(history, settings("min_runs=1"), str(DAY)).is_worse
    with pytest.raises(ConfigError, match="does not exist"):
        History(f"{bucket}-not-there")


def settings(*overrides: str) -> HistoryConfig:
    return parse_history(compose_settings("history", overrides))


def judged(folder: Path, *overrides: str, run: str | None = None) -> Judgement:
    return judge(History(str(folder)), settings(*overrides), run)


def verdicts(found: Judgement) -> dict[str, str]:
    return {one.name: one.verdict for one in found.measures}


NO_ANSWERS = {"num_output_tokens": 0, "num_prompt_tokens": 0}


@pytest.mark.parametrize(
    ("tonight", "overrides", "worse"),
    [
        ({}, [], []),
        ({"cost": 2.2}, [], []),
        ({"cost": 2.4}, [], ["cost_per_million_output_tokens", "cost_per_million_total_tokens"]),
        ({"cost": 2.4}, ["tolerances.cost_per_million_total_tokens=null"], ["cost_per_million_output_tokens"]),
        ({"cost": 2.4}, ["tolerances.cost_per_million_total_tokens=0.5", "tolerances.cost_per_million_output_tokens=0.5"], []),
        ({"cost": 0.5}, [], []),  # cheaper is no harm
        ({"wall_s": 1100.0}, [], []),
        ({"wall_s": 1300.0}, [], ["output_tokens_per_s"]),
        ({"wall_s": 300.0}, [], []),
        ({"num_failed": 9}, [], []),
        ({"num_failed": 11}, [], ["failed_share"]),
        ({"num_correct": 810}, [], []),
        ({"num_correct": 740}, [], ["accuracy"]),
        ({"num_correct": 740}, ["tolerances.accuracy=0.1"], []),
        ({"num_marked": 0}, [], []),
        ({"ttft_s_p95": 5.0}, [], []),  # off, unless asked for
        ({"ttft_s_p95": 5.0}, ["tolerances.ttft_s_p95=1.0"], ["ttft_s_p95"]),
        ({"ttft_s_p95": None}, ["tolerances.ttft_s_p95=1.0"], []),
        ({"num_rows": 100}, [], []),
        ({"num_rows": 100}, ["tolerances.num_rows=0.5"], ["num_rows"]),
        ({"num_rows": 1600}, ["tolerances.num_rows=0.5"], ["num_rows"]),
        ({**NO_ANSWERS, "num_failed": 1000}, [], ["failed_share"]),  # of which nothing else has a value
        ({**NO_ANSWERS, "num_rows": 0, "wall_s": 0.0, "cost": 0.0}, [], []),
        ({**NO_ANSWERS, "num_rows": 0, "wall_s": 0.0, "cost": 0.0}, ["tolerances.num_rows=0.5"], ["num_rows"]),
    ],
)  # fmt: skip
def test_a_night_is_worse_where_a_measure_left_its_limit(
    tmp_path: Path, tonight: dict[str, Any], overrides: list[str], worse: list[str]
) -> None:
    marked = {"num_marked": 1000, "num_correct": 800}
    days(
        tmp_path,
        marked,
        {"cost": 2.1, "wall_s": 1010.0, **marked},
        {"cost": 1.9, "wall_s": 990.0, **marked},
        {**marked, **tonight},
    )
    found = judged(tmp_path, *overrides)
    assert [name for name, verdict in verdicts(found).items() if verdict == "worse"] == worse
    assert (found.day, found.num_comparable, found.is_worse) == (DAY, 3, bool(worse))


@pytest.mark.parametrize(
    "other",
    [{"workload": "x"}, {"experiment": None}, {"accelerator": "L40S"}, {"engine": "echo"}, {"currency": "EUR"}],
    ids=lambda other: next(iter(other)),
)
def test_only_the_same_job_on_the_same_accelerator_is_compared_with(tmp_path: Path, other: dict[str, Any]) -> None:
    days(tmp_path, {"cost": 0.1, **other}, {"cost": 0.1, **other}, {"cost": 0.1, **other}, {}, {}, {}, {})
    assert (judged(tmp_path).num_comparable, judged(tmp_path).is_worse) == (3, False)


def test_too_few_nights_judge_nothing(tmp_path: Path) -> None:
    days(tmp_path, {}, {}, {"cost": 99.0})
    found = judged(tmp_path)
    assert set(verdicts(found).values()) == {"not judged"}
    assert "fewer than min_runs=3" in found.measures[0].reason
    assert judged(tmp_path, "min_runs=2").is_worse


def test_a_measure_counts_only_the_nights_that_have_it(tmp_path: Path) -> None:
    failed = {**NO_ANSWERS, "num_failed": 1000}
    days(tmp_path, {}, failed, {}, failed, failed, {"cost": 99.0})
    found = {one.name: one for one in judged(tmp_path).measures}
    assert (found["cost_per_million_output_tokens"].verdict, found["cost_per_million_output_tokens"].num_runs) == (
        "not judged",
        2,
    )
    assert (found["failed_share"].verdict, found["failed_share"].num_runs) == ("fine", 5)
    assert judged(tmp_path, "min_runs=2").is_worse


def test_the_last_n_nights_before_the_run_that_is_named_count(tmp_path: Path) -> None:
    days(tmp_path, {"cost": 9.0}, {"cost": 9.0}, {}, {}, {}, {"cost": 4.0}, {"cost": 9.0})
    yesterday = str(DAY - timedelta(days=1))
    for name in (yesterday, str(tmp_path / yesterday)):
        found = judged(tmp_path, "last_n=3", run=name)
        assert (found.run, found.num_comparable, found.is_worse) == (str(tmp_path / yesterday), 3, True)
    lenient = [f"tolerances.cost_per_million_{tokens}_tokens=4" for tokens in ("output", "total")]
    assert not judged(tmp_path, "last_n=5", *lenient, run=yesterday).is_worse
    with pytest.raises(ConfigError, match=r"--run 2020-01-01 is no finished run in .*; the newest is .*2026-11-30"):
        judged(tmp_path, run="2020-01-01")


def test_a_free_night_after_free_nights_is_fine_and_a_paid_one_is_not(tmp_path: Path) -> None:
    days(tmp_path, *[{"cost": 0.0}] * 4)
    assert verdicts(judged(tmp_path))["cost_per_million_output_tokens"] == "fine"
    night(tmp_path / "paid", DAY + timedelta(days=1))
    (cost, *_) = judged(tmp_path).measures
    assert (cost.verdict, cost.change) == ("worse", None)


@settings_of_hypothesis(max_examples=15)
@given(costs=st.lists(st.floats(0.01, 100), min_size=4, max_size=9), tolerance=st.floats(0, 2))
def test_the_limit_is_the_median_and_its_tolerance(
    tmp_path_factory: pytest.TempPathFactory, costs: list[float], tolerance: float
) -> None:
    folder = days(tmp_path_factory.mktemp("nights"), *({"cost": cost} for cost in costs))
    (measure, *_) = judged(folder, f"tolerances.cost_per_million_output_tokens={tolerance:f}").measures
    *before, tonight = costs
    limit = median(before) * (1 + float(f"{tolerance:f}"))
    assert measure.at_most == pytest.approx(limit)
    if tonight != pytest.approx(limit):
        assert (measure.verdict == "worse") == (tonight > limit)


def test_the_command_shows_the_newest_lines_and_says_that_there_are_more(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    days(tmp_path, *[{}] * 40, {"cost": 3.0})
    assert cli.main(["history", str(tmp_path)]) == ExitCode.OK
    out = capsys.readouterr().out
    assert "2026-11-30" in out and "3.000 (+50%)" in out and "1,000.0 (+0%)" in out
    assert "2026-11-01" in out and "2026-10-31" not in out
    assert "the last 30 of 41 lines; --last 41 shows all" in out
    assert cli.main(["history", str(tmp_path), "--since", "2027-01-01"]) == ExitCode.OK
    assert "no finished run of these days" in capsys.readouterr().out


def test_the_command_gives_the_same_facts_as_json_and_csv(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    days(tmp_path, {}, {**NO_ANSWERS})
    assert cli.main(["history", str(tmp_path), "--json"]) == ExitCode.OK
    first, last = json.loads(capsys.readouterr().out)
    assert (first["date"], first["cost_per_million_output_tokens"], last["cost_per_million_output_tokens"]) == (
        "2026-11-29", 2.0, None,
    )  # fmt: skip
    assert cli.main(["history", str(tmp_path), "--csv", "--last", "1", "--by", "week,model"]) == ExitCode.OK
    header, line = capsys.readouterr().out.splitlines()
    assert header.startswith('"week","model","currency","num_runs"') and line.startswith(
        '2026-11-30,"qwen3-8b","USD",1,1000,0,'
    )


def test_the_check_says_what_is_worse_and_ends_with_3(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    days(tmp_path, {}, {}, {}, {"wall_s": 2000.0})
    assert cli.main(["history", "check", str(tmp_path)]) == 3
    out = capsys.readouterr().out
    assert "worse than allowed: output_tokens_per_s" in out and ">= 850" in out and "-50.0%" in out
    assert cli.main(["history", "check", str(tmp_path), "--json", "tolerances.output_tokens_per_s=0.6"]) == 0
    assert {one["verdict"] for one in json.loads(capsys.readouterr().out)["measures"]} == {"fine", "not judged"}
    assert cli.main(["history", "check", str(tmp_path), "--run", "2026-11-28"]) == 0
    assert "nothing is judged: 1 comparable runs before it, min_runs=3" in capsys.readouterr().out


@pytest.mark.parametrize(("arguments", "message"), [
    (["no_such_folder"], "no_such_folder does not exist"),
    (["empty"], "empty holds no finished run; name the folder that holds the run folders"),
    (["check", "empty"], "empty holds no finished run"),
    (["check", "runs", "min_run=2"], "min_run is not a setting; did you mean min_runs?"),
    (["check", "runs", "tolerances.failed_share=15"], "tolerances.failed_share=15 must be less than or equal to 1"),
    (["check", "runs", "--frob"], '"--frob" is not an override'),
])  # fmt: skip
def test_a_mistake_ends_with_exit_code_2_and_its_reason(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    days(tmp_path / "runs", {})
    assert cli.main(["history", *arguments]) == ExitCode.BAD_CONFIG
    out, err = capsys.readouterr()
    assert (out, err.startswith("fournee: "), message in " ".join(err.split())) == ("", True, True), err


@pytest.mark.parametrize(("arguments", "message"), [
    ([], "the following arguments are required: folder"),
    (["runs", "--by", "day,model"], "day is none of date, week, model"),
    (["runs", "--since", "yesterday"], "invalid fromisoformat value: 'yesterday'"),
    (["runs", "--last", "0"], "invalid _positive value: '0'"),
    (["runs", "--since", "2026-11-30", "--until", "2026-11-29"], "--since 2026-11-30 is after --until 2026-11-29"),
    (["runs", "--json", "--csv"], "not allowed with argument"),
    (["check"], "the following arguments are required: folder"),
])  # fmt: skip
def test_a_wrong_option_ends_with_exit_code_2(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["history", *arguments])
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


def test_a_damaged_file_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    days(tmp_path, {}, {})
    (tmp_path / str(DAY) / "stats" / "run.parquet").write_bytes(b"no parquet")
    assert cli.main(["history", str(tmp_path)]) == ExitCode.FAILED
    assert f"{DAY}/stats/run.parquet" in capsys.readouterr().err.replace("\n", "")


def test_the_help_of_the_check_lists_every_key(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["history", "check", "--help"])
    out = capsys.readouterr().out
    for key in ("last_n: 14", "min_runs: 3", "tolerances.failed_share: 0.01", "tolerances.num_rows: null"):
        assert key in out
    assert "3 worse than allowed" in out


def test_showing_runs_loads_nothing_that_takes_seconds(tmp_path: Path) -> None:
    days(tmp_path, {})
    heavy = "{'ray', 'vllm', 'hydra', 'pandas', 'transformers'} & set(sys.modules)"
    code = (
        f"import sys; from jobs import cli; cli.main(['history', {str(tmp_path)!r}]); sys.exit(str({heavy}) if {heavy} else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env={**os.environ})
    assert (done.returncode, done.stderr) == (0, "")
