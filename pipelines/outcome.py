"""How a job goes and ends, for whoever watches over it: a status file in the run's folder, and a webhook."""

import logging
import threading
from dataclasses import replace
from datetime import UTC, date, datetime
from time import perf_counter
from typing import Any, Literal

import pyarrow.compute as pc
import requests
from pydantic import BaseModel, ConfigDict, ValidationError
from requests.adapters import HTTPAdapter
from urllib3.util import Retry

from pipelines.config import BatchConfig
from pipelines.errors import ExitCode
from pipelines.heartbeat import heartbeats
from pipelines.meter import cost_so_far
from pipelines.parts import Parts
from pipelines.plan import PLAN_FILE, Plan
from pipelines.run import Run
from pipelines.storage import Folder
from pipelines.totals import Summary

logger = logging.getLogger(__name__)

STATUS_FILE = "status.json"
_PATIENCE_S = 5.0  # with the storage and with a count, at the end: whoever stops a job gives it seconds
_WEBHOOK_TRIES = 3
_WEBHOOK_TIMEOUT_S = 5.0  # to connect, and to answer
_WEBHOOK_MOST_S = 20.0  # for everything, a name server's silence included
_NOT_NOW = (429, 500, 502, 503, 504)  # what a server answers that may take the same message a moment later
_WORDS: dict[ExitCode, Literal["success", "partial", "failed", "stopped"]] = {
    ExitCode.OK: "success",
    ExitCode.FAILED: "failed",
    ExitCode.BAD_CONFIG: "failed",
    ExitCode.ROWS_FAILED: "partial",
    ExitCode.STOPPED: "stopped",
}


class Status(BaseModel):
    """How an attempt goes or went, and what the run has come to: `status.json`, and the body of the webhook."""

    model_config = ConfigDict(frozen=True)

    status: Literal["running", "success", "partial", "failed", "stopped"]
    """`running` from the start of an attempt to its end; it stays where a process was killed and could not say so."""
    exit_code: ExitCode | None = None
    message: str = ""
    """One line."""
    run_folder: str | None = None
    fingerprint: str | None = None
    attempt: int | None = None
    run_date: date | None = None
    experiment: str | None = None
    num_rows: int | None = None
    num_ok: int | None = None
    num_failed: int | None = None
    num_left: int | None = None
    cost: float | None = None
    """What the run has cost, over all attempts, its overheads included."""
    currency: str | None = None
    started_at: datetime
    ended_at: datetime | None = None

    @property
    def text(self) -> str:
        """All that matters, in one line."""
        job = " ".join(str(word) for word in ("fournee", self.experiment or "batch", self.run_date) if word)
        facts = [f"{job}: {self.status} (exit {self.exit_code}): {self.message}"]
        if self.num_left:
            facts.append(f"{self.num_left:,} of {self.num_rows:,} rows left")
        if self.cost is not None:
            facts.append(f"{self.cost:.4f} {self.currency}")
        return "; ".join([*facts, *([self.run_folder] if self.run_folder else [])])


class Outcome:
    """What becomes of one job, from its start to its end."""

    def __init__(self, experiment: str | None):
        self._status = Status(status="running", experiment=experiment, started_at=datetime.now(UTC))
        self._run: Run | None = None

    def begin(self, config: BatchConfig, run: Run) -> None:
        """The job works on this run from now on, and no earlier success stands in its folder any more."""
        self._status = self._status.model_copy(update={"run_date": config.run_date, **_names(run), "attempt": run.attempt})
        _write(run.folder, self._status)
        self._run = run

    def end(self, code: ExitCode, message: str, config: BatchConfig | None, finished: tuple[Run, Summary] | None) -> Status:
        """Tell how the job ended. The status file is written where the job worked on a run, or found a finished one."""
        run, summary = finished or (self._run, None)
        told = {
            "status": _WORDS[code],
            "exit_code": code,
            "message": "; ".join(line.strip() for line in message.splitlines() if line.strip()),
            "run_date": config and config.run_date,
            **(_names(run) if run else {}),
            **(_totals(summary) if summary else _so_far(run, config) if run and config else {}),
            "ended_at": datetime.now(UTC),
        }
        status = self._status.model_copy(update=told)
        if run:
            self._record(run, status)
        return status

    def _record(self, run: Run, status: Status) -> None:
        folder = replace(run.folder, patience_s=_PATIENCE_S)
        try:
            there = _read(folder)
            if there is None or self._may_replace(there, status):
                _write(folder, status)
        except Exception as error:  # noqa: BLE001 - storage clients raise kinds of their own; the job's own end counts more
            logger.warning("%s/%s could not be written: %s", run.folder.url, STATUS_FILE, error)

    def _may_replace(self, there: Status, status: Status) -> bool:
        """Its own beginning, but not that of a driver which took the run over; of a finished run, another end."""
        if self._run is None:
            return there.exit_code != status.exit_code
        return (there.attempt, there.started_at) == (status.attempt, status.started_at)


