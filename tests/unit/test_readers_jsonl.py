"""Reading JSON lines by batch gives what a reader that takes the file line by line would give."""

import gzip
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelines import spool
from pipelines.config import FileInput
from pipelines.errors import ConfigError, ErrorKind, RowError
from pipelines.file_systems import file_system
from pipelines.plan import Plan
from pipelines.readers import jsonl, read_batches
from pipelines.rows import Batch, Block
from pipelines.storage import Folder

Configure = Callable[..., FileInput]
PlanOf = Callable[..., Plan]
BlocksOf = Callable[..., list[Block]]

COMPRESSIONS = {".gz": "gzip", ".zst": "zstd", ".bz2": "bz2"}


def numbered_rows(blocks: Sequence[Block]) -> list[tuple[int, Any]]:
    """Each row with its line's number; a failed row as its kind."""
    return [
        (number, row.kind if isinstance(row, RowError) else row)
        for block in blocks
        for number, row in zip(block.source_rows, block.rows, strict=True)
    ]


def naive_lines(content: bytes) -> list[tuple[int, bytes]]:
    """The lines of a file that are rows, with their numbers."""
    return [(number, line) for number, line in enumerate(content.split(b"\n")) if line not in (b"", b"\r")]


def naive_row(number: int, line: bytes) -> Any:
    """A line as a row, or the kind of its error."""
    try:
        text = line.decode("utf-8-sig" if number == 0 else "utf-8")
    except UnicodeDecodeError:
        return ErrorKind.INVALID_TEXT
    try:
        value = json.loads(text)
    except ValueError:
        return ErrorKind.MALFORMED_ROW
    return value if isinstance(value, dict) else ErrorKind.MALFORMED_ROW


@pytest.fixture
def read_bytes(tmp_path: Path, input_config: Configure, plan_of: PlanOf, blocks_of: BlocksOf) -> Callable[..., list[Block]]:
    """Write a file and read it by batches of two rows."""

    def read(content: bytes, *, name: str = "rows.jsonl", **changes: Any) -> list[Block]:
        (tmp_path / name).write_bytes(content)
        config = input_config(tmp_path / name, format="jsonl", **changes)
        run = Folder(str(tmp_path / "run"))
        return blocks_of(config, plan_of(config, needed=(), rows_per_batch=2, run=run), needed=())

    return read


contents = st.lists(
    st.one_of(
        st.sampled_from([b"\n", b"\r\n", b"\r", b"\n\n", b" ", b"\xef\xbb\xbf", b"null", b"[1]", b"\xff"]),
        st.integers(0, 99).map(lambda n: b'{"prompt": %d}' % n),
        st.integers(0, 99).map(lambda n: b'{"prompt": "\xc3\xa9%d"}\n' % n),
        st.binary(max_size=5),
    ),
    max_size=30,
).map(b"".join)


@given(
    content=contents,
    chunk_bytes=st.integers(1, 9),
    stride=st.integers(1, 6),
    strides_per_batch=st.integers(1, 3),
    limit=st.none() | st.integers(1, 12),
)
def test_any_bytes_are_planned_and_read_as_a_naive_reader_reads_them(
    tmp_path_factory: pytest.TempPathFactory,
    input_config: Configure,
    content: bytes,
    chunk_bytes: int,
    stride: int,
    strides_per_batch: int,
    limit: int | None,
) -> None:
    file = tmp_path_factory.mktemp("any") / "rows.jsonl"
    file.write_bytes(content)
    fs, path = file_system(str(file))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jsonl, "_CHUNK_BYTES", chunk_bytes)
        outline = jsonl.outline(fs, path, stride, limit)
    lines = naive_lines(content)[:limit]
    size, num_rows = stride * strides_per_batch, min(outline.num_rows, limit if limit is not None else outline.num_rows)
    cuts = outline.cut([min(size, num_rows - first) for first in range(0, num_rows, size)])
    assert [cut.num_rows for cut in cuts[:-1]] == [stride * strides_per_batch] * len(cuts[:-1])
    assert [line for cut in cuts for line in lines_of_cut(content, cut)] == lines
    config = input_config(file, format="jsonl")
    blocks = list(read_batches(config, as_batches(path, cuts), [], pa.schema([]))) if cuts else []
    assert [len(block.rows) for block in blocks] == [cut.num_rows for cut in cuts]
    assert numbered_rows(blocks) == [(number, naive_row(number, line)) for number, line in lines]


