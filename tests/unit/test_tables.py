"""Tables are copied as they were when they were named: every row, value and type, in their order."""

import io
import json
import shutil
import sqlite3
import struct
import sys
import uuid
from collections.abc import Callable, Sequence
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelines.config import DeltaInput, HuggingFaceInput, IcebergInput, LanceInput, SqlInput, TableInput
from pipelines.errors import ConfigError, RunFailed
from pipelines.tables import identify, spool

needs_lance = pytest.mark.skipif(find_spec("lance") is None, reason="pylance is too large for the development set-up (220 MB)")
CONFIGS = {"huggingface": HuggingFaceInput, "sql": SqlInput, "delta": DeltaInput, "iceberg": IcebergInput, "lance": LanceInput}
COMMON: dict[str, Any] = {
    "id_column": None,
    "ids": "allow",
    "prompt_column": "prompt",
    "messages_column": None,
    "request_column": None,
    "tools_column": None,
    "sampling_column": None,
    "schema_column": None,
    "expected_column": None,
    "carry_columns": (),
    "limit": None,
    "order": "as_is",
    "on_bad_file": "fail",
}
OWN: dict[str, dict[str, Any]] = {
    "huggingface": {"split": None},
    "sql": {},
    "delta": {"version": None},
    "iceberg": {"version": None},
    "lance": {"version": None},
}
BIG = 2**53 + 1
MESSAGE = pa.struct([("role", pa.string()), ("content", pa.string())])
# The first rows have nothing in some columns: a type that is guessed from them is wrong.
ROWS = pa.table(
    {
        "id": pa.array([None, BIG, None, -BIG], pa.int64()),
        "prompt": pa.array([None, "", "naïve 🥖\n\x00", "2024-01-01"], pa.string()),
        "price": pa.array([None, Decimal("12345678901234567890.123456789"), Decimal("-0.1"), None], pa.decimal128(38, 9)),
        "day": pa.array([None, date(2024, 2, 29), date(1, 1, 1), None], pa.date32()),
        "at": pa.array([None, datetime(2024, 1, 1, 1, 2, 3, 456789, UTC), None, None], pa.timestamp("us", "UTC")),
        "raw": pa.array([None, b"\x00\xff", b"", None], pa.binary()),
        "score": pa.array([None, 1.0, 0.1, float("inf")], pa.float64()),
        "messages": pa.array([[], [{"role": "user", "content": None}, None], [], []], pa.list_(MESSAGE)),
    }
)
MORE = ROWS.slice(1, 2)


def settings(kind: str, **own: Any) -> TableInput:
    """The settings of an input, with the defaults of its file in conf/input."""
    config: TableInput = CONFIGS[kind](format=kind, **{**COMMON, **OWN[kind], **own})
    return config


def copy_of(config: TableInput, version: str | None = None) -> pa.Table:
    """What the copy of a table holds."""
    target = io.BytesIO()
    spool(config, target, identify(config)[1] if version is None else version)
    return pq.read_table(target)


def rows_of(table: pa.Table) -> list[dict[str, Any]]:
    """Rows that compare exactly: 1 is not 1.0."""
    return [{name: repr(value) for name, value in row.items()} for row in table.to_pylist()]


def write_delta(folder: Path, rows: pa.Table) -> TableInput:
    from deltalake import write_deltalake

    write_deltalake(folder, rows, mode="append")
    return settings("delta", path=str(folder))


def write_iceberg(folder: Path, rows: pa.Table) -> TableInput:
    from pyiceberg.catalog import load_catalog

    folder.mkdir(exist_ok=True)
    properties = {"name": "books", "type": "sql", "uri": f"sqlite:///{folder}/catalog.db", "warehouse": f"file://{folder}"}
    catalog = load_catalog(**properties)
    catalog.create_namespace_if_not_exists("shop")
    catalog.create_table_if_not_exists("shop.prompts", schema=rows.schema).append(rows)
    return settings("iceberg", table="shop.prompts", catalog=properties)


def write_lance(folder: Path, rows: pa.Table) -> TableInput:
    import lance

    lance.write_dataset(rows, folder, mode="append" if folder.exists() else "create")
    return settings("lance", path=str(folder))


