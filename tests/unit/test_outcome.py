"""How a job goes and ends: what stands in the run's status file, and what a webhook is told."""

import json
import signal
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from pipelines.batch import stop_on_signal
from pipelines.config import BatchConfig
from pipelines.errors import ExitCode, Stopped
from pipelines.outcome import Outcome, Status, describe, post
from pipelines.run import Run
from pipelines.summary import finish
from tests.unit.story import answer, echo
from tests.webhook import SECRET, Webhook

Config = Callable[..., BatchConfig]
Jsonl = Callable[..., Path]


@pytest.fixture
def config(batch_config: Config, jsonl: Jsonl, tmp_path: Path) -> BatchConfig:
    """Forty rows in batches of ten, of which the third has two bad rows."""
    rows = [{"id": f"r{i}", "prompt": None if i in (22, 23) else f"row {i}"} for i in range(40)]
    return batch_config(*echo(jsonl(rows), str(tmp_path / "run"), "run_date=2026-11-30", "pricing.overhead_per_run=5"))


def status_of(run: Run) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(run.folder.read("status.json"))
    return found


def begun(config: BatchConfig, run: Run, experiment: str | None = None) -> Outcome:
    outcome = Outcome(experiment)
    outcome.begin(config, run)
    return outcome


def a_status(**values: Any) -> Status:
    now = datetime.now(UTC)
    return Status(**{"status": "success", "exit_code": 0, "message": "all well", "started_at": now, "ended_at": now, **values})


def test_a_job_at_work_says_so_and_an_earlier_success_is_gone(config: BatchConfig) -> None:
    run, plan, _ = answer(config)
    summary = finish(run, plan, config)
    begun(config, run).end(ExitCode.OK, describe(summary), config, (run, summary))
    assert status_of(run)["status"] == "success"

    begun(config, run, "nightly")
    now = status_of(run)
    assert (now["status"], now["exit_code"], now["ended_at"]) == ("running", None, None)
    assert (now["run_date"], now["experiment"], now["attempt"]) == ("2026-11-30", "nightly", run.attempt)


def test_a_finished_run_tells_its_totals(config: BatchConfig) -> None:
    run, plan, _ = answer(config)
    outcome = begun(config, run)
    summary = finish(run, plan, config)
    outcome.end(summary.exit_code, describe(summary), config, (run, summary))
    told = status_of(run)
    assert (told["status"], told["exit_code"]) == ("partial", 3)
    assert told["message"] == "40 rows: 38 ok, 2 failed (missing_value 2); more than allowed"
    assert [told[f"num_{name}"] for name in ("rows", "ok", "failed", "left")] == [40, 38, 2, 0]
    assert (told["cost"], told["currency"]) == (summary.costs.total, config.pricing.currency)
    assert (told["run_folder"], told["fingerprint"]) == (run.folder.url, run.fingerprint)
    assert told["started_at"] < told["ended_at"]


@pytest.mark.parametrize(("code", "word"), [
    (ExitCode.FAILED, "failed"),
    (ExitCode.BAD_CONFIG, "failed"),
    (ExitCode.ROWS_FAILED, "partial"),
    (ExitCode.STOPPED, "stopped"),
])  # fmt: skip
def test_a_job_that_ends_early_tells_why_and_what_is_left(config: BatchConfig, code: ExitCode, word: str) -> None:
    run, *_ = answer(config, most_shards=3)
    told = begun(config, run).end(code, "first line\n  second line", config, None)
    assert (told.status, told.exit_code, told.message) == (word, code, "first line; second line")
    assert (told.num_rows, told.num_ok, told.num_failed, told.num_left) == (40, 28, 2, 10)
    assert told.cost is not None and told.cost > 5  # its workers, and what every run costs
    assert Status.model_validate_json(run.folder.read("status.json")) == told


def test_a_job_that_ends_before_its_plan_still_tells_that_it_ended(config: BatchConfig) -> None:
    run, *_ = answer(config, most_shards=0)
    run.folder.delete("plan/plan.parquet")
    begun(config, run).end(ExitCode.BAD_CONFIG, "no such column", config, None)
    assert (status_of(run)["status"], status_of(run)["num_rows"]) == ("failed", None)


def test_a_finished_run_that_is_found_again_keeps_its_file_unless_it_is_judged_anew(config: BatchConfig) -> None:
    run, plan, _ = answer(config)
    outcome = begun(config, run)
    summary = finish(run, plan, config)
    outcome.end(summary.exit_code, describe(summary), config, (run, summary))
    before = status_of(run)
    again = Outcome(None).end(summary.exit_code, describe(summary), config, (run, summary))
    assert again.num_ok == 38
    assert status_of(run) == before

    lenient = summary.model_copy(update={"exit_code": ExitCode.OK})
    Outcome(None).end(ExitCode.OK, describe(lenient), config, (run, lenient))
    assert status_of(run)["status"] == "success"


