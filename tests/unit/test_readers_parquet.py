"""Reading Parquet by batch gives the file's rows, in order, however file and batches are cut."""

from collections.abc import Callable
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelines.config import FileInput
from pipelines.errors import ErrorKind, RowError
from pipelines.plan import Plan
from pipelines.readers import parquet
from pipelines.readers.jsonl import as_text
from pipelines.rows import Block

Configure = Callable[..., FileInput]
PlanOf = Callable[..., Plan]
BlocksOf = Callable[..., list[Block]]
ReadTable = Callable[..., list[Block]]

LISTS_OF_STRUCTS = pa.list_(pa.struct([("a", pa.list_(pa.struct([("b", pa.string())])))]))
NOT_UTF8 = pa.array([b"a", b"\xff\xfe", b"b"]).view(pa.string())


@pytest.fixture
def read_table(tmp_path: Path, input_config: Configure, plan_of: PlanOf, blocks_of: BlocksOf) -> ReadTable:
    """Write a table and read it by batches of two rows."""

    def read(table: pa.Table, *, needed: tuple[str, ...] = ("prompt",), carried: tuple[str, ...] = ()) -> list[Block]:
        pq.write_table(table, tmp_path / "rows.parquet")
        config = input_config(tmp_path / "rows.parquet", carry_columns=carried)
        return blocks_of(config, plan_of(config, needed=needed, rows_per_batch=2), needed=needed)

    return read


def rows_of(blocks: list[Block]) -> list[Any]:
    return [row for block in blocks for row in block.rows]


def carried_of(blocks: list[Block]) -> pa.Table:
    return pa.concat_tables([block.carried for block in blocks])


def write_groups(path: Path, sizes: list[int]) -> pa.Table:
    """Write a file with row groups of these sizes, empty ones too; its `prompt` counts the rows."""
    schema = pa.schema([("prompt", pa.string()), ("number", pa.int64())])
    table = pa.table({"prompt": [f"row {i}" for i in range(sum(sizes))], "number": range(sum(sizes))}, schema=schema)
    start = 0
    with pq.ParquetWriter(path, schema) as writer:
        for size in sizes:
            writer.write_table(table.slice(start, size))
            start += size
    return table


@pytest.mark.parametrize("rows_per_group", [1, 7, 10, 64, 1000])
@pytest.mark.parametrize("rows_per_batch", [1, 3, 10, 64, 1000])
def test_row_groups_smaller_and_larger_than_batches_give_the_same_rows(
    tmp_path: Path, input_config: Configure, plan_of: PlanOf, blocks_of: BlocksOf, rows_per_group: int, rows_per_batch: int
) -> None:
    table = pa.table({"prompt": [f"row {i}" for i in range(100)], "number": range(100)})
    pq.write_table(table, tmp_path / "rows.parquet", row_group_size=rows_per_group)
    config = input_config(tmp_path / "rows.parquet", carry_columns=("number",))
    blocks = blocks_of(config, plan_of(config, rows_per_batch=rows_per_batch))
    assert {len(block.rows) for block in blocks[:-1]} <= {rows_per_batch}
    assert rows_of(blocks) == table.select(["prompt"]).to_pylist()
    assert [number for block in blocks for number in block.source_rows] == list(range(100))
    assert carried_of(blocks).equals(table.select(["number"]))


@given(
    sizes=st.lists(st.integers(0, 9), max_size=8),
    rows_per_batch=st.integers(1, 12),
    decode_rows=st.integers(1, 12),
    committed=st.sets(st.integers(0, 71)),
)
def test_gaps_between_batches_as_after_a_resume_leave_the_other_rows_as_they_are(
    tmp_path_factory: pytest.TempPathFactory,
    input_config: Configure,
    plan_of: PlanOf,
    blocks_of: BlocksOf,
    sizes: list[int],
    rows_per_batch: int,
    decode_rows: int,
    committed: set[int],
) -> None:
    path = tmp_path_factory.mktemp("groups") / "rows.parquet"
    table = write_groups(path, sizes)
    config = input_config(path, carry_columns=("number",))
    plan = plan_of(config, rows_per_batch=rows_per_batch)
    pending = plan.without(committed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parquet, "DECODE_ROWS", decode_rows)
        blocks = blocks_of(config, plan, batches=pending)
    lines = pending.to_pylist()
    assert len(blocks) == len(lines)
    for line, block in zip(lines, blocks, strict=True):
        expected = table.slice(line["first_row"], line["num_rows"])
        assert block.rows == expected.select(["prompt"]).to_pylist()
        assert list(block.source_rows) == expected["number"].to_pylist()
        assert block.carried.equals(expected.select(["number"]))


