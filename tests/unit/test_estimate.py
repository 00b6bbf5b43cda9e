"""What is said before a job runs: the rows that are drawn, their tokens, and the pace that a pilot shows."""

import gzip
import heapq
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobs import estimate as job
from pipelines.batch import plan_input
from pipelines.compose import compose_settings
from pipelines.config import BatchConfig, EstimateConfig
from pipelines.errors import ConfigError, ExitCode
from pipelines.estimate import Estimate, estimate
from pipelines.intervals import mean_of_rows, t_quantile
from pipelines.pace import Pilot, pace_of_pilot
from pipelines.parse import parse_estimate
from pipelines.pilot import run_pilot
from pipelines.run import Run
from pipelines.sample import draw
from pipelines.sources import list_sources
from pipelines.storage import Folder
from pipelines.summary import finish
from pipelines.totals import Summary
from tests.unit.story import answer, results
from tests.unit.test_ledger import batches, share


def settings(*overrides: str) -> EstimateConfig:
    return parse_estimate(compose_settings("estimate", ["engine=echo", *overrides]))


def in_this_process(config: BatchConfig, began: Callable[[Run], None]) -> tuple[Run, Summary]:
    run, plan, _ = answer(config)
    return run, finish(run, plan, config)


def estimated(*overrides: str) -> Estimate:
    return estimate(settings(*overrides), in_this_process)


# ---- drawing rows


@given(st.integers(0, 3000), st.integers(1, 3000), st.integers(0, 5))
def test_a_sample_has_the_rows_that_were_asked_for_each_once(num_rows: int, size: int, seed: int) -> None:
    sample = draw(num_rows, size, seed)
    assert len(sample.rows) == len(sample.places) <= min(size, num_rows)
    assert len(sample.rows) >= min(size, num_rows) - 12  # the input's last place may be short
    assert len(set(sample.rows.tolist())) == len(sample.rows)
    assert all(0 <= row < num_rows for row in sample.rows)
    if size >= num_rows:
        assert sample.rows.tolist() == list(range(num_rows))
    again = draw(num_rows, size, seed)
    assert again.rows.tolist() == sample.rows.tolist()


def test_every_row_is_as_likely_to_be_drawn_as_any_other() -> None:
    counts = np.zeros(1000)
    for seed in range(300):
        counts[draw(1000, 500, seed).rows] += 1
    assert 110 < counts.min() <= counts.max() < 190  # 150 expected, with a deviation of 8.7


# ---- ranges


def coverage(population: np.ndarray, size: int, draws: int = 400) -> float:
    truth, hits = population.mean(), 0
    for seed in range(draws):
        sample = draw(len(population), size, seed)
        found = mean_of_rows(population[sample.rows], sample.places, sample.num_places)
        assert found is not None
        hits += found.low <= truth <= found.high
    return hits / draws


RANDOM = np.random.default_rng(7)
POPULATIONS = {
    "alike": RANDOM.normal(100, 5, 20_000),
    "skewed": RANDOM.lognormal(4, 1, 20_000),
    "two kinds, one after the other": np.concatenate([RANDOM.normal(20, 3, 15_000), RANDOM.normal(400, 50, 5_000)]),
    "files of their own length each": np.repeat(RANDOM.lognormal(4, 0.7, 200), 100) * RANDOM.uniform(0.8, 1.2, 20_000),
    "neighbours alike": np.repeat(RANDOM.lognormal(4, 0.7, 5000), 4),
    "a fifth fails": RANDOM.lognormal(4, 0.5, 20_000) * (RANDOM.random(20_000) > 0.2),
    "small": RANDOM.lognormal(4, 0.5, 300),
}


@pytest.mark.parametrize("size", [40, 200, 1000])
@pytest.mark.parametrize("population", POPULATIONS)
def test_nine_ranges_in_ten_hold_the_true_mean(population: str, size: int) -> None:
    values = POPULATIONS[population]
    if size >= len(values):
        assert coverage(values, size, 3) == 1
        return
    lowest = 0.79 if (population, size) == ("skewed", 40) else 0.85  # of forty, the longest are too often none
    assert lowest <= coverage(values, size) <= 0.97


