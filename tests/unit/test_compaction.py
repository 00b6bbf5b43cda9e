"""Compaction: files of several batches instead of one for each, and at no moment a row twice, whatever dies."""

import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem
from hypothesis import given
from hypothesis import strategies as st

from pipelines import storage
from pipelines.batch import reopened
from pipelines.compaction import files_of
from pipelines.config import BatchConfig
from pipelines.errors import ConfigError, RunFailed
from pipelines.inspection import read_run
from pipelines.inspection.comparison import compare
from pipelines.inspection.rows import count, rows_with_ids, sample
from pipelines.parts import Parts, commit, part_name
from pipelines.plan import Plan
from pipelines.run import Run, open_run
from pipelines.schema import PLAN, RESULT
from pipelines.sources import list_sources
from pipelines.storage import Folder
from pipelines.summary import finish, read_summary
from tests.unit.story import answer, echo, results

Config = Callable[..., BatchConfig]
Jsonl = Callable[..., Path]
UNALIKE = ["arrived_at", "queue_s", "ttft_s", "generation_s"]  # two runs differ in when things happened
FAILING = (4, 17, 93)


class Died(Exception):
    """The process has come to its end."""


@pytest.fixture(params=["local", "memory"])
def run_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "local":
        yield str(tmp_path / "run")
        return
    name = f"/compaction/{uuid.uuid4().hex}"
    yield f"memory:/{name}"
    fsspec.filesystem("memory").rm(name, recursive=True)


@pytest.fixture
def rows(jsonl: Jsonl) -> Path:
    """95 rows, of which some fail."""
    return jsonl([{"id": f"r{i:02d}", "prompt": None if i in FAILING else f"row {i}", "tag": i} for i in range(95)])


def command(rows: Path, run_url: str, *more: str) -> list[str]:
    return [
        *echo(rows, run_url), "errors.max_failed_fraction=1", "input.carry_columns=[tag]", "output.rows_per_file=30", *more,
    ]  # fmt: skip


def ids_in(run: Run) -> list[str]:
    """The ids that a reader of `results/` sees now, in the order of the files."""
    return [row["id"] for row in results(run)]


def timeless(run: Run) -> list[dict[str, Any]]:
    return [{name: value for name, value in row.items() if name not in UNALIKE} for row in results(run)]


ALL = [f"r{i:02d}" for i in range(95)]
FILES = ["part-00000000-00000002.parquet", "part-00000003-00000005.parquet", "part-00000006-00000008.parquet",
         "part-00000009-00000009.parquet"]  # fmt: skip


def test_the_files_hold_the_same_rows_in_the_same_order_and_all_statistics(
    batch_config: Config, rows: Path, run_url: str, tmp_path: Path
) -> None:
    plain = batch_config(*command(rows, str(tmp_path / "plain"), "output.rows_per_file=null"))
    one, plan, _ = answer(plain)
    finish(one, plan, plain)
    config = batch_config(*command(rows, run_url))
    run, plan, _ = answer(config)
    assert ids_in(run) == []  # nobody reads a batch before its file is there
    written = list(Parts(run.folder).statistics(range(10)))
    summary = finish(run, plan, config)

    assert run.folder.names("results") == FILES
    assert run.folder.names("parts") == []
    assert timeless(run) == timeless(one)
    assert (summary.num_rows, summary.num_failed, summary.num_batches) == (95, 3, 10)
    assert list(Parts(run.folder).statistics(range(10))) == written
    schema = pa.schema([*RESULT, pa.field("tag", pa.string())])
    files = [pq.ParquetFile(run.folder.path(f"results/{name}"), filesystem=run.folder.arrow) for name in FILES]
    assert [(file.schema_arrow.remove_metadata(), file.num_row_groups) for file in files] == [(schema, 1)] * 4
    assert {file.metadata.row_group(0).column(0).compression for file in files} == {"ZSTD"}