def describe(summary: Summary) -> str:
    """What a finished run came to, in one line."""
    kinds = ", ".join(f"{kind} {count:,}" for kind, count in summary.error_kinds.items())
    line = f"{summary.num_rows:,} rows: {summary.num_ok:,} ok, {summary.num_failed:,} failed{f' ({kinds})' if kinds else ''}"
    if summary.bad_files:
        return f"{line}; input files left out: {len(summary.bad_files):,}"
    return f"{line}; more than allowed" if summary.exit_code == ExitCode.ROWS_FAILED else line


def post(url: str, status: Status) -> None:
    """Send the status, and a `text` as Slack and Mattermost show it. Failing is a warning that does not show the URL."""
    logging.getLogger("urllib3").setLevel(logging.ERROR)  # its warnings show the URL, which is a secret
    # A thread, because nothing else puts a limit on looking up a name.
    sender = threading.Thread(target=_post, args=(url, status), name="webhook", daemon=True)
    sender.start()
    sender.join(_WEBHOOK_MOST_S)
    if sender.is_alive():
        logger.warning("the webhook did not answer within %g s", _WEBHOOK_MOST_S)


def _post(url: str, status: Status) -> None:
    retry = Retry(
        total=_WEBHOOK_TRIES - 1,
        backoff_factor=1,
        status_forcelist=_NOT_NOW,
        allowed_methods=None,  # all: a message that arrives twice is better than none
        respect_retry_after_header=False,  # it may ask for minutes
    )
    adapter = HTTPAdapter(max_retries=retry)
    body = {**status.model_dump(mode="json"), "text": status.text}
    try:
        with requests.Session() as session:
            session.mount("http://", adapter)
            session.mount("https://", adapter)
            # No redirects: a POST that follows one becomes a GET, which delivers nothing and looks well.
            answer = session.post(url, json=body, timeout=_WEBHOOK_TIMEOUT_S, allow_redirects=False)
    except Exception as error:  # noqa: BLE001 - odd URLs raise kinds of their own; each message holds the URL, so none is shown
        logger.warning("the webhook was not reached: %s", type(error).__name__)
        return
    if not 200 <= answer.status_code < 300:
        logger.warning("the webhook refused the message with HTTP status %d", answer.status_code)


def _names(run: Run) -> dict[str, Any]:
    return {"run_folder": run.folder.url, "fingerprint": run.fingerprint}


def _totals(summary: Summary) -> dict[str, Any]:
    return {
        "attempt": summary.num_attempts,
        "num_rows": summary.num_rows,
        "num_ok": summary.num_ok,
        "num_failed": summary.num_failed,
        "num_left": 0,
        "cost": summary.costs.total,
        "currency": summary.costs.currency,
    }


def _so_far(run: Run, config: BatchConfig) -> dict[str, Any]:
    """What an unfinished run has come to, as far as its storage says so soon."""
    folder = replace(run.folder, patience_s=_PATIENCE_S)
    found: dict[str, Any] = {"currency": config.pricing.currency}
    try:
        found["cost"] = cost_so_far(config.pricing, heartbeats(folder))
        if folder.exists(PLAN_FILE):
            plan, parts = Plan.load(folder), Parts(folder)
            num_left = pc.sum(plan.without(parts.batch_ids)["num_rows"]).as_py() or 0
            found |= {"num_rows": plan.num_rows, "num_left": num_left}
            num_failed = _count_failed(parts)
            if num_failed is not None:
                found |= {"num_failed": num_failed, "num_ok": plan.num_rows - num_left - num_failed}
    except Exception as error:  # noqa: BLE001 - storage clients raise kinds of their own; the job's own end counts more
        logger.warning("%s: what came out so far could not be counted: %s", run.folder.url, error)
    return found


def _count_failed(parts: Parts) -> int | None:
    """The failed rows of all parts; None where there are too many parts to look into."""
    started, num_failed = perf_counter(), 0
    for statistics in parts.statistics(parts.batch_ids):
        num_failed += sum(line["num_failed"] for line in statistics)
        if perf_counter() - started > _PATIENCE_S:
            return None
    return num_failed


def _read(folder: Folder) -> Status | None:
    try:
        return Status.model_validate_json(folder.read(STATUS_FILE))
    except (FileNotFoundError, ValidationError):
        return None


def _write(folder: Folder, status: Status) -> None:
    folder.write(STATUS_FILE, status.model_dump_json(indent=2).encode())
