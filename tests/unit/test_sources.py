"""Which files are the input, in which order, and when it counts as another input."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pipelines.config import FileInput
from pipelines.errors import ConfigError
from pipelines.sources import Source, list_sources, snapshot
from pipelines.storage import Folder

Configure = Callable[..., FileInput]


def touch(folder: Path, *names: str) -> None:
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x")


@pytest.fixture
def sources_of(input_config: Configure) -> Callable[..., list[Source]]:
    """The sources of a JSON lines input."""

    def sources(path: Any) -> list[Source]:
        return list_sources(input_config(path, format="jsonl"))

    return sources


@pytest.fixture
def names_of(sources_of: Callable[..., list[Source]], tmp_path: Path) -> Callable[..., list[str]]:
    """The paths of a JSON lines input, below `tmp_path`."""

    def names(path: Any) -> list[str]:
        return [os.path.relpath(source.path, tmp_path) for source in sources_of(path)]

    return names


def test_a_file_is_itself_whatever_its_ending(tmp_path: Path, sources_of: Callable[..., list[Source]]) -> None:
    (tmp_path / "rows.txt").write_bytes(b"12345")
    (source,) = sources_of(tmp_path / "rows.txt")
    assert source.path == str(tmp_path / "rows.txt")
    assert source.num_bytes == 5


def test_a_folder_is_all_files_of_the_format_at_every_depth(tmp_path: Path, names_of: Callable[..., list[str]]) -> None:
    touch(tmp_path, "b.jsonl", "a.ndjson", "c.json", "deep/er/d.jsonl", "e.jsonl.gz", "f.jsonl.ZST", "g.json.bz2")
    touch(tmp_path, "notes.txt", "a.parquet", "archive.gz", "jsonl")
    found = ["a.ndjson", "b.jsonl", "c.json", "deep/er/d.jsonl", "e.jsonl.gz", "f.jsonl.ZST", "g.json.bz2"]
    assert names_of(tmp_path) == found
    assert names_of(f"{tmp_path}/") == found


def test_a_parquet_folder_is_its_parquet_files(tmp_path: Path, input_config: Configure) -> None:
    touch(tmp_path, "a.parquet", "b.pq", "c.parquet.gz", "d.jsonl")
    assert [Path(source.path).name for source in list_sources(input_config(tmp_path))] == ["a.parquet", "b.pq"]


def test_a_folder_of_delimited_text_is_its_csv_and_tsv_files(tmp_path: Path, input_config: Configure) -> None:
    touch(tmp_path, "a.csv", "b.tsv", "c.csv.gz", "d.TSV.ZST", "e.CSV", "f.jsonl", "g.gz")
    found = [Path(source.path).name for source in list_sources(input_config(tmp_path, format="csv"))]
    assert found == ["a.csv", "b.tsv", "c.csv.gz", "d.TSV.ZST", "e.CSV"]


def test_markers_and_hidden_files_in_a_folder_are_no_input(tmp_path: Path, names_of: Callable[..., list[str]]) -> None:
    touch(tmp_path, "a.jsonl", "_SUCCESS", "_metadata.jsonl", ".a.jsonl.crc", ".b.jsonl")
    touch(tmp_path, "_temporary/0/c.jsonl", ".ipynb_checkpoints/a.jsonl")
    assert names_of(tmp_path) == ["a.jsonl"]


def test_a_folder_may_itself_lie_in_a_hidden_one(tmp_path: Path, names_of: Callable[..., list[str]]) -> None:
    touch(tmp_path, ".cache/_data/a.jsonl")
    assert names_of(tmp_path / ".cache" / "_data") == [".cache/_data/a.jsonl"]
    assert names_of(tmp_path / ".cache" / "*" / "a.jsonl") == [".cache/_data/a.jsonl"]


@pytest.mark.parametrize(
    ("glob", "found"),
    [
        ("*.jsonl", ["a.jsonl", "b.jsonl"]),
        ("?.jsonl", ["a.jsonl", "b.jsonl"]),
        ("[b-z].jsonl", ["b.jsonl"]),
        ("*", ["a.jsonl", "b.jsonl", "note"]),
        ("*/*.jsonl", ["deep/c.jsonl"]),
        ("**/*.jsonl", ["a.jsonl", "b.jsonl", "deep/c.jsonl", "deep/er/d.jsonl"]),
        ("deep/**", ["deep/c.jsonl", "deep/er/d.jsonl"]),
    ],
)
def test_a_glob_is_the_files_it_matches_but_hidden_ones(
    tmp_path: Path, names_of: Callable[..., list[str]], glob: str, found: list[str]
) -> None:
    touch(tmp_path, "a.jsonl", "b.jsonl", "note", "deep/c.jsonl", "deep/er/d.jsonl")
    touch(tmp_path, ".a.jsonl", ".ipynb_checkpoints/a.jsonl", "deep/.git/e.jsonl")
    assert names_of(tmp_path / glob) == found


def test_a_file_whose_name_looks_like_a_glob_is_found(tmp_path: Path, names_of: Callable[..., list[str]]) -> None:
    touch(tmp_path, "rows[1].jsonl", "v[2]/a.jsonl")
    assert names_of(tmp_path / "rows[1].jsonl") == ["rows[1].jsonl"]
    assert names_of(tmp_path / "v[2]") == ["v[2]/a.jsonl"]


def test_a_list_is_sorted_and_holds_each_file_once(tmp_path: Path, names_of: Callable[..., list[str]]) -> None:
    touch(tmp_path, "b.jsonl", "a.jsonl", "deep/c.jsonl")
    paths = [tmp_path / "b.jsonl", tmp_path, tmp_path / "*.jsonl", tmp_path / "a.jsonl", tmp_path / "deep"]
    assert names_of(paths) == ["a.jsonl", "b.jsonl", "deep/c.jsonl"]
    assert names_of(paths[::-1]) == ["a.jsonl", "b.jsonl", "deep/c.jsonl"]


def test_a_file_is_listed_once_however_it_is_spelt(
    tmp_path: Path, names_of: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    touch(tmp_path, "a.jsonl", "deep/c.jsonl")
    monkeypatch.chdir(tmp_path)
    spellings = [
        "a.jsonl",
        "./a.jsonl",
        "deep/../a.jsonl",
        f"{tmp_path}/./a.jsonl",
        f"{tmp_path}//a.jsonl",
        f"file://{tmp_path}/a.jsonl",
    ]
    assert names_of(spellings) == ["a.jsonl"]


@pytest.mark.parametrize("path", ["rows/*.jsonl", "rows", "rows/a.jsonl"])
def test_a_symbolic_link_is_the_file_behind_it(tmp_path: Path, sources_of: Callable[..., list[Source]], path: str) -> None:
    (tmp_path / "blob").write_bytes(b"12345")
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / "a.jsonl").symlink_to(tmp_path / "blob")
    before = sources_of(tmp_path / path)
    assert [(source.path, source.num_bytes) for source in before] == [(str(tmp_path / "rows" / "a.jsonl"), 5)]
    os.utime(tmp_path / "blob", (1, 1))
    assert snapshot(sources_of(tmp_path / path)) != snapshot(before)


def test_a_link_to_nothing_is_not_passed_over(tmp_path: Path, names_of: Callable[..., list[str]]) -> None:
    (tmp_path / "gone.jsonl").symlink_to(tmp_path / "nothing")
    assert names_of(tmp_path / "*.jsonl") == ["gone.jsonl"]
    assert names_of(tmp_path) == ["gone.jsonl"]


@pytest.fixture
def bucket(tmp_path: Path) -> Iterator[Folder]:
    """Object storage, in memory."""
    folder = Folder(f"memory:/{tmp_path}/bucket")
    yield folder
    folder.remove()


@pytest.mark.parametrize("path", ["", "/", "/*.jsonl", "/**/*.jsonl"])
def test_sources_on_object_storage_keep_their_scheme(
    bucket: Folder, sources_of: Callable[..., list[Source]], path: str
) -> None:
    for name in ("a.jsonl", "_SUCCESS", ".b.jsonl"):
        bucket.write(name, b"12345")
    (source,) = sources_of(bucket.url + path)
    assert source.path == f"memory://{bucket.path('a.jsonl')}"
    assert source.num_bytes == 5


def test_a_package_url_is_a_source(sources_of: Callable[..., list[Source]]) -> None:
    (source,) = sources_of("package://pipelines/demo_prompts.jsonl")
    assert source.path.endswith("/demo_prompts.jsonl")


@pytest.mark.parametrize(
    ("path", "problem"),
    [
        ("gone.jsonl", "does not exist"),
        ("gone/", "does not exist"),
        ("*.csv", "matches no file"),
        ("gone/*.jsonl", "matches no file"),
        ("empty", r"holds no jsonl file \(.json, .jsonl, .ndjson\); it has: nothing"),
        ("other", r"holds no jsonl file .*; it has: .parquet, .txt, README. .*input.format"),
        ("empty*", "matches no file"),
    ],
)
def test_a_path_that_names_no_file_is_refused(
    tmp_path: Path, sources_of: Callable[..., list[Source]], path: str, problem: str
) -> None:
    touch(tmp_path, "a.jsonl", "other/a.txt", "other/b.txt", "other/c.parquet", "other/README")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=problem) as refusal:
        sources_of([tmp_path / "a.jsonl", f"{tmp_path}/{path}"])
    assert str(refusal.value).startswith(f"input.path={tmp_path}/{path} ")


def test_the_same_files_have_the_same_snapshot(tmp_path: Path, sources_of: Callable[..., list[Source]]) -> None:
    touch(tmp_path, "a.jsonl", "b.jsonl")
    assert snapshot(sources_of(tmp_path)) == snapshot(sources_of([tmp_path / "b.jsonl", tmp_path / "a.jsonl"]))


def test_the_snapshot_changes_with_a_files_size(tmp_path: Path, sources_of: Callable[..., list[Source]]) -> None:
    touch(tmp_path, "a.jsonl")
    os.utime(tmp_path / "a.jsonl", (1, 1))
    before = snapshot(sources_of(tmp_path))
    (tmp_path / "a.jsonl").write_bytes(b"xx")
    os.utime(tmp_path / "a.jsonl", (1, 1))
    assert snapshot(sources_of(tmp_path)) != before


def test_the_snapshot_changes_with_a_files_modification_time(tmp_path: Path, sources_of: Callable[..., list[Source]]) -> None:
    touch(tmp_path, "a.jsonl")
    os.utime(tmp_path / "a.jsonl", ns=(0, 1_700_000_000_123_000_000))
    before = snapshot(sources_of(tmp_path))
    os.utime(tmp_path / "a.jsonl", ns=(0, 1_700_000_000_124_000_000))
    assert snapshot(sources_of(tmp_path)) != before


def test_the_snapshot_changes_when_a_file_comes_goes_or_is_renamed(
    tmp_path: Path, sources_of: Callable[..., list[Source]]
) -> None:
    touch(tmp_path, "a.jsonl", "b.jsonl")
    snapshots = [snapshot(sources_of(tmp_path))]
    touch(tmp_path, "c.jsonl")
    snapshots.append(snapshot(sources_of(tmp_path)))
    (tmp_path / "c.jsonl").rename(tmp_path / "d.jsonl")
    snapshots.append(snapshot(sources_of(tmp_path)))
    (tmp_path / "b.jsonl").unlink()
    snapshots.append(snapshot(sources_of(tmp_path)))
    assert len(set(snapshots)) == 4


def test_the_snapshot_changes_when_an_object_is_written_anew(bucket: Folder, sources_of: Callable[..., list[Source]]) -> None:
    bucket.write("a.jsonl", b"12345")
    before = snapshot(sources_of(bucket.url))
    bucket.write("a.jsonl", b"54321")
    assert snapshot(sources_of(bucket.url)) != before