def lines_of_cut(content: bytes, cut: jsonl.Cut) -> list[tuple[int, bytes]]:
    """The rows that a cut's bytes hold."""
    piece = content[cut.first_byte : cut.first_byte + cut.num_bytes]
    return [(cut.first_row + offset, line) for offset, line in naive_lines(piece)][: cut.num_rows]


def as_batches(source: str, cuts: Sequence[jsonl.Cut]) -> list[Batch]:
    def each() -> Iterator[Batch]:
        rows_before = 0
        for batch_id, cut in enumerate(cuts):
            where = {name: getattr(cut, name) for name in ("first_row", "num_rows", "first_byte", "num_bytes", "row_group")}
            yield Batch(batch_id, source, None, 0, "", rows_before=rows_before, **where)
            rows_before += cut.num_rows

    return list(each())


@given(content=contents, limit=st.none() | st.integers(1, 12), committed=st.sets(st.integers(0, 30)))
def test_a_resumed_plan_reads_the_batches_that_are_left(
    tmp_path_factory: pytest.TempPathFactory,
    input_config: Configure,
    plan_of: PlanOf,
    blocks_of: BlocksOf,
    content: bytes,
    limit: int | None,
    committed: set[int],
) -> None:
    file = tmp_path_factory.mktemp("resumed") / "rows.jsonl"
    file.write_bytes(content)
    config = input_config(file, format="jsonl", limit=limit)
    plan = plan_of(config, needed=(), rows_per_batch=2)
    all_blocks = blocks_of(config, plan, needed=())
    left = blocks_of(config, plan, needed=(), batches=plan.without(committed))
    assert numbered_rows(left) == numbered_rows([block for n, block in enumerate(all_blocks) if n not in committed])


@pytest.mark.parametrize("suffix", COMPRESSIONS)
@given(content=contents, limit=st.none() | st.integers(1, 12), chunk_bytes=st.integers(1, 40), spool_rows=st.integers(1, 5))
def test_a_compressed_file_gives_the_rows_of_the_plain_one(
    tmp_path_factory: pytest.TempPathFactory,
    input_config: Configure,
    plan_of: PlanOf,
    blocks_of: BlocksOf,
    suffix: str,
    content: bytes,
    limit: int | None,
    chunk_bytes: int,
    spool_rows: int,
) -> None:
    folder = tmp_path_factory.mktemp("compressed")
    (folder / "rows.jsonl").write_bytes(content)
    with pa.CompressedOutputStream(str(folder / f"rows.jsonl{suffix}"), COMPRESSIONS[suffix]) as stream:
        stream.write(content)

    def read(name: str) -> tuple[Plan, list[Block]]:
        config = input_config(folder / name, format="jsonl", limit=limit)
        plan = plan_of(config, needed=(), rows_per_batch=3, run=Folder(str(folder / "run")))
        return plan, blocks_of(config, plan, needed=())

    plain_plan, plain = read("rows.jsonl")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jsonl, "_CHUNK_BYTES", chunk_bytes)
        patch.setattr(spool, "_GROUP_ROWS", spool_rows)
        spooled_plan, spooled = read(f"rows.jsonl{suffix}")
    assert spooled_plan.batches["num_rows"] == plain_plan.batches["num_rows"]
    assert numbered_rows(spooled) == numbered_rows(plain)


def test_blank_lines_are_no_rows_and_rows_keep_their_lines_number(read_bytes: Callable[..., list[Block]]) -> None:
    blocks = read_bytes(b'\n{"n": 1}\n\r\n\n{"n": 2}\n{"n": 3}\n\n')
    assert numbered_rows(blocks) == [(1, {"n": 1}), (4, {"n": 2}), (5, {"n": 3})]


