"""Looking into a run's folder: what is counted, found, drawn and compared, and how it is shown."""

import json
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from itertools import count as numbers
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from jobs import cli
from jobs.terminal import inline_diff, one_line
from pipelines.config import BatchConfig
from pipelines.errors import ConfigError, ErrorKind, ExitCode, Flag, RunFailed
from pipelines.inspection import WrittenRun, read_run
from pipelines.inspection.comparison import compare
from pipelines.inspection.rows import FailedRow, count, failed_rows, rows_with_ids, sample
from pipelines.parts import commit
from pipelines.plan import BadFile, Plan
from pipelines.rows import Batch
from pipelines.schema import PLAN, result_schema
from pipelines.statistics import Age, Origin, Timing, share_of, statistics_of
from pipelines.storage import Folder
from pipelines.summary import finish
from tests.unit.conftest import PRICING
from tests.unit.story import answer, echo

ROOT = Path(__file__).parents[2]
FINGERPRINT = "f" * 64

Row = dict[str, Any]
folder_numbers = numbers()


def new_folder() -> Folder:
    return Folder(f"memory://inspection/{next(folder_numbers)}")


def ok(source_row: int, text: str = "yes", **more: Any) -> Row:
    tokens = {"num_prompt_tokens": 3, "num_cached_tokens": 0, "num_output_tokens": 2, "finish_reason": "stop"}
    return {"id": f"r{source_row}", "source_row": source_row, "status": "ok", "text": text, "flags": [], **tokens, **more}


def failed(source_row: int, kind: ErrorKind = ErrorKind.MISSING_VALUE, message: str = "it is null", **more: Any) -> Row:
    error = {"status": "failed", "error_kind": kind.value, "error_message": message}
    return {"id": f"r{source_row}", "source_row": source_row, "flags": [], **error, **more}


def write_run(
    sources: Mapping[str, Sequence[Row]],
    *,
    folder: Folder | None = None,
    rows_per_batch: int = 3,
    missing: Sequence[int] = (),
    carried: pa.Schema | None = None,
    bad_files: Sequence[BadFile] = (),
    input_format: str = "jsonl",
) -> WrittenRun:
    """Write a run with these rows, all batches but the `missing` ones committed, and read it again."""
    folder, carried = folder or new_folder(), carried or pa.schema([])
    cuts = [
        (source, rows[start : start + rows_per_batch])
        for source, rows in sources.items()
        for start in range(0, len(rows), rows_per_batch)
    ]
    batches = [
        Batch(number, source, None, 1, "v", rows[0]["source_row"], len(rows), 0, None, None, None)
        for number, (source, rows) in enumerate(cuts)
    ]
    lines = [{name: getattr(batch, name) for name in PLAN.names} for batch in batches]
    Plan(pa.Table.from_pylist(lines, schema=PLAN), carried, tuple(bad_files), "3").save(folder)
    folder.write("run.json", json.dumps({"fingerprint": FINGERPRINT, "config": {"input": {"format": input_format}}}).encode())
    for batch, (source, rows) in zip(batches, cuts, strict=True):
        if batch.batch_id not in missing:
            whole = [
                {"source": source, "attempts": 1, "request_key": f"{batch.batch_id:08d}-{offset}", **row}
                for offset, row in enumerate(rows)
            ]
            write_part(folder, batch, pa.Table.from_pylist(whole, schema=result_schema(carried)))
    return read_run(folder.url)


def write_part(folder: Folder, batch: Batch, table: pa.Table, fingerprint: str = FINGERPRINT) -> None:
    origin = Origin(fingerprint, "w", "n", "CPU", 1, 1, PRICING)
    commit(folder, table, statistics_of(batch, table, Timing(0.0, 1.0), [share_of([], origin, Age(1.0, 0.0))], origin), "zstd")


def rows_of_a_source() -> st.SearchStrategy[list[Row]]:
    """Rows as a reader numbers them: in order, with gaps where lines are empty."""

    some_ok = st.builds(
        lambda text, flags, finish: (ok, {"text": text, "flags": flags, "finish_reason": finish}),
        st.sampled_from(["a", "b", "", "a [b] c\n"]),
        st.sampled_from([[], ["special_tokens"], ["special_tokens", "prompt_truncated"]]),
        st.sampled_from(["stop", "length"]),
    )
    filtered = st.builds(lambda name: (ok, {"flags": ["filtered"], "filtered_by": name}), st.sampled_from(["short", "rude"]))
    some_failed = st.builds(lambda kind: (failed, {"kind": kind}), st.sampled_from(ErrorKind))
    one = st.tuples(st.integers(1, 3), st.one_of(some_ok, filtered, some_failed))

    def place(drawn: list[tuple[int, tuple[Callable[..., Row], dict[str, Any]]]]) -> list[Row]:
        rows, at = [], -1
        for step, (build, values) in drawn:
            at += step
            rows.append(build(at, **values))
        return rows

    return st.lists(one, max_size=12).map(place)