def test_whoever_looks_into_a_run_sees_the_same_with_files_and_without(
    batch_config: Config, rows: Path, tmp_path: Path
) -> None:
    seen = []
    for size in ("null", "30"):
        config = batch_config(*command(rows, str(tmp_path / size), f"output.rows_per_file={size}", "output.openai=true"))
        run, plan, _ = answer(config)
        found = read_run(run.folder.url)
        before = (count(found).num_failed, sample(found, 5, seed=1))
        finish(run, plan, config)
        found = read_run(run.folder.url)
        assert before == (3, sample(found, 5, seed=1))
        some = rows_with_ids(found, ["r00", "r17", "r94", "none"], limit=5)
        keys = [[row["request_key"] for row in some.rows], some.not_found]
        seen.append((replace(count(found), run=""), keys, run.folder.read("openai/errors.jsonl"), before[1]))
    assert seen[0] == seen[1]
    compared = compare(read_run(str(tmp_path / "null")), read_run(str(tmp_path / "30")), limit=3)
    assert (compared.num_both, compared.num_same, compared.num_both_failed) == (95, 92, 3)


@given(
    sizes=st.lists(st.integers(1, 40), max_size=30),
    rows_per_file=st.integers(1, 50),
)
def test_every_batch_is_in_one_file_and_no_file_of_several_is_too_large(sizes: list[int], rows_per_file: int) -> None:
    numbers = {field.name: 0 for field in PLAN}
    texts = {"source": "a", "spooled": None, "source_version": "1"}
    lines = [{**numbers, **texts, "batch_id": batch_id, "num_rows": size} for batch_id, size in enumerate(sizes)]
    files = files_of(Plan(pa.Table.from_pylist(lines, schema=PLAN), pa.schema([]), (), ""), rows_per_file)
    assert [batch_id for file in files for batch_id in file] == list(range(len(sizes)))
    totals = [sum(sizes[batch_id] for batch_id in file) for file in files]
    assert all(total <= rows_per_file or len(file) == 1 for file, total in zip(files, totals, strict=True))
    assert all(total + sizes[following[0]] > rows_per_file for total, following in zip(totals, files[1:], strict=False))


def test_a_run_without_rows_has_no_file(batch_config: Config, tmp_path: Path, run_url: str) -> None:
    empty = tmp_path / "empty.parquet"
    pq.write_table(pa.table({"id": pa.array([], pa.string()), "prompt": pa.array([], pa.string())}), empty)
    config = batch_config(*echo(empty, run_url, "input=parquet", "output.rows_per_file=5"))
    run, plan, _ = answer(config)
    assert finish(run, plan, config).num_rows == 0
    assert (run.folder.names("results"), run.folder.exists("_SUCCESS")) == ([], True)


def test_row_groups_are_cut_by_rows_and_by_bytes_and_batches_are_found_in_them(tmp_path: Path, batch_config: Config) -> None:
    """Batches of 40,000 short rows, and one of 30 rows with 3 MiB of text each."""
    from pipelines.compaction import compact

    run, sizes = Folder(str(tmp_path)), [40_000, 40_000, 30, 20_000]
    numbers = {field.name: 0 for field in PLAN}
    texts = {"source": "a", "spooled": None, "source_version": "1"}
    for batch_id, size in enumerate(sizes):
        fixed = {"source": ["a"], "status": ["ok"], "attempts": [1], "request_key": ["k"], "flags": [[]]}
        columns = {name: value * size for name, value in fixed.items()}
        columns |= {"source_row": list(range(size)), "text": [("long " * 600_000) if size == 30 else "short"] * size}
        arrays = [pa.array(columns.get(field.name, [None] * size), field.type) for field in RESULT]
        commit(run, pa.table(arrays, schema=RESULT), {"batch_id": batch_id, "num_rows": size}, "zstd", "parts")
    lines = [{**numbers, **texts, "batch_id": batch_id, "num_rows": size} for batch_id, size in enumerate(sizes)]
    plan = Plan(pa.Table.from_pylist(lines, schema=PLAN), pa.schema([]), (), "")
    compact(run, plan, batch_config("engine=echo", "output.rows_per_file=1000000").output)
    file = pq.ParquetFile(tmp_path / "results" / "part-00000000-00000003.parquet")
    groups = [file.metadata.row_group(group).num_rows for group in range(file.num_row_groups)]
    assert groups == [40_000, 40_000, 11, 11, 8, 20_000]
    found = Parts(run, ["results"])
    for batch_id in (3, 2, 0, 1):
        (part,) = found.read([batch_id], ["source_row", "text"])
        assert part["source_row"].to_pylist() == list(range(sizes[batch_id]))


