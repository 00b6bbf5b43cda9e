"""Delimited text is read character for character, and a bad line fails by itself."""

import csv
import gzip
import io
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelines import spool
from pipelines.config import FileInput
from pipelines.errors import ConfigError, ErrorKind, RowError
from pipelines.readers import csv as reader
from pipelines.rows import Block
from pipelines.storage import Folder

Configure = Callable[..., FileInput]
ReadBytes = Callable[..., list[Block]]

BOM = b"\xef\xbb\xbf"


@pytest.fixture
def read_bytes(
    tmp_path: Path, input_config: Configure, plan_of: Callable[..., Any], blocks_of: Callable[..., Any]
) -> ReadBytes:
    """Write a file and read its columns `id` and `prompt` by batches of two rows."""

    def read(content: bytes, *, name: str = "rows.csv", needed: tuple[str, ...] = ("id", "prompt"), **changes: Any) -> Any:
        (tmp_path / name).write_bytes(content)
        config = input_config(tmp_path / name, format="csv", **changes)
        plan = plan_of(config, needed=needed, rows_per_batch=2, run=Folder(str(tmp_path / "run")))
        return blocks_of(config, plan, needed=needed)

    return read


def rows_of(blocks: Sequence[Block]) -> list[Any]:
    """The values of each row, or the kind of its error."""
    return [
        row.kind if isinstance(row, RowError) else tuple(row.values())
        for block in blocks
        for row in block.rows
    ]  # fmt: skip


def lines_of(blocks: Sequence[Block]) -> list[int]:
    """The number of each row's line, as an editor shows it."""
    return [number + 1 for block in blocks for number in block.source_rows]


def errors_of(blocks: Sequence[Block]) -> list[str]:
    return [row.message for block in blocks for row in block.rows if isinstance(row, RowError)]


@pytest.mark.parametrize(
    "text",
    ["2024-01-01", "12", "007", "7.0", "1e3", "true", "NA", "null", "NaN", "", " ", " x ", "\t", "9007199254740993", "é", "\0"],
)
def test_a_value_is_text_character_for_character(read_bytes: ReadBytes, text: str) -> None:
    content = f'id,prompt\n"{text}","{text}"\n{text},x\n'.encode()
    assert rows_of(read_bytes(content)) == [(text, text), (text, "x")]


def test_a_quoted_value_may_hold_delimiters_quotes_and_line_ends(read_bytes: ReadBytes) -> None:
    content = b'id,prompt\r\n1,"a, b"\r\n2,"a ""b"" c"\r\n3,"one\r\ntwo\n\nfour\rfive"\r\n4,last\r\n'
    blocks = read_bytes(content)
    assert rows_of(blocks) == [("1", "a, b"), ("2", 'a "b" c'), ("3", "one\r\ntwo\n\nfour\rfive"), ("4", "last")]
    assert lines_of(blocks) == [2, 3, 4, 9]


def test_without_a_quote_every_character_is_as_it_is(read_bytes: ReadBytes) -> None:
    content = b'id\tprompt\n1\tsay "hi"\n"2\t"a, b\n'
    blocks = read_bytes(content, name="rows.tsv", delimiter="\t", quote=None)
    assert rows_of(blocks) == [("1", 'say "hi"'), ('"2', '"a, b')]


@pytest.mark.parametrize("content", [b"", b"\n", BOM, b"id,prompt", b"id,prompt\n\n\r\n"])
def test_a_file_without_lines_or_with_a_header_only_has_no_rows(read_bytes: ReadBytes, content: bytes) -> None:
    assert read_bytes(content) == []


def test_blank_lines_are_no_rows_and_rows_keep_their_lines_number(read_bytes: ReadBytes) -> None:
    blocks = read_bytes(b"\n\nid,prompt\n\n1,a\n\r\n\n2,b")
    assert rows_of(blocks) == [("1", "a"), ("2", "b")]
    assert lines_of(blocks) == [5, 8]