def write_hugging_face(folder: Path, rows: pa.Table) -> TableInput:
    from datasets import Dataset, concatenate_datasets, load_from_disk

    new = Dataset(rows)
    if folder.exists():
        new = concatenate_datasets([load_from_disk(str(folder), keep_in_memory=True), new])
        shutil.rmtree(folder)
    new.save_to_disk(str(folder))
    return settings("huggingface", path=str(folder))


versioned = pytest.mark.parametrize(
    "write", [write_delta, write_iceberg, pytest.param(write_lance, marks=needs_lance)], ids=["delta", "iceberg", "lance"]
)
typed = pytest.mark.parametrize(
    "write",
    [write_delta, write_iceberg, write_hugging_face, pytest.param(write_lance, marks=needs_lance)],
    ids=["delta", "iceberg", "huggingface", "lance"],
)
Write = Callable[[Path, pa.Table], TableInput]


@pytest.fixture
def sql(tmp_path: Path) -> Callable[..., TableInput]:
    """A table `t` in SQLite with untyped columns, and the input that selects all of it in order."""

    def make(columns: Sequence[str], rows: Sequence[Sequence[Any]], **own: Any) -> TableInput:
        with sqlite3.connect(tmp_path / "data.db") as connection:
            connection.execute(f"create table t ({', '.join(columns)})")
            connection.executemany(f"insert into t values ({', '.join('?' * len(columns))})", rows)
        connection.close()
        return settings(
            "sql", **{"query": "select * from t order by rowid", "connection": f"sqlite:///{tmp_path}/data.db", **own}
        )

    return make


@typed
def test_every_value_and_type_is_copied_as_it_is(tmp_path: Path, write: Write) -> None:
    copy = copy_of(write(tmp_path / "table", ROWS))
    assert rows_of(copy) == rows_of(ROWS)
    plain = copy.select(["id", "price", "day", "at", "score"])
    assert plain.schema.types == [ROWS.schema.field(name).type for name in plain.column_names]


@pytest.mark.parametrize("write", [write_delta, write_hugging_face, pytest.param(write_lance, marks=needs_lance)])
def test_a_conversation_that_is_null_stays_null(tmp_path: Path, write: Write) -> None:
    rows = pa.table({"messages": pa.array([None, [], None, [None]], pa.list_(MESSAGE))})
    assert copy_of(write(tmp_path / "table", rows)).to_pydict() == rows.to_pydict()


@typed
def test_rows_keep_their_order_and_row_groups_their_size(tmp_path: Path, write: Write) -> None:
    config = write(tmp_path / "table", pa.table({"n": range(40_000), "prompt": ["x"] * 40_000}))
    target = io.BytesIO()
    spool(config, target, identify(config)[1])
    assert pq.read_table(target)["n"].to_pylist() == list(range(40_000))
    metadata = pq.read_metadata(target)
    assert max(metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)) < 20_000


@typed
def test_row_groups_of_long_rows_hold_fewer_of_them(tmp_path: Path, write: Write) -> None:
    config = write(tmp_path / "table", pa.table({"prompt": [f"{i:04}" * 2**18 for i in range(150)]}))
    target = io.BytesIO()
    spool(config, target, identify(config)[1])
    metadata = pq.read_metadata(target)
    assert metadata.num_rows == 150
    assert max(metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)) < 128


@typed
def test_a_limit_copies_the_first_rows_only(tmp_path: Path, write: Write) -> None:
    config = write(tmp_path / "table", ROWS).model_copy(update={"limit": 3})
    assert rows_of(copy_of(config)) == rows_of(ROWS.slice(0, 3))


@typed
def test_an_empty_table_has_its_columns(tmp_path: Path, write: Write) -> None:
    copy = copy_of(write(tmp_path / "table", ROWS.slice(0, 0)))
    assert copy.num_rows == 0
    assert copy.column_names == ROWS.column_names


@versioned
def test_rows_that_are_added_later_are_not_in_the_version_that_was_named(tmp_path: Path, write: Write) -> None:
    config = write(tmp_path / "table", ROWS)
    name, version = identify(config)
    write(tmp_path / "table", MORE)
    assert identify(config)[0] == name
    assert identify(config)[1] != version
    assert rows_of(copy_of(config, version)) == rows_of(ROWS)
    assert copy_of(config).num_rows == len(ROWS) + len(MORE)