@pytest.mark.parametrize("content", [b"", b"\n", b"\r\n", b"\n\r\n\n", b"\r"])
def test_a_file_of_blank_lines_has_no_rows(read_bytes: Callable[..., list[Block]], content: bytes) -> None:
    assert read_bytes(content) == []


@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
@pytest.mark.parametrize("last_end", [b"", b"\n", b"\r\n", b"\r"])
def test_line_ends_of_every_kind_give_the_same_rows(
    read_bytes: Callable[..., list[Block]], end: bytes, last_end: bytes
) -> None:
    content = end.join([b'{"n": 1}', b'{"n": "a\\r\\n"}', b'{"n": 3}']) + last_end
    assert numbered_rows(read_bytes(content)) == [(0, {"n": 1}), (1, {"n": "a\r\n"}), (2, {"n": 3})]


@pytest.mark.parametrize("suffix", ["", ".gz"])
@pytest.mark.parametrize("end", [b"", b"\n"])
def test_a_line_of_two_carriage_returns_is_a_row_wherever_it_stands(
    read_bytes: Callable[..., list[Block]], suffix: str, end: bytes
) -> None:
    content = b'{"n": 1}\n\r\r' + end
    blocks = read_bytes(gzip.compress(content) if suffix else content, name=f"rows.jsonl{suffix}")
    assert numbered_rows(blocks) == [(0, {"n": 1}), (1, ErrorKind.MALFORMED_ROW)]


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_a_byte_order_mark_is_no_part_of_the_first_row(read_bytes: Callable[..., list[Block]], suffix: str) -> None:
    content = b'\xef\xbb\xbf{"n": 1}\n{"n": 2}\n'
    blocks = read_bytes(gzip.compress(content) if suffix else content, name=f"rows.jsonl{suffix}", carry_columns=("n",))
    assert numbered_rows(blocks) == [(0, {"n": 1}), (1, {"n": 2})]


@pytest.mark.parametrize(
    ("line", "kind", "problem"),
    [
        (b'{"n": 1', ErrorKind.MALFORMED_ROW, "not JSON"),
        (b"{'n': 1}", ErrorKind.MALFORMED_ROW, "not JSON"),
        (b'{"n": 1} {"n": 2}', ErrorKind.MALFORMED_ROW, "not JSON"),
        (b"   ", ErrorKind.MALFORMED_ROW, "not JSON"),
        (b"\x00", ErrorKind.MALFORMED_ROW, "not JSON"),
        (b"[" * 100_000, ErrorKind.MALFORMED_ROW, "not JSON"),
        (b'{"n": ' + b"9" * 5000 + b"}", ErrorKind.MALFORMED_ROW, "not JSON"),
        (b"[1, 2]", ErrorKind.MALFORMED_ROW, "list, not an object"),
        (b'"text"', ErrorKind.MALFORMED_ROW, "str, not an object"),
        (b"null", ErrorKind.MALFORMED_ROW, "not an object"),
        (b'{"n": "\xff"}', ErrorKind.INVALID_TEXT, "not Unicode"),
        (b'{"n": "\xed\xa0\x80"}', ErrorKind.INVALID_TEXT, "not Unicode"),
        (b'{"n": "\\ud83d"}', ErrorKind.INVALID_TEXT, "not Unicode"),
        (b'{"n": "\\uDE00\\uD83D"}', ErrorKind.INVALID_TEXT, "not Unicode"),
        (b'{"\\ud83d": 1}', ErrorKind.INVALID_TEXT, "not Unicode"),
        (b'{"a": [{"b": "\\udc00"}]}', ErrorKind.INVALID_TEXT, "not Unicode"),
    ],
)
def test_a_bad_line_fails_its_own_row_and_no_other(
    read_bytes: Callable[..., list[Block]], line: bytes, kind: ErrorKind, problem: str
) -> None:
    blocks = read_bytes(b'{"n": 1}\n' + line + b'\n{"n": 3}\n', carry_columns=("n",))
    assert numbered_rows(blocks) == [(0, {"n": 1}), (1, kind), (2, {"n": 3})]
    error = blocks[0].rows[1]
    assert isinstance(error, RowError)
    assert error.message.startswith("line 2 is ")
    assert problem in error.message
    error.message.encode()
    assert [value for block in blocks for value in block.carried["n"].to_pylist()] == ["1", None, "3"]


