"""Runs on S3, against a real server on loopback (`s3_server.py`): the folder's contract, whole runs, kills, refusals."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import fsspec
import pyarrow as pa
import pyarrow.dataset as ds
import pytest

from jobs import batch
from pipelines.file_systems import arrow_file_system
from pipelines.storage import Folder
from tests.integration.conftest import Done, Fournee, ray_cluster
from tests.integration.s3_server import BUCKET, Server, running
from tests.unit.test_storage import (  # noqa: F401 - collected here too, with a folder on S3
    test_a_block_that_raises_leaves_what_was_there_and_nothing_else,
    test_a_created_file_appears_when_its_block_ends,
    test_a_file_that_is_not_there_does_not_exist,
    test_a_folder_is_empty_until_it_holds_more_than_a_killed_writer_left,
    test_a_missing_folder_is_empty,
    test_a_pickled_folder_is_the_same_place,
    test_a_second_writer_replaces_the_file,
    test_an_empty_file_is_a_file,
    test_arrow_reads_what_a_folder_holds,
    test_deleting_what_is_not_there_does_nothing,
    test_names_are_the_sorted_files_of_one_folder,
    test_names_leave_out_what_a_killed_writer_left,
    test_names_see_what_another_process_has_just_written,
    test_remove_deletes_the_folder_and_nothing_else,
    test_removing_a_missing_folder_does_nothing,
    test_what_was_written_is_read_back,
)

S3FileSystem = pytest.importorskip("s3fs").S3FileSystem
pytest.importorskip("moto")

Jsonl = Callable[..., Path]
WaitUntil = Callable[[Callable[[], bool], "subprocess.Popen[str]"], None]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running(tmp_path_factory.mktemp("s3") / "server.log") as server:
        yield server


@pytest.fixture(autouse=True)
def credentials(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the user, in the environment, as everywhere; the server is in order whatever the last test did."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Folder]:
    """A folder in the bucket that does not exist yet."""
    folder = Folder(f"s3://{BUCKET}{tmp_path}/run")
    yield folder
    folder.remove()


@pytest.fixture(scope="module")
def s3_cluster(server: Server) -> Iterator[str]:
    """A Ray cluster whose nodes have the credentials in their environment: workers get no others."""
    with ray_cluster(**server.environment) as address:
        yield address


@dataclass(frozen=True)
class Bucketed:
    """`fournee batch` with input and output in the bucket."""

    fournee: Fournee
    place: str

    @property
    def run_folder(self) -> Folder:
        return Folder(f"s3://{BUCKET}/{self.place}/run")

    def command(self, *more: str) -> list[str]:
        return [
            "engine=echo", "engine.rows_per_batch=10", "engine.max_num_seqs=10", "input=jsonl", f"input.path=s3://{BUCKET}/{self.place}/in/*.jsonl",
            "input.id_column=id", "output=bucket", f"output.path={self.run_folder.url}", *more,
        ]  # fmt: skip

    def upload(self, count: int) -> list[str]:
        """Put rows into two files; returns their ids."""
        ids = [f"r{i:03d}" for i in range(count)]
        lines = [json.dumps({"id": one, "prompt": f"{one} says hello"}) + "\n" for one in ids]
        source = Folder(f"s3://{BUCKET}/{self.place}/in")
        source.write("a.jsonl", "".join(lines[: count // 3]).encode())
        source.write("b.jsonl", "".join(lines[count // 3 :]).encode())
        return ids

    def start(self, *more: str) -> "subprocess.Popen[str]":
        return self.fournee.start(*self.command(*more))

    def run(self, *more: str) -> Done:
        return self.fournee.run(*self.command(*more))

    def table(self) -> pa.Table:
        """All rows of the run, read as a user would read them."""
        fs = self.run_folder.fs
        fs.invalidate_cache()
        return ds.dataset(self.run_folder.path("results"), filesystem=arrow_file_system(fs)).to_table()

    def parts(self) -> dict[str, str]:
        """The committed parts, and the tag of what each holds."""
        info, path = self.run_folder.fs.info, self.run_folder.path
        return {name: info(path(f"results/{name}"))["ETag"] for name in self.run_folder.names("results")}

    def files(self) -> list[str]:
        """Every file of the run."""
        self.run_folder.fs.invalidate_cache()
        return [path.removeprefix(f"{self.run_folder.path()}/") for path in self.run_folder.fs.find(self.run_folder.path())]


@pytest.fixture
def bucketed(s3_cluster: str, tmp_path: Path) -> Bucketed:
    return Bucketed(Fournee(tmp_path / "run", s3_cluster), tmp_path.name)


def check_exactly_once(bucketed: Bucketed, ids: list[str]) -> None:
    rows = bucketed.table().to_pylist()
    assert sorted(row["id"] for row in rows) == ids
    assert {row["id"]: row["text"] for row in rows} == {one: f"{one} says hello" for one in ids}
    assert bucketed.run_folder.exists("_SUCCESS")
    assert [name for name in bucketed.files() if "tmp" in name] == []


def test_a_run_from_bucket_to_bucket_whose_driver_is_killed_is_resumed_to_its_end_and_shows_no_secret(
    bucketed: Bucketed, server: Server, wait_until: WaitUntil
) -> None:
    ids = bucketed.upload(200)
    process = bucketed.start("engine.seconds_per_token=0.5", "output.openai=true")
    wait_until(lambda: len(bucketed.parts()) >= 3, process)
    process.kill()
    process.communicate()
    survived = bucketed.parts()
    assert 3 <= len(survived) < 21

    done = bucketed.run("output.openai=true")
    assert done.code == 0, done.err
    check_exactly_once(bucketed, ids)
    now = {name: tag for name, tag in bucketed.parts().items() if name in survived}
    assert now == survived, "a batch that was committed was answered again"
    assert json.loads(bucketed.run_folder.read("stats/summary.json"))["num_attempts"] == 2

    assert {"run.json", "plan/plan.parquet", "stats/summary.json", "openai/output.jsonl"} <= set(bucketed.files())
    contents = [bucketed.run_folder.read(name) for name in bucketed.files()]
    assert not any(server.secret.encode() in content for content in contents)
    assert server.secret not in done.out + done.err


@pytest.mark.slow
def test_storage_that_refuses_and_then_stalls_in_mid_run_is_waited_for(
    bucketed: Bucketed, server: Server, wait_until: WaitUntil
) -> None:
    ids = bucketed.upload(200)
    process = bucketed.start("engine.seconds_per_token=0.5", "output.patience_s=120")
    try:
        wait_until(lambda: len(bucketed.run_folder.names("results")) >= 2, process)
        server.gate.shut()
        time.sleep(12)
        server.gate.open()
        count = len(bucketed.run_folder.names("results"))
        wait_until(lambda: len(bucketed.run_folder.names("results")) > count, process)
        server.process.send_signal(signal.SIGSTOP)
        time.sleep(5)
    finally:
        server.process.send_signal(signal.SIGCONT)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    check_exactly_once(bucketed, ids)
    said = out + err
    assert "Could not connect to the endpoint URL" in said and "trying again for up to 120 s (output.patience_s)" in said
    assert "the storage answers again, after" in said
    assert json.loads(bucketed.run_folder.read("stats/summary.json"))["num_deaths"] == 0


@pytest.mark.parametrize(
    ("environment", "bucket", "reason"),
    [
        ({"AWS_SECRET_ACCESS_KEY": "a-secret-that-is-wrong"}, BUCKET, "PermissionError"),
        ({"AWS_ACCESS_KEY_ID": "AKIAUNKNOWNUNKNOWN00"}, BUCKET, "PermissionError"),
        ({"AWS_ACCESS_KEY_ID": None}, BUCKET, "credentials"),
        ({}, "no-such-bucket", "bucket does not exist"),
        ({}, "No_Bucket!", "Invalid bucket name"),
    ],
    ids=["wrong secret", "wrong key", "no credentials", "no bucket", "bad name"],
)
def test_storage_that_refuses_for_good_is_a_bad_setting_and_shows_no_secret(
    server: Server,
    jsonl: Jsonl,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    environment: dict[str, str | None],
    bucket: str,
    reason: str,
) -> None:
    for name, value in environment.items():
        monkeypatch.delenv(name) if value is None else monkeypatch.setenv(name, value)
    S3FileSystem.clear_instance_cache()  # as in a new process: one that is logged in stays so
    path = f"s3://{bucket}/run"
    source = jsonl([{"id": "a", "prompt": "hello"}])
    assert batch.main(["engine=echo", "input=jsonl", f"input.path={source}", "output=bucket", f"output.path='{path}'"]) == 2
    S3FileSystem.clear_instance_cache()
    said = "".join(capfd.readouterr())
    assert f"output.path={path} cannot be used: " in said and reason in said and "check the bucket's name" in said
    for secret in (server.secret, "a-secret-that-is-wrong"):
        assert secret not in said


def test_a_file_larger_than_one_put_appears_whole_and_leaves_no_unfinished_upload(folder: Folder) -> None:
    block = os.urandom(2**20)
    with folder.create("spool/large.parquet") as file:
        for _ in range(101):
            file.write(block)
        assert not folder.exists("spool/large.parquet")
    assert folder.fs.info(folder.path("spool/large.parquet"))["size"] == 101 * 2**20
    assert folder.fs.cat_file(folder.path("spool/large.parquet"), start=100 * 2**20, end=101 * 2**20) == block
    assert folder.fs.list_multipart_uploads(BUCKET) == []


def test_a_finished_run_sweeps_the_unfinished_uploads_of_its_own_folder(folder: Folder) -> None:
    _, key, _ = folder.fs.split_path(folder.path())
    for name in (f"{key}/openai/output.jsonl", f"{key}-2/openai/output.jsonl"):
        folder.fs.call_s3("create_multipart_upload", Bucket=BUCKET, Key=name)
    folder.sweep("spool")
    assert len(folder.fs.list_multipart_uploads(BUCKET)) == 2
    folder.sweep("openai")
    (left,) = folder.fs.list_multipart_uploads(BUCKET)
    assert left["Key"] == f"{key}-2/openai/output.jsonl"
    folder.fs.abort_mpu(BUCKET, left["Key"], left["UploadId"])


def test_an_empty_file_that_marks_a_folder_is_no_file_in_it(folder: Folder) -> None:
    folder.fs.call_s3("put_object", Bucket=BUCKET, Key=folder.fs.split_path(f"{folder.path()}/")[1], Body=b"")
    assert folder.is_empty()
    assert folder.names() == []


def test_a_server_that_never_answers_is_given_up(server: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    impatient = {"config_kwargs": {"read_timeout": 0.2, "retries": {"total_max_attempts": 1}}}  # seconds, not minutes
    monkeypatch.setitem(fsspec.config.conf, "s3", impatient)
    server.process.send_signal(signal.SIGSTOP)
    try:
        with pytest.raises(TimeoutError, match=r"run\.json: .*Timeout.*given up after 0.1 s \(output.patience_s\)"):
            Folder(f"s3://{BUCKET}{tmp_path}/run", patience_s=0.1).read("run.json")
    finally:
        server.process.send_signal(signal.SIGCONT)
