"""The columns that a run asks for are checked before it starts, against those of all files."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipelines.config import FileInput
from pipelines.errors import ConfigError
from pipelines.plan import Plan
from pipelines.storage import Folder

PlanRows = Callable[..., Plan]


def write(folder: Path, file_format: str, name: str, rows: list[dict[str, Any]]) -> Path:
    """Write rows that all have the same keys."""
    path = folder / f"{name}.{file_format}"
    if file_format == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    elif file_format == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        path.write_text("\n".join([",".join(rows[0]), *(",".join(map(str, row.values())) for row in rows)]))
    return path


@pytest.fixture
def plan_rows(tmp_path: Path, input_config: Callable[..., FileInput], plan_of: Callable[..., Plan]) -> PlanRows:
    """Plan all files of a format, with the named settings and the columns that they ask for."""

    def plan(file_format: str, *, needed: tuple[str, ...] = (), **changes: Any) -> Plan:
        columns = [value for key, value in changes.items() if key.endswith("_column") and value is not None]
        config = input_config(tmp_path, format=file_format, **changes)
        return plan_of(config, needed=["prompt", *columns, *needed], run=Folder(str(tmp_path / "run")))

    return plan


@pytest.mark.parametrize("file_format", ["parquet", "jsonl", "csv"])
@pytest.mark.parametrize("key", ["id", "prompt", "messages", "request", "tools", "sampling", "schema"])
def test_a_column_that_no_file_has_is_refused_with_its_setting(
    tmp_path: Path, plan_rows: PlanRows, file_format: str, key: str
) -> None:
    path = write(tmp_path, file_format, "a", [{"prompt": "x", "values": "y"}])
    with pytest.raises(ConfigError) as refusal:
        plan_rows(file_format, **{f"{key}_column": "valuse"})
    assert str(refusal.value) == f"input.{key}_column: the column 'valuse' is not in {path}; did you mean values?"


@pytest.mark.parametrize("file_format", ["parquet", "jsonl", "csv"])
@pytest.mark.parametrize("key", ["tools", "sampling", "schema"])
def test_what_only_some_rows_have_of_their_own_may_be_absent_from_a_file(
    tmp_path: Path, plan_rows: PlanRows, file_format: str, key: str
) -> None:
    write(tmp_path, file_format, "a", [{"prompt": "x"}])
    write(tmp_path, file_format, "b", [{"prompt": "x", "own": "{}"}])
    assert plan_rows(file_format, **{f"{key}_column": "own"}).num_rows == 2


@pytest.mark.parametrize("file_format", ["parquet", "csv"])
@pytest.mark.parametrize("key", ["id", "messages", "request"])
def test_what_every_row_must_have_may_not_be_absent_from_a_file(
    tmp_path: Path, plan_rows: PlanRows, file_format: str, key: str
) -> None:
    write(tmp_path, file_format, "a", [{"prompt": "x"}])
    write(tmp_path, file_format, "b", [{"prompt": "x", "own": "{}"}])
    with pytest.raises(ConfigError, match=rf"input\.{key}_column: the column 'own' is not in .*a\.{file_format}; there are: "):
        plan_rows(file_format, **{f"{key}_column": "own"})


def test_a_key_that_json_lines_have_far_down_only_is_found(tmp_path: Path, plan_rows: PlanRows) -> None:
    write(tmp_path, "jsonl", "a", [{"prompt": "x"}] * 500)
    with pytest.raises(ConfigError, match=r"input\.sampling_column: the column 'schön' is not in "):
        plan_rows("jsonl", sampling_column="schön")
    write(tmp_path, "jsonl", "b", [{"prompt": "x"}] * 500 + [{"prompt": "x", "schön": {"temperature": 1}}])
    assert plan_rows("jsonl", sampling_column="schön").num_rows == 1001
    assert plan_rows("jsonl", carry_columns=("schön",)).carried == pa.schema([("schön", pa.string())])


@pytest.mark.parametrize("head", ["# no row\n" * 200, json.dumps({"prompt": "x" * 17 * 2**20}) + "\n"], ids=["bad", "long"])
def test_json_lines_whose_first_rows_show_no_key_are_looked_through(tmp_path: Path, plan_rows: PlanRows, head: str) -> None:
    (tmp_path / "a.jsonl").write_text(head + '{"prompt": "x", "uid": "a"}\n')
    assert plan_rows("jsonl", id_column="uid").carried == pa.schema([])
    with pytest.raises(ConfigError, match=r"input\.id_column: the column 'id' is not in "):
        plan_rows("jsonl", id_column="id")


@pytest.mark.parametrize("file_format", ["parquet", "jsonl", "csv"])
def test_request_bodies_need_no_url_and_method_beside_them(tmp_path: Path, plan_rows: PlanRows, file_format: str) -> None:
    write(tmp_path, file_format, "a", [{"prompt": "x", "body": "{}"}])
    write(tmp_path, file_format, "b", [{"prompt": "x", "body": "{}", "url": "/v1/completions"}])
    assert plan_rows(file_format, request_column="body", needed=("url", "method")).num_rows == 2
    with pytest.raises(ConfigError, match=r"prompt\.template: the column 'method' is not in "):
        plan_rows(file_format, needed=("method",))


@pytest.mark.parametrize("empty", [pa.nulls(2), pa.nulls(2, pa.string()), pa.nulls(2, pa.large_string())])
@pytest.mark.parametrize("names", ["ab", "ba"])
def test_a_column_of_nulls_takes_its_type_from_other_files(
    tmp_path: Path, plan_rows: PlanRows, empty: pa.Array, names: str
) -> None:
    pq.write_table(pa.table({"prompt": empty, "topic": empty}), tmp_path / f"{names[0]}.parquet")
    pq.write_table(pa.table({"prompt": ["x"], "topic": ["y"]}), tmp_path / f"{names[1]}.parquet")
    assert plan_rows("parquet", carry_columns=("topic",)).carried == pa.schema([("topic", pa.string())])


def test_prompts_of_two_types_are_refused_and_both_files_named(tmp_path: Path, plan_rows: PlanRows) -> None:
    write(tmp_path, "parquet", "a", [{"prompt": "x"}])
    write(tmp_path, "parquet", "b", [{"prompt": 12}])
    with pytest.raises(
        ConfigError, match=r"input\.prompt_column: 'prompt' is string in .*a\.parquet and int64 in .*b\.parquet"
    ):
        plan_rows("parquet")


def test_ids_and_conversations_may_be_of_another_type_in_each_file(tmp_path: Path, plan_rows: PlanRows) -> None:
    write(tmp_path, "parquet", "a", [{"prompt": "x", "id": 1, "chat": [{"role": "user", "content": "x"}]}])
    write(tmp_path, "parquet", "b", [{"prompt": "x", "id": "1", "chat": "[]"}])
    assert plan_rows("parquet", id_column="id", messages_column="chat", prompt_column=None).num_rows == 2
