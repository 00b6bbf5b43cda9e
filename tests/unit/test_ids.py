"""`input.ids=require_unique` refuses null and repeated ids, compared as text, before the run starts."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelines.config import FileInput
from pipelines.errors import ConfigError
from pipelines.plan import Plan
from pipelines.storage import Folder

Check = Callable[..., Plan]


@pytest.fixture
def check(tmp_path: Path, input_config: Callable[..., FileInput], plan_of: Callable[..., Plan]) -> Check:
    """Plan JSON lines files with these ids, by batches of two rows."""

    def plan(*files: Sequence[Any], ids: str = "require_unique", **changes: Any) -> Plan:
        for number, values in enumerate(files):
            lines = [value if isinstance(value, bytes) else json.dumps({"id": value}).encode() for value in values]
            (tmp_path / f"{number}.jsonl").write_bytes(b"\n".join(lines))
        config = input_config(tmp_path, format="jsonl", id_column="id", ids=ids, **changes)
        return plan_of(config, needed=("id",), rows_per_batch=2)

    return plan


def test_unique_ids_of_any_kind_are_taken(check: Check) -> None:
    assert check(["a", "A", "a ", 1, 1.5, True, "", 2**70, 2**70 + 1, 2**53, 2**53 + 1], ["b", [1], {"x": 1}]).num_rows == 14


def test_repeated_and_null_ids_are_counted_and_shown_with_their_places(tmp_path: Path, check: Check) -> None:
    with pytest.raises(ConfigError) as refusal:
        check(["a", "b", None, "a"], [b"", "c", "b", "a", None])
    assert str(refusal.value) == (
        "input.ids=require_unique: in the column 'id', 2 ids are null and 3 are repeated "
        f"(null in {tmp_path}/0.jsonl, row 2; null in {tmp_path}/1.jsonl, row 4; "
        f'"a" in {tmp_path}/0.jsonl, row 0 and in {tmp_path}/0.jsonl, row 3; '
        f'"b" in {tmp_path}/0.jsonl, row 1 and in {tmp_path}/1.jsonl, row 2; '
        f'"a" in {tmp_path}/0.jsonl, row 0 and in {tmp_path}/1.jsonl, row 3). '
        "Put the ids right, or set input.ids=allow"
    )


def test_a_number_and_its_text_are_the_same_id(check: Check) -> None:
    with pytest.raises(ConfigError, match="0 ids are null and 1 are repeated"):
        check([1], ["1"])


def test_of_many_only_a_few_are_shown(check: Check) -> None:
    with pytest.raises(ConfigError, match="5000 ids are null and 4999 are repeated") as refusal:
        check(["x"] * 5000 + [None] * 5000)
    assert str(refusal.value).count("jsonl") == 3 + 2 * 3


def test_repeated_and_null_ids_are_allowed_where_the_settings_say_so(check: Check) -> None:
    assert check(["a", "a", None], ids="allow").num_rows == 3


def test_a_row_that_cannot_be_read_has_no_id(check: Check) -> None:
    assert check(["a", b"{", b"[1]", "b"]).num_rows == 4


def test_rows_behind_the_limit_are_not_looked_at(check: Check) -> None:
    assert check(["a", "b", "a"], limit=2).num_rows == 2


def test_ids_of_all_formats_are_compared(
    tmp_path: Path, input_config: Callable[..., FileInput], plan_of: Callable[..., Plan]
) -> None:
    for name, ids in {"a": pa.array([2**53, 2**53 + 1]), "b": pa.array(["9007199254740993", "x"])}.items():
        pq.write_table(pa.table({"id": ids}), tmp_path / f"{name}.parquet")
    (tmp_path / "c.csv").write_text("id\n007\n7\n007\n")
    with pytest.raises(ConfigError, match=r"\(\"9007199254740993\" in .*a\.parquet, row 1 and in .*b\.parquet, row 0\)"):
        plan_of(input_config(tmp_path, id_column="id", ids="require_unique"), needed=("id",))
    with pytest.raises(ConfigError, match=r"\(\"007\" in .*c\.csv, row 1 and in .*c\.csv, row 3\)"):
        config = input_config(tmp_path, format="csv", id_column="id", ids="require_unique")
        plan_of(config, needed=("id",), run=Folder(str(tmp_path / "run")))


def test_damage_that_planning_did_not_see_is_refused_or_passed_over(
    tmp_path: Path, input_config: Callable[..., FileInput], plan_of: Callable[..., Plan]
) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"id": [f"id {n}" for n in range(20)]}), path, row_group_size=10, write_page_checksum=True)
    content = bytearray(path.read_bytes())
    content[30:60] = b"\xa5" * 30
    path.write_bytes(content)
    config = input_config(path, id_column="id", ids="require_unique")
    with pytest.raises(ConfigError, match=r"a\.parquet, rows from 0, cannot be read: .*on_bad_file=skip"):
        plan_of(config, needed=("id",))
    assert plan_of(config.model_copy(update={"on_bad_file": "skip"}), needed=("id",)).num_rows == 20


@given(ids=st.lists(st.none() | st.integers(0, 12) | st.sampled_from("abc0123"), max_size=30))
def test_the_counts_are_those_of_a_set(
    tmp_path_factory: pytest.TempPathFactory,
    input_config: Callable[..., FileInput],
    plan_of: Callable[..., Plan],
    ids: list[Any],
) -> None:
    path = tmp_path_factory.mktemp("ids") / "a.jsonl"
    path.write_text("".join(json.dumps({"id": value}) + "\n" for value in ids))
    config = input_config(path, format="jsonl", id_column="id", ids="require_unique")
    texts = [str(value) for value in ids if value is not None]
    num_nulls, num_repeats = len(ids) - len(texts), len(texts) - len(set(texts))
    if num_nulls or num_repeats:
        with pytest.raises(ConfigError, match=f"{num_nulls} ids are null and {num_repeats} are repeated"):
            plan_of(config, needed=("id",), rows_per_batch=3)
    else:
        assert plan_of(config, needed=("id",), rows_per_batch=3).num_rows == len(ids)