def test_a_row_group_larger_than_what_is_decoded_at_once_is_read_whole(
    tmp_path: Path, input_config: Configure, plan_of: PlanOf, blocks_of: BlocksOf
) -> None:
    num_rows = 2 * parquet.DECODE_ROWS + 1
    table = write_groups(tmp_path / "rows.parquet", [num_rows])
    config = input_config(tmp_path / "rows.parquet")
    blocks = blocks_of(config, plan_of(config, rows_per_batch=parquet.DECODE_ROWS - 1))
    assert rows_of(blocks) == table.select(["prompt"]).to_pylist()


@pytest.mark.parametrize("sizes", [[], [0], [0, 0]])
def test_a_file_without_rows_has_no_batches(
    tmp_path: Path, input_config: Configure, plan_of: PlanOf, blocks_of: BlocksOf, sizes: list[int]
) -> None:
    write_groups(tmp_path / "rows.parquet", sizes)
    config = input_config(tmp_path / "rows.parquet")
    plan = plan_of(config)
    assert plan.num_batches == 0
    assert blocks_of(config, plan) == []


@pytest.mark.parametrize(
    ("column", "carried_type"),
    [
        (pa.array(["a", None, "b", "a"], pa.large_string()), pa.string()),
        (pa.array(["a", None, "b", "a"], pa.string_view()), pa.string()),
        (pa.array(["a", None, "b", "a"]).dictionary_encode(), pa.string()),
        (pa.array(["a", None, "b", "a"], pa.large_string()).dictionary_encode(), pa.string()),
        (pa.array([1, None, 2, 1]).dictionary_encode(), pa.int64()),
        (pa.array([2**53 + 1, None, -(2**63), 2**63 - 1], pa.int64()), pa.int64()),
        (pa.array([2**64 - 1, None, 2**53 + 1, 0], pa.uint64()), pa.uint64()),
        (pa.array([True, None, False, True]), pa.bool_()),
        (pa.array([b"\xff\x00", None, b"", b"a"]), pa.binary()),
        (pa.array([[1, None], None, [], [2]]), pa.list_(pa.int64())),
        (pa.array([{"role": "user"}, None, {"role": None}, {"role": "tool"}]), pa.struct([("role", pa.string())])),
        (pa.nulls(4), pa.null()),
        (pa.array([None, Decimal(2**70), Decimal(-1), Decimal(0)], pa.decimal128(38)), pa.decimal128(38)),
        (pa.array([None, Decimal("1.10"), Decimal("-0.01"), None]), pa.decimal128(3, 2)),
        (pa.array([date(2024, 1, 1), None, date(1, 1, 1), date(9999, 12, 31)]), pa.date32()),
        (pa.array([1, None, 0, -1], pa.timestamp("us", "UTC")), pa.timestamp("us", "UTC")),
        (pa.array([[None, [1]], None, [], [[]]], pa.list_(pa.list_(pa.int64()))), pa.list_(pa.list_(pa.int64()))),
        (pa.array([[1.5, None], None, [0, 1], [2, 3]], pa.list_(pa.float64(), 2)), pa.list_(pa.float64(), 2)),
        (pa.array([[{"a": None}], None, [None], [{"a": [{"b": "x"}]}]]), LISTS_OF_STRUCTS),
        (pa.array([b"\xff", None, b"", b"a"], pa.binary_view()), pa.binary()),
        (pa.array([["a", None], None, [], ["b"]], pa.list_(pa.string_view())), pa.list_(pa.string())),
        (pa.array([{"a": "x"}, None, {"a": None}, {}], pa.struct([("a", pa.large_string())])), pa.struct([("a", pa.string())])),
    ],
    ids=lambda value: str(value.type) if isinstance(value, pa.Array) else "",
)
def test_a_column_is_read_and_carried_value_for_value(
    read_table: ReadTable, column: pa.Array, carried_type: pa.DataType
) -> None:
    table = pa.table({"prompt": ["1", "2", "3", "4"], "value": column})
    blocks = read_table(table, needed=("prompt", "value"), carried=("value",))
    assert rows_of(blocks) == table.to_pylist()
    assert carried_of(blocks).schema.field("value").type == carried_type
    assert carried_of(blocks)["value"].to_pylist() == column.to_pylist()
    assert carried_of(blocks).filter(pa.array([False, True, False, True]))["value"].to_pylist() == column.to_pylist()[1::2]


