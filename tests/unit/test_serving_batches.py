"""Files and batches over the endpoint: OpenAI's own client drives them, and each batch is a run of the batch job's story."""

import asyncio
import io
import json
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from http import HTTPStatus
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import openai
import pytest

from jobs import served_batch
from pipelines.config import BatchConfig
from pipelines.engines.served import KEY_VARIABLE
from pipelines.errors import ExitCode
from pipelines.run import Run
from pipelines.serving.app import Gate, build_app
from pipelines.serving.batch_routes import add_batch_routes
from pipelines.serving.batches import Batches
from pipelines.serving.files import Files
from pipelines.serving.keys import VARIABLE, Keys
from pipelines.storage import Folder
from pipelines.summary import finish
from tests.unit.serving import ASKED, KEY, Backend, Heard, config_of, listening
from tests.unit.story import answer

OPEN = ("validating", "in_progress", "finalizing", "cancelling")
OTHER = "sk-bob-0123456789abcdef"


class WatchedFolder(Folder):
    """A folder that notes which threads wait for its storage."""

    threads: ClassVar[set[int]] = set()

    def patiently(self, action: Callable[[], Any], name: str = "") -> Any:
        self.threads.add(threading.get_ident())
        return super().patiently(action, name)


class WatchedFiles(Files):
    """Files while whose reading something happens."""

    def __init__(self, folder: Folder, most_bytes: int):
        super().__init__(folder, most_bytes)
        self.meanwhile: Callable[[], object] = lambda: None

    def read(self, record: dict[str, Any]) -> Iterator[bytes]:
        self.meanwhile()
        return super().read(record)


class Server:
    """An endpoint that listens, with batches that run in this process."""

    def __init__(self, folder: Path, *overrides: str, monkeypatch: pytest.MonkeyPatch):
        self.monkeypatch = monkeypatch
        self.config = config_of(f"serve.folder={folder}", "serve.idle_s=0.0", "sampling.max_tokens=16", *overrides)
        self.backend, self.heard = Backend(self.config), Heard()
        self.keys = Keys(self.config.serve, {VARIABLE: f"alice:{KEY},bob:{OTHER}"})
        gate = Gate(self.config, self.backend, self.keys, [self.heard])
        self.app = build_app(gate, "")
        self.folder = WatchedFolder(str(folder))
        self.files = WatchedFiles(self.folder, 10_000)
        self.batches = Batches(self.config, self.folder, self.files, self.run_job, poll_s=0.001)
        add_batch_routes(self.app, gate, Files(self.folder, 10_000), self.batches)
        self.most_shards: int | None = None
        self.is_own_job = False
        self.cut_off_code = ExitCode.STOPPED
        self.exit_codes: dict[str, Iterator[int]] = {}
        self.runs: list[Run] = []

    def __enter__(self) -> "Server":
        self._listening = listening(self.app)
        self.url = self._listening.__enter__()
        return self

    def __exit__(self, *_: Any) -> None:
        self._listening.__exit__(None, None, None)

    def client(self, key: str = KEY) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0)

    async def run_job(self, settings: str, client: str, is_cancelled: Callable[[], bool]) -> int:
        """The story, without Ray; `most_shards` kills it half-way, a client's `exit_codes` before it begins."""
        if (code := next(self.exit_codes.get(client, iter(())), None)) is not None:
            return code
        if self.is_own_job:
            return self.own_job(settings)
        config = BatchConfig.model_validate_json(settings).model_copy(update={"endpoint": self.url})
        self.monkeypatch.setenv(KEY_VARIABLE, self.keys.batch_key_for(client))
        run, plan, _ = await asyncio.to_thread(answer, config, most_shards=self.most_shards)
        self.runs.append(run)
        if await asyncio.to_thread(is_cancelled) or self.most_shards is not None:
            return self.cut_off_code
        return (await asyncio.to_thread(finish, run, plan, config)).exit_code

    def own_job(self, settings: str) -> int:
        """What its process would do, up to where Ray begins."""
        self.monkeypatch.setattr("sys.stdin", io.StringIO(settings))
        handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            return served_batch.main()
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)

    def work(self, seconds: float = 30.0) -> None:
        """Run batches until none is open, or the time is over."""

        async def until_done() -> None:
            looking = asyncio.create_task(self.batches.run_for_ever())
            deadline = time.monotonic() + seconds
            while any(one["status"] in OPEN for one in await asyncio.to_thread(self.batches.records.all)):
                assert time.monotonic() < deadline, "the batch did not end"
                await asyncio.sleep(0.02)
            looking.cancel()

        asyncio.run(until_done())


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    with Server(tmp_path, monkeypatch=monkeypatch) as one:
        yield one


