"""The console command: what it says about itself, and that a dry run and a bad configuration start and write nothing."""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import ray

from jobs import batch, cli
from pipelines.compose import compose_settings, conf_folder
from pipelines.errors import ExitCode
from tests.webhook import SECRET, Webhook

ROOT = Path(__file__).parents[2]


def names_in(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


@pytest.mark.parametrize("arguments", [["--help"], ["-h"]])
def test_help_names_every_job(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(arguments) == 0
    out = capsys.readouterr().out
    assert out.startswith("usage: fournee <job>")
    assert re.search(r"^  batch +answer every row", out, re.MULTILINE)


def test_version_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 1


def test_an_unknown_job_is_refused_with_the_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bacth"]) == ExitCode.BAD_CONFIG
    out, err = capsys.readouterr()
    assert out == ""
    assert "'bacth' is not a job" in err
    assert "usage: fournee <job>" in err


def test_every_job_that_the_usage_names_can_be_asked_for_help(capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(["--help"])
    jobs = re.findall(r"^  (\w+) ", capsys.readouterr().out, re.MULTILINE)
    assert "batch" in jobs
    for job in jobs:
        with pytest.raises(SystemExit) as caught:
            cli.main([job, "--help"])
        assert caught.value.code == 0
        assert f"usage: fournee {job}" in capsys.readouterr().out


def test_the_help_of_batch_lists_every_group_with_its_choices_and_every_key(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        batch.main(["--help"])
    out = capsys.readouterr().out
    for group in (path for path in conf_folder().iterdir() if any(path.glob("*.yaml"))):
        choices = ", ".join(sorted(path.stem for path in group.glob("*.yaml")))
        assert re.search(rf"^  {group.name} +{re.escape(choices)}$", out, re.MULTILINE)
    for name, value in compose_settings("batch", []).items():
        if name == "experiment":
            continue  # a group, whose choice is all that becomes of it
        for key in [f"{name}.{inner}" for inner in value] if isinstance(value, dict) else [name]:
            assert re.search(rf"^  {re.escape(key)}: ", out, re.MULTILINE), f"{key} is missing"
    assert "errors.max_failed_fraction: 0.01     # the largest share of failed rows; above it" in out
    assert re.search(r"^  input=csv +delimiter, quote, encoding, columns$", out, re.MULTILINE)
    assert "exit codes: 0 done, 1 the job failed, 2 bad configuration" in out


def test_a_dry_run_shows_the_settings_and_the_plan_and_writes_nothing(
    jsonl: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    jsonl([{"prompt": "Hi there"}, {"prompt": "Bye"}, {"prompt": None}])
    monkeypatch.chdir(tmp_path)
    before = names_in(tmp_path)
    arguments = ["engine=echo", "input=jsonl", "input.path=rows.jsonl", "prompt.system='Be [b]rief[/b].'", "--dry-run"]
    assert batch.main(arguments) == ExitCode.OK
    out, err = capsys.readouterr()
    assert err == ""
    for fragment in ("dry_run: true", "kind: echo", "path: rows.jsonl", "system: Be [b]rief[/b].", "would write to runs/rows-"):
        assert fragment in out
    assert re.search(r"rows +\W+3\b", out)
    assert names_in(tmp_path) == before
    assert not ray.is_initialized()


def test_a_dry_run_can_be_asked_for_as_a_setting(
    jsonl: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    jsonl([{"prompt": "Hi"}])
    monkeypatch.chdir(tmp_path)
    assert cli.main(["batch", "engine=echo", "input=jsonl", "input.path=rows.jsonl", "dry_run=true"]) == ExitCode.OK
    assert "would write to runs/rows-" in capsys.readouterr().out
    assert names_in(tmp_path) == ["rows.jsonl"]


@pytest.mark.parametrize(("arguments", "message"), [
    (["input.limti=5"], "input.limti is not a setting; did you mean limit?"),
    (["--dry-run", "input=jsonl", "input.path=no_such.jsonl", "engine=echo"], "input.path=no_such.jsonl does not exist"),
    (["--config-dir", "no_such_folder"], "--config-dir=no_such_folder is not a folder"),
    (["--dryrun"], '"--dryrun" is not an override'),
    (["experiment=nightly"], 'run_date="YYYY-MM-DD" must be a date as YYYY-MM-DD, such as run_date=2026-11-30'),
    (["run_date=today"], 'run_date="today" must be a date as YYYY-MM-DD'),
    (["run_date=20261130"], "run_date=20261130 must be a date as YYYY-MM-DD"),
    (["run_date=2026-02-30"], 'run_date="2026-02-30" must be a date as YYYY-MM-DD'),
    (["run_date="], 'run_date="" must be a date as YYYY-MM-DD'),
    (["prompt.system=[b]Hello[/b], world"], """'prompt.system="[b]Hello[/b], world"'"""),
])  # fmt: skip
def test_a_bad_configuration_ends_with_exit_code_2_and_its_reason(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["batch", *arguments]) == ExitCode.BAD_CONFIG
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("fournee: ")
    assert message in err
    assert names_in(tmp_path) == []
    assert not ray.is_initialized()


def test_every_wrong_setting_stands_on_a_line_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    assert batch.main(["input.limti=5", "sampling.top_p=2", "cluster.workers=0"]) == ExitCode.BAD_CONFIG
    err = capsys.readouterr().err
    assert len(err.splitlines()) == 3


@pytest.mark.parametrize("arguments", [
    ["--config-dir", "conf", "experiment=nightly"],
    ["input=jsonl", 'input.path="data/dt=${run_date}/rows.jsonl"', "output.path=runs/${run_date}"],
])  # fmt: skip
def test_a_date_gives_each_day_its_own_input_and_output(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data" / "dt=2026-11-30").mkdir(parents=True)
    (tmp_path / "data" / "dt=2026-11-30" / "rows.jsonl").write_text('{"id": "a", "prompt": "Hi"}', encoding="utf-8")
    (tmp_path / "conf" / "experiment").mkdir(parents=True)
    (tmp_path / "conf" / "experiment" / "nightly.yaml").write_text(
        "# @package _global_\n"
        "run_date: YYYY-MM-DD\n"
        "input: {path: 'data/dt=${run_date}/rows.jsonl'}\n"
        "output: {path: 'runs/${run_date}'}\n",
        encoding="utf-8",
    )
    assert batch.main(["engine=echo", "run_date=2026-11-30", "--dry-run", *arguments]) == ExitCode.OK
    out = capsys.readouterr().out
    assert "path: data/dt=2026-11-30/rows.jsonl" in out
    assert "would write to runs/2026-11-30" in out


def test_a_webhook_is_told_of_a_bad_configuration_but_not_of_a_dry_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with Webhook() as hook:
        monkeypatch.setenv("FOURNEE_WEBHOOK_URL", hook.url)
        missing = ["engine=echo", "experiment=nightly", "run_date=2026-11-30", "input=jsonl", "input.path=no_such.jsonl"]
        assert batch.main(missing) == ExitCode.BAD_CONFIG
        assert batch.main(["experiment=nightly"]) == ExitCode.BAD_CONFIG
        for way in ("--dry-run", "dry_run=true"):
            assert batch.main(["engine=echo", way]) == ExitCode.OK
            assert batch.main([*missing, way]) == ExitCode.BAD_CONFIG
    assert names_in(tmp_path) == []
    first, second = hook.messages
    assert (first["status"], first["exit_code"], first["run_folder"]) == ("failed", 2, None)
    assert (first["experiment"], first["run_date"]) == ("nightly", "2026-11-30")
    assert "input.path=no_such.jsonl does not exist" in first["text"]
    assert (second["experiment"], second["run_date"]) == ("nightly", None)
    assert SECRET not in "".join(capsys.readouterr())


@pytest.mark.parametrize("answers", [[404], [302]])
def test_a_webhook_that_refuses_does_not_change_the_exit_code_and_is_not_shown(
    answers: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    with Webhook(answers) as hook:
        monkeypatch.setenv("FOURNEE_WEBHOOK_URL", hook.url)
        assert batch.main(["engine=echo", "input.path=no_such.jsonl", "verbose=true"]) == ExitCode.BAD_CONFIG
    assert "the webhook refused" in caplog.text
    assert SECRET not in caplog.text


def test_ctrl_c_while_modules_load_is_a_stop(tmp_path: Path) -> None:
    """A package that takes the place of Ray stands for the moment."""
    (tmp_path / "ray.py").write_text("raise KeyboardInterrupt")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-m", "jobs.cli", "batch"], cwd=ROOT, env=environment, timeout=60, check=False)
    assert done.returncode == ExitCode.STOPPED