def test_dictionaries_that_differ_between_row_groups_are_carried_as_text(
    tmp_path: Path, input_config: Configure, plan_of: PlanOf, blocks_of: BlocksOf
) -> None:
    words = [f"word {i % 7}" for i in range(50)]
    table = pa.table({"prompt": words, "topic": pa.array(words).dictionary_encode()})
    pq.write_table(table, tmp_path / "rows.parquet", row_group_size=3)
    config = input_config(tmp_path / "rows.parquet", carry_columns=("topic",))
    blocks = blocks_of(config, plan_of(config, rows_per_batch=8))
    assert carried_of(blocks)["topic"].to_pylist() == words


def test_files_that_encode_text_differently_are_carried_alike(
    tmp_path: Path, input_config: Configure, plan_of: PlanOf, blocks_of: BlocksOf
) -> None:
    text = pa.array(["a", "b"])
    for name, column in {"a": text, "b": text.cast(pa.large_string()), "c": text.dictionary_encode()}.items():
        pq.write_table(pa.table({"prompt": ["x", "y"], "topic": column}), tmp_path / f"{name}.parquet")
    config = input_config(tmp_path, carry_columns=("topic",))
    blocks = blocks_of(config, plan_of(config))
    assert carried_of(blocks)["topic"].to_pylist() == ["a", "b"] * 3


def test_a_carried_column_that_a_file_lacks_is_null_there(
    tmp_path: Path, input_config: Configure, plan_of: PlanOf, blocks_of: BlocksOf
) -> None:
    pq.write_table(pa.table({"prompt": ["x", "y"]}), tmp_path / "a.parquet")
    pq.write_table(pa.table({"prompt": ["z"], "topic": [[1, 2]]}), tmp_path / "b.parquet")
    config = input_config(tmp_path, carry_columns=("topic",))
    blocks = blocks_of(config, plan_of(config))
    assert carried_of(blocks)["topic"].to_pylist() == [None, None, [1, 2]]


def test_carried_columns_keep_the_order_of_the_setting(read_table: ReadTable) -> None:
    table = pa.table({"a": [1], "prompt": ["x"], "b": [2]})
    assert carried_of(read_table(table, carried=("b", "prompt", "a", "b"))).to_pylist() == [{"b": 2, "prompt": "x", "a": 1}]


def test_a_column_whose_name_has_a_dot_is_not_taken_for_a_field(read_table: ReadTable) -> None:
    table = pa.table({"prompt": ["x"], "prompt.id": [1], "a": [{"b": 2}], "a.b": [3]})
    blocks = read_table(table, needed=("prompt", "a.b"), carried=("a", "prompt.id"))
    assert rows_of(blocks) == [{"prompt": "x", "a.b": 3}]
    assert carried_of(blocks).to_pylist() == [{"a": {"b": 2}, "prompt.id": 1}]


def test_rows_of_which_no_column_is_needed_are_still_rows(read_table: ReadTable) -> None:
    table = pa.table({"prompt": ["x", "y", "z"]})
    assert rows_of(read_table(table, needed=())) == [{}, {}, {}]


def test_text_that_is_not_utf8_fails_its_own_row_and_no_other(read_table: ReadTable) -> None:
    first, bad, last = rows_of(read_table(pa.table({"prompt": NOT_UTF8, "id": [1, 2, 3]}), needed=("prompt", "id")))
    assert [first, last] == [{"prompt": "a", "id": 1}, {"prompt": "b", "id": 3}]
    assert isinstance(bad, RowError)
    assert bad.kind == ErrorKind.INVALID_TEXT
    assert bad.message.startswith("row 1 cannot be read: ")


