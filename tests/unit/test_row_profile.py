"""What is summed up over the rows of many parts is what a straightforward look at all of them together finds."""

import uuid
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelines.parts import part_name
from pipelines.row_profile import RowProfile, profile_rows
from pipelines.schema import RESULT, WORKER
from pipelines.storage import Folder

Row = dict[str, Any]
SPANS = {1: (1_000.0, 1_050.0), 2: (5_000.0, 5_030.0)}  # 80 s with workers, and more than an hour without
TIMES = ("arrived_at_s", "queue_s", "ttft_s", "generation_s")


def worker(attempt: int, start_s: float, end_s: float) -> Row:
    zeros = {field.name: 0 for field in WORKER if field.type in (pa.int64(), pa.float64())}
    texts = {field.name: "x" for field in WORKER if field.type == pa.string()}
    times = {"started_at": int(start_s * 1e6), "lifetime_s": end_s - start_s}
    return {**zeros, **texts, "attempt": attempt, **times}


def profile(parts: Sequence[Sequence[Row]], spans: dict[int, tuple[float, float]] | None = None) -> RowProfile:
    run = Folder(f"memory://row_profile/{uuid.uuid4().hex}")
    place = 0
    for number, rows in enumerate(parts):
        lines = []
        for row in rows:
            arrived_at_s = row.get("arrived_at_s")
            known = {name: value for name, value in row.items() if name != "arrived_at_s"}
            fixed = {"source": "in.jsonl", "source_row": place, "status": "ok", "attempts": 1, "request_key": "k", "flags": []}
            arrived_at = None if arrived_at_s is None else int(arrived_at_s * 1e6)
            lines.append({**fixed, "num_cached_tokens": 0, "arrived_at": arrived_at, **known})
            place += 1
        with run.create(part_name(number)) as file:
            pq.write_table(pa.Table.from_pylist(lines, schema=RESULT), file)
    workers = [worker(attempt, *span) for attempt, span in (SPANS if spans is None else spans).items()]
    return profile_rows(run, range(len(parts)), pa.Table.from_pylist(workers, schema=WORKER))


def answered(**more: Any) -> Row:
    base = {"num_prompt_tokens": 5, "num_output_tokens": 3, "finish_reason": "stop"}
    return {**base, "arrived_at_s": 1_000.0, "queue_s": 0.0, "ttft_s": 1.0, "generation_s": 1.0, **more}


seconds = st.one_of(st.just(0.0), st.floats(1e-3, 60))
rows = st.builds(
    lambda arrived_at_s, queue_s, ttft_s, generation_s, prompt, output, unknown: {
        **dict(zip(TIMES, (arrived_at_s, min(queue_s, ttft_s), ttft_s, generation_s), strict=True)),
        "num_prompt_tokens": prompt,
        "num_output_tokens": output,
        **({unknown: None} if unknown else {}),
    },
    st.sampled_from([990.0, 1_000.0, 1_010.5, 1_049.0, 2_000.0, 5_000.0, 5_017.25]),
    seconds, seconds, seconds, st.integers(0, 10_000), st.integers(0, 10_000),
    st.one_of(st.none(), st.sampled_from(TIMES)),
)  # fmt: skip
parts_of_rows = st.lists(st.lists(rows, min_size=1, max_size=12), min_size=1, max_size=4)


@given(parts=parts_of_rows)
def test_quantiles_and_histograms_are_those_of_all_rows_together(parts: list[list[Row]]) -> None:
    found = profile(parts)
    everything = [row for part in parts for row in part]
    prompts = np.array([row["num_prompt_tokens"] for row in everything])
    histogram = found.histograms["num_prompt_tokens"]
    for label, share in {"p50": 0.5, "p95": 0.95, "p99": 0.99}.items():
        exact = np.quantile(prompts, share, method="inverted_cdf")
        assert getattr(histogram.quantiles, label) == pytest.approx(exact, rel=0.001)
    assert sum(histogram.counts) + histogram.num_above == pytest.approx(histogram.num_values) == len(everything)
    assert len(histogram.counts) <= 40

    timed = [row for row in everything if None not in (row["queue_s"], row["ttft_s"], row["generation_s"])]
    for name, of in {"ttft_s": lambda r: r["ttft_s"], "latency_s": lambda r: r["ttft_s"] + r["generation_s"]}.items():
        if not timed:
            assert found.latencies[name].p50 is None
            continue
        values = np.array([of(row) for row in timed])
        assert found.latencies[name].p95 == pytest.approx(np.quantile(values, 0.95, method="inverted_cdf"), rel=0.006)