@versioned
def test_an_older_version_can_be_asked_for(tmp_path: Path, write: Write) -> None:
    config = write(tmp_path / "table", ROWS)
    number = int(identify(config)[1].partition("@")[0])
    write(tmp_path / "table", MORE)
    older = config.model_copy(update={"version": number})
    assert rows_of(copy_of(older)) == rows_of(ROWS)


@versioned
def test_a_version_that_does_not_exist_is_refused(tmp_path: Path, write: Write) -> None:
    config = write(tmp_path / "table", ROWS).model_copy(update={"version": 987654})
    with pytest.raises(ConfigError, match=r"input\.version=987654"):
        identify(config)


@pytest.mark.parametrize("write", [write_delta, pytest.param(write_lance, marks=needs_lance)], ids=["delta", "lance"])
def test_a_table_made_anew_has_another_version(tmp_path: Path, write: Write) -> None:
    config = write(tmp_path / "table", ROWS)
    _, version = identify(config)
    shutil.rmtree(tmp_path / "table")
    write(tmp_path / "table", MORE)
    assert identify(config)[1] != version
    with pytest.raises(RunFailed, match="start again"):
        copy_of(config, version)


def test_a_data_set_saved_anew_has_another_version(tmp_path: Path) -> None:
    config = write_hugging_face(tmp_path / "table", ROWS)
    _, version = identify(config)
    write_hugging_face(tmp_path / "table", MORE)
    assert identify(config)[1] != version
    with pytest.raises(RunFailed, match="start again"):
        copy_of(config, version)


@pytest.mark.parametrize("kind", ["delta", "huggingface", pytest.param("lance", marks=needs_lance)])
def test_a_place_without_a_table_is_named(tmp_path: Path, kind: str) -> None:
    with pytest.raises(ConfigError, match=rf"input\.path={tmp_path}/nothing"):
        identify(settings(kind, path=f"{tmp_path}/nothing"))


def test_an_iceberg_table_that_does_not_exist_is_named(tmp_path: Path) -> None:
    config = write_iceberg(tmp_path / "table", ROWS)
    with pytest.raises(ConfigError, match=r"input\.table=shop\.promts"):
        identify(config.model_copy(update={"table": "shop.promts"}))


@pytest.mark.parametrize(("kind", "module"), [("huggingface", "datasets"), ("delta", "deltalake"), ("lance", "lance")])
def test_a_missing_package_is_named_with_what_installs_it(monkeypatch: pytest.MonkeyPatch, kind: str, module: str) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError, match=rf"{module}: pip install 'fournee\[{kind}\]'"):
        identify(settings(kind, path="anywhere"))


def test_a_relative_path_is_named_from_the_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_delta(tmp_path / "table", ROWS)
    monkeypatch.chdir(tmp_path)
    config = settings("delta", path="table")
    assert identify(config)[0] == str(tmp_path / "table")
    assert len(copy_of(config)) == len(ROWS)


def test_delta_columns_keep_their_places_and_partitions_their_types(tmp_path: Path) -> None:
    from deltalake import write_deltalake

    rows = pa.table({"year": pa.array([2024, 2024, None], pa.int32()), "prompt": ["a", "b", "c"]})
    write_deltalake(tmp_path, rows, partition_by=["year"])
    copy = copy_of(settings("delta", path=str(tmp_path)))
    assert copy.schema.names == ["year", "prompt"]
    assert sorted(rows_of(copy), key=str) == sorted(rows_of(rows), key=str)


def test_delta_rows_that_a_deletion_vector_hides_stay_hidden(tmp_path: Path) -> None:
    write_delta(tmp_path, pa.table({"n": range(10)}))
    log = tmp_path / "_delta_log"
    add = next(line["add"] for line in map(json.loads, (log / f"{0:020}.json").read_text().splitlines()) if "add" in line)
    # What Spark writes for `delete from ... where n in (2, 5)`, which the Python package cannot write itself.
    vector = {"storageType": "i", "pathOrInlineDv": _inline_vector([2, 5]), "sizeInBytes": 36, "cardinality": 2}
    removed = {"path": add["path"], "deletionTimestamp": 1, "dataChange": True, "partitionValues": {}, "size": add["size"]}
    features = ["deletionVectors"]
    versions = {"minReaderVersion": 3, "minWriterVersion": 7, "readerFeatures": features, "writerFeatures": features}
    lines = [{"protocol": versions}, {"remove": removed}, {"add": {**add, "deletionVector": vector}}]
    (log / f"{1:020}.json").write_text("\n".join(map(json.dumps, lines)))
    assert copy_of(settings("delta", path=str(tmp_path)))["n"].to_pylist() == [0, 1, 3, 4, 6, 7, 8, 9]