# What dies


def strike(monkeypatch: pytest.MonkeyPatch, at: int, look: Callable[[], None]) -> list[int]:
    """Look before each write and removal of the storage, and die at one of them; returns where it has come to, at last."""
    reached = [0]

    def deadly(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            if reached[0] < at:
                look()
            reached[0] += 1
            if reached[0] > at:
                raise Died
            return function(*arguments, **options)

        return call

    for owner, name in (
        (storage, "_rename"), (MemoryFileSystem, "pipe_file"), (MemoryFileSystem, "put_file"), (MemoryFileSystem, "rm_file"),
        (LocalFileSystem, "rm"), (LocalFileSystem, "rm_file"),
    ):  # fmt: skip
        monkeypatch.setattr(owner, name, deadly(getattr(owner, name)))
    return reached


def look_at(run: Run) -> Callable[[], None]:
    def look() -> None:
        twice = {row: times for row, times in Counter(ids_in(run)).items() if times > 1}
        assert not twice

    return look


def test_wherever_the_end_of_a_run_dies_no_row_is_seen_twice_and_the_same_command_finishes_it(
    batch_config: Config, rows: Path, run_url: str
) -> None:
    config = batch_config(*command(rows, run_url))
    run, plan, _ = answer(config)
    kept = {name: run.folder.read(f"parts/{name}") for name in run.folder.names("parts")}
    dead_at = 0
    while True:
        with pytest.MonkeyPatch.context() as patch:
            strike(patch, dead_at, look_at(run))
            try:
                finish(run, plan, config)
            except Died:
                look_at(run)()
        assert not run.is_finished
        is_all_there = not run.folder.names("parts")  # what comes then is as in any run
        resumed = open_run(config, list_sources(config.input))
        assert not answer(config, most_shards=1)[2], "a batch that was committed is answered again"
        finish(resumed, plan, config)
        assert ids_in(run) == ALL
        assert (run.folder.names("results"), run.folder.names("parts")) == (FILES, [])
        if is_all_there:
            break
        for name in FILES:
            run.folder.delete(f"results/{name}")
        run.folder.delete("_SUCCESS")
        for name, content in kept.items():
            run.folder.write(f"parts/{name}", content)
        dead_at += 1
    assert dead_at >= 4 + 1  # four files, and the removal of the parts


def test_half_of_the_parts_removed_is_as_good_as_all(batch_config: Config, rows: Path, run_url: str) -> None:
    config = batch_config(*command(rows, run_url))
    run, plan, _ = answer(config)
    parts = {name: run.folder.read(f"parts/{name}") for name in run.folder.names("parts")}
    finish(run, plan, config)
    files = {name: run.folder.read(f"results/{name}") for name in FILES}
    run.folder.delete("_SUCCESS")
    for name, content in list(parts.items())[::2]:
        run.folder.write(f"parts/{name}", content)
    assert not answer(config)[2]
    finish(run, plan, config)
    assert {name: run.folder.read(f"results/{name}") for name in FILES} == files
    assert run.folder.names("parts") == []


def test_a_zombie_that_commits_after_the_end_changes_nothing(batch_config: Config, rows: Path, run_url: str) -> None:
    config = batch_config(*command(rows, run_url))
    run, plan, _ = answer(config)
    stale = run.folder.read(part_name(1, "parts"))
    summary = finish(run, plan, config)
    files = {name: run.folder.read(f"results/{name}") for name in FILES}
    (first, *_) = Parts(run.folder).read([1])
    commit(run.folder, first.slice(0, 3), {"batch_id": 1, "fingerprint": "another run's"}, "zstd", "parts")
    assert count(read_run(run.folder.url)).num_failed == 3
    assert read_summary(run, config).num_rows == summary.num_rows
    run.folder.write(part_name(1, "parts"), stale)
    again = config.model_copy(update={"retry_failed": True})
    assert reopened(again, run)
    assert run.folder.names("parts") == []
    assert {name: run.folder.read(f"results/{name}") for name in FILES} == files


def test_a_zombie_that_commits_while_the_files_are_written_is_taken_whole_or_not_at_all(
    batch_config: Config, rows: Path, run_url: str
) -> None:
    config = batch_config(*command(rows, run_url))
    run, plan, _ = answer(config)
    (late,) = Parts(run.folder).read([4])
    line = {**next(Parts(run.folder).statistics([4]))[0], "worker": "late"}
    line.pop("num_rows_written")
    with pytest.MonkeyPatch.context() as patch:
        strike(patch, 3, look_at(run))
        with pytest.raises(Died):
            finish(run, plan, config)
    line |= {"worker": next(Parts(run.folder).statistics([5]))[0]["worker"], "wall_s": 7.5}
    commit(run.folder, late.set_column(5, "text", pa.array(["late"] * len(late))), line, "zstd", "parts")
    finish(run, plan, config)
    assert ids_in(run) == ALL
    assert {row["text"] for row in results(run)[40:50]} == {"late"}
    assert [one["wall_s"] for one in next(Parts(run.folder).statistics([4]))] == [7.5]


def test_failed_rows_are_answered_again_in_their_files_and_other_files_stay(
    batch_config: Config, jsonl: Jsonl, tmp_path: Path
) -> None:
    path = jsonl([{"id": f"r{i:02d}", "prompt": None if i in FAILING else f"row {i}", "tag": i} for i in range(95)])
    config = batch_config(*command(path, str(tmp_path / "run")))
    run, plan, _ = answer(config)
    first = finish(run, plan, config)
    before = {name: run.folder.read(f"results/{name}") for name in FILES}

    again = batch_config(*command(path, str(tmp_path / "run"), "retry_failed=true"))
    assert reopened(again, run)
    run, plan, lines = answer(again, most_shards=1)  # a crash after the first batch
    assert sorted(line["batch_id"] for line in lines) == [0]
    assert ids_in(run) == ALL
    run, plan, lines = answer(again)
    assert sorted(line["batch_id"] for line in lines) == [0, 1, 9]
    with pytest.MonkeyPatch.context() as patch:
        strike(patch, 1, look_at(run))  # and one between the two files
        with pytest.raises(Died):
            finish(run, plan, again)
    assert ids_in(run) == ALL
    run, plan, _ = answer(config)
    second = finish(run, plan, config)

    assert ids_in(run) == ALL
    assert (second.num_rows, second.num_failed, first.num_failed) == (95, 3, 3)
    attempts = {row["id"]: row["attempts"] for row in results(run) if row["attempts"] > 1}
    assert attempts == {"r04": 3, "r17": 2, "r93": 2}
    unchanged = [name for name in FILES if run.folder.read(f"results/{name}") == before[name]]
    assert unchanged == FILES[1:3]
    assert run.folder.names("parts") == []


# What is refused


def test_the_layout_of_a_run_is_decided_once(batch_config: Config, rows: Path, tmp_path: Path) -> None:
    config = batch_config(*command(rows, str(tmp_path / "run")))
    answer(config)
    for size in ("null", "31"):
        other = batch_config(*command(rows, str(tmp_path / "run"), f"output.rows_per_file={size}"))
        with pytest.raises(ConfigError, match=rf"output\.rows_per_file={size}, but .* resume it with output\.rows_per_file=30"):
            open_run(other, list_sources(other.input))


def test_what_is_no_file_of_the_run_is_never_read_beside_its_own(batch_config: Config, rows: Path, tmp_path: Path) -> None:
    config = batch_config(*command(rows, str(tmp_path / "run")))
    run, plan, _ = answer(config)
    part = run.folder.read(part_name(1, "parts"))
    run.folder.write(part_name(1), part)
    with pytest.raises(RunFailed, match=r"1 files are none of this run's, the first is results/part-00000001\.parquet"):
        finish(run, plan, config)
    run.folder.delete(part_name(1))
    finish(run, plan, config)
    run.folder.write(part_name(1), part)
    with pytest.raises(RunFailed, match=r"batch 1 stands twice in results/"):
        Parts(run.folder)


def test_readers_of_any_kind_find_the_files_alone(batch_config: Config, rows: Path, tmp_path: Path) -> None:
    config = batch_config(*command(rows, str(tmp_path / "run")))
    run, plan, _ = answer(config)
    finish(run, plan, config)
    assert ds.dataset(tmp_path / "run" / "results").count_rows() == 95
    assert not (tmp_path / "run" / "parts").exists()
