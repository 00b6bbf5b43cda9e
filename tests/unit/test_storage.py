"""Files appear whole or not at all, on local disks and on object storage (here: fsspec's own, in memory)."""

import errno
import os
import pickle
import threading
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import duckdb
import pandas as pd
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem

from pipelines.errors import ConfigError
from pipelines.file_systems import arrow_file_system, file_system
from pipelines.storage import Folder
from tests.benchmarks.scale.slow import SlowFileSystem


@pytest.fixture(params=["local", "memory"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Folder]:
    """A folder that does not exist yet."""
    folder = Folder(f"{tmp_path}/run" if request.param == "local" else f"memory:/{tmp_path}/run")
    yield folder
    folder.remove()


def files_under(folder: Folder) -> list[str]:
    """Every file, temporary ones too."""
    return sorted(path.removeprefix(folder.path() + "/") for path in folder.fs.find(folder.path()))


def test_what_was_written_is_read_back(folder: Folder) -> None:
    folder.write("results/part-1", b"rows")
    assert folder.exists("results/part-1")
    assert folder.read("results/part-1") == b"rows"


def test_a_second_writer_replaces_the_file(folder: Folder) -> None:
    folder.write("run.json", b"a longer text than the next one")
    folder.write("run.json", b"new")
    assert folder.read("run.json") == b"new"
    assert files_under(folder) == ["run.json"]


def test_an_empty_file_is_a_file(folder: Folder) -> None:
    folder.write("_SUCCESS", b"")
    assert folder.exists("_SUCCESS")
    assert folder.read("_SUCCESS") == b""


def test_a_file_that_is_not_there_does_not_exist(folder: Folder) -> None:
    assert not folder.exists("run.json")
    with pytest.raises(FileNotFoundError):
        folder.read("run.json")


def test_a_created_file_appears_when_its_block_ends(folder: Folder) -> None:
    with folder.create("plan/plan.parquet") as file:
        file.write(b"first ")
        assert not folder.exists("plan/plan.parquet")
        file.write(b"second")
    assert folder.read("plan/plan.parquet") == b"first second"
    assert files_under(folder) == ["plan/plan.parquet"]


@pytest.mark.parametrize("old", [{}, {"spool/a.parquet": b"old"}], ids=["nothing", "a file"])
def test_a_block_that_raises_leaves_what_was_there_and_nothing_else(folder: Folder, old: dict[str, bytes]) -> None:
    for name, content in old.items():
        folder.write(name, content)
    with pytest.raises(KeyError), folder.create("spool/a.parquet") as file:
        file.write(b"half of the new")
        raise KeyError
    assert folder.exists("spool/a.parquet") == bool(old)
    assert {name: folder.read(name) for name in files_under(folder)} == old


def test_a_file_can_be_created_again_after_a_block_that_raised(folder: Folder) -> None:
    with pytest.raises(KeyError), folder.create("a") as file:
        file.write(b"half of")
        raise KeyError
    with folder.create("a") as file:
        file.write(b"whole")
    folder.write("b", b"another")
    assert folder.read("a") == b"whole"
    assert folder.read("b") == b"another"


def test_names_are_the_sorted_files_of_one_folder(folder: Folder) -> None:
    for name in ("results/b", "results/a", "results/deeper/c", "d"):
        folder.write(name, b"x")
    assert folder.names("results") == ["a", "b"]
    assert folder.names() == ["d"]


def test_names_leave_out_what_a_killed_writer_left(folder: Folder) -> None:
    folder.write("results/part-1", b"x")
    folder.write("results/.part-2.0123abcd.tmp", b"half of")
    assert folder.names("results") == ["part-1"]


def test_names_see_what_another_process_has_just_written(folder: Folder) -> None:
    assert folder.names("results") == []
    Folder(folder.url).write("results/part-1", b"x")
    assert folder.names("results") == ["part-1"]


def test_a_missing_folder_is_empty(folder: Folder) -> None:
    assert folder.names() == []
    assert folder.names("results") == []


def test_deleting_what_is_not_there_does_nothing(folder: Folder) -> None:
    folder.write("a", b"x")
    folder.delete("a")
    folder.delete("a")
    assert folder.names() == []


def test_a_folder_is_empty_until_it_holds_more_than_a_killed_writer_left(folder: Folder) -> None:
    assert folder.is_empty()
    folder.write(".run.json.0123abcd.tmp", b"half of")
    assert folder.is_empty()
    folder.write("run.json", b"{}")
    assert not folder.is_empty()


def test_a_folder_that_holds_a_folder_is_not_empty(folder: Folder) -> None:
    folder.write("results/part-1", b"x")
    assert not folder.is_empty()


def test_remove_deletes_the_folder_and_nothing_else(folder: Folder) -> None:
    neighbour = Folder(f"{folder.url}-2")
    neighbour.write("a", b"stays")
    folder.write("results/part-1", b"x")
    folder.remove()
    assert not folder.exists("results/part-1")
    assert folder.names("results") == []
    assert neighbour.read("a") == b"stays"


def test_removing_a_missing_folder_does_nothing(folder: Folder) -> None:
    folder.remove()
    assert folder.names() == []


def test_a_pickled_folder_is_the_same_place(folder: Folder) -> None:
    folder.write("a", b"x")
    copy = pickle.loads(pickle.dumps(folder))
    assert copy.path("a") == folder.path("a")
    assert copy.read("a") == b"x"


def test_a_pickled_folder_is_as_patient(folder: Folder) -> None:
    assert pickle.loads(pickle.dumps(Folder(folder.url, patience_s=7))).patience_s == 7


def test_a_relative_folder_is_the_same_place_in_a_process_that_runs_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    pickled = pickle.dumps(Folder("runs/one"))
    Folder("runs/one").write("a", b"x")
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert pickle.loads(pickled).read("a") == b"x"


def test_a_slash_at_the_end_of_a_folder_changes_nothing(folder: Folder) -> None:
    folder.write("a", b"x")
    assert Folder(f"{folder.url}/").path("a") == folder.path("a")


def test_arrow_reads_what_a_folder_holds(folder: Folder) -> None:
    with folder.create("a.parquet") as file:
        pq.write_table(pa.table({"id": [1, 2]}), file)
    assert pq.read_table(folder.path("a.parquet"), filesystem=folder.arrow)["id"].to_pylist() == [1, 2]
    assert pq.read_metadata(folder.path("a.parquet"), filesystem=arrow_file_system(folder.fs)).num_rows == 2


def refused_once(method: Callable[..., Any], error: Exception) -> Callable[..., Any]:
    """The same method, whose first call raises: the first of this thread, for heartbeats of other tests may still write."""
    coming, here = [error], threading.get_ident()

    def call(*arguments: Any, **options: Any) -> Any:
        if coming and threading.get_ident() == here:
            raise coming.pop()
        return method(*arguments, **options)

    return call


def create(folder: Folder, name: str, content: bytes) -> None:
    with folder.create(name) as file:
        file.write(content)


@pytest.mark.parametrize("error", [ConnectionResetError("reset"), OSError(errno.EBUSY, "SlowDown")], ids=repr)
@pytest.mark.parametrize(
    ("method", "operation", "answer"),
    [
        ("info", lambda folder: folder.exists("a"), True),
        ("cat_file", lambda folder: folder.read("a"), b"old"),
        ("pipe_file", lambda folder: folder.write("a", b"new"), None),
        ("put_file", lambda folder: create(folder, "a", b"new"), None),
        ("ls", lambda folder: folder.names(), ["a"]),
        ("ls", lambda folder: folder.is_empty(), False),
        ("rm_file", lambda folder: folder.delete("a"), None),
        ("rm", lambda folder: folder.remove(), None),
    ],
)
def test_storage_that_refuses_for_a_while_is_asked_again(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
    method: str,
    operation: Callable[[Folder], Any],
    answer: Any,
) -> None:
    folder = Folder(f"memory:/{tmp_path}/run", patience_s=30)
    folder.write("a", b"old")
    with monkeypatch.context() as patch:
        patch.setattr(MemoryFileSystem, method, refused_once(getattr(MemoryFileSystem, method), error))
        assert operation(folder) == answer
    left = {"pipe_file": {"a": b"new"}, "put_file": {"a": b"new"}, "rm_file": {}, "rm": {}}.get(method, {"a": b"old"})
    assert {name: folder.read(name) for name in folder.names()} == left


@pytest.mark.parametrize("error", [PermissionError("Forbidden"), FileNotFoundError("no such bucket")], ids=repr)
def test_storage_that_refuses_for_good_is_not_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    monkeypatch.setattr(MemoryFileSystem, "pipe_file", refused_once(MemoryFileSystem.pipe_file, error))
    with pytest.raises(type(error)):
        Folder(f"memory:/{tmp_path}/run", patience_s=30).write("a", b"x")


def test_a_local_write_that_fails_for_a_while_is_whole_in_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Folder(f"{tmp_path}/run", patience_s=30)
    monkeypatch.setattr(os, "fsync", refused_once(os.fsync, OSError(errno.EIO, "the server of this mount is away")))
    folder.write("a", b"whole")
    assert folder.read("a") == b"whole"
    assert files_under(folder) == ["a"]


def test_a_full_disk_ends_a_write_at_once_and_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Folder(f"{tmp_path}/run", patience_s=30)
    folder.write("a", b"old")
    monkeypatch.setattr(os, "fsync", refused_once(os.fsync, OSError(errno.ENOSPC, "No space left on device")))
    with pytest.raises(OSError, match="No space left on device"):
        folder.write("a", b"new")
    assert folder.read("a") == b"old"
    assert files_under(folder) == ["a"]


def test_a_disk_that_gives_no_answer_is_not_a_file_that_does_not_exist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LocalFileSystem, "info", refused_once(LocalFileSystem.info, OSError(errno.EIO, "away")))
    with pytest.raises(TimeoutError, match=r"run\.json: OSError: .*away"):
        Folder(f"{tmp_path}/run").exists("run.json")