@given(parts=parts_of_rows)
def test_the_timeline_holds_every_token_and_every_request_second_where_it_was(parts: list[list[Row]]) -> None:
    timeline = profile(parts).timeline
    timed = [row for part in parts for row in part if all(row[name] is not None for name in TIMES)]

    def place(at_s: float) -> float:
        """Seconds with workers until then."""
        return sum(min(max(at_s - start, 0.0), end - start) for start, end in SPANS.values())

    intervals = []
    for row in timed:
        arrived_at_s, queue_s, ttft_s, generation_s = (row[name] for name in TIMES)
        times = (arrived_at_s + queue_s, arrived_at_s + ttft_s, arrived_at_s + ttft_s + generation_s)
        intervals.append([*map(place, times), row["num_output_tokens"]])
    assert (timeline.bin_s, len(timeline.running_requests)) == (1.0, 80)
    assert timeline.attempts == ((1, 0.0), (2, 50.0))
    for name, exact in {
        "running_requests": [sum(overlap(i, start, end) for start, _, end, _ in intervals) for i in range(80)],
        "output_tokens_per_s": [sum(part_in(i, start, end) * n for _, start, end, n in intervals) for i in range(80)],
        "finished_rows_per_s": [sum(part_in(i, end, end) for _, _, end, _ in intervals) for i in range(80)],
    }.items():
        assert getattr(timeline, name) == pytest.approx(exact, rel=1e-4, abs=1e-2), name


def overlap(second: int, start: float, end: float) -> float:
    return max(0.0, min(second + 1, end) - max(second, start))


def part_in(second: int, start: float, end: float) -> float:
    """How much of an interval lies in a second of the axis; a moment lies in one, the last holds the end."""
    if end - start > 1e-6:
        return overlap(second, start, end) / (end - start)
    return float(min(int(end), 79) == second)


@given(parts=parts_of_rows)
def test_the_rows_that_stand_out_are_the_first_of_all_in_order(parts: list[list[Row]]) -> None:
    found = profile(parts)
    everything = list(enumerate(row for part in parts for row in part))

    def names(worth: Callable[[Row], float], of: list[tuple[int, Row]]) -> list[str]:
        return [f"in.jsonl row {place}" for place, _ in sorted(of, key=lambda one: -worth(one[1]))[:10]]

    timed = [(place, row) for place, row in everything if None not in (row["ttft_s"], row["generation_s"])]
    assert [row.name for row in found.slowest] == names(lambda row: row["ttft_s"] + row["generation_s"], timed)
    assert [row.name for row in found.largest] == names(
        lambda row: row["num_prompt_tokens"] + row["num_output_tokens"], everything
    )


def test_no_time_at_all_is_zero_and_no_rows_are_null() -> None:
    assert profile([]).latencies["ttft_s"].p99 is None
    assert profile([]).histograms["num_prompt_tokens"].counts == ()
    assert profile([[answered(ttft_s=0.0)]]).latencies["ttft_s"].p99 == 0.0


def test_each_kind_of_error_has_its_first_three_rows() -> None:
    def failed(kind: str, **more: Any) -> Row:
        return {"status": "failed", "error_kind": kind, "error_message": f"{kind}!", "arrived_at_s": None, **more}

    found = profile([[failed("a", id="r0"), answered(), failed("b")], [failed("a", id=f"r{i}") for i in range(3, 8)]])
    assert {kind: [row.name for row in rows] for kind, rows in found.errors.items()} == {
        "a": ["r0", "r3", "r4"],
        "b": ["in.jsonl row 2"],
    }
    assert found.errors["b"][0].message == "b!"
    assert found.histograms["num_output_tokens"].num_values == 1


def test_attempts_that_overlap_share_no_time_and_a_run_without_workers_has_no_timeline() -> None:
    both = profile([[answered(generation_s=19.0)]], {1: (1_000.0, 1_020.0), 2: (1_010.0, 1_040.0)}).timeline
    assert both.attempts == ((1, 0.0), (2, 20.0))
    assert sum(both.running_requests) * both.bin_s == pytest.approx(20)
    assert sum(both.output_tokens_per_s) * both.bin_s == pytest.approx(3)
    assert profile([[answered()]], {}).timeline.running_requests == ()


def test_a_tail_far_out_is_counted_and_does_not_squeeze_the_rest() -> None:
    histogram = profile([[answered(ttft_s=1 + i / 1_000) for i in range(999)], [answered(ttft_s=5_000.0)]]).histograms["ttft_s"]
    assert histogram.num_above == 1
    assert histogram.edges[-1] < 3
    assert len(histogram.counts) > 30


def test_lengths_are_counted_to_the_token() -> None:
    histogram = profile([[answered(num_output_tokens=n) for n in (1, 2, 2, 4)]]).histograms["num_output_tokens"]
    assert (histogram.edges, histogram.counts) == ((0.5, 1.5, 2.5, 3.5, 4.5), (1, 2, 0, 1))