def _inline_vector(deleted: Sequence[int]) -> str:
    """Row numbers as Delta's protocol writes them into the log: a roaring bitmap in Z85."""
    digits = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"
    bitmap = struct.pack(f"<IIHHI{len(deleted)}H", 12346, 1, 0, len(deleted) - 1, 16, *deleted)
    content = struct.pack("<IqI", 1681511377, 1, 0) + bitmap
    assert len(content) == 36
    words = struct.unpack(f">{len(content) // 4}I", content)
    return "".join(digits[word // 85**place % 85] for word in words for place in (4, 3, 2, 1, 0))


def test_an_iceberg_table_that_nothing_was_written_to_is_empty(tmp_path: Path) -> None:
    from pyiceberg.catalog import load_catalog

    config = write_iceberg(tmp_path / "table", ROWS)
    assert isinstance(config, IcebergInput)
    load_catalog(**config.catalog).create_table("shop.new", schema=ROWS.schema)
    copy = copy_of(config.model_copy(update={"table": "shop.new"}))
    assert (copy.num_rows, copy.column_names) == (0, ROWS.column_names)


@pytest.mark.parametrize(
    ("key", "value"),
    [("token", "hunter2"), ("s3.secret-access-key", "hunter2"), ("uri", "postgresql://me:hunter2@host/catalog")],
)
def test_secrets_in_an_iceberg_catalog_are_refused_without_being_shown(key: str, value: str) -> None:
    with pytest.raises(ConfigError, match=rf"input\.catalog\.{key} .* PYICEBERG_CATALOG__PROD__") as refused:
        identify(settings("iceberg", table="a.b", catalog={"name": "prod", "type": "rest", "uri": "http://host", key: value}))
    assert "hunter2" not in str(refused.value)


def test_a_selection_of_a_data_set_is_followed_row_by_row(tmp_path: Path) -> None:
    from datasets import Dataset

    Dataset(ROWS).select([3, 1]).with_format("numpy", columns=["id"]).save_to_disk(str(tmp_path / "picked"))
    copy = copy_of(settings("huggingface", path=str(tmp_path / "picked")))
    assert rows_of(copy) == rows_of(ROWS.take([3, 1]))


def test_pictures_are_not_decoded(tmp_path: Path) -> None:
    from datasets import Dataset, Features, Image, Value

    rows = {"prompt": ["look"], "picture": [{"bytes": b"no picture", "path": None}]}
    Dataset.from_dict(rows, Features({"prompt": Value("string"), "picture": Image()})).save_to_disk(str(tmp_path / "set"))
    assert copy_of(settings("huggingface", path=str(tmp_path / "set"))).to_pydict() == rows


def test_a_data_set_with_splits_wants_one_of_them(tmp_path: Path) -> None:
    from datasets import Dataset, DatasetDict

    DatasetDict({"train": Dataset(ROWS), "test": Dataset(MORE)}).save_to_disk(str(tmp_path))
    assert len(copy_of(settings("huggingface", path=str(tmp_path), split="test"))) == len(MORE)
    for split in (None, "tets"):
        with pytest.raises(ConfigError, match=r"input\.split=.*test"):
            identify(settings("huggingface", path=str(tmp_path), split=split))


def test_a_split_of_a_data_set_without_any_is_refused(tmp_path: Path) -> None:
    config = write_hugging_face(tmp_path / "table", ROWS)
    with pytest.raises(ConfigError, match=r"input\.split=train"):
        identify(config.model_copy(update={"split": "train"}))


@pytest.mark.parametrize(
    ("values", "expected_type"),
    [
        ([None, None], pa.string()),
        ([None, BIG, -(2**63)], pa.int64()),
        ([None, 1, 2.5], pa.float64()),
        ([None, "2024-01-01", "007"], pa.string()),
        ([None, b"\x00\xff", b""], pa.binary()),
    ],
)
def test_a_query_keeps_values_exactly(sql: Callable[..., TableInput], values: list[Any], expected_type: pa.DataType) -> None:
    column = copy_of(sql(["v"], [(value,) for value in values]))["v"]
    assert column.type == expected_type
    assert column.to_pylist() == values


@pytest.mark.parametrize(
    ("values", "texts"),
    [
        ([1, "a", None], ["1", "a", None]),
        ([BIG, 0.5], ["9007199254740993", "0.5"]),
        ([b"caf\xc3\xa9", "x"], ["café", "x"]),
    ],
)
def test_a_query_turns_values_that_fit_no_one_type_into_text(
    sql: Callable[..., TableInput], values: list[Any], texts: list[str | None]
) -> None:
    assert copy_of(sql(["v"], [(value,) for value in values]))["v"].to_pylist() == texts


def test_types_do_not_depend_on_the_first_rows_of_a_query(sql: Callable[..., TableInput]) -> None:
    rows = [(None, i) for i in range(10_000)] + [(BIG, "last")]
    copy = copy_of(sql(["id", "mixed"], rows))
    assert copy["id"].to_pylist() == [None] * 10_000 + [BIG]
    assert copy["mixed"].to_pylist() == [*map(str, range(10_000)), "last"]


@given(
    st.lists(
        st.none()
        | st.integers(-(2**63), 2**63 - 1)
        | st.floats(allow_nan=False)
        | st.text(st.characters(codec="utf-8", exclude_characters="\x00"))
        | st.binary()
    )
)
def test_a_query_loses_no_row_whatever_its_values(tmp_path_factory: pytest.TempPathFactory, values: list[Any]) -> None:
    path = tmp_path_factory.mktemp("sql") / "data.db"
    with sqlite3.connect(path) as connection:
        connection.execute("create table t (v)")
        connection.executemany("insert into t values (?)", [(value,) for value in values])
    connection.close()
    config = settings("sql", query="select v from t order by rowid", connection=f"sqlite:///{path}")
    copied = copy_of(config)["v"].to_pylist()
    kinds = {type(value) for value in values if value is not None}
    if len(kinds) <= 1:
        assert copied == values
    else:
        assert [value is None for value in copied] == [value is None for value in values]
        assert all(one == two for one, two in zip(copied, values, strict=True) if isinstance(two, str))


def test_a_query_is_taken_literally(sql: Callable[..., TableInput]) -> None:
    config = sql(["v"], [("a:b%",), ("c",)], query="select v, 'x:y' as w from t where v like 'a:%'")
    assert copy_of(config).to_pylist() == [{"v": "a:b%", "w": "x:y"}]


def test_the_first_rows_of_a_query_are_enough_where_there_is_a_limit(sql: Callable[..., TableInput]) -> None:
    assert copy_of(sql(["v"], [(1,), (2,), ("x",)], limit=2))["v"].to_pylist() == [1, 2]


def test_an_empty_result_has_its_columns(sql: Callable[..., TableInput]) -> None:
    copy = copy_of(sql(["id", "prompt"], []))
    assert (copy.num_rows, copy.column_names) == (0, ["id", "prompt"])


@pytest.mark.parametrize("query", ["select * from missing", "selec 1", "delete from t"])
def test_a_query_without_a_result_is_refused_and_changes_nothing(sql: Callable[..., TableInput], query: str) -> None:
    config = sql(["v"], [(1,)], query=query)
    with pytest.raises(ConfigError, match=r"input\.query="):
        copy_of(config)
    assert copy_of(config.model_copy(update={"query": "select v from t"}))["v"].to_pylist() == [1]


def test_another_query_or_database_is_another_version(sql: Callable[..., TableInput], tmp_path: Path) -> None:
    one = sql(["v"], [(1,)])
    (tmp_path / "other.db").touch()
    others = [{"query": "select 2"}, {"connection": f"sqlite:///{tmp_path}/other.db"}]
    versions = [identify(one.model_copy(update=change))[1] for change in ({}, *others)]
    assert len(set(versions)) == 3
    assert identify(one)[1] == versions[0]


def test_a_password_is_never_shown_and_not_part_of_the_version(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "data.db").touch()
    found = []
    for password in ("hunter2", "rotated"):
        monkeypatch.setenv("DB_URL", f"sqlite:///{tmp_path}/data.db?password={password}&mode=ro")
        found.append(identify(settings("sql", query="select 1", connection="env:DB_URL")))
    assert found[0] == found[1]
    assert found[0][0] == f"sqlite:///{tmp_path}/data.db"


@pytest.mark.parametrize(
    "connection",
    ["sqlite://me:hunter2@/data.db", "sqlite:///data.db?password=hunter2", "sqlite:///?odbc_connect=UID%3Dme%3BPWD%3Dhunter2"],
)
def test_a_password_in_the_settings_is_refused_without_being_shown(connection: str) -> None:
    with pytest.raises(ConfigError, match="env:NAME") as refused:
        identify(settings("sql", query="select 1", connection=connection))
    assert "hunter2" not in str(refused.value)


@pytest.mark.parametrize(
    ("connection", "said"),
    [
        ("env:NO_SUCH_VARIABLE", "NO_SUCH_VARIABLE is not set"),
        ("data.db", "no SQLAlchemy URL"),
        ("fancydb://host/data", "no dialect fancydb"),
        ("mysql+mysqldb://host/data", "needs the database's driver MySQLdb"),
        ("sqlite:////no/such/file.db", "no SQLite file /no/such/file.db"),
    ],
)
def test_a_connection_that_cannot_work_is_named(connection: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        identify(settings("sql", query="select 1", connection=connection))


DATABASE_TYPES: dict[str, tuple[Callable[[str], Any], pa.DataType, list[str | None], list[Any]]] = {
    "decimal": (
        Decimal,
        pa.decimal128(24, 4),
        [None, "1.5", "12345678901234567890", "-0.0001", "1E+3"],
        [None, Decimal("1.5"), Decimal("12345678901234567890"), Decimal("-0.0001"), Decimal(1000)],
    ),
    "long_decimal": (Decimal, pa.decimal256(40, 1), ["0.5", "9" * 39], [Decimal("0.5"), Decimal("9" * 39)]),
    "endless_decimal": (Decimal, pa.string(), ["1.5", "NaN", None], ["1.5", "NaN", None]),
    "day": (date.fromisoformat, pa.date32(), ["0001-01-01", "9999-12-31"], [date(1, 1, 1), date(9999, 12, 31)]),
    "moment": (
        datetime.fromisoformat,
        pa.timestamp("us"),
        ["2024-01-01T01:02:03.456789", None],
        [datetime(2024, 1, 1, 1, 2, 3, 456789), None],
    ),
    "zoned": (
        datetime.fromisoformat,
        pa.timestamp("us", "UTC"),
        ["2024-01-01T00:00:00+02:00", "2024-07-01T00:00:00+00:00"],
        [datetime(2023, 12, 31, 22, tzinfo=UTC), datetime(2024, 7, 1, tzinfo=UTC)],
    ),
    "clock": (time.fromisoformat, pa.time64("us"), ["01:02:03", None], [time(1, 2, 3), None]),
    "span": (lambda text: timedelta(seconds=float(text)), pa.duration("us"), ["1.5"], [timedelta(seconds=1.5)]),
    "flag": (lambda text: text == "1", pa.bool_(), ["1", "0", None], [True, False, None]),
    "uuid": (uuid.UUID, pa.string(), [f"{7:032}"], [str(uuid.UUID(f"{7:032}"))]),
    "json": (json.loads, pa.string(), ['{"a": ["\u00e9", null]}', "[1]"], ['{"a": ["\u00e9", null]}', "[1]"]),
}


@pytest.mark.parametrize("kind", DATABASE_TYPES)
def test_values_of_databases_with_more_types_than_sqlite_are_kept(sql: Callable[..., TableInput], kind: str) -> None:
    convert, expected_type, stored, expected = DATABASE_TYPES[kind]
    sqlite3.register_converter(f"text_{kind}", lambda content: convert(content.decode()))
    config = sql([f"v text_{kind}"], [(value,) for value in stored])
    assert isinstance(config, SqlInput)
    column = copy_of(config.model_copy(update={"connection": f"{config.connection}?detect_types=1"}))["v"]
    assert column.type == expected_type
    assert column.to_pylist() == expected


def test_a_value_that_nothing_can_hold_is_refused_with_its_column(sql: Callable[..., TableInput]) -> None:
    sqlite3.register_converter("text_own", lambda content: complex(content.decode()))
    config = sql(["odd text_own"], [("1j",)])
    assert isinstance(config, SqlInput)
    with pytest.raises(ConfigError, match="column odd has values of the database's own type complex"):
        copy_of(config.model_copy(update={"connection": f"{config.connection}?detect_types=1"}))
