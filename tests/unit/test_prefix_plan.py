"""Rows in the order of their prompts' prefixes: the same answers, row by row, whatever the input looks like."""

import gzip
import json
from collections.abc import Callable
from itertools import groupby, pairwise
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rich.console import Console

from pipelines.batch import plan_input
from pipelines.config import BatchConfig
from pipelines.errors import ConfigError, RunFailed
from pipelines.inspection import read_run
from pipelines.inspection.comparison import compare
from pipelines.inspection.rows import failed_rows
from pipelines.parts import Parts
from pipelines.plan import Plan
from pipelines.report import plan_report
from pipelines.run import Run
from pipelines.sources import list_sources
from pipelines.storage import Folder
from pipelines.summary import finish, verify
from tests.unit.story import answer, echo, results
from tests.unit.test_bad_files import damage

Config = Callable[..., BatchConfig]
_TIMES = {"arrived_at", "queue_s", "ttft_s", "generation_s", "request_key"}
_LONG = [" ".join(f"{kind}{word}" for word in range(50)) for kind in "abc"]


def rows_of(num_rows: int, seed: int = 1) -> list[dict[str, Any]]:
    """Rows behind one of three long instructions, mixed up, and some that share nothing."""
    rng = Random(seed)
    instructions = [rng.choice([*_LONG, f"alone{i}"]) for i in range(num_rows)]
    return [{"id": f"r{i}", "prompt": f"{text} question {i}", "tag": i} for i, text in enumerate(instructions)]


def settings(path: Path, run: Path, *more: str) -> list[str]:
    seeded = ["sampling.seed=7", "sampling.temperature=1", "input.sampling_column=null"]
    return echo(path, str(run), "errors.max_failed_fraction=1", "output.patience_s=0", "input.order=by_prefix", *seeded, *more)


def both(batch_config: Config, path: Path, folder: Path, *more: str) -> tuple[dict[Any, Any], dict[Any, Any], Plan, Run]:
    """The rows of the input in its own order and ordered, by their place."""
    found = []
    for order in ("as_is", "by_prefix"):
        config = batch_config(*settings(path, folder / order, *more, f"input.order={order}"))
        run, plan, _ = answer(config)
        verify(run, plan, Parts(run.folder))
        rows = [{name: value for name, value in row.items() if name not in _TIMES} for row in results(run)]
        found.append({(row["source"], row["source_row"]): row for row in rows})
        assert len(found[-1]) == len(rows) == plan.num_rows
    return found[0], found[1], plan, run


def write_jsonl(path: Path, rows: list[Any], blank_every: int = 7) -> Path:
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    for place in range(0, len(lines), blank_every):
        lines[place] = "\n" + lines[place]
    text = "\n".join(lines).encode() + b"\n"
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    return path


BAD = ["{broken", "[1]", {"id": "null", "prompt": None}, {"id": "blank", "prompt": " "}, {"id": "number", "prompt": 7}]


def make(kind: str, folder: Path) -> Path:
    folder.mkdir()
    rows = rows_of(120)
    match kind:
        case "jsonl":
            return write_jsonl(folder / "rows.jsonl", [*rows[:50], *BAD, *rows[50:]])
        case "compressed":
            return write_jsonl(folder / "rows.jsonl.gz", [*rows[:50], *BAD, *rows[50:]])
        case "csv":
            lines = [f'{row["id"]},"{row["prompt"]}\nmore",{row["tag"]}' for row in rows]
            (folder / "rows.csv").write_text("\n".join(["id,prompt,tag", *lines[:60], "one,two", *lines[60:]]))
            return folder / "rows.csv"
        case "parquet":
            for number in range(3):
                table = pa.Table.from_pylist(rows_of(40, number))
                if number == 1:  # of another type
                    table = table.set_column(1, "prompt", table["prompt"].dictionary_encode())
                pq.write_table(table, folder / f"{number}.parquet", row_group_size=16)
            return folder
        case _:
            write_jsonl(folder / "a.jsonl", rows[:60])
            write_jsonl(folder / "b.jsonl.gz", rows[60:])
            pq.write_table(pa.Table.from_pylist(rows_of(40, 3)).drop_columns("tag"), folder / "c.parquet")
            (folder / "d.csv").write_text("\n".join(["id,prompt", *(f"{row['id']},{row['prompt']}" for row in rows_of(30, 4))]))
            return folder


INPUTS = {
    "jsonl": ["input.carry_columns=[tag]"],
    "compressed": ["input.carry_columns=[tag]"],
    "csv": ["input=csv", "input.carry_columns=[tag,prompt]"],
    "parquet": ["input=parquet", "input.carry_columns=[tag]"],
    "files": ["input=files", "input.carry_columns=[tag]"],
}


