"""A process that dies between any two steps of a commit leaves the old part or the new one, whole, and nothing that is seen."""

import os
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from pipelines.errors import RunFailed
from pipelines.parts import RESULTS, Parts, commit, part_name, statistics_in
from pipelines.storage import Folder

BATCH = 7
MOST_STEPS = 60


class Death:
    """Ends this process before the `after`-th step of a commit; a write is torn in two by a step of its own."""

    def __init__(self, after: int):
        self._left = after

    def step(self) -> None:
        if self._left == 0:
            os._exit(9)
        self._left -= 1

    def await_it(self) -> None:
        """Count each call with which `Folder` touches the disk as a step before it and one after."""
        for owner, name in ((Path, "mkdir"), (Path, "replace"), (Path, "unlink"), (os, "open"), (os, "fsync"), (os, "close")):
            setattr(owner, name, self._counted(getattr(owner, name)))
        opened, death = Path.open, self

        def torn(path: Path, mode: str = "r", **options: Any) -> Any:
            file = opened(path, mode, **options)
            write = file.write

            def half_and_half(content: bytes) -> int:
                first = write(content[: len(content) // 2])
                file.flush()
                death.step()
                return int(first + write(content[len(content) // 2 :]))

            return _Writing(file, half_and_half) if "w" in mode else file

        Path.open = self._counted(torn)  # type: ignore[method-assign]

    def _counted(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            self.step()
            result = function(*arguments, **options)
            self.step()
            return result

        return call


class _Writing:
    """A file whose writes go another way: those of an open file cannot be replaced."""

    def __init__(self, file: Any, write: Callable[[bytes], int]):
        self._file = file
        self.write = write

    def __enter__(self) -> "_Writing":
        return self

    def __exit__(self, *_: Any) -> None:
        self._file.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def dies(action: Callable[[], None], *, after: int) -> bool:
    """Do something in a process of its own that dies on the way; returns whether it died, not whether it was done."""
    process = os.fork()
    if process == 0:
        try:
            Death(after).await_it()
            action()
            os._exit(0)
        finally:
            traceback.print_exc()
            os._exit(1)
    code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    assert code in (0, 9), "the child failed otherwise; what it said stands above"
    return code == 9


def part(who: str) -> pa.Table:
    return pa.table({"text": [f"{who} answers row {row}" for row in range(500)]})


def put(run: Folder, who: str) -> None:
    commit(run, part(who), {"batch_id": BATCH, "by": who}, "zstd")


def answers(run: Folder) -> str | None:
    """Whose answers the folder shows, all of them; None where it shows no part. Anything else fails the test."""
    assert run.names(RESULTS) in ([], [part_name(BATCH).removeprefix(f"{RESULTS}/")])
    parts = Parts(run)
    if BATCH not in parts:
        return None
    (found,) = parts.read([BATCH])
    who: str = statistics_in(found)["by"]
    assert found.replace_schema_metadata().equals(part(who))
    assert [[line["num_rows_written"] for line in some] for some in parts.statistics([BATCH])] == [[500]]
    return who


@pytest.mark.parametrize("before", [None, "first"])
def test_wherever_a_commit_dies_the_old_part_or_the_new_one_is_there(tmp_path: Path, before: str | None) -> None:
    seen: list[str | None] = []
    for after in range(MOST_STEPS):
        run = Folder(f"{tmp_path}/{after}")
        if before is not None:
            put(run, before)
        died = dies(lambda run=run: put(run, "second"), after=after)  # type: ignore[misc]
        seen.append(answers(run))
        put(run, "third")
        assert answers(run) == "third"
        run.sweep(RESULTS)
        assert [path.name for path in (tmp_path / str(after) / RESULTS).iterdir()] == [
            part_name(BATCH).removeprefix("results/")
        ]
        if not died:
            break
    else:
        pytest.fail(f"not done after {MOST_STEPS} steps")
    assert len(seen) > 12, "the commit has more steps than that: the counting is broken"
    turn = seen.index("second")
    assert seen == [before] * turn + ["second"] * (len(seen) - turn)
    assert turn > 0


def test_wherever_the_first_write_to_a_new_folder_dies_it_is_empty_or_has_the_file(tmp_path: Path) -> None:
    turns = []
    for after in range(MOST_STEPS):
        run = Folder(f"{tmp_path}/{after}")
        died = dies(lambda run=run: run.write("run.json", b"identity"), after=after)  # type: ignore[misc]
        turns.append(run.is_empty())
        assert run.is_empty() or run.read("run.json") == b"identity"
        if not died:
            break
    assert (turns[0], turns[-1]) == (True, False)


@pytest.mark.parametrize("swept", [False, True])
def test_a_zombie_that_commits_late_replaces_the_part_by_a_whole_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, swept: bool
) -> None:
    run, rename = Folder(f"{tmp_path}/run", patience_s=30), Path.replace

    def late(temporary: Path, target: Path) -> Path:
        monkeypatch.undo()
        put(run, "healthy worker")
        if swept:  # the run was finished meanwhile
            run.sweep(RESULTS)
        return rename(temporary, target)

    monkeypatch.setattr(Path, "replace", late)
    put(run, "zombie")
    assert answers(run) == "zombie"
    assert len(list((tmp_path / "run" / RESULTS).iterdir())) == 1


def test_a_zombie_without_patience_fails_and_leaves_the_others_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, rename = Folder(f"{tmp_path}/run"), Path.replace

    def late(temporary: Path, target: Path) -> Path:
        monkeypatch.undo()
        put(run, "healthy worker")
        run.sweep(RESULTS)
        return rename(temporary, target)

    monkeypatch.setattr(Path, "replace", late)
    with pytest.raises(TimeoutError, match="another driver swept"):
        put(run, "zombie")
    assert answers(run) == "healthy worker"


def test_a_part_cut_short_by_other_hands_is_refused_with_the_way_out(tmp_path: Path) -> None:
    run = Folder(f"{tmp_path}/run")
    put(run, "first")
    run.write(part_name(BATCH), run.read(part_name(BATCH))[:-10])
    with pytest.raises(RunFailed, match=r"part-00000007.parquet cannot be read: .*delete it and resume"):
        list(Parts(run).statistics([BATCH]))