def test_sweeping_takes_what_killed_writers_left_and_nothing_else(tmp_path: Path) -> None:
    folder = Folder(f"{tmp_path}/run")
    for name in ("results/part-1", "results/.part-2.0123abcd.tmp", "results/.probe.tmp", "results/.nfs0001", "stats/.a.tmp"):
        folder.write(name, b"x")
    folder.sweep("results")
    assert files_under(folder) == ["results/.nfs0001", "results/part-1", "stats/.a.tmp"]


def test_a_missing_folder_is_swept(folder: Folder) -> None:
    folder.sweep("results")
    assert folder.names("results") == []


def test_a_write_whose_temporary_file_is_swept_away_is_done_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, rename = Folder(f"{tmp_path}/run", patience_s=30), Path.replace

    def swept_first(temporary: Path, target: Path) -> Path:
        monkeypatch.undo()
        folder.sweep("results")
        return rename(temporary, target)

    monkeypatch.setattr(Path, "replace", swept_first)
    folder.write("results/part-1", b"whole")
    assert folder.read("results/part-1") == b"whole"
    assert files_under(folder) == ["results/part-1"]


def test_readers_of_the_results_do_not_see_what_killed_writers_left(tmp_path: Path) -> None:
    folder = Folder(f"{tmp_path}/run")
    with folder.create("results/part-00000000.parquet") as file:
        pq.write_table(pa.table({"id": [1]}), file)
    folder.write("results/.part-00000001.parquet.0123abcd.tmp", b"PAR1 half of a part")
    place = folder.path("results")
    assert pq.read_table(place).num_rows == ds.dataset(place).count_rows() == len(pd.read_parquet(place)) == 1
    assert duckdb.sql(f"select count(*) from '{place}/*.parquet'").fetchall() == [(1,)]


