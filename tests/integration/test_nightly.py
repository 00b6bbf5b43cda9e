"""A job that a scheduler starts each night, and again when it failed: what it leaves behind, and whom it tells."""

import json
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.conftest import Fournee
from tests.webhook import SECRET, Webhook

Jsonl = Callable[..., Path]
WaitUntil = Callable[[Callable[[], bool], "subprocess.Popen[str]"], None]
SLOW = "engine.seconds_per_token=0.3"


@pytest.fixture
def hook(monkeypatch: pytest.MonkeyPatch) -> Iterator[Webhook]:
    """Told of every job of the test; refuses at first, as a webhook may."""
    with Webhook([500, 200]) as hook:
        monkeypatch.setenv("FOURNEE_WEBHOOK_URL", hook.url)
        yield hook


def nightly(day: str, path: Path, *more: str) -> list[str]:
    return [
        "experiment=nightly", f"run_date={day}", "engine=echo", "engine.rows_per_batch=10", "engine.max_num_seqs=10",
        "input=jsonl", f"input.path={path}", "input.id_column=id", *more,
    ]  # fmt: skip


def rows(count: int) -> list[dict[str, Any]]:
    return [{"id": f"r{i:03d}", "prompt": f"row {i} says {'word ' * (i % 5 + 1)}"} for i in range(count)]


def status(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "status.json").read_text())
    return found


def contents(folder: Path) -> dict[str, tuple[int, bytes]]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): (path.stat().st_mtime_ns, path.read_bytes()) for path in files}


def test_each_day_has_its_folder_and_a_repeated_night_changes_nothing(fournee: Fournee, jsonl: Jsonl, hook: Webhook) -> None:
    path = jsonl([*rows(30), {"id": "null", "prompt": None}])
    dated = "output.path=" + str(fournee.folder.parent / "${run_date}")
    lenient, strict = (nightly(day, path, dated) for day in ("2026-11-29", "2026-11-30"))
    lenient += ["errors.max_failed_fraction=0.5"]
    done = [fournee.run(*lenient), fournee.run(*strict)]
    assert [one.code for one in done] == [0, 3], [one.err for one in done]
    days = [fournee.folder.parent / day for day in ("2026-11-29", "2026-11-30")]

    records = [json.loads((day / "run.json").read_text()) for day in days]
    assert [record["config"]["run_date"] for record in records] == ["2026-11-29", "2026-11-30"]
    assert records[0]["fingerprint"] == records[1]["fingerprint"]  # the day alone makes no other answers
    assert [status(day)["status"] for day in days] == ["success", "partial"]
    assert status(days[0])["num_ok"] == status(days[1])["num_ok"] == 30

    before = [contents(day) for day in days]
    again = [fournee.run(*lenient), fournee.run(*strict)]
    assert [one.code for one in again] == [0, 3]
    assert [contents(day) for day in days] == before

    told = [(message["status"], message["exit_code"], message["run_date"], message["attempt"]) for message in hook.messages]
    assert told == [("success", 0, "2026-11-29", 1), ("partial", 3, "2026-11-30", 1)] * 2
    assert hook.messages[0]["text"].startswith("fournee nightly 2026-11-29: success (exit 0): 31 rows: 30 ok, 1 failed")
    assert SECRET not in "".join(one.out + one.err for one in done + again)


def test_a_night_that_is_killed_stopped_or_started_twice_says_so_and_the_next_ends_well(
    fournee: Fournee, jsonl: Jsonl, hook: Webhook, wait_until: WaitUntil
) -> None:
    command = nightly("2026-11-30", jsonl(rows(400)), f"output.path={fournee.folder}", "cluster.heartbeat_s=1")
    killed = fournee.start(*command, SLOW)
    wait_until(lambda: len(fournee.parts()) >= 2, killed)
    killed.kill()
    killed.communicate()
    assert (status(fournee.folder)["status"], status(fournee.folder)["ended_at"]) == ("running", None)
    assert hook.messages == []

    stopped = fournee.start(*command, SLOW)
    wait_until(lambda: status(fournee.folder)["attempt"] == 2 and len(fournee.parts()) >= 10, stopped)
    refused = fournee.run(*command)
    assert refused.code == 1
    assert f"another driver works on {fournee.folder}: attempt 2 on node " in refused.err
    assert (status(fournee.folder)["status"], status(fournee.folder)["attempt"]) == ("running", 2)
    stopped.send_signal(signal.SIGTERM)
    out, err = stopped.communicate(timeout=120)
    assert stopped.returncode == 4, err
    told = status(fournee.folder)
    assert (told["status"], told["exit_code"], told["attempt"]) == ("stopped", 4, 2)
    assert "stopped by SIGTERM" in told["message"]
    assert (told["num_rows"], told["num_ok"], told["num_left"]) == (400, told["num_ok"], 400 - told["num_ok"])
    assert told["num_ok"] == 10 * len(fournee.parts())

    done = fournee.run(*command)
    assert done.code == 0, done.err
    told = status(fournee.folder)
    assert (told["status"], told["attempt"], told["num_ok"], told["num_left"]) == ("success", 3, 400, 0)
    assert fournee.table()["id"].to_pylist() == [row["id"] for row in rows(400)]
    told_to_hook = [(message["status"], message["attempt"]) for message in hook.messages]
    assert told_to_hook == [("failed", None), ("stopped", 2), ("success", 3)]
    assert {key: value for key, value in hook.messages[-1].items() if key != "text"} == told
    assert SECRET not in out + err + refused.err + done.out + done.err


def test_a_night_that_fails_says_why_even_where_its_webhook_is_down(
    fournee: Fournee, jsonl: Jsonl, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FOURNEE_WEBHOOK_URL", f"http://127.0.0.1:1/{SECRET}")
    command = nightly("2026-11-30", jsonl(rows(10)), f"output.path={fournee.folder}")
    assert fournee.run(*command).code == 0
    assert status(fournee.folder)["status"] == "success"

    foreign = fournee.folder / "results" / "part-00000099.parquet"
    foreign.write_bytes(b"")
    (fournee.folder / "_SUCCESS").unlink()
    failed = fournee.run(*command)
    assert failed.code == 1, failed.err
    told = status(fournee.folder)
    assert (told["status"], told["exit_code"], told["attempt"], told["num_left"]) == ("failed", 1, 2, 0)
    assert "1 parts are in no plan" in told["message"] and "\n" not in told["message"]
    assert "the webhook was not reached: ConnectionError" in failed.err
    assert SECRET not in failed.out + failed.err

    foreign.unlink()
    assert fournee.run(*command).code == 0
    assert status(fournee.folder)["status"] == "success"
    assert not [path for path in fournee.folder.rglob("*") if path.is_file() and SECRET.encode() in path.read_bytes()]