def line(name: str, **changes: Any) -> str:
    return json.dumps({"custom_id": name, "method": "POST", "url": "/v1/chat/completions", "body": {**ASKED, **changes}})


def upload(client: openai.OpenAI, *lines: str) -> str:
    return client.files.create(file=("rows.jsonl", "\n".join(lines).encode()), purpose="batch").id


def create(client: openai.OpenAI, file_id: str, **more: Any) -> Any:
    return client.batches.create(
        input_file_id=file_id, endpoint="/v1/chat/completions", completion_window="24h", metadata={"night": "1"}, **more
    )


def error_of(client: openai.OpenAI, batch_id: str) -> Any:
    """The one error of a batch that failed."""
    failed = client.batches.retrieve(batch_id)
    assert failed.status == "failed" and failed.errors is not None and failed.errors.data is not None
    (error,) = failed.errors.data
    return error


def test_a_batch_is_answered_row_by_row_and_its_files_can_be_downloaded(server: Server) -> None:
    client = server.client()
    batch = create(client, upload(client, line("a"), line("b", temperature=9), line("c", max_tokens=2)))
    assert (batch.status, batch.metadata) == ("validating", {"night": "1"})
    server.work()
    done = client.batches.retrieve(batch.id)
    assert done.status == "completed" and done.request_counts is not None
    assert done.request_counts.model_dump() == {"total": 3, "completed": 2, "failed": 1}
    output = [json.loads(one) for one in client.files.content(done.output_file_id or "").text.splitlines()]
    errors = [json.loads(one) for one in client.files.content(done.error_file_id or "").text.splitlines()]
    said = {one["custom_id"]: one["response"]["body"]["choices"][0] for one in output}
    assert said["a"]["message"]["content"] == "Say these five words back"
    assert (said["c"]["message"]["content"], said["c"]["finish_reason"]) == ("Say these", "length")
    assert [(one["custom_id"], one["response"]["status_code"]) for one in errors] == [("b", 400)]
    assert {tally.key for tally in server.heard.tallies} == {"alice"}  # whoever made it is who used the tokens
    assert all(ask.is_background for ask in server.backend.asked)


def test_live_requests_never_wait_for_the_storage_of_batches(server: Server) -> None:
    client = server.client()
    create(client, upload(client, line("a")))
    cancelled = create(client, upload(client, line("b")))
    client.batches.cancel(cancelled.id)
    create(client, upload(client, ""))
    WatchedFolder.threads.clear()
    server.work()  # its event loop is this thread's
    assert WatchedFolder.threads and threading.get_ident() not in WatchedFolder.threads
    assert [one.status for one in client.batches.list()].count("cancelled") == 1


def test_a_batch_that_was_cut_off_goes_on_after_a_restart_and_no_row_is_asked_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    overrides = ("engine.rows_per_batch=1",)
    with Server(tmp_path, *overrides, monkeypatch=monkeypatch) as first:
        client = first.client()
        batch = create(client, upload(client, *(line(str(number)) for number in range(6))))
        first.most_shards = 2
        record = first.batches.records.get(batch.id, "alice")
        asyncio.run(first.batches._run(record))
        asked = len(first.backend.asked)
        assert 0 < asked < 6 and client.batches.retrieve(batch.id).status == "in_progress"
    with Server(tmp_path, *overrides, monkeypatch=monkeypatch) as second:
        second.work()
        done = second.client().batches.retrieve(batch.id)
        assert done.status == "completed" and done.request_counts is not None
        assert (done.request_counts.completed, len(second.backend.asked)) == (6, 6 - asked)
        lines = second.client().files.content(done.output_file_id or "").text.splitlines()
        assert [json.loads(one)["custom_id"] for one in lines] == [str(number) for number in range(6)]


def test_rows_of_a_batch_wait_for_live_requests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    overrides = ("serve.target_running=1", "engine.seconds_per_token=0.01", "engine.hang_text=endless")
    with Server(tmp_path, *overrides, monkeypatch=monkeypatch) as server:
        client = server.client()
        batch = create(client, upload(client, line("a")))
        live = client.completions.create(model="smollm2", prompt="endless", stream=True)
        next(live)  # the one place is taken
        worker = threading.Thread(target=server.work)
        worker.start()
        deadline = time.monotonic() + 30
        while ("alice", HTTPStatus.TOO_MANY_REQUESTS) not in server.heard.refusals:
            assert time.monotonic() < deadline, "the batch's row was not put off"
            time.sleep(0.02)
        assert not any(ask.is_background for ask in server.backend.asked)
        live.close()
        worker.join(30)
        assert client.batches.retrieve(batch.id).status == "completed"