def test_students_t_is_that_of_the_tables() -> None:
    table = {1: 6.314, 2: 2.920, 3: 2.353, 4: 2.132, 5: 2.015, 10: 1.812, 30: 1.697, 1000: 1.646}
    assert {n: t_quantile(n) for n in table} == pytest.approx(table, abs=2e-3)


# ---- tokens


def test_tokens_are_estimated_from_a_sample_of_rows(jsonl: Callable[..., Path]) -> None:
    rows = [{"prompt": "Answer this: " + "word " * (i % 9 + 1)} for i in range(3000)]
    path = jsonl(rows)
    found = estimated("input=jsonl", f"input.path={path}", "sampling.max_tokens=5", "estimate.sample_rows=400")
    prompts, truth = found.prompts, sum(len(row["prompt"].split()) for row in rows)
    assert (found.num_rows, prompts.num_sampled_rows) == (3000, 400)
    assert prompts.num_tokens is not None and prompts.most_output_tokens is not None
    assert prompts.num_tokens.low < truth < prompts.num_tokens.high
    assert (prompts.num_tokens.high - prompts.num_tokens.low) / truth < 0.1
    assert prompts.most_output_tokens.value == 15_000
    assert prompts.max == 11 and prompts.p50 == 7
    assert prompts.shared_prefix_share == pytest.approx(3 / 7, rel=0.05)  # Answer this: word
    assert found.spending is None and "estimate.pilot_rows=" in found.notes[0]
    assert estimated("input=jsonl", f"input.path={path}", "sampling.max_tokens=5", "estimate.sample_rows=400") == found


def test_all_rows_are_looked_at_where_they_are_few_and_rows_that_would_fail_are_counted_by_kind(
    jsonl: Callable[..., Path],
) -> None:
    bad = ["{broken", {"prompt": None}, {"prompt": "w " * 5000}, {"prompt": "  "}]
    found = estimated("input=jsonl", f"input.path={jsonl([{'prompt': 'two words'}] * 20 + bad)}")
    assert found.prompts.failing == dict.fromkeys(("malformed_row", "missing_value", "prompt_too_long", "empty_prompt"), 1)
    assert found.prompts.num_tokens is not None
    assert (found.prompts.num_tokens.low, found.prompts.num_tokens.high) == (40, 40)


def test_each_rows_own_limit_counts_for_the_most_output(jsonl: Callable[..., Path]) -> None:
    rows = [
        {"prompt": "a b", "own": {"max_tokens": 7}},
        {"prompt": "a b"},
        {"prompt": "a b", "own": {"n": 2, "temperature": 1}},
    ]
    found = estimated("input=jsonl", f"input.path={jsonl(rows)}", "input.sampling_column=own", "sampling.max_tokens=3")
    assert found.prompts.most_output_tokens is not None
    assert found.prompts.most_output_tokens.value == pytest.approx(7 + 3 + 6)


# ---- what a pilot answers


def copied(config: EstimateConfig, size: int, folder: Path) -> tuple[Pilot, list[dict[str, Any]]]:
    """Run a pilot; also returns the rows of its results, which it removes."""
    rows: list[dict[str, Any]] = []

    def story(pilot: BatchConfig, began: Callable[[Run], None]) -> tuple[Run, Summary]:
        run, summary = in_this_process(pilot, began)
        rows.extend(results(run))
        return run, summary

    sources = list_sources(config.input)
    plan = plan_input(config, sources, Folder(str(folder / "spool")))
    return run_pilot(config, sources, plan, draw(plan.num_rows, size, 0), story), rows


def write_csv(rows: list[dict[str, Any]], path: Path) -> None:
    lines = [f'{row["id"]},"{row["prompt"]}",{row["topic"]}\n' for row in rows]
    path.write_text("id,prompt,topic\n" + "".join(lines), encoding="utf-8")


def write_gzip(rows: list[dict[str, Any]], path: Path) -> None:
    path.write_bytes(gzip.compress("".join(f"{json.dumps(row)}\n" for row in rows).encode()))


