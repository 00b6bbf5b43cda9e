"""The plan cuts the input's rows into batches, each row in exactly one, and the pending batches into shards."""

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import IO

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelines import tables
from pipelines.config import DeltaInput, FileInput
from pipelines.errors import ConfigError
from pipelines.plan import Plan, batches_of, make_plan, make_shards, num_rows_of
from pipelines.rows import Batch, Block
from pipelines.schema import PLAN
from pipelines.sources import list_sources
from pipelines.storage import Folder

Configure = Callable[..., FileInput]
PlanOf = Callable[..., Plan]


def write_rows(path: Path, num_rows: int, rows_per_group: int = 1000) -> None:
    """Write a file of so many rows, in the format that its name tells."""
    if path.suffix == ".parquet":
        table = pa.table({"prompt": pa.array([f"row {n}" for n in range(num_rows)], pa.string())})
        pq.write_table(table, path, row_group_size=rows_per_group)
    else:
        path.write_text("".join(f'{{"prompt": "row {n}"}}\n' for n in range(num_rows)))


@pytest.mark.parametrize("file_format", ["parquet", "jsonl"])
@given(
    sizes=st.lists(st.integers(0, 70), max_size=4),
    rows_per_batch=st.none() | st.integers(1, 80),
    limit=st.none() | st.integers(1, 300),
)
def test_the_plan_holds_every_row_exactly_once(
    tmp_path_factory: pytest.TempPathFactory,
    input_config: Configure,
    plan_of: PlanOf,
    file_format: str,
    sizes: list[int],
    rows_per_batch: int | None,
    limit: int | None,
) -> None:
    sizes = [*sizes, 1]
    folder = tmp_path_factory.mktemp("rows")
    for number, size in enumerate(sizes):
        write_rows(folder / f"{number}.{file_format}", size, rows_per_group=7)
    plan = plan_of(input_config(folder, format=file_format, limit=limit), rows_per_batch=rows_per_batch)
    batches = [Batch(**line) for line in plan.batches.to_pylist()]
    assert [batch.batch_id for batch in batches] == list(range(plan.num_batches))
    assert [batch.rows_before for batch in batches] == [0, *accumulate(batch.num_rows for batch in batches)][: len(batches)]
    planned = [(Path(batch.source).stem, row) for batch in batches for row in range(batch.first_row, batch.end_row)]
    assert planned == [(str(number), row) for number, size in enumerate(sizes) for row in range(size)][:limit]
    assert plan.num_rows == len(planned)
    for batch, following in pairwise(batches):
        assert batch.num_rows == max(b.num_rows for b in batches) or batch.source != following.source


def test_a_parquet_batch_knows_the_row_group_of_its_first_row(tmp_path: Path, input_config: Configure, plan_of: PlanOf) -> None:
    write_rows(tmp_path / "a.parquet", 20, rows_per_group=8)
    plan = plan_of(input_config(tmp_path), rows_per_batch=3)
    assert plan.batches["row_group"].to_pylist() == [0, 0, 0, 1, 1, 1, 2]


def test_an_input_without_rows_has_a_plan_without_batches(tmp_path: Path, input_config: Configure, plan_of: PlanOf) -> None:
    write_rows(tmp_path / "a.parquet", 0)
    plan = plan_of(input_config(tmp_path))
    assert (plan.num_batches, plan.num_rows) == (0, 0)
    assert plan.batches.schema == PLAN
    assert make_shards(plan.batches, 2) == []


def test_a_loaded_plan_is_the_saved_one(tmp_path: Path, input_config: Configure, plan_of: PlanOf) -> None:
    table = pa.table({"prompt": ["x"] * 40, "topic": [{"words": ["a"]}] * 40, "score": pa.array([1] * 40, pa.uint8())})
    pq.write_table(table, tmp_path / "a.parquet")
    plan = plan_of(input_config(tmp_path / "a.parquet", carry_columns=("score", "topic")))
    run = Folder(str(tmp_path / "run"))
    plan.save(run)
    loaded = Plan.load(run)
    assert loaded.batches.equals(plan.batches)
    assert loaded.batches.schema == PLAN
    assert loaded.carried == plan.carried == pa.schema([table.schema.field("score"), table.schema.field("topic")])


def test_an_empty_plan_can_be_saved_and_loaded(tmp_path: Path, input_config: Configure, plan_of: PlanOf) -> None:
    write_rows(tmp_path / "a.parquet", 0)
    run = Folder(str(tmp_path / "run"))
    plan_of(input_config(tmp_path / "a.parquet")).save(run)
    assert Plan.load(run).num_batches == 0