def test_a_batch_can_be_cancelled(server: Server) -> None:
    client = server.client()
    batch = create(client, upload(client, line("a")))
    assert client.batches.cancel(batch.id).status == "cancelling"
    server.work()
    assert client.batches.retrieve(batch.id).status == "cancelled"
    with pytest.raises(openai.ConflictError, match="is cancelled already"):
        client.batches.cancel(batch.id)


@pytest.mark.parametrize(("end", "status"), [("cancel", "cancelled"), ("delete the input", "failed")])
def test_what_a_batch_has_answered_is_offered_however_it_ends(
    end: str, status: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Server(tmp_path, "engine.rows_per_batch=1", monkeypatch=monkeypatch) as server:
        client = server.client()
        file_id = upload(client, *(line(str(number), **({"temperature": 9} if number == 1 else {})) for number in range(6)))
        batch = create(client, file_id)
        server.most_shards = 2
        asyncio.run(server.batches._run(server.batches.records.get(batch.id, "alice")))
        if end == "cancel":
            client.batches.cancel(batch.id)
        else:
            client.files.delete(file_id)
        server.work()
        done = client.batches.retrieve(batch.id)
        assert done.status == status and done.request_counts is not None
        output, errors = (
            client.files.content(one or "").text.splitlines() for one in (done.output_file_id, done.error_file_id)
        )
        assert [json.loads(one)["custom_id"] for one in errors] == ["1"]
        assert 0 < len(output) == done.request_counts.completed < 5


def test_a_batch_that_is_cancelled_while_its_file_is_looked_at_is_not_run(server: Server) -> None:
    client = server.client()
    batch = create(client, upload(client, line("a")))
    server.files.meanwhile = lambda: server.batches.cancel(batch.id, "alice")
    server.work()
    assert client.batches.retrieve(batch.id).status == "cancelled"
    assert not server.runs


def test_a_record_is_changed_only_after_the_statuses_that_allow_it(server: Server) -> None:
    client = server.client()
    batch = create(client, upload(client, line("a")))
    records = server.batches.records
    assert records.update(batch.id, after=("in_progress",), status="completed")["status"] == "validating"
    assert records.update(batch.id, after=("validating",), status="completed")["status"] == "completed"
    assert client.batches.retrieve(batch.id).status == "completed"


def test_a_file_without_rows_fails_its_batch(server: Server) -> None:
    client = server.client()
    batch = create(client, upload(client, "", " "))
    server.work()
    assert error_of(client, batch.id).code == "empty_file"


def test_a_batch_whose_input_is_deleted_fails_and_those_of_others_go_on(server: Server) -> None:
    alice, bob = server.client(), server.client(OTHER)
    file_id = upload(alice, line("a"))
    batch = create(alice, file_id)
    alice.files.delete(file_id)
    other = create(bob, upload(bob, line("b")))
    server.work()
    assert error_of(alice, batch.id).code == "input_file_gone"
    assert bob.batches.retrieve(other.id).status == "completed"


@pytest.mark.parametrize("code", [ExitCode.FAILED, ExitCode.BAD_CONFIG])
def test_a_batch_whose_input_is_deleted_while_it_runs_says_so(code: ExitCode, server: Server) -> None:
    client = server.client()
    file_id = upload(client, line("a"))
    batch = create(client, file_id)

    def delete_and_end() -> Iterator[int]:
        client.files.delete(file_id)
        yield code

    server.exit_codes["alice"] = delete_and_end()
    server.work()
    assert error_of(client, batch.id).code == "input_file_gone"


def test_a_batch_whose_runs_fail_again_and_again_is_given_up_after_longer_and_longer_pauses(server: Server) -> None:
    alice, bob = server.client(), server.client(OTHER)
    batch = create(alice, upload(alice, line("a")))
    other = create(bob, upload(bob, line("b")))
    ran_at: list[float] = []

    def fail() -> Iterator[int]:
        while True:
            ran_at.append(time.monotonic())
            yield ExitCode.FAILED

    server.exit_codes["alice"] = fail()
    server.work()
    assert error_of(alice, batch.id).code == "run_failed"
    assert bob.batches.retrieve(other.id).status == "completed"
    assert all(later - before >= 0.01 * 2**n for n, (before, later) in enumerate(pairwise(ran_at)))
    assert len(ran_at) == 5


def test_a_batch_that_gets_further_with_each_run_is_not_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Server(tmp_path, "engine.rows_per_batch=1", monkeypatch=monkeypatch) as server:
        client = server.client()
        batch = create(client, upload(client, *(line(str(number)) for number in range(8))))
        server.most_shards, server.cut_off_code = 1, ExitCode.FAILED
        for _ in range(6):
            asyncio.run(server.batches._run(server.batches.records.get(batch.id, "alice")))
            assert client.batches.retrieve(batch.id).status == "in_progress"
        server.most_shards = None
        server.work()
        assert client.batches.retrieve(batch.id).status == "completed"


def test_a_batch_that_the_server_cannot_begin_is_given_up(server: Server) -> None:
    client = server.client()
    batch = create(client, upload(client, line("a")))

    def refuse() -> None:
        raise PermissionError("no")

    server.files.meanwhile = refuse
    server.work()
    assert error_of(client, batch.id).code == "run_failed"


@pytest.mark.parametrize("overrides", [("experiment=classify",), ("input.order=by_prefix", "input.limit=1")])
def test_what_the_servers_own_input_is_set_to_is_not_asked_of_a_batch(
    overrides: Sequence[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Server(tmp_path, *overrides, monkeypatch=monkeypatch) as server:
        client = server.client()
        batch = create(client, upload(client, line("a"), line("b")))
        server.work()
        done = client.batches.retrieve(batch.id)
        assert done.status == "completed" and done.request_counts is not None and done.request_counts.total == 2
        lines = client.files.content(done.output_file_id or done.error_file_id or "").text.splitlines()
        assert [json.loads(one)["custom_id"] for one in lines] == ["a", "b"]


def test_the_client_is_told_why_its_file_cannot_be_run_and_not_where_it_lies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Server(tmp_path / "with a space", monkeypatch=monkeypatch) as server:
        client = server.client()
        file_id = upload(client, json.dumps({"custom_id": "a", "text": "no request"}))
        batch = create(client, file_id)
        server.is_own_job = True
        server.work()
        error = error_of(client, batch.id)
        assert error.code == "invalid_file"
        assert f"input.request_column: the column 'body' is not in {file_id}.jsonl" in error.message
        assert "/" not in error.message


def test_lists_are_in_pages_the_newest_first(server: Server) -> None:
    client = server.client()
    file_id = upload(client, line("a"))
    made = [create(client, file_id).id for _ in range(3)]
    assert {one.id for one in client.batches.list(limit=2)} == set(made)  # the client follows the pages
    first = client.batches.list(limit=2)
    assert (len(first.data), first.has_more) == (2, True)
    assert [one.id for one in client.files.list()] == [file_id]
    with pytest.raises(openai.BadRequestError):
        client.batches.list(limit=0)


def test_a_client_sees_its_own_files_and_batches_only(server: Server) -> None:
    alice, bob = server.client(), server.client(OTHER)
    file_id = upload(alice, line("a"))
    batch = create(alice, file_id)
    for refused in (
        lambda: bob.files.retrieve(file_id), lambda: bob.files.content(file_id), lambda: bob.files.delete(file_id),
        lambda: create(bob, file_id), lambda: bob.batches.retrieve(batch.id), lambda: bob.batches.cancel(batch.id),
    ):  # fmt: skip
        with pytest.raises(openai.NotFoundError):
            refused()
    assert not list(bob.files.list()) and not list(bob.batches.list())


def test_a_deleted_file_is_gone(server: Server, tmp_path: Path) -> None:
    client = server.client()
    file_id = upload(client, line("a"))
    assert client.files.delete(file_id).deleted
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve(file_id)
    assert not list((tmp_path / "files").iterdir())


@pytest.mark.parametrize("wrong", [
    {"endpoint": "/v1/responses"}, {"completion_window": "1h"}, {"metadata": {"a": 1}},
    {"metadata": {str(n): "" for n in range(17)}},
])  # fmt: skip
def test_a_batch_that_cannot_be_is_refused(wrong: dict[str, Any], server: Server) -> None:
    client = server.client()
    body = {"input_file_id": upload(client, line("a")), "endpoint": "/v1/chat/completions", "completion_window": "24h", **wrong}
    with pytest.raises(openai.BadRequestError):
        client.post("/batches", body=body, cast_to=object)


@pytest.mark.parametrize("name", ["../../etc/passwd", "file-..", "file-%2e%2e", "file-", "x"])
def test_an_id_is_no_path(name: str, server: Server) -> None:
    with pytest.raises((openai.NotFoundError, ValueError)):
        server.client().files.content(name)


def test_an_upload_that_is_too_large_or_no_file_is_refused(server: Server) -> None:
    client = server.client()
    with pytest.raises(openai.APIStatusError) as caught:
        upload(client, "x" * 20_000)
    assert caught.value.status_code == HTTPStatus.REQUEST_ENTITY_TOO_LARGE
    with pytest.raises(openai.BadRequestError):
        client.files.create(file=b"x", purpose="assistants")
    with pytest.raises(openai.BadRequestError):
        client.post("/files", body={"purpose": "batch"}, cast_to=object)
