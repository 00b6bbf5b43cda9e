"""A file that cannot be read is refused by name or left out and noted; what is wrong with the way to it is neither."""

import errno
import gzip
import lzma
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from pipelines.config import FileInput
from pipelines.errors import ConfigError, ErrorKind, RowError
from pipelines.plan import BadFile, Plan, make_plan, make_shards
from pipelines.readers import read_batches, unreadable
from pipelines.rows import Batch
from pipelines.sources import is_bad_file, list_sources
from pipelines.storage import Folder

Configure = Callable[..., FileInput]
Write = Callable[[], Path]

BAD = ("cut-short", "empty", "garbage", "gone")


def write_parquet(folder: Path) -> Path:
    """Four bad Parquet files around a good one; `gone` goes after it was listed."""
    pq.write_table(pa.table({"prompt": ["x"] * 9}), folder / "good.parquet")
    whole = (folder / "good.parquet").read_bytes()
    for name, content in {"cut-short": whole[:-10], "empty": b"", "garbage": b"\xff\x00" * 500, "gone": whole}.items():
        (folder / f"{name}.parquet").write_bytes(content)
    return folder / "gone.parquet"


def write_compressed(folder: Path, suffix: str, text: str) -> Path:
    """The same for compressed text."""
    whole = gzip.compress(text.encode())
    (folder / f"good{suffix}.gz").write_bytes(whole)
    for name, content in {"cut-short": whole[:-10], "empty": b"", "garbage": b"\xff\x00" * 500, "gone": whole}.items():
        (folder / f"{name}{suffix}.gz").write_bytes(content)
    return folder / f"gone{suffix}.gz"


@pytest.fixture(params=["parquet", "jsonl", "csv"])
def planned_with(
    request: pytest.FixtureRequest, tmp_path: Path, input_config: Configure
) -> Callable[[str], tuple[Plan, FileInput]]:
    """Plan a folder of four bad files and a good one of nine rows."""
    folder = tmp_path / "in"
    folder.mkdir()
    text = {"jsonl": '{"prompt": "x"}\n' * 9, "csv": "prompt\n" + "x\n" * 9}.get(request.param, "")
    gone = write_compressed(folder, f".{request.param}", text) if text else write_parquet(folder)

    def plan(on_bad_file: str) -> tuple[Plan, FileInput]:
        config = input_config(folder, format=request.param, on_bad_file=on_bad_file)
        sources = list_sources(config)
        gone.unlink()
        return make_plan(config, sources, ["prompt"], Folder(str(tmp_path / "run")), rows_per_batch=None, num_workers=1), config

    return plan


def test_bad_files_are_refused_and_each_is_named(planned_with: Callable[[str], tuple[Plan, FileInput]]) -> None:
    with pytest.raises(ConfigError) as refusal:
        planned_with("fail")
    *lines, remedy = str(refusal.value).splitlines()
    assert [Path(line.partition(" ")[0]).name.partition(".")[0] for line in lines] == list(BAD)
    assert "on_bad_file=skip" in remedy


def test_bad_files_are_left_out_and_noted_with_their_reasons(
    tmp_path: Path, planned_with: Callable[[str], tuple[Plan, FileInput]]
) -> None:
    plan, config = planned_with("skip")
    assert plan.num_rows == 9
    assert {Path(source).name.partition(".")[0] for source in plan.batches["source"].to_pylist()} == {"good"}
    assert [Path(bad.path).name.partition(".")[0] for bad in plan.bad_files] == list(BAD)
    assert all(bad.reason.startswith(f"cannot be read as {config.format}: ") for bad in plan.bad_files)
    plan.save(Folder(str(tmp_path / "run")))
    assert Plan.load(Folder(str(tmp_path / "run"))).bad_files == plan.bad_files


def test_an_input_of_bad_files_only_is_a_plan_without_rows(
    tmp_path: Path, input_config: Configure, plan_of: Callable[..., Plan]
) -> None:
    (tmp_path / "a.parquet").write_bytes(b"")
    plan = plan_of(input_config(tmp_path, on_bad_file="skip", carry_columns=("topic",), ids="require_unique", id_column="id"))
    assert (plan.num_rows, plan.num_batches, make_shards(plan.batches, 2)) == (0, 0, [])
    assert [type(bad) for bad in plan.bad_files] == [BadFile]


def test_a_header_that_is_none_makes_a_bad_file(tmp_path: Path, input_config: Configure, plan_of: Callable[..., Plan]) -> None:
    for number, header in enumerate([b'"prompt\n', b"pr\xffmpt\n", b'"prompt"s\n']):
        (tmp_path / f"{number}.csv").write_bytes(header + b"x\n")
    plan = plan_of(input_config(tmp_path, format="csv", on_bad_file="skip"), run=Folder(str(tmp_path / "run")))
    assert ["its header, line 1 is not" in bad.reason for bad in plan.bad_files] == [True] * 3