@st.composite
def inputs(draw: st.DrawFn) -> dict[str, list[Row]]:
    return {name: draw(rows_of_a_source()) for name in draw(st.sets(st.sampled_from(["a", "b", "c"])).map(sorted))}


def committed_rows(sources: Mapping[str, Sequence[Row]], rows_per_batch: int, missing: Sequence[int]) -> list[Row]:
    """What `write_run` commits, by another way."""
    found, batch_id = [], 0
    for source, rows in sources.items():
        for offset, row in enumerate(rows):
            number = batch_id + offset // rows_per_batch
            if number not in missing:
                found.append({"source": source, **row})
        batch_id += -(-len(rows) // rows_per_batch)
    return found


@given(inputs(), st.integers(1, 5), st.sets(st.integers(0, 9)))
def test_every_planned_row_is_ok_or_failed_or_not_run_yet(
    sources: dict[str, list[Row]], rows_per_batch: int, missing: set[int]
) -> None:
    counts = count(write_run(sources, rows_per_batch=rows_per_batch, missing=sorted(missing)))
    rows = committed_rows(sources, rows_per_batch, sorted(missing))
    assert counts.num_planned == sum(map(len, sources.values())) == counts.num_ok + counts.num_failed + counts.num_not_run
    assert counts.num_ok == sum(row["status"] == "ok" for row in rows)
    assert counts.num_failed == sum(row["status"] == "failed" for row in rows)
    assert {one.error_kind: one.num_rows for one in counts.error_kinds} == Counter(
        row["error_kind"] for row in rows if row["status"] == "failed"
    )
    assert counts.flags == Counter(flag for row in rows for flag in row["flags"])
    assert counts.filtered_by == Counter(row["filtered_by"] for row in rows if "filtered_by" in row)
    assert counts.finish_reasons == Counter(row["finish_reason"] for row in rows if row["status"] == "ok")
    for one in counts.error_kinds:
        assert one.share == one.num_rows / len(rows)
        first = [(row["source"], row["source_row"]) for row in rows if row.get("error_kind") == one.error_kind][:3]
        assert [(row.source, row.source_row) for row in one.examples] == first
        assert failed_rows(read_run(counts.run), one.error_kind, limit=3).rows == one.examples


def test_files_that_the_plan_left_out_are_named() -> None:
    run = write_run({"a": [ok(0)]}, bad_files=[BadFile("b", "is no file of ours")])
    assert count(run).bad_files == (BadFile("b", "is no file of ours"),)


def test_a_failed_row_is_named_by_its_line_where_its_file_has_lines_and_keeps_its_answer() -> None:
    rows = {"a": [ok(0), failed(4, ErrorKind.INVALID_JSON, "no brace", text="{"), failed(9)]}
    (row,) = failed_rows(write_run(rows), "invalid_json", limit=5).rows
    assert row == FailedRow("r4", "a", 4, 5, "invalid_json", "no brace", "{")
    (row,) = failed_rows(write_run(rows, input_format="parquet"), "invalid_json", limit=5).rows
    assert (row.source_row, row.line) == (4, None)


def test_no_more_failed_rows_than_asked_for_are_shown_but_all_are_counted() -> None:
    run = write_run({"a": [failed(row) for row in range(10)]}, rows_per_batch=2)
    found = failed_rows(run, "missing_value", limit=3)
    assert [row.source_row for row in found.rows] == [0, 1, 2]
    assert found.num_rows == 10


def test_an_error_kind_that_did_not_occur_is_no_mistake_but_one_that_does_not_exist_is() -> None:
    run = write_run({"a": [failed(0)]})
    found = failed_rows(run, "truncated", limit=3)
    assert (found.num_rows, found.rows, found.error_kinds) == (0, (), {"missing_value": 1})
    with pytest.raises(ConfigError, match=r"--kind=truncatd is not an error kind; did you mean truncated\?"):
        failed_rows(run, "truncatd", limit=3)


@pytest.mark.parametrize("rows", [[ok(0), ok(1), ok(2)], [ok(0), ok(1)]], ids=["another run's", "too few rows"])
def test_a_part_that_is_not_as_the_plan_says_is_not_counted_as_if_it_were(rows: list[Row]) -> None:
    run = write_run({"a": [ok(0), ok(1), ok(2), ok(3)]})
    lines = [{"source": "a", "attempts": 1, "request_key": "k", **row} for row in rows]
    table = pa.Table.from_pylist(lines, schema=result_schema(pa.schema([])))
    batch = Batch(0, "a", None, 1, "v", 0, len(rows), 0, None, None, None)
    write_part(run.folder, batch, table, FINGERPRINT if len(rows) == 2 else "e" * 64)
    with pytest.raises(RunFailed, match=r"results/part-00000000.parquet is no part of this run"):
        count(run)


def test_parts_that_are_not_in_the_plan_do_not_count() -> None:
    run = write_run({"a": [ok(0), ok(1)]})
    run.folder.write("results/part-00000099.parquet", run.folder.read("results/part-00000000.parquet"))
    counts = count(read_run(run.folder.url))
    assert (counts.num_planned, counts.num_ok, counts.num_not_run) == (2, 2, 0)


def test_a_sample_is_drawn_from_the_answered_rows_alone_and_again_by_its_seed() -> None:
    rows = [failed(row) if row % 3 == 0 else ok(row, f"answer {row}") for row in range(60)]
    run = write_run({"a": rows}, rows_per_batch=7, missing=[2])
    answered = [row for row in committed_rows({"a": rows}, 7, [2]) if row["status"] == "ok"]
    drawn = [sample(run, 5, seed=seed) for seed in range(60)]
    assert drawn == [sample(run, 5, seed=seed) for seed in range(60)]
    for rows_of_one_seed in drawn:
        assert len({row.source_row for row in rows_of_one_seed}) == 5
        assert all(row.text == f"answer {row.source_row}" for row in rows_of_one_seed)
    assert {row.source_row for some in drawn for row in some} == {row["source_row"] for row in answered}
    assert [row.source_row for row in sample(run, 10**6, seed=0)] == [row["source_row"] for row in answered]


@pytest.mark.parametrize("missing", [(), (0,)], ids=["all rows failed", "nothing was run"])
def test_a_sample_of_nothing_is_empty(missing: Sequence[int]) -> None:
    assert sample(write_run({"a": [failed(0)]}, missing=missing), 5, seed=0) == ()


def test_rows_are_found_by_their_ids_with_all_that_is_known_about_them() -> None:
    carried = pa.schema([("day", pa.timestamp("s")), ("raw", pa.binary())])
    rows = {
        "a": [ok(0), ok(1, id="x", day=datetime(2026, 1, 2), raw=b"\xff"), ok(2)],
        "b": [ok(0, id="x"), ok(1, id=None), failed(2, id="y z")],
    }
    found = rows_with_ids(write_run(rows, rows_per_batch=2, carried=carried), ["y z", "x", "not there"], limit=9)
    assert (found.num_rows, found.not_found) == (3, ("not there",))
    assert [(row["source"], row["source_row"]) for row in found.rows] == [("a", 1), ("b", 0), ("b", 2)]
    assert (found.rows[0]["day"], found.rows[0]["raw"]) == (datetime(2026, 1, 2), b"\xff")
    assert "day" not in found.rows[1]
    assert found.rows[2]["error_message"] == "it is null"


def test_a_repeated_id_shows_its_first_rows_and_counts_them_all() -> None:
    run = write_run({"a": [ok(row, id="same") for row in range(50)]}, rows_per_batch=4)
    found = rows_with_ids(run, ["same"], limit=5)
    assert found.num_rows == 50
    assert [row["source_row"] for row in found.rows] == [0, 1, 2, 3, 4]


def test_a_carried_value_that_python_cannot_hold_is_shown_all_the_same() -> None:
    carried = pa.schema([("day", pa.timestamp("s"))])
    run = write_run({"a": [ok(0)]}, carried=carried)
    table = pa.Table.from_pylist(
        [{"source": "a", "attempts": 1, "request_key": "00000000-0", **ok(0)}], schema=result_schema(carried)
    )
    table = table.set_column(table.schema.get_field_index("day"), carried[0], pa.array([10**13]).cast(pa.timestamp("s")))
    write_part(run.folder, Batch(0, "a", None, 1, "v", 0, 1, 0, None, None, None), table)
    (row,) = rows_with_ids(run, ["r0"], limit=1).rows
    assert "out of range" in row["day"]


@given(inputs(), inputs(), st.tuples(st.integers(1, 5), st.integers(1, 5)), st.sets(st.integers(0, 9)))
@example({"a": [ok(row) for row in range(12)]}, {"a": [ok(row) for row in range(12)]}, (1, 5), {0, 1, 5})
def test_two_runs_are_compared_row_by_row_whatever_their_batches(
    before: dict[str, list[Row]], after: dict[str, list[Row]], sizes: tuple[int, int], missing: set[int]
) -> None:
    runs = [
        write_run(sources, rows_per_batch=size, missing=sorted(missing))
        for sources, size in zip((before, after), sizes, strict=True)
    ]
    found = compare(*runs, limit=3)
    old, new = (
        {(row["source"], row["source_row"]): row for row in committed_rows(sources, size, sorted(missing))}
        for sources, size in zip((before, after), sizes, strict=True)
    )
    both = [(old[place], new[place]) for place in old if place in new]
    changes = Counter(change_of(*pair) for pair in both)
    assert found.num_both == len(both)
    assert (found.num_only_run, found.num_only_other) == (len(old) - len(both), len(new) - len(both))
    assert found.num_same == changes["same"]
    assert found.num_different == changes["different"]
    assert found.num_ok_to_failed == changes["ok_to_failed"]
    assert found.num_failed_to_ok == changes["failed_to_ok"]
    assert found.num_both_failed == changes["both_failed"]
    for change in ("ok_to_failed", "failed_to_ok", "different"):
        first = [(a["source"], a["source_row"]) for a, b in both if change_of(a, b) == change][:3]
        assert [(one.source, one.source_row) for one in found.examples if one.change == change] == first


def change_of(before: Row, after: Row) -> str:
    match before["status"], after["status"]:
        case "ok", "ok":
            return "same" if before["text"] == after["text"] else "different"
        case "ok", "failed":
            return "ok_to_failed"
        case "failed", "ok":
            return "failed_to_ok"
        case _:
            return "both_failed"


@pytest.mark.parametrize("column, one, other", [
    ("text", "4", "5"),
    ("tool_calls", '[{"id": "a"}]', None),
    ("parsed", "1", "2"),
    ("embedding", [0.5, 1.5], [0.5, 1.25]),
    ("embedding", [0.5], [0.5, 0.5]),
    ("embedding", None, [0.5]),
])  # fmt: skip
def test_answers_differ_in_whatever_the_model_gave(column: str, one: Any, other: Any) -> None:
    rows = [ok(0, **{column: one}), ok(1, **{column: other}), ok(2, **{column: one})]
    run, changed = write_run({"a": rows}), write_run({"a": [rows[0], rows[1], ok(2, **{column: other})]})
    assert compare(run, run, limit=1).num_same == 3
    found = compare(run, changed, limit=1)
    assert (found.num_same, found.num_different) == (2, 1)
    assert (found.examples[0].before.get(column), found.examples[0].after.get(column)) == (one, other)


def test_two_real_runs_with_other_batches_match(
    batch_config: Callable[..., BatchConfig], jsonl: Callable[..., Path], tmp_path: Path
) -> None:
    path = jsonl([{"id": f"r{i}", "prompt": None if i % 7 == 0 else f"say {i}"} for i in range(45)])
    run, _, _ = answer(batch_config(*echo(path, str(tmp_path / "one"))))
    other, _, _ = answer(batch_config(*echo(path, str(tmp_path / "other"), "engine.rows_per_batch=16")), most_shards=2)
    counts = count(read_run(run.folder.url))
    assert (counts.num_planned, counts.num_ok, counts.num_failed, counts.num_not_run) == (45, 38, 7, 0)
    there = count(read_run(other.folder.url))
    found = compare(read_run(run.folder.url), read_run(other.folder.url), limit=1)
    assert 0 < there.num_not_run < 45
    assert found.num_both == found.num_same + found.num_both_failed == there.num_ok + there.num_failed
    assert (found.num_only_run, found.num_only_other) == (there.num_not_run, 0)


def test_a_finished_run_is_counted_from_its_table_as_from_its_footers(
    batch_config: Callable[..., BatchConfig], jsonl: Callable[..., Path], tmp_path: Path
) -> None:
    path = jsonl([{"id": f"r{i}", "prompt": None if i % 7 == 0 else f"say {i}"} for i in range(45)])
    config = batch_config(*echo(path, str(tmp_path / "run"), "errors.max_failed_fraction=1"))
    run, plan, _ = answer(config)
    before, drawn = count(read_run(run.folder.url)), sample(read_run(run.folder.url), 4, seed=2)
    assert not before.is_finished
    finish(run, plan, config)
    finished = read_run(run.folder.url)
    assert count(finished) == replace(before, is_finished=True)
    assert sample(finished, 4, seed=2) == drawn
    for name in run.folder.names("results")[1:]:  # their footers are not needed
        run.folder.write(f"results/{name}", b"")
    assert count(finished, num_examples=1).num_failed == 7


def test_a_finished_run_that_lost_a_part_counts_what_is_left() -> None:
    run = write_run({"a": [ok(row) for row in range(5)]})
    run.folder.write("_SUCCESS", b"")
    run.folder.delete("results/part-00000001.parquet")
    counts = count(read_run(run.folder.url))
    assert (counts.num_ok, counts.num_not_run) == (3, 2)


def inspect(*arguments: str) -> int:
    return cli.main(["inspect", *arguments])


@pytest.fixture
def run_folder(tmp_path: Path) -> str:
    """A run whose rows hold what terminals and rich would obey."""
    rows = [
        ok(0, "[bold]four[/bold]\n\x1b[31mred", flags=[Flag.SPECIAL_TOKENS]),
        failed(1, ErrorKind.PROMPT_TOO_LONG, "9 tokens [of 8]", id="[q]"),
        failed(2, ErrorKind.INVALID_JSON, "no brace", text="{" * 3000),
        ok(3, finish_reason="length"),
    ]
    return write_run({"in.jsonl": rows}, folder=Folder(str(tmp_path / "run")), rows_per_batch=3, missing=[1]).folder.url


def test_the_counts_are_shown_with_examples(run_folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert inspect(run_folder) == ExitCode.OK
    out = " ".join(capsys.readouterr().out.replace("│", " ").split())
    for part in ("rows planned 4", "ok 1 (33.33%)", "failed 2 (66.67%)", "not run yet 1", "special_tokens 1", "stop 1"):
        assert part in out
    assert "prompt_too_long 1 33.33%" in out
    assert "--kind prompt_too_long" in out


@pytest.mark.parametrize(("arguments", "shown"), [
    (["--kind", "prompt_too_long"], ["[q]", "in.jsonl:2", "9 tokens [of 8]"]),
    (["--kind", "invalid_json"], ["in.jsonl:3", "no brace", "{{{..."]),
    (["--kind", "truncated"], ["no row failed with truncated", "prompt_too_long 1, invalid_json 1"]),
    (["--sample", "5"], ["1 answered rows", "[bold]four[/bold]\\n\\x1b[31mred"]),
    (["--id", "[q]", "--id", "q9"], ["row [q]", "9 tokens [of 8]", "no row that was run has the id q9"]),
])  # fmt: skip
def test_rows_are_shown_as_they_are_on_one_line_and_nothing_in_them_is_obeyed(
    arguments: list[str], shown: list[str], run_folder: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    assert inspect(run_folder, *arguments) == ExitCode.OK
    out = capsys.readouterr().out
    for part in shown:
        assert part in out
    assert "\x1b" not in out


def test_a_difference_is_shown_inside_the_answer(
    tmp_path: Path, run_folder: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    rows = [ok(0, "[bold]five[/bold]"), ok(1), failed(2), ok(3)]
    other = write_run({"in.jsonl": rows}, folder=Folder(str(tmp_path / "other")), rows_per_batch=1).folder.url
    assert inspect(run_folder, "--diff", other) == ExitCode.OK
    out = capsys.readouterr().out
    for part in (
        r"[-[bold]four[/bold]\n\x1b[31mred-]",
        "{+[bold]five[/bold]+}",
        "failed -> ok",
        "prompt_too_long: 9 tokens [of 8]",
    ):
        assert part in out


@pytest.mark.parametrize("arguments", [[], ["--kind", "invalid_json"], ["--sample", "3"], ["--id", "r0"]])
def test_json_holds_the_same_facts_with_texts_in_full(
    arguments: list[str], run_folder: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert inspect(run_folder, "--json", *arguments) == ExitCode.OK
    facts = json.loads(capsys.readouterr().out)
    match arguments:
        case []:
            assert (facts["num_planned"], facts["num_ok"], facts["num_failed"], facts["num_not_run"]) == (4, 1, 2, 1)
        case ["--kind", _]:
            assert facts["rows"][0]["text"] == "{" * 3000
        case ["--sample", _]:
            assert facts[0]["text"] == "[bold]four[/bold]\n\x1b[31mred"
        case _:
            assert facts["rows"][0]["id"] == "r0"


def test_json_of_values_that_json_does_not_have_can_be_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    carried = pa.schema([("raw", pa.binary()), ("odd", pa.float64()), ("day", pa.date32())])
    row = ok(0, raw=b"\xff\x00", odd=float("nan"), day=datetime(2026, 1, 2).date())
    url = write_run({"a": [row]}, folder=Folder(str(tmp_path / "run")), carried=carried).folder.url
    assert inspect(url, "--id", "r0", "--json") == ExitCode.OK
    out = capsys.readouterr().out
    assert "NaN" not in out
    assert (json.loads(out)["rows"][0]["odd"], json.loads(out)["rows"][0]["day"]) == (None, "2026-01-02")


@pytest.mark.parametrize(("files", "arguments", "message"), [
    ({}, [], "holds no run: there is no run.json"),
    ({"run.json": b"{}"}, [], "holds a run.json that no run of ours wrote"),
    ({"run.json": b'{"fingerprint": "f", "config": {"input": {"format": "csv"}}}'}, [], "has no plan yet"),
])  # fmt: skip
def test_a_folder_that_is_no_run_ends_with_exit_code_2(
    files: dict[str, bytes], arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, content in files.items():
        Folder(str(tmp_path / "run")).write(name, content)
    assert inspect(str(tmp_path / "run"), *arguments) == ExitCode.BAD_CONFIG
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err


def test_an_unknown_kind_and_a_missing_other_run_end_with_exit_code_2(
    run_folder: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert inspect(run_folder, "--kind", "prompt_to_long") == ExitCode.BAD_CONFIG
    assert "did you mean prompt_too_long?" in capsys.readouterr().err
    assert inspect(run_folder, "--diff", f"{run_folder}-2") == ExitCode.BAD_CONFIG
    assert "run-2 holds no run" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [[], ["--kind", "invalid_json"], ["--sample", "1"], ["--id", "x"], ["--diff", "{run}"]])
def test_a_damaged_part_ends_with_exit_code_1_and_its_name(
    arguments: list[str], run_folder: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Folder(run_folder).write("results/part-00000000.parquet", b"PAR1 not really")
    assert inspect(run_folder, *(one.format(run=run_folder) for one in arguments)) == ExitCode.FAILED
    out, err = capsys.readouterr()
    assert out == ""
    assert "part-00000000.parquet" in err


@pytest.mark.parametrize("arguments", [
    ["--kind", "truncated", "--sample", "3"],
    ["--sample", "0"],
    ["--limit", "3"],
    ["--seed", "3"],
    [],
])  # fmt: skip
def test_options_that_do_not_go_together_are_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        inspect(*(["run", *arguments] if arguments else []))
    assert caught.value.code == ExitCode.BAD_CONFIG
    assert "usage: fournee inspect" in capsys.readouterr().err


@given(st.text())
def test_any_text_is_shown_on_one_printable_line(text: str) -> None:
    shown = one_line(text)
    assert shown.isprintable()
    assert len(shown) <= 200 * len(r"\U0010ffff") + 3


@given(st.text(max_size=150), st.text(max_size=150))
def test_a_diff_holds_all_of_both_short_texts(before: str, after: str) -> None:
    shown = inline_diff(f"the {before} same", f"the {after} same")
    spans = [(str(span.style), shown.plain[span.start : span.end]) for span in shown.spans]
    removed = [text[2:-2] for style, text in spans if style == "red"]
    added = [text[2:-2] for style, text in spans if style == "green"]
    assert shown.plain.isprintable()
    assert (before == after) == (not removed and not added)


def test_no_script_of_ours_hides_a_module_of_python_when_it_is_run_by_its_path() -> None:
    assert not [path.name for path in (ROOT / "jobs").glob("*.py") if path.stem in sys.stdlib_module_names]