@pytest.mark.parametrize(
    ("committed", "left"),
    [([], [0, 1, 2, 3]), ([2, 0], [1, 3]), ([0, 1, 2, 3], []), ([7, 3, 3], [0, 1, 2])],
)
def test_the_pending_batches_are_those_without_a_part(
    tmp_path: Path, input_config: Configure, plan_of: PlanOf, committed: list[int], left: list[int]
) -> None:
    write_rows(tmp_path / "a.parquet", 8)
    plan = plan_of(input_config(tmp_path), rows_per_batch=2)
    assert plan.without(committed)["batch_id"].to_pylist() == left


def test_the_automatic_batch_size_follows_the_limit_and_not_the_file(
    tmp_path: Path, input_config: Configure, plan_of: PlanOf
) -> None:
    write_rows(tmp_path / "a.parquet", 5000)
    assert plan_of(input_config(tmp_path)).batches["num_rows"][0].as_py() == 64
    assert plan_of(input_config(tmp_path, limit=40)).batches["num_rows"].to_pylist() == [16, 16, 8]


@pytest.mark.parametrize("file_format", ["parquet", "jsonl"])
@pytest.mark.parametrize(
    ("changes", "needed", "key", "column", "hint"),
    [
        ({"prompt_column": "promt"}, ["promt"], "input.prompt_column", "promt", "did you mean prompt?"),
        ({"id_column": "qqq"}, ["prompt", "qqq"], "input.id_column", "qqq", "there are: prompt"),
        ({"carry_columns": ("prompt", "prompts")}, ["prompt"], "input.carry_columns", "prompts", "did you mean prompt?"),
        ({"prompt_column": None}, ["promptt"], "prompt.template", "promptt", "did you mean prompt?"),
    ],
)
def test_a_missing_column_is_refused_with_its_setting_and_the_likely_name(
    tmp_path: Path,
    input_config: Configure,
    plan_of: PlanOf,
    file_format: str,
    changes: dict[str, object],
    needed: list[str],
    key: str,
    column: str,
    hint: str,
) -> None:
    path = tmp_path / f"a.{file_format}"
    write_rows(path, 3)
    with pytest.raises(ConfigError) as refusal:
        plan_of(input_config(path, format=file_format, **changes), needed=needed)
    assert str(refusal.value) == f"{key}: the column {column!r} is not in {path}; {hint}"


def test_a_needed_column_must_be_in_every_parquet_file_that_has_rows(
    tmp_path: Path, input_config: Configure, plan_of: PlanOf
) -> None:
    write_rows(tmp_path / "a.parquet", 3)
    pq.write_table(pa.table({"text": pa.array([], pa.string())}), tmp_path / "b.parquet")
    assert plan_of(input_config(tmp_path)).num_rows == 3
    pq.write_table(pa.table({"text": ["x"]}), tmp_path / "c.parquet")
    with pytest.raises(ConfigError, match=r"'prompt' is not in .*c\.parquet"):
        plan_of(input_config(tmp_path))


def test_a_carried_column_of_two_types_is_refused_and_names_both_files(
    tmp_path: Path, input_config: Configure, plan_of: PlanOf
) -> None:
    pq.write_table(pa.table({"prompt": ["x"], "score": [1]}), tmp_path / "a.parquet")
    pq.write_table(pa.table({"prompt": ["x"], "score": ["1"]}), tmp_path / "b.parquet")
    assert plan_of(input_config(tmp_path)).num_rows == 2
    with pytest.raises(ConfigError, match=r"input\.carry_columns: 'score' is int64 in .*a\.parquet and string in .*b\.parquet"):
        plan_of(input_config(tmp_path, carry_columns=("score",)))


def test_a_carried_column_with_the_name_of_a_result_column_is_refused(
    tmp_path: Path, input_config: Configure, plan_of: PlanOf
) -> None:
    pq.write_table(pa.table({"prompt": ["x"], "id": [1], "text": ["y"]}), tmp_path / "a.parquet")
    assert plan_of(input_config(tmp_path, id_column="id"), needed=["prompt", "id", "text"]).num_rows == 1
    with pytest.raises(ConfigError, match=r"input\.carry_columns=\['id', 'text'\]"):
        plan_of(input_config(tmp_path, carry_columns=("text", "id")))