def test_in_a_file_of_one_column_a_quoted_nothing_is_a_row(read_bytes: ReadBytes) -> None:
    assert rows_of(read_bytes(b'prompt\n""\n\n" "\n', needed=("prompt",))) == [("",), (" ",)]


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-le"])
def test_a_byte_order_mark_is_no_part_of_the_first_name(read_bytes: ReadBytes, encoding: str) -> None:
    content = "\ufeffid,prompt\n1,é\n".encode(encoding.removesuffix("-sig"))
    assert rows_of(read_bytes(content, encoding=encoding)) == [("1", "é")]


@pytest.mark.parametrize(
    ("encoding", "text"), [("cp1252", "€ é"), ("utf-16", "é 😀"), ("shift_jis", "日本"), ("gb18030", "你好")]
)
def test_a_file_is_read_in_its_encoding(read_bytes: ReadBytes, encoding: str, text: str) -> None:
    content = f'id,prompt\n1,{text}\n2,"{text}\n{text}"\n'.encode(encoding)
    assert rows_of(read_bytes(content, encoding=encoding)) == [("1", text), ("2", f"{text}\n{text}")]


@pytest.mark.parametrize("encoding", ["utf-9", "hex", "a\0b"])
def test_an_encoding_that_does_not_exist_is_refused(read_bytes: ReadBytes, encoding: str) -> None:
    with pytest.raises(ConfigError, match=r"^input\.encoding="):
        read_bytes(b"id,prompt\n1,a\n", encoding=encoding)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"delimiter": "\n"}, "input.delimiter is a line end"),
        ({"quote": "\r"}, "input.quote is a line end"),
        ({"delimiter": '"'}, "input.delimiter and input.quote are both"),
    ],
)
def test_marks_that_cannot_be_told_apart_are_refused(read_bytes: ReadBytes, changes: dict[str, str], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        read_bytes(b"id,prompt\n1,a\n", **changes)


@pytest.mark.parametrize(
    ("line", "kind", "problem"),
    [
        (b"2", ErrorKind.MALFORMED_ROW, "line 3 has 1 values where 2 were expected"),
        (b"2,b,c", ErrorKind.MALFORMED_ROW, "line 3 has 3 values where 2 were expected"),
        (b"   ", ErrorKind.MALFORMED_ROW, "line 3 has 1 values where 2 were expected"),
        (b'2,"b"c', ErrorKind.MALFORMED_ROW, "line 3 is not delimited text: ',' expected after '\"'"),
        (b'2,"never closed', ErrorKind.MALFORMED_ROW, "line 3 is not delimited text: unexpected end of data"),
        (b"2," + b"x" * 200, ErrorKind.MALFORMED_ROW, "line 3 is not delimited text: field larger than field limit (100)"),
        (b"2,\xff\xfe", ErrorKind.INVALID_TEXT, "line 3 is not utf-8 text"),
        (b"2,\xed\xa0\x80", ErrorKind.INVALID_TEXT, "line 3 is not utf-8 text"),
        (b'2,"b\xff\nc"', ErrorKind.INVALID_TEXT, "line 3 is not utf-8 text"),
    ],
)
def test_a_bad_line_fails_its_own_row_and_no_other(
    read_bytes: ReadBytes, monkeypatch: pytest.MonkeyPatch, line: bytes, kind: ErrorKind, problem: str
) -> None:
    monkeypatch.setattr(reader, "_MAX_VALUE_CHARACTERS", 100)
    blocks = read_bytes(b"id,prompt\n1,a\n" + line + b"\n3,c\n4,d\n", carry_columns=("prompt",))
    assert rows_of(blocks) == [("1", "a"), kind, ("3", "c"), ("4", "d")]
    assert errors_of(blocks)[0].startswith(problem)
    assert [text for block in blocks for text in block.carried["prompt"].to_pylist()] == ["a", None, "c", "d"]


def test_a_stray_quote_takes_no_neighbour_along(read_bytes: ReadBytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "_MAX_VALUE_CHARACTERS", 300)
    good = [(str(n), "x" * 20) for n in range(3, 60)]
    content = b'id,prompt\n1,"stray\n2,"twice\n' + b"".join(f"{n},{text}\n".encode() for n, text in good) + b'60,"closed"\n'
    blocks = read_bytes(content)
    assert rows_of(blocks) == [ErrorKind.MALFORMED_ROW] * 2 + good + [("60", "closed")]
    assert lines_of(blocks) == list(range(2, 62))


def test_a_value_longer_than_what_the_csv_module_takes_by_itself_is_read(read_bytes: ReadBytes) -> None:
    text = "x" * 1_000_000
    assert rows_of(read_bytes(f"id,prompt\n1,{text}\n".encode())) == [("1", text)]


def test_names_can_be_given_where_there_is_no_header(read_bytes: ReadBytes) -> None:
    assert rows_of(read_bytes(b"1,a\n2,b\n", columns=("id", "prompt"))) == [("1", "a"), ("2", "b")]


def test_a_column_that_the_header_lacks_is_refused_with_the_likely_name(tmp_path: Path, read_bytes: ReadBytes) -> None:
    problem = rf"^input\.prompt_column: the column 'prompt' is not in {tmp_path}/rows\.csv; did you mean promt\?$"
    with pytest.raises(ConfigError, match=problem):
        read_bytes(b"id,promt\n1,a\n")


def test_a_name_that_is_there_twice_is_refused_only_if_it_is_asked_for(read_bytes: ReadBytes) -> None:
    content = b"id,prompt,x,x\n1,a,b,c\n"
    assert rows_of(read_bytes(content)) == [("1", "a")]
    with pytest.raises(ConfigError, match=r"^input\.carry_columns: .*rows\.csv has 2 columns 'x'; rename all but one$"):
        read_bytes(content, carry_columns=("x",))


def test_a_column_may_be_called_like_one_of_the_copys_own(read_bytes: ReadBytes) -> None:
    names = ("number", "error_kind", "error_message", "=number", "a.b", "")
    content = ",".join(names).encode() + b"\n1,2,3,4,5,6\n"
    (block,) = read_bytes(content, needed=names, carry_columns=names[:1])
    assert block.rows == [dict(zip(names, "123456", strict=True))]
    assert block.carried.to_pylist() == [{"number": "1"}]


@pytest.mark.parametrize(("suffix", "compression"), [(".gz", "gzip"), (".zst", "zstd"), (".bz2", "bz2")])
def test_a_compressed_file_is_read_like_a_plain_one(
    tmp_path: Path, read_bytes: ReadBytes, suffix: str, compression: str
) -> None:
    with pa.CompressedOutputStream(str(tmp_path / "whole"), compression) as stream:
        stream.write("id,prompt\n1,é\n2\n".encode())
    blocks = read_bytes((tmp_path / "whole").read_bytes(), name=f"rows.csv{suffix}")
    assert rows_of(blocks) == [("1", "é"), ErrorKind.MALFORMED_ROW]


@pytest.mark.parametrize("limit", [1, 2, 3, 99])
def test_a_limit_takes_the_first_rows(read_bytes: ReadBytes, limit: int) -> None:
    blocks = read_bytes(b"id,prompt\n\n1,a\n2\n3,c\n", limit=limit)
    assert rows_of(blocks) == [("1", "a"), ErrorKind.MALFORMED_ROW, ("3", "c")][:limit]


def test_a_copy_made_with_other_settings_is_not_used(read_bytes: ReadBytes) -> None:
    content = b"id,prompt;extra\n1,a;b\n2,c;d\n"
    with pytest.raises(ConfigError):
        read_bytes(content, limit=1)
    assert rows_of(read_bytes(content, needed=("prompt;extra",))) == [("a;b",), ("c;d",)]
    assert rows_of(read_bytes(content, needed=("extra",), delimiter=";")) == [("b",), ("d",)]


def test_files_with_other_columns_keep_their_rows_apart(
    tmp_path: Path, input_config: Configure, plan_of: Callable[..., Any], blocks_of: Callable[..., Any]
) -> None:
    (tmp_path / "a.csv").write_text("prompt,id\n12,1\n")
    (tmp_path / "b.csv.gz").write_bytes(gzip.compress(b"id,prompt,note\nx,hello,y\n"))
    config = input_config(tmp_path, format="csv", carry_columns=("note",))
    plan = plan_of(config, needed=("id", "prompt"), run=Folder(str(tmp_path / "run")))
    blocks = blocks_of(config, plan, needed=("id", "prompt"))
    assert [row for block in blocks for row in block.rows] == [{"id": "1", "prompt": "12"}, {"id": "x", "prompt": "hello"}]
    assert [text for block in blocks for text in block.carried["note"].to_pylist()] == [None, "y"]


texts = st.text(st.characters(exclude_categories=("Cs",)), max_size=6) | st.sampled_from(["", '"', ",", "\n", "\r\n", 'a"b'])


@given(table=st.lists(st.tuples(texts, texts), max_size=12), group_rows=st.integers(1, 5))
def test_what_pythons_writer_writes_is_what_is_read(
    tmp_path_factory: pytest.TempPathFactory,
    input_config: Configure,
    plan_of: Callable[..., Any],
    blocks_of: Callable[..., Any],
    table: list[tuple[str, str]],
    group_rows: int,
) -> None:
    folder = tmp_path_factory.mktemp("written")
    sink = io.StringIO(newline="")
    csv.writer(sink, quoting=csv.QUOTE_ALL).writerows([("id", "prompt"), *table])
    (folder / "rows.csv").write_text(sink.getvalue(), encoding="utf-8", newline="")
    config = input_config(folder / "rows.csv", format="csv")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(spool, "_GROUP_ROWS", group_rows)
        plan = plan_of(config, needed=("id", "prompt"), rows_per_batch=3, run=Folder(str(folder / "run")))
        blocks = blocks_of(config, plan, needed=("id", "prompt"))
    assert rows_of(blocks) == table


junk = st.lists(
    st.binary(max_size=6) | st.sampled_from([b'"', b",", b"\n", b"\r", b"\r\n", BOM, b'"a\nb"', b"\xff", b"\0", b"1,2\n"]),
    max_size=40,
).map(b"".join)


@given(content=junk.map(lambda junk: junk.replace(b'"', b"'")), quote=st.none() | st.just('"'))
def test_every_line_of_junk_that_is_not_blank_is_exactly_one_row(
    tmp_path_factory: pytest.TempPathFactory,
    input_config: Configure,
    plan_of: Callable[..., Any],
    blocks_of: Callable[..., Any],
    content: bytes,
    quote: str | None,
) -> None:
    path = tmp_path_factory.mktemp("junk") / "rows.csv"
    path.write_bytes(content)
    config = input_config(path, format="csv", quote=quote, columns=("id", "prompt"))
    blocks = blocks_of(config, plan_of(config, run=Folder(str(path.parent / "run"))))
    lines = content.removeprefix(BOM).replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
    assert lines_of(blocks) == [number for number, line in enumerate(lines, 1) if line]


@given(content=junk)
def test_no_line_of_junk_with_quotes_is_lost(
    tmp_path_factory: pytest.TempPathFactory,
    input_config: Configure,
    plan_of: Callable[..., Any],
    blocks_of: Callable[..., Any],
    content: bytes,
) -> None:
    path = tmp_path_factory.mktemp("quotes") / "rows.csv"
    path.write_bytes(content + b"\nid,1\n")
    config = input_config(path, format="csv", columns=("id", "prompt"))
    blocks = blocks_of(
        config, plan_of(config, needed=("id", "prompt"), run=Folder(str(path.parent / "run"))), needed=("id", "prompt")
    )
    lines = list(io.StringIO((content + b"\nid,1\n").removeprefix(BOM).decode("latin-1"), newline=""))
    starts = lines_of(blocks)
    assert not any(line.strip("\r\n") for line in lines[: starts[0] - 1])
    for start, following in pairwise([*starts, len(lines) + 1]):  # a row of several lines is one that Python's reader reads
        own = lines[start - 1 : following - 1]
        if any(line.strip("\r\n") for line in own[1:]):
            assert len([record for record in csv.reader(own, strict=True) if record]) == 1
