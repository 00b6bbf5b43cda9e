"""No secret of the environment gets into a run's folder, its status, its webhook, its report, or what is said on the way."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from jobs import batch, cli
from pipelines.config import BatchConfig
from pipelines.errors import ExitCode
from pipelines.outcome import Outcome, describe, post
from pipelines.placement import place
from pipelines.summary import finish
from tests.unit.story import answer, echo
from tests.webhook import SECRET, Webhook

Config = Callable[..., BatchConfig]
Jsonl = Callable[..., Path]
NAMES = (
    "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AZURE_STORAGE_CONNECTION_STRING", "GOOGLE_API_KEY",
    "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "RAY_AUTH_TOKEN", "FOURNEE_API_KEY", "FOURNEE_API_KEYS", "DATABASE_URL",
)  # fmt: skip
VALUES = {name: f"hush-{name.lower()}-0123456789" for name in NAMES}


@pytest.fixture(autouse=True)
def full_of_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in VALUES.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def hook(monkeypatch: pytest.MonkeyPatch) -> Iterator[Webhook]:
    with Webhook() as hook:
        monkeypatch.setenv("FOURNEE_WEBHOOK_URL", hook.url)
        yield hook


def leaked(text: str) -> list[str]:
    return [secret for secret in (SECRET, *VALUES.values()) if secret in text]


def contents(folder: Path) -> Iterator[tuple[str, str]]:
    """What every file holds: its bytes, and of Parquet its rows, which may be compressed."""
    for path in (path for path in folder.rglob("*") if path.is_file()):
        yield path.name, path.read_bytes().decode("latin-1")
        if path.suffix == ".parquet":
            yield path.name, str(pq.read_table(path, partitioning=None).to_pylist())


def test_a_run_and_what_it_tells_hold_none(
    batch_config: Config, jsonl: Jsonl, tmp_path: Path, hook: Webhook,
    capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    caplog.set_level("DEBUG")
    rows = [{"id": f"r{i}", "prompt": None if i == 22 else f"say {i}"} for i in range(40)]
    config = batch_config(*echo(jsonl(rows), str(tmp_path / "run"), "verbose=true", "errors.max_failed_fraction=0.5"))
    outcome = Outcome("nightly")
    run, plan, _ = answer(config)
    outcome.begin(config, run)
    summary = finish(run, plan, config)
    post(hook.url, outcome.end(summary.exit_code, describe(summary), config, (run, summary)))
    assert cli.main(["inspect", run.folder.url]) == ExitCode.OK

    held = list(contents(tmp_path / "run"))
    names = {name for name, _ in held}
    assert {"run.json", "attempt-0001.json", "status.json", "summary.json", "report.html", "_SUCCESS"} <= names
    assert any("say 7" in text for name, text in held if name.startswith("part-")), "rows are looked into"
    assert not [(name, secret) for name, text in held for secret in leaked(text)]
    (message,) = hook.messages
    assert (message["status"], leaked(str(message))) == ("success", [])
    assert not leaked("".join(capfd.readouterr()) + caplog.text)


@pytest.mark.parametrize("wrong", [
    ["cluster.address='127.0.0.1:1'"],  # found out late: the run is open, its plan is made
    ["input=sql", "input.query='select 1'", "input.connection=env:DATABASE_URL"],
    ["engine=vllm", "engine.kwargs.hf_token=${oc.env:HF_TOKEN}"],
])  # fmt: skip
def test_a_job_that_fails_says_why_without_any(
    wrong: list[str], jsonl: Jsonl, tmp_path: Path, hook: Webhook, monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    caplog.set_level("DEBUG")
    monkeypatch.chdir(tmp_path)
    command = echo(jsonl([{"id": "a", "prompt": "Hi"}]), "run", "verbose=true")
    assert batch.main([*command, *wrong]) == ExitCode.BAD_CONFIG
    (message,) = hook.messages
    said = "".join(capfd.readouterr())
    assert "fournee: " in said
    assert not leaked(said + caplog.text + str(message))
    assert not [(name, secret) for name, text in contents(tmp_path) for secret in leaked(text)]


def test_none_is_handed_to_workers(batch_config: Config) -> None:
    """Ray keeps what it hands to them where whoever has its token can read it; each node has its own credentials."""
    for overrides in (["engine=vllm"], ["engine=echo"], ["model=qwen3_8b", "cluster=job"]):
        assert not leaked(str(place(batch_config(*overrides), {"CPU": 2.0}).environment))