@pytest.mark.parametrize("more", [["input.id_column=id"], ["input.id_column=null", "input.limit=70"]])
@pytest.mark.parametrize("kind", INPUTS)
def test_every_row_comes_out_as_in_the_order_of_the_input(
    batch_config: Config, tmp_path: Path, kind: str, more: list[str]
) -> None:
    path = make(kind, tmp_path / "in")
    as_is, ordered, plan, run = both(batch_config, path, tmp_path, *INPUTS[kind], *more)
    assert ordered == as_is
    assert plan.is_ordered
    prompts = [row["text"] or "" for row in results(run)]
    groups = [text.split()[0][0] for text in prompts if text[:2] in ("a0", "b0", "c0")]
    switches = sum(one != other for one, other in pairwise(groups))
    assert switches <= (8 if kind in ("parquet", "files") else 2)  # there rows of several schemas lie in files of their own


def test_failed_rows_are_answered_again_with_seeds_of_their_own_rows(batch_config: Config, tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", rows_of(120))
    refusing = ["engine.refuse_text=question 5", "input.id_column=null"]
    as_is, before, plan, _ = both(batch_config, path, tmp_path, *refusing)
    assert before == as_is
    config = batch_config(*settings(path, tmp_path / "by_prefix", *refusing, "retry_failed=true"))
    run, plan, reported = answer(config)
    assert 0 < len(reported) <= plan.num_batches
    again = {(row["source"], row["source_row"]): row for row in results(run)}
    assert {place: row["attempts"] for place, row in again.items()} == {
        place: 1 + (row["status"] == "failed") for place, row in before.items()
    }
    assert {place: row["id"] for place, row in again.items()} == {place: row["id"] for place, row in as_is.items()}


def test_a_row_draws_its_seed_from_its_number_in_the_input(batch_config: Config, tmp_path: Path) -> None:
    rows = [{**row, "own": json.dumps({"temperature": 0.5})} for row in rows_of(120)]
    path = write_jsonl(tmp_path / "rows.jsonl", rows)
    as_is, ordered, _, _ = both(batch_config, path, tmp_path, "input.sampling_column=own")
    seeds = {json.loads(row["sampling"])["seed"] for row in ordered.values()}
    assert len(seeds) == 120
    assert ordered == as_is


def test_rows_of_damaged_files_fail_as_in_the_order_of_the_input(batch_config: Config, tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "bad.parquet").write_bytes(b"PAR1 no more")
    for number in range(2):
        pq.write_table(
            pa.Table.from_pylist(rows_of(60, number)),
            folder / f"{number}.parquet",
            row_group_size=20,
            use_dictionary=False,
            write_page_checksum=True,
        )
    damage(folder / "1.parquet", 1)
    more = ["input=parquet", "input.id_column=id", "input.on_bad_file=skip"]
    as_is, ordered, plan, _ = both(batch_config, folder, tmp_path, *more)
    assert [bad.path for bad in plan.bad_files] == [str(folder / "bad.parquet")]
    assert "unreadable_file" in {row["error_kind"] for row in ordered.values()}
    assert ordered == as_is
    with pytest.raises(ConfigError, match="on_bad_file=skip"):
        both(batch_config, folder, tmp_path / "again", *more[:2])


def test_an_ordered_run_is_resumed_inspected_and_compared(batch_config: Config, tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", [*rows_of(120), *BAD])
    config = batch_config(*settings(path, tmp_path / "run"))
    run, plan, _ = answer(config, most_shards=3)
    config = batch_config(*settings(path, tmp_path / "run", "input.order=as_is"))  # the plan stands, whatever is asked for now
    run, resumed, reported = answer(config)
    assert resumed.batches.equals(plan.batches)
    assert 0 < len(reported) < plan.num_batches
    summary = finish(run, resumed, config)
    assert (summary.num_rows, summary.prefix_hits) == (125, plan.prefix_hits)

    other, _, _ = answer(batch_config(*settings(path, tmp_path / "other", "input.order=as_is", "engine.rows_per_batch=7")))
    ours, theirs = read_run(str(tmp_path / "run")), read_run(other.folder.url)
    for one, two in ((ours, theirs), (theirs, ours), (ours, ours)):
        found = compare(one, two, limit=3)
        assert (found.num_both, found.num_same, found.num_both_failed) == (125, 120, 5)
    failed = failed_rows(ours, "malformed_row", limit=5)
    assert {(row.source, row.line) for row in failed.rows} == {
        (row.source, row.line) for row in failed_rows(theirs, "malformed_row", limit=5).rows
    }


def test_a_run_whose_rows_share_nothing_keeps_its_order_and_copies_nothing(batch_config: Config, tmp_path: Path) -> None:
    rows = [{"id": f"r{i}", "prompt": " ".join(f"w{i}-{word}" for word in range(40))} for i in range(60)]
    path = write_jsonl(tmp_path / "rows.jsonl", rows)
    run, plan, _ = answer(batch_config(*settings(path, tmp_path / "run")))
    as_is = answer(batch_config(*settings(path, tmp_path / "as_is", "input.order=as_is")))[1]
    assert plan.batches.equals(as_is.batches)
    assert not run.folder.names("spool")
    assert plan.prefix_hits is not None
    assert (plan.prefix_hits.num_prompt_tokens, plan.prefix_hits.predicted) == (2400, 0)
    assert as_is.prefix_hits is None


def test_many_rows_are_told_by_their_texts_that_nothing_is_to_be_won(
    batch_config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("pipelines.prefix_plan.MANY_ROWS", 100)
    caplog.set_level("INFO")
    alone = write_jsonl(
        tmp_path / "alone.jsonl", [{"id": i, "prompt": f"{i} is a number {'of some ' * 20}"} for i in range(120)]
    )
    config = batch_config(*settings(alone, tmp_path / "alone"))
    plan = plan_input(config, list_sources(config.input), Folder(str(tmp_path / "alone")))
    assert "hardly begin alike; the order is kept" in caplog.text
    assert (plan.prefix_hits, set(plan.batches["spooled"].to_pylist())) == (None, {None})


def test_a_look_at_the_texts_of_many_rows_changes_no_order(
    batch_config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", rows_of(200))
    plans = []
    for many in (1, 10**6):
        monkeypatch.setattr("pipelines.prefix_plan.MANY_ROWS", many)
        config = batch_config(*settings(path, tmp_path / str(many)))
        plans.append(plan_input(config, list_sources(config.input), Folder(str(tmp_path / str(many)))))
    one, other = (plan.batches.select(["batch_id", "num_rows", "rows_before"]) for plan in plans)
    assert one == other and plans[0].prefix_hits == plans[1].prefix_hits is not None


def test_batches_hold_about_the_same_number_of_tokens(batch_config: Config, tmp_path: Path) -> None:
    rng = Random(3)
    rows = [{"id": f"r{i}", "prompt": f"{_LONG[i % 3]} " + "more " * rng.choice([1, 2, 150])} for i in range(300)]
    path = write_jsonl(tmp_path / "rows.jsonl", rows)
    run, plan, _ = answer(batch_config(*settings(path, tmp_path / "run")))
    tokens = [sum(row["num_prompt_tokens"] for row in rows) for _, rows in by_batch(results(run))]
    mean = sum(tokens) / len(tokens)
    assert all(0.5 * mean < some < 1.5 * mean for some in tokens[:-1])
    assert max(plan.batches["num_rows"].to_pylist()) <= 20


def test_a_copy_that_is_damaged_ends_the_job(batch_config: Config, tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", rows_of(60))
    config = batch_config(*settings(path, tmp_path / "run", "input.on_bad_file=skip", "engine.rows_per_batch=60"))
    run, _, _ = answer(config, most_shards=0)
    run.folder.write(f"spool/{run.folder.names('spool')[0]}", b"PAR1 no more")
    with pytest.raises(RunFailed, match="the run's own copy, cannot be read"):
        answer(config)


def test_a_dry_run_shows_what_the_order_brings(batch_config: Config, tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", rows_of(60))
    config = batch_config(*settings(path, tmp_path / "run"))
    sources = list_sources(config.input)
    plan = plan_input(config, sources, Folder(str(tmp_path / "spool")))
    hits = plan.prefix_hits
    assert hits is not None
    assert hits.as_is < hits.by_prefix
    console = Console(width=400)
    with console.capture() as shown:
        console.print(plan_report(plan, sources, 0))
    assert f"{hits.by_prefix:,}" in shown.get()
    Plan.save(plan, Folder(str(tmp_path / "saved")))
    assert Plan.load(Folder(str(tmp_path / "saved"))).prefix_hits == hits


def by_batch(rows: list[dict[str, Any]]) -> list[tuple[str, list[dict[str, Any]]]]:
    found = groupby(rows, key=lambda row: row["request_key"].partition("-")[0])
    return [(key, list(some)) for key, some in found]