@pytest.mark.parametrize(("needed", "carried"), [(["twice"], ()), (["prompt"], ("twice",))])
def test_a_parquet_column_that_is_there_twice_is_refused(
    tmp_path: Path, input_config: Configure, plan_of: PlanOf, needed: list[str], carried: tuple[str, ...]
) -> None:
    columns = [pa.array(["x"]), pa.array(["y"]), pa.array(["z"])]
    pq.write_table(pa.Table.from_arrays(columns, names=["prompt", "twice", "twice"]), tmp_path / "a.parquet")
    assert plan_of(input_config(tmp_path)).num_rows == 1
    with pytest.raises(ConfigError, match=r"a\.parquet has 2 columns 'twice'"):
        plan_of(input_config(tmp_path, carry_columns=carried), needed=needed)


def damaged(whole: bytes) -> dict[str, bytes]:
    """A Parquet file in several kinds of distress."""
    footer = len(whole) - 8 - int.from_bytes(whole[-8:-4], "little")
    name = whole.index(b"prompt", footer)
    return {
        "zero-byte": b"",
        "truncated": whole[:-10],
        "headless": whole[len(whole) // 2 :],
        "no-parquet": b'{"prompt": "x"}\n' * 50,
        "bad-footer": whole[:-60] + b"\xff" * 52 + whole[-8:],
        "bad-name": whole[:name] + b"\xff" + whole[name + 1 :],
    }


@pytest.mark.parametrize("kind", ["zero-byte", "truncated", "headless", "no-parquet", "bad-footer", "bad-name"])
def test_a_damaged_parquet_file_is_refused_by_name(tmp_path: Path, input_config: Configure, plan_of: PlanOf, kind: str) -> None:
    pq.write_table(pa.table({"prompt": ["x"] * 9}), tmp_path / "whole.parquet", store_schema=False)
    (tmp_path / "bad.parquet").write_bytes(damaged((tmp_path / "whole.parquet").read_bytes())[kind])
    with pytest.raises(ConfigError, match=r"bad\.parquet cannot be read as parquet: .*\nRepair .*input\.path") as refusal:
        plan_of(input_config(tmp_path))
    assert "whole.parquet" not in str(refusal.value)


def test_all_damaged_parquet_files_are_named_at_once(tmp_path: Path, input_config: Configure, plan_of: PlanOf) -> None:
    write_rows(tmp_path / "whole.parquet", 3)
    for number in range(12):
        (tmp_path / f"bad-{number:02}.parquet").write_bytes(b"")
    with pytest.raises(ConfigError) as refusal:
        plan_of(input_config(tmp_path))
    assert [f"bad-{number:02}.parquet" in str(refusal.value) for number in range(12)] == [True] * 10 + [False] * 2
    assert "and 2 more" in str(refusal.value)


def planned(*files: Sequence[int | None]) -> pa.Table:
    """The batches of files, each given by its row groups' numbers of batches; None is a file without row groups."""
    places = [
        (f"file-{number}", None if num_batches is None else group)
        for number, groups in enumerate(files)
        for group, num_batches in enumerate(groups)
        for _ in range(3 if num_batches is None else num_batches)
    ]
    rest = {"source_bytes": 1, "source_version": "1", "num_rows": 64}
    lines = [
        {"batch_id": n, "source": source, "row_group": group, "first_row": n, "rows_before": n, **rest}
        for n, (source, group) in enumerate(places)
    ]
    return pa.Table.from_pylist(lines, schema=PLAN)


def shards_of(pending: pa.Table, num_workers: int) -> list[list[Batch]]:
    return [batches_of(shard) for shard in make_shards(pending, num_workers)]


@given(
    files=st.lists(st.lists(st.none() | st.integers(0, 150), max_size=3), max_size=3),
    num_workers=st.integers(1, 20),
    keep_every=st.integers(1, 4),
)
def test_every_pending_batch_is_in_exactly_one_shard(files: list[list[int | None]], num_workers: int, keep_every: int) -> None:
    batches = planned(*files)
    pending = batches.take(pa.array(range(0, len(batches), keep_every), pa.int64()))
    shards = shards_of(pending, num_workers)
    assert [batch for shard in shards for batch in shard] == [Batch(**line) for line in pending.to_pylist()]


def decodes(shards: list[list[Batch]]) -> float:
    """How often each batch is decoded on average: a shard decodes a row group from its start up to the shard's own end."""
    firsts: dict[tuple[str, int | None], int] = {}
    decoded = 0
    for shard in shards:
        ends = {(batch.source, batch.row_group): batch.first_row for batch in shard}
        for batch in shard:
            firsts.setdefault((batch.source, batch.row_group), batch.first_row)
        decoded += sum(end - firsts[group] + 1 for group, end in ends.items())
    return decoded / sum(len(shard) for shard in shards)


@pytest.mark.parametrize(
    ("num_groups", "num_workers", "most"), [(1, 1, 4.5), (1, 2, 4.5), (1, 8, 17), (4, 8, 4.5), (100, 64, 4.5)]
)
def test_a_row_group_of_many_batches_is_decoded_a_bounded_number_of_times(
    num_groups: int, num_workers: int, most: float
) -> None:
    shards = shards_of(planned([4000] * num_groups), num_workers)
    assert decodes(shards) <= most + 0.1
    assert decodes([[batch] for shard in shards for batch in shard]) == pytest.approx(2000.5)


@pytest.mark.parametrize("num_workers", [1, 3, 16, 100])
def test_one_row_group_is_enough_work_for_every_worker(num_workers: int) -> None:
    shards = shards_of(planned([10_000]), num_workers)
    assert len(shards) >= max(8, 4 * num_workers * 0.95)
    assert max(len(shard) for shard in shards) <= -(-10_000 // max(8, 4 * num_workers))


@pytest.mark.parametrize("num_workers", [1, 2, 5])
@pytest.mark.parametrize("files", [[[None]] * 5000, [[5] * 1000], [[3]] * 2000])
def test_the_last_batches_travel_alone_and_every_worker_has_several_shards(
    files: list[list[int | None]], num_workers: int
) -> None:
    shards = shards_of(planned(*files), num_workers)
    assert all(len(shard) == 1 for shard in shards[-2 * num_workers :])
    assert len(shards) >= 16 * num_workers


def test_small_row_groups_and_small_files_share_a_shard() -> None:
    for files in ([[1] * 6400], [[None]] * 6400):
        assert {len(shard) for shard in shards_of(planned(*files), 2)[:-5]} == {64}


def test_few_batches_travel_one_by_one() -> None:
    assert [len(shard) for shard in shards_of(planned([5], [None]), 4)] == [1] * 8


def test_a_shard_of_a_real_plan_carries_its_batches_unchanged(tmp_path: Path, input_config: Configure, plan_of: PlanOf) -> None:
    write_rows(tmp_path / "a.jsonl", 100)
    plan = plan_of(input_config(tmp_path, format="jsonl"), rows_per_batch=3)
    carried = [batch for shard in make_shards(plan.batches, 1) for batch in batches_of(shard)]
    assert carried == [Batch(**line) for line in plan.batches.to_pylist()]
    assert sum(num_rows_of(shard) for shard in make_shards(plan.batches, 1)) == plan.num_rows == 100


def test_a_table_is_planned_and_read_from_its_copy(
    tmp_path: Path, input_config: Configure, blocks_of: Callable[..., list[Block]], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Stands for a package that reads tables; test_tables.py has the real ones.
    def copy(config: DeltaInput, target: IO[bytes], version: str) -> None:
        pq.write_table(pa.table({"prompt": [f"version {version}"] * 5, "n": range(5)}).slice(0, config.limit), target)

    monkeypatch.setattr(tables, "identify", lambda config: ("delta:///rows", "7"))
    monkeypatch.setattr(tables, "spool", copy)
    files = input_config("rows", carry_columns=("n",), limit=4).model_dump(exclude={"format", "path"})
    config = DeltaInput(format="delta", path="rows", version=None, **files)
    sources = list_sources(config)
    plan = make_plan(config, sources, ["prompt"], Folder(str(tmp_path / "run")), rows_per_batch=2, num_workers=1)
    assert plan.batches.select(["source", "source_version", "first_row", "row_group"]).to_pylist() == [
        {"source": "delta:///rows", "source_version": "7", "first_row": first, "row_group": 0} for first in (0, 2)
    ]
    blocks = blocks_of(config, plan)
    assert [row for block in blocks for row in block.rows] == [{"prompt": "version 7"}] * 4
    assert [n for block in blocks for n in block.carried["n"].to_pylist()] == [0, 1, 2, 3]
    with pytest.raises(
        ConfigError, match=r"input\.prompt_column: the column 'promt' is not in delta:///rows; did you mean prompt\?"
    ):
        other = config.model_copy(update={"prompt_column": "promt"})
        make_plan(other, sources, ["promt"], Folder(str(tmp_path / "run")), rows_per_batch=2, num_workers=1)