def test_a_package_url_is_the_file_that_the_package_ships() -> None:
    fs, path = file_system("package://pipelines/demo_prompts.jsonl")
    assert Path(path).name == "demo_prompts.jsonl"
    assert fs.cat_file(path).startswith(b"{")


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("package://no_such_package/a.jsonl", "pip install --no-deps no_such_package"),
        ("package://no_such_package.inner/a.jsonl", "no_such_package.inner is not installed"),
        ("package://./a.jsonl", "not installed"),
        ("package://sys/a.jsonl", "not installed"),
        ("package://pipelines/no_such_file.jsonl", "has no file no_such_file.jsonl"),
        ("package://pipelines/readers", "has no file readers"),
    ],
)
def test_a_package_url_that_names_nothing_is_refused(url: str, problem: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        file_system(url)
    assert str(refusal.value).startswith(f"{url}: ")
    assert problem in str(refusal.value)


def test_an_unknown_scheme_is_refused_and_names_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"^nope://bucket/a: .*use a local path, s3://, gs:// or abfs://"):
        Folder("nope://bucket/a").exists("b")


@pytest.mark.skipif(find_spec("gcsfs") is not None, reason="needs a machine without gcsfs")
def test_a_scheme_whose_package_is_missing_names_what_to_install() -> None:
    with pytest.raises(ConfigError, match=r"^gs://bucket/a: .*pip install 'fournee\[gcs\]'"):
        file_system("gs://bucket/a")


def test_from_afar_arrow_fetches_the_columns_that_it_wants_and_asks_once_for_the_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SlowFileSystem, "request_s", 0.0)
    numbers, texts = pa.array(range(1000)), pa.array([os.urandom(2000).hex() for _ in range(1000)])
    pq.write_table(pa.table({"text": texts, "number": numbers}), tmp_path / "a.parquet", compression="none")
    SlowFileSystem.asked.clear()
    with pq.ParquetFile(f"{tmp_path}/a.parquet", filesystem=arrow_file_system(SlowFileSystem())) as file:
        assert file.read(["number"])["number"].to_pylist() == numbers.to_pylist()
    assert SlowFileSystem.asked["bytes"] < 2**20 < (tmp_path / "a.parquet").stat().st_size
    assert SlowFileSystem.asked["HEAD"] == 1