def test_good_rows_stay_among_bad_lines_and_rows_of_other_shapes(read_bytes: Callable[..., list[Block]]) -> None:
    lines = [
        b'{"name": "a", "prompt": "x"}',
        b'{"name": "b", "pro',
        b'"text"',
        b"",
        b'{"name": 7, "prompt": ["x"]}',
        b'{"name": "7"}',
    ]
    blocks = read_bytes(b"\n".join(lines), carry_columns=("name",))
    assert numbered_rows(blocks) == [
        (0, {"name": "a", "prompt": "x"}),
        (1, ErrorKind.MALFORMED_ROW),
        (2, ErrorKind.MALFORMED_ROW),
        (4, {"name": 7, "prompt": ["x"]}),
        (5, {"name": "7"}),
    ]
    assert [text for block in blocks for text in block.carried["name"].to_pylist()] == ["a", None, None, "7", "7"]


def test_a_row_that_is_nested_too_deep_to_be_carried_fails_alone(read_bytes: Callable[..., list[Block]]) -> None:
    nested = [b"[" * depth + b"]" * depth for depth in range(1, 1200)]
    blocks = read_bytes(b"\n".join(b'{"n": %b}' % value for value in nested), carry_columns=("n",))
    carried = [text for block in blocks for text in block.carried["n"].to_pylist()]
    assert carried == [value.decode() if len(value) < 2 * 200 else None for value in nested]
    assert {row.kind for block in blocks for row in block.rows if isinstance(row, RowError)} == {ErrorKind.MALFORMED_ROW}


def test_a_row_with_many_brackets_but_little_nesting_is_read(read_bytes: Callable[..., list[Block]]) -> None:
    row = {"text": "[{" * 1000, "list": [{"a": []}] * 1000}
    assert numbered_rows(read_bytes(json.dumps(row).encode())) == [(0, row)]


@pytest.mark.parametrize(
    ("text", "value", "carried"),
    [
        (rb'"\ud83d\ude00"', "\U0001f600", "\U0001f600"),
        (rb'"\\ud83d"', r"\ud83d", r"\ud83d"),
        (rb'"\u0000"', "\0", "\0"),
        ('"\u2028\u0085"'.encode(), "\u2028\u0085", "\u2028\u0085"),
        (b"9007199254740993", 2**53 + 1, "9007199254740993"),
        (b"18446744073709551615", 2**64 - 1, "18446744073709551615"),
        (b"1180591620717411303424", 2**70, "1180591620717411303424"),
        (b'"2024-01-01"', "2024-01-01", "2024-01-01"),
        (b'"007"', "007", "007"),
        (b'"true"', "true", "true"),
        (b'"NA"', "NA", "NA"),
        (b'""', "", ""),
        (b"-" + b"9" * 4300, -int("9" * 4300), "-" + "9" * 4300),
        (b"0.1", 0.1, "0.1"),
        (b"true", True, "true"),
        (b"null", None, None),
        (b'{"b": ["\xc3\xa9", 1]}', {"b": ["é", 1]}, '{"b": ["é", 1]}'),
    ],
)
def test_a_value_is_read_as_it_stands_and_carried_as_text(
    read_bytes: Callable[..., list[Block]], text: bytes, value: Any, carried: str | None
) -> None:
    (block,) = read_bytes(b'{"n": ' + text + b"}\n", carry_columns=("n",))
    assert block.rows == [{"n": value}]
    assert block.carried.schema == pa.schema([("n", pa.string())])
    assert block.carried["n"].to_pylist() == [carried]


def test_a_carried_key_that_a_row_lacks_is_null(read_bytes: Callable[..., list[Block]]) -> None:
    (block,) = read_bytes(b'{"n": 1, "m": 2}\n{"m": 3}\n', carry_columns=("m", "n"))
    assert block.carried.to_pylist() == [{"m": "2", "n": "1"}, {"m": "3", "n": None}]