def test_a_finished_run_whose_driver_was_killed_before_it_said_so_is_told_by_the_next(config: BatchConfig) -> None:
    run, plan, _ = answer(config)
    begun(config, run)
    summary = finish(run, plan, config)
    Outcome(None).end(summary.exit_code, describe(summary), config, (run, summary))
    assert status_of(run)["status"] == "partial"


def test_the_status_of_a_driver_that_took_the_run_over_is_left_alone(config: BatchConfig) -> None:
    run, *_ = answer(config, most_shards=1)
    mine = begun(config, run)
    begun(config, run)
    theirs = status_of(run)
    mine.end(ExitCode.FAILED, "another driver has taken the run over", config, None)
    assert status_of(run) == theirs


def test_a_job_without_a_run_writes_nothing(config: BatchConfig, tmp_path: Path) -> None:
    told = Outcome("nightly").end(ExitCode.BAD_CONFIG, "input.path=x does not exist", config, None)
    assert (told.status, told.run_folder, told.experiment, str(told.run_date)) == ("failed", None, "nightly", "2026-11-30")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rows.jsonl"]


def test_a_status_that_cannot_be_written_is_a_warning(config: BatchConfig, caplog: pytest.LogCaptureFixture) -> None:
    run, *_ = answer(config, most_shards=1)
    outcome = begun(config, run)
    run.folder.delete("status.json")
    Path(run.folder.path("status.json")).mkdir()
    assert outcome.end(ExitCode.FAILED, "the disk is full", config, None).num_left == 30
    assert "status.json could not be written" in caplog.text


def test_a_webhook_is_sent_the_status_and_a_line_of_text() -> None:
    facts = a_status(experiment="nightly", run_date="2026-11-30", run_folder="s3://b/x", cost=1.5, currency="EUR")
    with Webhook() as hook:
        post(hook.url, facts)
    (message,) = hook.messages
    assert message.pop("text") == "fournee nightly 2026-11-30: success (exit 0): all well; 1.5000 EUR; s3://b/x"
    assert Status.model_validate_json(json.dumps(message)) == facts
    assert message["run_date"] == "2026-11-30"


def test_the_text_says_how_many_rows_are_left() -> None:
    left = a_status(status="stopped", exit_code=4, message="stopped by SIGTERM", num_rows=4000, num_left=1200)
    assert left.text == "fournee batch: stopped (exit 4): stopped by SIGTERM; 1,200 of 4,000 rows left"


def test_a_webhook_that_refuses_for_a_moment_is_asked_again(caplog: pytest.LogCaptureFixture) -> None:
    with Webhook([500, 429, 200]) as hook:
        post(hook.url, a_status())
    assert len(hook.messages) == 1
    assert caplog.text == ""


@pytest.mark.parametrize(("answers", "num_requests", "said"), [
    ([503], 3, "was not reached: RetryError"),
    ([404], 1, "refused the message with HTTP status 404"),
    ([302], 1, "refused the message with HTTP status 302"),
])  # fmt: skip
def test_a_webhook_that_refuses_is_a_warning_without_its_url(
    answers: list[int], num_requests: int, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    with Webhook(answers) as hook:
        post(hook.url, a_status())
    assert (hook.num_requests, hook.messages) == (num_requests, [])
    assert said in caplog.text
    assert SECRET not in caplog.text


def test_a_webhook_that_never_answers_holds_a_job_up_for_seconds_only(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipelines.outcome._WEBHOOK_TIMEOUT_S", 0.2)
    started = time.perf_counter()
    with Webhook(silent=True) as hook:
        post(hook.url, a_status())
        assert time.perf_counter() - started < 10
    assert "the webhook was not reached: " in caplog.text
    assert SECRET not in caplog.text


@pytest.mark.parametrize("url", [
    f"http://127.0.0.1:1/{SECRET}",
    f"http://127.0.0.1:99999/{SECRET}",
    f"http://[{SECRET}",
    f"{SECRET}/no/scheme",
    f"slack://{SECRET}",
    f"http://{'a' * 70}.{SECRET}.invalid/",
    f"http://user:{SECRET}@127.0.0.1:1/\udc80",
])  # fmt: skip
def test_a_webhook_that_is_down_or_no_url_is_a_warning_that_does_not_show_it(
    url: str, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    post(url, a_status())
    assert "the webhook was not reached: " in caplog.text
    assert SECRET not in caplog.text + "".join(capfd.readouterr())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_a_job_and_is_ignored_once_it_has_ended(number: signal.Signals) -> None:
    with pytest.raises(Stopped, match=number.name), stop_on_signal():
        signal.raise_signal(number)
    signal.raise_signal(number)  # a job that was stopped still has to say so