WRITERS: dict[str, Callable[[list[dict[str, Any]], Path], Any]] = {
    "parquet": lambda rows, path: pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=30),
    "jsonl": lambda rows, path: path.write_text("".join(f"{json.dumps(row)}\n\n" for row in rows), encoding="utf-8"),
    "csv": write_csv,
    "jsonl.gz": write_gzip,
}


@pytest.mark.parametrize("ending", WRITERS)
def test_a_pilot_answers_rows_of_every_format_and_leaves_nothing_behind(ending: str, tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    rows = [{"id": f"r{i}", "prompt": f"say {i} and {'x ' * (i % 3)}", "topic": f"t{i}"} for i in range(200)]
    WRITERS[ending](rows[:120], data / f"a.{ending}")
    WRITERS[ending](rows[120:], data / f"b.{ending}")
    kind = ending.partition(".")[0]
    config = settings(
        f"input={kind}", f"input.path={data}", "input.id_column=id", f"output.path={tmp_path}/run", "input.prompt_column=null",
        "prompt.template='{{ prompt }} please'", "input.carry_columns=[topic]",
    )  # fmt: skip
    pilot, answered = copied(config, 60, tmp_path)
    assert len(pilot.rows) == len(answered) == 60
    known = {row["id"]: row["prompt"].split() for row in rows}
    for row in answered:
        assert row["text"].split() == [*known[row["id"]], "please"]
        assert row["topic"] == row["id"].replace("r", "t")
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("run")] == []


def test_requests_of_openai_mean_the_same_in_a_pilot(jsonl: Callable[..., Path], tmp_path: Path) -> None:
    def request(number: int) -> dict[str, Any]:
        body = {"model": "x", "messages": [{"role": "user", "content": "a b c d e"}], "max_tokens": 1 + number % 3, "n": None}
        return {"custom_id": f"c{number}", "method": "POST", "url": "/v1/chat/completions", "body": body}

    config = settings("input=openai", f"input.path={jsonl([request(i) for i in range(50)])}", f"output.path={tmp_path}/run")
    _, answered = copied(config, 30, tmp_path)
    assert {row["id"]: row["num_output_tokens"] for row in answered} == {
        row["id"]: 1 + int(row["id"][1:]) % 3 for row in answered
    }
    assert len(answered) == 30