@pytest.mark.parametrize("suffix", ["", ".gz"])
@pytest.mark.parametrize("limit", [1, 2, 3, 4, 5, 99])
def test_a_limit_takes_the_first_rows(read_bytes: Callable[..., list[Block]], suffix: str, limit: int) -> None:
    content = b"\n" + b"".join(b'{"n": %d}\n\n' % n for n in range(4))
    blocks = read_bytes(gzip.compress(content) if suffix else content, name=f"rows.jsonl{suffix}", limit=limit)
    assert numbered_rows(blocks) == [(1 + 2 * n, {"n": n}) for n in range(min(limit, 4))]


def test_a_gzip_file_of_several_members_is_read_whole(read_bytes: Callable[..., list[Block]]) -> None:
    members = [gzip.compress(b'{"n": 1}\n{"n":'), gzip.compress(b""), gzip.compress(b' 2}\n{"n": 3}')]
    blocks = read_bytes(b"".join(members), name="rows.jsonl.gz")
    assert numbered_rows(blocks) == [(0, {"n": 1}), (1, {"n": 2}), (2, {"n": 3})]


def test_a_compressions_ending_may_be_in_capitals(read_bytes: Callable[..., list[Block]]) -> None:
    assert numbered_rows(read_bytes(gzip.compress(b'{"n": 1}\n'), name="ROWS.JSONL.GZ")) == [(0, {"n": 1})]


@pytest.mark.parametrize("suffix", COMPRESSIONS)
@pytest.mark.parametrize("damage", ["truncated", "not compressed"])
def test_a_damaged_compressed_file_is_refused_by_name_and_leaves_no_copy(
    tmp_path: Path, read_bytes: Callable[..., list[Block]], suffix: str, damage: str
) -> None:
    content = "".join(f'{{"n": {n * 7919 % 10007}}}\n' for n in range(1000)).encode()
    with pa.CompressedOutputStream(str(tmp_path / "whole"), COMPRESSIONS[suffix]) as stream:
        stream.write(content)
    damaged = (tmp_path / "whole").read_bytes()[:-9] if damage == "truncated" else content
    with pytest.raises(ConfigError, match=r"rows\.jsonl\.\w+ cannot be read as jsonl: .*\n.*input\.path"):
        read_bytes(damaged, name=f"rows.jsonl{suffix}")
    assert not [path for path in (tmp_path / "run").rglob("*") if path.is_file()]


def test_files_on_object_storage_are_spooled_and_read(
    tmp_path: Path, input_config: Configure, plan_of: PlanOf, blocks_of: BlocksOf
) -> None:
    bucket = Folder(f"memory:/{tmp_path}/bucket")
    bucket.write("in/a.jsonl.gz", gzip.compress(b'{"n": 1}\n'))
    bucket.write("in/b.jsonl", b'{"n": 2}\n')
    config = input_config(f"{bucket.url}/in", format="jsonl", carry_columns=("n",))
    plan = plan_of(config, needed=("n",), run=Folder(f"{bucket.url}/run"))
    assert numbered_rows(blocks_of(config, plan, needed=("n",))) == [(0, {"n": 1}), (0, {"n": 2})]
    bucket.remove()


def test_a_copy_of_other_rows_is_not_used(read_bytes: Callable[..., list[Block]]) -> None:
    content = gzip.compress(b'{"n": 1}\n{"n": 2}\n{"n": 3}\n')
    for limit in (1, 3):
        assert len(numbered_rows(read_bytes(content, name="rows.jsonl.gz", limit=limit))) == limit
    other = gzip.compress(b'{"n": 1}\n')
    assert len(numbered_rows(read_bytes(other, name="rows.jsonl.gz", limit=3))) == 1


def test_long_lines_are_copied_in_small_row_groups(tmp_path: Path, read_bytes: Callable[..., list[Block]]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(spool, "_GROUP_BYTES", 100)
        blocks = read_bytes(gzip.compress(b'{"n": "%b"}\n' % (b"x" * 60) * 9), name="rows.jsonl.gz")
    assert numbered_rows(blocks) == [(n, {"n": "x" * 60}) for n in range(9)]
    (copy,) = (tmp_path / "run" / "spool").iterdir()
    assert pq.ParquetFile(copy).metadata.num_row_groups == 5