@pytest.mark.parametrize(
    ("error", "is_bad"),
    [
        (pa.ArrowInvalid("no footer"), True),
        (pa.ArrowIndexError("index out of bounds"), True),
        (pa.ArrowNotImplementedError("unknown encoding"), True),
        (OSError("Corrupt snappy compressed data."), True),
        (EOFError("cut short"), True),
        (UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad"), True),
        (FileNotFoundError(errno.ENOENT, "gone"), True),
        (zlib.error("bad"), True),
        (lzma.LZMAError("bad"), True),
        (pa.ArrowMemoryError("malloc failed"), False),
        (PermissionError("Forbidden"), False),
        (PermissionError(errno.EACCES, "denied"), False),
        (ConnectionError("reset"), False),
        (TimeoutError("late"), False),
        (OSError(errno.EIO, "the disk"), False),
        (OSError(errno.ENOSPC, "full"), False),
        (type("HttpError", (OSError,), {})("503"), False),
        (ConfigError("a setting"), False),
        (RuntimeError("ours"), False),
        (MemoryError(), False),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else str(value),
)
def test_only_what_a_file_holds_is_its_fault(error: Exception, is_bad: bool) -> None:
    assert is_bad_file(error) is is_bad


class BrokenStorage(MemoryFileSystem):
    """Object storage that lists its files and then fails to give them out."""

    protocol = "broken"
    store: dict[str, Any] = {}  # noqa: RUF012 - as its parent's: one storage for all who look
    pseudo_dirs = [""]  # noqa: RUF012
    error: Exception = PermissionError("Access Denied")

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(super()._strip_protocol(path.replace("broken://", "memory://")))

    def _open(self, path: str, mode: str = "rb", **kwargs: Any) -> Any:
        if mode == "rb":
            raise type(self).error
        return super()._open(path, mode, **kwargs)


@pytest.mark.parametrize("on_bad_file", ["fail", "skip"])
@pytest.mark.parametrize("name", ["a.parquet", "a.jsonl", "a.jsonl.gz", "a.csv"])
@pytest.mark.parametrize(
    "error",
    [PermissionError("Access Denied"), ConnectionError("reset"), TimeoutError("late"), OSError(errno.EIO, "the network")],
)
def test_a_file_that_may_not_or_cannot_be_fetched_is_no_bad_file(
    tmp_path: Path, input_config: Configure, monkeypatch: pytest.MonkeyPatch, error: Exception, name: str, on_bad_file: str
) -> None:
    fsspec.register_implementation("broken", BrokenStorage, clobber=True)
    monkeypatch.setattr(BrokenStorage, "error", error)
    BrokenStorage().pipe_file(f"/bucket/{name}", b"prompt\n")
    config = input_config(f"broken://bucket/{name}", format=name.split(".")[1], on_bad_file=on_bad_file)
    with pytest.raises(type(error)) as raised:
        make_plan(config, list_sources(config), ["prompt"], Folder(str(tmp_path / "run")), rows_per_batch=None, num_workers=1)
    assert not is_bad_file(raised.value)
    assert str(error) in str(raised.value)


def damage(path: Path, group: int) -> None:
    """Overwrite the pages of one row group."""
    column = pq.ParquetFile(path).metadata.row_group(group).column(0)
    content = bytearray(path.read_bytes())
    start = column.dictionary_page_offset or column.data_page_offset
    content[start + 10 : start + column.total_compressed_size] = b"\xa5" * (column.total_compressed_size - 10)
    path.write_bytes(content)


def surviving(config: FileInput, plan: Plan) -> dict[int, list[str] | None]:
    """Read on behind every error; a batch that cannot be read as None."""
    left = [Batch(**line) for line in plan.batches.to_pylist()]
    found: dict[int, list[str] | None] = {}
    while left:
        try:
            for block in read_batches(config, left, ["prompt"], plan.carried):
                found[left.pop(0).batch_id] = [row["prompt"] for row in block.rows if isinstance(row, dict)]
        except Exception as error:
            if not is_bad_file(error):
                raise
            found[left.pop(0).batch_id] = None
    return found


@pytest.mark.parametrize("compression", ["snappy", "zstd", "none"])
@pytest.mark.parametrize("group", [0, 1, 2])
def test_damage_in_one_row_group_costs_no_batch_of_another(
    tmp_path: Path, input_config: Configure, plan_of: Callable[..., Plan], compression: str, group: int
) -> None:
    prompts = [f"row {n} {n * 7919 % 10007}" for n in range(60)]
    path = tmp_path / "rows.parquet"
    pq.write_table(
        pa.table({"prompt": prompts}), path, row_group_size=20, compression=compression, write_page_checksum=True
    )  # fmt: skip
    damage(path, group)
    config = input_config(path)
    plan = plan_of(config, rows_per_batch=10)
    expected = {n: None if n // 2 == group else prompts[10 * n : 10 * n + 10] for n in range(6)}
    assert surviving(config, plan) == expected


def test_json_lines_that_are_cut_off_after_they_were_planned_are_a_bad_file(
    tmp_path: Path, input_config: Configure, plan_of: Callable[..., Plan]
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "x"}\n' * 9)
    config = input_config(path, format="jsonl")
    plan = plan_of(config, rows_per_batch=3)
    path.write_text('{"prompt": "x"}\n' * 5)
    assert surviving(config, plan) == {0: ["x"] * 3, 1: None, 2: None}


def test_the_rows_of_a_batch_that_cannot_be_read_are_errors_that_name_the_file(
    tmp_path: Path, input_config: Configure, plan_of: Callable[..., Plan]
) -> None:
    pq.write_table(pa.table({"prompt": ["x"] * 5, "n": range(5)}), tmp_path / "a.parquet")
    plan = plan_of(input_config(tmp_path, carry_columns=("n",)), rows_per_batch=3)
    batch = Batch(**plan.batches.to_pylist()[1])
    block = unreadable(batch, OSError("damaged"), plan.carried)
    assert list(block.source_rows) == [3, 4]
    assert block.carried.schema == plan.carried
    assert block.carried["n"].to_pylist() == [None, None]
    for row in block.rows:
        assert isinstance(row, RowError)
        assert row.kind == ErrorKind.UNREADABLE_FILE
        assert "a.parquet cannot be read here: damaged" in row.message