def test_a_carried_text_that_is_not_utf8_is_carried_byte_for_byte(read_table: ReadTable) -> None:
    blocks = read_table(pa.table({"prompt": ["x", "y", "z"], "note": NOT_UTF8}), carried=("note",))
    assert rows_of(blocks) == [{"prompt": "x"}, {"prompt": "y"}, {"prompt": "z"}]
    assert carried_of(blocks)["note"].cast(pa.binary()).to_pylist() == [b"a", b"\xff\xfe", b"b"]


def test_a_date_that_python_cannot_hold_fails_its_own_row_and_no_other(read_table: ReadTable) -> None:
    times = pa.array([0, 2**62, 1_000_000], pa.timestamp("us"))
    first, bad, last = rows_of(read_table(pa.table({"prompt": times})))
    assert [first["prompt"], last["prompt"]] == [datetime(1970, 1, 1), datetime(1970, 1, 1, 0, 0, 1)]
    assert isinstance(bad, RowError)
    assert bad.kind == ErrorKind.MALFORMED_ROW


PLAIN = {dict, list, str, bytes, int, float, bool, type(None), datetime, date, time, timedelta, Decimal}


def types_in(value: Any) -> set[type]:
    """The types of a value and of all that it holds."""
    inner = [*value, *value.values()] if isinstance(value, dict) else value if isinstance(value, list) else []
    return {type(value)}.union(*(types_in(one) for one in inner))


@pytest.mark.parametrize(
    ("column", "values"),
    [
        (pa.array([[("a", 1), ("b", None)], None, []], pa.map_(pa.string(), pa.int64())), [{"a": 1, "b": None}, None, {}]),
        (pa.array([[[("a", "b")]], None, []], pa.list_(pa.map_(pa.string(), pa.string()))), [[{"a": "b"}], None, []]),
        (
            pa.array([1000, None, 0], pa.timestamp("ns", "UTC")),
            [datetime(1970, 1, 1, 0, 0, 0, 1, UTC), None, datetime(1970, 1, 1, tzinfo=UTC)],
        ),
        (
            pa.array([{"t": [1000]}, None, {"t": None}], pa.struct([("t", pa.list_(pa.timestamp("ns")))])),
            [{"t": [datetime(1970, 1, 1, 0, 0, 0, 1)]}, None, {"t": None}],
        ),
        (pa.array([1000, None, 0], pa.duration("ns")), [timedelta(microseconds=1), None, timedelta(0)]),
        (pa.array([1000, None, 0], pa.time64("ns")), [time(0, 0, 0, 1), None, time(0)]),
    ],
    ids=lambda value: str(value.type) if isinstance(value, pa.Array) else "",
)
def test_every_value_is_plain_python_at_every_depth(read_table: ReadTable, column: pa.Array, values: list[Any]) -> None:
    rows = rows_of(read_table(pa.table({"value": column}), needed=("value",)))
    assert [row["value"] for row in rows] == values
    assert types_in(rows) <= PLAIN


@pytest.mark.parametrize(
    "column",
    [
        pa.array([[("a", 1)], [("a", 1), ("a", 2)], []], pa.map_(pa.string(), pa.int64())),
        pa.array([0, 1, 1000], pa.timestamp("ns")),
        pa.array([0, 1, 1000], pa.time64("ns")),
    ],
    ids=lambda column: str(column.type),
)
def test_a_value_that_python_would_hold_with_a_loss_fails_its_own_row(read_table: ReadTable, column: pa.Array) -> None:
    rows = rows_of(read_table(pa.table({"value": column}), needed=("value",)))
    assert [row.kind if isinstance(row, RowError) else None for row in rows] == [None, ErrorKind.MALFORMED_ROW, None]


