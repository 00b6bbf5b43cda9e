"""What is found wrong with the output before a model loads."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from pipelines.errors import ConfigError
from pipelines.preflight import check_space, check_writable, refusals_explained
from pipelines.storage import Folder


@pytest.mark.parametrize("scheme", ["", "memory:/"])
def test_a_folder_that_can_be_written_passes_and_keeps_nothing(tmp_path: Path, scheme: str) -> None:
    folder = Folder(f"{scheme}{tmp_path}/run")
    folder.write("run.json", b"{}")
    check_writable(folder)
    assert [path for path in folder.fs.find(folder.path()) if not path.endswith("run.json")] == []


def test_a_local_folder_that_cannot_be_made_is_refused_and_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(
        ConfigError, match=r"output\.path=.*/file/run cannot be used: .*name a folder that this user may write to"
    ):
        check_writable(Folder(f"{tmp_path}/file/run"))


def raising(error: Exception) -> Callable[..., Any]:
    def refuse(*_: Any, **__: Any) -> None:
        raise error

    return refuse


@pytest.mark.parametrize(
    ("operation", "error"),
    [
        ("pipe_file", PermissionError("AccessDenied")),
        ("pipe_file", FileNotFoundError("no such bucket")),
        ("pipe_file", RuntimeError("no credentials")),
        ("rm_file", PermissionError("AccessDenied")),
    ],
)
def test_a_bucket_that_refuses_names_itself_the_reason_and_the_way_out(
    monkeypatch: pytest.MonkeyPatch, operation: str, error: Exception
) -> None:
    monkeypatch.setattr(MemoryFileSystem, operation, raising(error))
    with pytest.raises(ConfigError) as refusal:
        check_writable(Folder("memory://bucket/run"))
    assert str(refusal.value).startswith(f"output.path=memory://bucket/run cannot be used: {type(error).__name__}: {error}; ")
    assert "check the bucket's name" in str(refusal.value)


def test_a_bucket_that_refuses_for_too_long_is_no_fault_of_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MemoryFileSystem, "pipe_file", raising(ConnectionResetError()))
    with pytest.raises(TimeoutError):
        check_writable(Folder("memory://bucket/run", patience_s=0.1))


def test_an_explanation_that_is_one_already_is_left_alone() -> None:
    with pytest.raises(ConfigError, match=r"^holds another run$"), refusals_explained(Folder("memory://bucket/run")):
        raise ConfigError("holds another run")


def test_a_disk_without_room_for_the_rows_is_refused_with_both_numbers(tmp_path: Path) -> None:
    free = shutil.disk_usage(tmp_path).free
    check_space(Folder(str(tmp_path)), 1000)
    with pytest.raises(ConfigError, match=r"output\.path=.* has .* MiB free, and .* rows take at least .* MiB; make room"):
        check_space(Folder(str(tmp_path)), free)


def test_object_storage_is_never_full() -> None:
    check_space(Folder("memory://bucket/run"), 10**18)
