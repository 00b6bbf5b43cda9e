"""Batches over the endpoint: each is a normal run of the batch job in a process of its own, one after the other.

A batch's record says how far it is. What a run has committed lies in its run folder, so a server that starts again goes on
with whatever its records say is not over; no row is answered twice. The run asks this server, as any client does, and is
told to wait while live requests need the replicas.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import replace
from http import HTTPStatus
from typing import Any

from pipelines.config import ServeConfig
from pipelines.errors import ExitCode
from pipelines.openai_results import ERRORS_FILE, OUTPUT_FILE, write_committed
from pipelines.parts import Parts
from pipelines.serving.asking import CHAT, EMBEDDINGS, TEXT
from pipelines.serving.faults import ApiError
from pipelines.serving.files import Files, Records
from pipelines.serving.served_job import batch_config, refusal
from pipelines.serving.setbacks import MOST_FAILED_RUNS, Setbacks
from pipelines.storage import Folder

logger = logging.getLogger(__name__)

_POLL_S = 1.0
_COUNT_S = 5.0
_POLLS_OF_FIRST_PAUSE = 10  # after a run that failed
_WINDOW_S = 24 * 3600
_GOING = ("validating", "in_progress", "finalizing")
_OPEN = (*_GOING, "cancelling")
_MOST_METADATA = 16
_TIMES = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")

RunJob = Callable[[str, str, Callable[[], bool]], Awaitable[int]]
"""Runs a job from its settings as JSON, for a client, asking again and again whether it is to stop; returns its exit code."""


class Batches:
    """The batches of one endpoint."""

    def __init__(self, config: ServeConfig, folder: Folder, files: Files, run_job: RunJob, *, poll_s: float = _POLL_S):
        self._config = config
        self._folder = folder
        self._files = files
        self._run_job = run_job
        self._poll_s = poll_s
        self._setbacks = Setbacks(_POLLS_OF_FIRST_PAUSE * poll_s)
        self.records = Records(self._folder, "batches", "batch_")

    def add(self, body: Mapping[str, Any], client: str) -> dict[str, Any]:
        """Take a batch on; raises ApiError."""
        endpoint, window, file_id = body.get("endpoint"), body.get("completion_window"), body.get("input_file_id")
        if endpoint not in (CHAT, TEXT, EMBEDDINGS):
            raise _refusal("endpoint", f"endpoint must be one of {CHAT}, {TEXT}, {EMBEDDINGS}")
        if window != "24h":
            raise _refusal("completion_window", 'completion_window must be "24h"')
        file = self._files.records.get(str(file_id), client)
        if file["purpose"] != "batch":
            raise _refusal("input_file_id", f"{file['id']} was not uploaded with purpose=batch")
        metadata = body.get("metadata")
        if metadata is not None and not _is_metadata(metadata):
            raise _refusal("metadata", f"metadata must be a mapping of at most {_MOST_METADATA} texts")
        now = int(time.time())
        return self.records.put({
            "id": self.records.new_id(), "object": "batch", "endpoint": endpoint, "errors": None, "input_file_id": file["id"],
            "completion_window": window, "status": "validating", "output_file_id": None, "error_file_id": None,
            "created_at": now, "expires_at": now + _WINDOW_S, **{f"{status}_at": None for status in _TIMES},
            "request_counts": {"total": 0, "completed": 0, "failed": 0}, "metadata": metadata, "client": client,
        })  # fmt: skip

    def cancel(self, batch_id: str, client: str) -> dict[str, Any]:
        """Stop a batch; what is answered is offered as its files. Raises ApiError."""
        self.records.get(batch_id, client)
        record = self._moved(batch_id, "cancelling", after=_OPEN)
        if record["status"] != "cancelling":
            raise ApiError(HTTPStatus.CONFLICT, f"{batch_id} is {record['status']} already")
        self._setbacks.forget(batch_id)  # it need not wait for its end
        return record

    async def run_for_ever(self) -> None:
        """Run what is to be run, the oldest first; one whose run failed lets the others go before it for a while."""
        while True:
            try:
                records = await asyncio.to_thread(self.records.all)
                todo = [one for one in records if one["status"] in _OPEN and self._setbacks.is_due(one["id"])]
                if todo:
                    await self._run_or_set_back(todo[-1])
            except Exception:
                logger.exception("batches could not be looked at")
            await asyncio.sleep(self._poll_s)

    async def _run_or_set_back(self, record: dict[str, Any]) -> None:
        try:
            await self._run(record)
        except Exception:
            logger.exception("%s could not be run", record["id"])
            if self._setbacks.add(record["id"]):
                await asyncio.to_thread(self._close, record["id"], "failed", errors=_HOPELESS)

    async def _run(self, record: dict[str, Any]) -> None:
        """Bring a batch to its end, or so far as one run brings it; whatever may wait for storage does so in a thread."""
        batch_id, client = record["id"], record["client"]
        settings = await asyncio.to_thread(self._begin, record)
        if settings is None:
            return
        watching = asyncio.create_task(self._watch(batch_id))
        try:
            code = await self._run_job(settings, client, lambda: self._is_cancelled(batch_id, client))
        finally:
            watching.cancel()
        await asyncio.to_thread(self._conclude, batch_id, code)

    def _begin(self, record: dict[str, Any]) -> str | None:
        """The settings of a batch's run; None where it has come to its end without one."""
        batch_id = record["id"]
        if record["status"] == "cancelling":
            self._end(record, "cancelled")
            return None
        file = self._input(record)
        if file is None:
            self._end(record, "failed", _INPUT_GONE)
            return None
        total = _num_lines(self._files, file)
        if not total:
            self._close(batch_id, "failed", errors=_errors("empty_file", "the file has no lines"))
            return None
        counts = {**record["request_counts"], "total": total}
        record = self._moved(batch_id, "in_progress", after=_GOING, request_counts=counts)
        if record["status"] != "in_progress":
            self._end(record, "cancelled")
            return None
        config = batch_config(self._config, input_url=self._files.url(file), run_url=self._run_url(batch_id))
        return config.model_dump_json()

    def _conclude(self, batch_id: str, code: int) -> None:
        """What is to be done after a run."""
        record = self._count(batch_id)
        if record["status"] == "cancelling":
            self._end(record, "cancelled")
        elif code in (ExitCode.OK, ExitCode.ROWS_FAILED):
            self._end(self._moved(batch_id, "finalizing", after=_GOING), "completed")
        elif code == ExitCode.BAD_CONFIG:
            invalid = _errors("invalid_file", f"the file cannot be run: {refusal(self._folder, self._run_path(batch_id))}")
            self._end(record, "failed", _INPUT_GONE if self._input(record) is None else invalid)
        elif code != ExitCode.STOPPED and self._setbacks.add(batch_id):
            self._end(record, "failed", _HOPELESS)
        else:
            logger.warning("%s ended with exit code %s; it is run again", batch_id, code)

    def _input(self, record: dict[str, Any]) -> dict[str, Any] | None:
        """The record of a batch's file; None where its client has deleted it."""
        try:
            return self._files.records.get(record["input_file_id"], record["client"])
        except ApiError:
            return None

    async def _watch(self, batch_id: str) -> None:
        """Count what is answered now and then."""
        while True:
            await asyncio.sleep(_COUNT_S)
            await asyncio.to_thread(self._count, batch_id)

    def _is_cancelled(self, batch_id: str, client: str) -> bool:
        return bool(self.records.get(batch_id, client)["status"] == "cancelling")

    def _count(self, batch_id: str) -> dict[str, Any]:
        parts = Parts(self._run_folder(batch_id))
        lines = [line for some in parts.statistics(parts.batch_ids) for line in some]
        num_ok, num_failed = (sum(line[name] for line in lines) for name in ("num_ok", "num_failed"))
        counts = {"completed": num_ok, "failed": num_failed}
        before = self.records.update(batch_id)["request_counts"]
        record = self.records.update(batch_id, after=_OPEN, request_counts={**before, **counts})
        if record["request_counts"] != before:
            self._setbacks.forget(batch_id)
        return record

    def _end(self, record: dict[str, Any], status: str, errors: dict[str, Any] | None = None) -> None:
        """Close a batch, and offer what is answered; a run that came to its end has written that itself."""
        if status != "completed":
            self._count(record["id"])
            write_committed(self._run_folder(record["id"]), self._config.model.name)
        made = {
            kind: self._file_of(record, name, f"{record['id']}_{kind}.jsonl")
            for kind, name in (("output", OUTPUT_FILE), ("error", ERRORS_FILE))
        }
        self._close(record["id"], status, errors=errors, **{f"{kind}_file_id": file_id for kind, file_id in made.items()})

    def _close(self, batch_id: str, status: str, **more: Any) -> None:
        """Bring a batch to its end; one that is to be cancelled ends as cancelled, whatever else it came to."""
        if self._moved(batch_id, status, after=_GOING, **more)["status"] == "cancelling":
            self._moved(batch_id, "cancelled", after=("cancelling",), **more)
        self._setbacks.forget(batch_id)

    def _file_of(self, record: dict[str, Any], name: str, shown_name: str) -> str | None:
        """A file of what the run wrote; none where it wrote nothing."""
        path = f"{self._run_path(record['id'])}/{name}"
        if not self._folder.exists(path) or not (num_bytes := self._folder.fs.size(self._folder.path(path))):
            return None
        file_id = f"file-{record['id'].removeprefix('batch_')}{'0' if name == OUTPUT_FILE else '1'}"
        noted = self._files.note(
            file_id, path, num_bytes=num_bytes, name=shown_name, purpose="batch_output", client=record["client"]
        )
        return str(noted["id"])

    def _moved(self, batch_id: str, status: str, *, after: Collection[str], **more: Any) -> dict[str, Any]:
        return self.records.update(batch_id, after=after, status=status, **{f"{status}_at": int(time.time())}, **more)

    def _run_path(self, batch_id: str) -> str:
        return f"batch_runs/{batch_id}"

    def _run_folder(self, batch_id: str) -> Folder:
        return replace(self._folder, url=self._run_url(batch_id))

    def _run_url(self, batch_id: str) -> str:
        return f"{self._folder.url.rstrip('/')}/{self._run_path(batch_id)}"


def _num_lines(files: Files, file: dict[str, Any]) -> int:
    """How many rows a file has: a line that is not empty is one."""
    count, rest = 0, b""
    for chunk in files.read(file):
        *lines, rest = (rest + chunk).split(b"\n")
        count += sum(1 for line in lines if line.strip())
    return count + bool(rest.strip())


def _is_metadata(value: Any) -> bool:
    is_mapping = isinstance(value, dict) and len(value) <= _MOST_METADATA
    return is_mapping and all(isinstance(one, str) for pair in value.items() for one in pair)


def _refusal(param: str, message: str) -> ApiError:
    return ApiError(HTTPStatus.BAD_REQUEST, message, param=param)


def _errors(code: str, message: str) -> dict[str, Any]:
    return {"object": "list", "data": [{"code": code, "message": message, "param": None, "line": None}]}


_INPUT_GONE = _errors("input_file_gone", "the input file was deleted before the batch had come to its end")
_HOPELESS = _errors("run_failed", f"{MOST_FAILED_RUNS} runs in a row failed and answered nothing; the server's log says why")