def test_ids_of_files_with_other_types_are_exact_texts(
    tmp_path: Path, input_config: Configure, plan_of: PlanOf, blocks_of: BlocksOf
) -> None:
    ids: dict[str, list[Any]] = {
        "a": pa.array([2**53 + 1, None, -(2**63)], pa.int64()),
        "b": pa.array([2**64 - 1, None], pa.uint64()),
        "c": pa.array([Decimal(2**70), Decimal("0")], pa.decimal128(38)),
        "d": pa.array(["007", "NA", "", " x"]),
        "e": pa.array(["2024-01-01", None]).dictionary_encode(),
        "f": pa.nulls(1),
    }
    for name, column in ids.items():
        pq.write_table(pa.table({"id": column, "prompt": ["x"] * len(column)}), tmp_path / f"{name}.parquet")
    config = input_config(tmp_path, id_column="id")
    blocks = blocks_of(config, plan_of(config, needed=("id",)), needed=("id",))
    assert [as_text(row["id"]) for row in rows_of(blocks)] == [
        "9007199254740993", None, "-9223372036854775808", "18446744073709551615", None, "1180591620717411303424", "0",
        "007", "NA", "", " x", "2024-01-01", None, None,
    ]  # fmt: skip


def test_a_column_of_nulls_is_carried_in_the_type_of_other_files(
    tmp_path: Path, input_config: Configure, plan_of: PlanOf, blocks_of: BlocksOf
) -> None:
    pq.write_table(pa.table({"prompt": pa.nulls(2), "topic": pa.nulls(2)}), tmp_path / "a.parquet")
    pq.write_table(pa.table({"prompt": ["x"], "topic": ["y"], "extra": [1]}), tmp_path / "b.parquet")
    config = input_config(tmp_path, carry_columns=("topic",))
    blocks = blocks_of(config, plan_of(config))
    assert rows_of(blocks) == [{"prompt": None}, {"prompt": None}, {"prompt": "x"}]
    assert carried_of(blocks)["topic"].to_pylist() == [None, None, "y"]


Column = tuple[pa.DataType, st.SearchStrategy[Any]]
"""A type and a strategy for its values."""


def list_of(inner: Column) -> Column:
    return pa.list_(inner[0]), st.none() | st.lists(inner[1], max_size=3)


def struct_of(inner: Column) -> Column:
    values = st.fixed_dictionaries({"a": inner[1], "b": st.none() | st.booleans()})
    return pa.struct([("a", inner[0]), ("b", pa.bool_())]), st.none() | values


def map_of(inner: Column) -> Column:
    return pa.map_(pa.string(), inner[0]), st.none() | st.dictionaries(st.sampled_from("xyz"), inner[1], max_size=3)


def nested(inner: st.SearchStrategy[Column]) -> st.SearchStrategy[Column]:
    return inner.map(list_of) | inner.map(struct_of) | inner.map(map_of)


leaves = st.sampled_from(
    [
        (pa.int64(), st.none() | st.integers(-(2**63), 2**63 - 1)),
        (pa.uint64(), st.none() | st.integers(0, 2**64 - 1)),
        (pa.string(), st.none() | st.text(st.characters(exclude_categories=("Cs",)), max_size=5)),
        (pa.binary(), st.none() | st.binary(max_size=5)),
        (pa.float64(), st.none() | st.floats(allow_nan=False)),
        (pa.timestamp("ns"), st.none() | st.datetimes(datetime(1800, 1, 1), datetime(2200, 1, 1))),
        (pa.decimal128(38, 2), st.none() | st.decimals(-(10**30), 10**30, places=2)),
    ]
)


@given(data=st.data(), rows_per_batch=st.integers(1, 5), rows_per_group=st.integers(1, 5))
def test_nested_values_of_any_shape_come_out_as_they_went_in(
    tmp_path_factory: pytest.TempPathFactory,
    input_config: Configure,
    plan_of: PlanOf,
    blocks_of: BlocksOf,
    data: st.DataObject,
    rows_per_batch: int,
    rows_per_group: int,
) -> None:
    data_type, value = data.draw(st.recursive(leaves, nested, max_leaves=4))
    values = data.draw(st.lists(value, max_size=8))
    path = tmp_path_factory.mktemp("nested") / "rows.parquet"
    column = pa.array(values, data_type)
    pq.write_table(pa.table({"value": column}), path, row_group_size=rows_per_group)
    config = input_config(path, carry_columns=("value",))
    blocks = blocks_of(config, plan_of(config, needed=("value",), rows_per_batch=rows_per_batch), needed=("value",))
    rows = rows_of(blocks)
    assert rows == [{"value": one} for one in values]
    assert types_in(rows) <= PLAIN