def test_the_rows_of_a_pilot_keep_their_places_in_the_input(tmp_path: Path) -> None:
    """One word in each row of a place, so that places can be told from answers."""
    run_length = 4
    texts = ["w " * (1 + number // run_length % 50) for number in range(8000)]
    pq.write_table(pa.table({"prompt": texts}), tmp_path / "rows.parquet")
    config = settings("input=parquet", f"input.path={tmp_path}/rows.parquet", f"output.path={tmp_path}/run")
    pilot, _ = copied(config, 1000, tmp_path)
    tokens = pilot.rows["num_prompt_tokens"].to_numpy()
    assert (tokens == 1 + pilot.places % 50).all()
    assert len(set(pilot.places.tolist())) == 250


# ---- from a pilot to the job


def test_a_pilot_of_all_rows_is_the_job_itself(jsonl: Callable[..., Path], tmp_path: Path) -> None:
    rows = [{"id": f"r{i}", "prompt": "one two three " * (1 + i % 4)} for i in range(200)]
    found = estimated(
        "input=jsonl", f"input.path={jsonl(rows)}", f"output.path={tmp_path}/run", "engine.rows_per_batch=10",
        "engine.seconds_per_token=0.01", "engine.max_num_seqs=160", "estimate.pilot_rows=200", "pricing.overhead_per_run=1",
        "pricing.price_per_accelerator_hour=3600", "pricing.spot_price_per_accelerator_hour=360", "pricing.market=spot",
    )  # fmt: skip
    assert found.spending is not None
    assert found.spending.num_output_tokens.value == sum(len(row["prompt"].split()) for row in rows)
    seconds = found.spending.hours.value * 3600
    assert 0.24 < seconds < 5  # two rounds of twelve steps
    assert found.spending.cost.value == pytest.approx(1 + seconds / 10, rel=0.05)


def test_without_rows_and_without_answers_there_are_nulls(jsonl: Callable[..., Path], tmp_path: Path) -> None:
    empty = estimated("input=jsonl", f"input.path={jsonl([])}", "estimate.pilot_rows=5", f"output.path={tmp_path}/run")
    assert (empty.num_rows, empty.prompts.num_tokens, empty.spending) == (0, None, None)
    assert empty.notes == ["the input has no rows"]
    failing = jsonl([{"prompt": None}] * 30, "failing.jsonl")
    failed = estimated("input=jsonl", f"input.path={failing}", "estimate.pilot_rows=5", f"output.path={tmp_path}/run")
    assert failed.spending is None and "no row was answered" in failed.notes[0]
    assert failed.prompts.mean is None and failed.prompts.failing == {"missing_value": 30}


def test_rows_that_fail_after_their_answer_are_paid_for(jsonl: Callable[..., Path], tmp_path: Path) -> None:
    found = estimated(
        "input=jsonl", f"input.path={jsonl([{'prompt': 'no JSON here'}] * 60)}", "postprocess=json", "estimate.pilot_rows=40",
        f"output.path={tmp_path}/run", "engine.seconds_per_token=0.02", "pricing.price_per_accelerator_hour=3600",
    ).spending  # fmt: skip
    assert found is not None and found.num_output_tokens.value == 0
    assert found.cost.value > 0.06 and found.cost_per_million_output_tokens is None


def test_an_earlier_run_tells_the_pace(jsonl: Callable[..., Path], tmp_path: Path) -> None:
    first = jsonl([{"prompt": "one two three four"} for i in range(300)])
    run = settings(
        "input=jsonl", f"input.path={first}", f"output.path={tmp_path}/run", "engine.seconds_per_token=0.05",
        "engine.rows_per_batch=10", "errors.max_failed_fraction=1", "pricing.price_per_accelerator_hour=3600",
    )  # fmt: skip
    _, summary = in_this_process(run, lambda _: None)
    more = jsonl([{"prompt": "one two three four"} for i in range(3000)], "more.jsonl")
    command = ["input=jsonl", f"input.path={more}", f"estimate.like={tmp_path}/run", "pricing.price_per_accelerator_hour=3600"]
    found = estimated(*command, "budget.max_cost=0.5", "budget.max_hours=0.003").spending
    assert found is not None and found.measured_by == "an earlier run"
    assert found.num_output_tokens.value == 12_000
    assert found.cost.value == pytest.approx(10 * (summary.worker_s - summary.loading_s) + summary.loading_s, rel=1e-3)
    notes = estimated(*command, "budget.max_cost=0.5", f"budget.max_hours={found.hours.value * 1.02}").notes
    assert [note.partition(":")[0] for note in notes] == [
        "budget.max_cost=0.5 would be passed",
        f"budget.max_hours={found.hours.value * 1.02:g} may be passed",
    ]
    for wrong in (tmp_path, tmp_path / "none"):
        with pytest.raises(ConfigError, match=r"estimate\.like: .* holds no run"):
            estimated("input=jsonl", f"input.path={more}", f"estimate.like={wrong}")


def pilot_of(lengths: np.ndarray, places: np.ndarray, num_places: int, slots: int, speed: np.ndarray) -> tuple[Pilot, float]:
    """What an engine with so many places for requests leaves behind; each token takes 1 / speed seconds, as they come."""
    running, starts, ends, now = [0.0] * slots, [], [], 0.0
    for number, length in enumerate(lengths):
        now = heapq.heappop(running)
        starts.append(now)
        ends.append(now + length / speed[number * len(speed) // len(lengths)])
        heapq.heappush(running, ends[-1])
    loading_s, busy_s, num_rows = 20.0, max(ends), len(lengths)
    rows = pa.table(
        {
            "status": ["ok"] * num_rows,
            "arrived_at": pa.array([int(start * 1e6) for start in starts], pa.timestamp("us", tz="UTC")),
            "queue_s": np.zeros(num_rows),
            "ttft_s": np.zeros(num_rows),
            "generation_s": np.array(ends) - np.array(starts),
            "num_prompt_tokens": np.zeros(num_rows),
            "num_cached_tokens": np.zeros(num_rows),
            "num_output_tokens": lengths,
        }
    )
    lifetime_s = loading_s + busy_s
    workers = pa.Table.from_pylist(
        [{"worker": "a", "attempt": 1, "num_accelerators": 1, "started_at": 0, "lifetime_s": lifetime_s}],
        schema=pa.schema([("worker", pa.string()), ("attempt", pa.int64()), ("num_accelerators", pa.int64()),
                          ("started_at", pa.timestamp("us", tz="UTC")), ("lifetime_s", pa.float64())]),
    )  # fmt: skip
    table = batches([share("a", 0.0, busy_s, lifetime_s)])
    sized = table.set_column(table.schema.get_field_index("num_rows"), "num_rows", pa.array([num_rows]))
    return Pilot(rows, places, num_places, sized, workers, slots), lifetime_s


@pytest.mark.parametrize(
    ("kind", "size"),
    [
        ("skewed", 400),
        ("a fifth fails", 300),
        ("neighbours alike", 600),
        ("alike", 256),
        ("two kinds, one after the other", 300),
    ],
)
def test_nine_estimates_in_ten_hold_what_the_job_really_takes(kind: str, size: int) -> None:
    """A simulated engine of 64 places, whose speed wanders by 10 % during a pilot and by 6 % from there to the job."""
    lengths = np.maximum(1, POPULATIONS[kind].astype(int))
    _, truth = pilot_of(lengths, np.zeros(0), 0, 64, np.full(1, 20.0))
    hits, draws = 0, 200
    for seed in range(draws):
        random = np.random.default_rng(seed)
        sample = draw(len(lengths), size, seed)
        mixed = random.permutation(len(sample.rows))
        speeds = 20 / random.normal(1, 0.1, 8)
        pilot, _ = pilot_of(lengths[sample.rows][mixed], sample.places[mixed], sample.num_places, 64, speeds)
        pace = pace_of_pilot(pilot)
        assert pace is not None and pace.is_steady
        found = pace.seconds(len(lengths), 1)
        hits += found.low <= 20 + (truth - 20) * random.normal(1, 0.06) <= found.high
    assert 0.85 <= hits / draws <= 0.97


def test_a_pilot_that_does_not_fill_its_engine_says_so_and_reaches_down_to_a_full_ones_pace() -> None:
    lengths = np.full(10_000, 100)
    sample = draw(len(lengths), 16, 0)
    pilot, _ = pilot_of(lengths[sample.rows], sample.places, sample.num_places, 64, np.full(1, 20.0))
    pace = pace_of_pilot(pilot)
    assert pace is not None and not pace.is_steady
    found = pace.seconds(10_000, 1)
    _, truth = pilot_of(lengths, np.zeros(0), 0, 64, np.full(1, 20.0))
    assert found.value == pytest.approx(20 + 10_000 / 16 * 5)
    assert found.low < truth < found.high
    assert pace.concurrency == pytest.approx(16)


# ---- the command


def test_the_command_prints_a_table_or_json(
    jsonl: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    jsonl([{"prompt": "Hi there"}] * 5)
    monkeypatch.chdir(tmp_path)
    command = ["engine=echo", "input=jsonl", "input.path=rows.jsonl"]
    assert job.main(command) == ExitCode.OK
    out = capsys.readouterr().out
    for said in ("prompt tokens", "10 (10 to 10)", "estimate.pilot_rows=", "ECHO ENGINE"):
        assert said in out
    assert job.main([*command, "--json"]) == ExitCode.OK
    assert Estimate.model_validate_json(capsys.readouterr().out).num_rows == 5
    assert [path.name for path in tmp_path.iterdir()] == ["rows.jsonl"]
    assert job.main([*command, "estimate.pilot_row=3"]) == ExitCode.BAD_CONFIG
    assert "estimate.pilot_row is not a setting; did you mean pilot_rows?" in capsys.readouterr().err
