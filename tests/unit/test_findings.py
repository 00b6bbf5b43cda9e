"""Each finding appears when there is something to act on, says what with, and not otherwise."""

from typing import Any

import pyarrow as pa
import pytest

from pipelines.costs import Costs
from pipelines.engine_use import EngineUse
from pipelines.errors import ExitCode
from pipelines.findings import find
from pipelines.histograms import Quantiles
from pipelines.prefix_order import PrefixHits
from pipelines.schema import BATCH, WORKER
from pipelines.statistics import batch_table
from pipelines.totals import Summary

H100 = "8 x NVIDIA H100 80GB HBM3, 81559 MiB"
LONG_PROMPT = "You are a careful assistant. " * 20
HITS = PrefixHits(block_size=16, num_prompt_tokens=2_000_000, as_is=100_000, by_prefix=1_000_000, least_gain=0.01)
NOTHING = Quantiles(p50=None, p95=None, p99=None)


def costs(**parts: float) -> Costs:
    whole = {"loading": 0.0, "prefill": 20.0, "decode": 80.0, "idle": 0.0, "lost": 0.0, "overhead": 0.0, **parts}
    millions = dict.fromkeys([name for name in Costs.model_fields if "million" in name])
    return Costs(currency="USD", total=sum(whole.values()), saved_by_caching=None, hosted=[], **whole, **millions)


def use(**changes: Any) -> EngineUse:
    good = {
        "mean_running_requests": 200.0,
        "max_num_seqs": 256,
        "concurrency_share": 0.8,
        "compute_share": 0.1,
        "memory_share": 0.6,
    }
    return EngineUse(**{**good, **changes})


def record(system: str | None = None, accelerator: str = "H100", hardware: str = H100, **engine: Any) -> dict[str, Any]:
    return {
        "identity": {"sampling": {"max_tokens": 128}, "prompt": {"system": system}},
        "pricing": {"accelerator": accelerator},
        "hardware": {"workers": [{"hardware": hardware}]},
        "engine": {"max_num_seqs": 256, "enable_prefix_caching": True, **engine},
    }


def summary(**changes: Any) -> Summary:
    """A large run with nothing to complain of."""
    good = {
        "exit_code": ExitCode.OK, "engine": "vllm", "fingerprint": "f" * 64, "num_rows": 10_000, "num_ok": 10_000,
        "num_failed": 0, "num_failures_allowed": 100, "error_kinds": {}, "error_examples": {}, "flags": {}, "bad_files": {},
        "finish_reasons": {"stop": 9_500, "length": 500}, "num_prompt_tokens": 2_000_000, "num_cached_tokens": 0,
        "num_output_tokens": 1_000_000, "num_generated_tokens": 1_000_000, "num_batches": 40, "num_attempts": 1,
        "num_workers": 4, "num_deaths": 0, "wall_s": 1_000.0, "worker_s": 4_000.0, "loading_s": 0.0, "prefill_s": 800.0,
        "decode_s": 3_200.0, "idle_s": 0.0, "lost_s": 0.0, "output_tokens_per_s": 1.0, "total_tokens_per_s": 1.0,
        "busy_output_tokens_per_s": 1.0, "engine_use": use(), "costs": costs(), "record": record(), "findings": {}, "sizes": {},
        "latencies": dict.fromkeys(("queue_s", "ttft_s", "time_per_output_token_s", "latency_s"), NOTHING),
    }  # fmt: skip
    return Summary(**{**good, **changes})


def tables(*workers: tuple[float, float, str | None], starved_s: dict[str, float] | None = None) -> tuple[pa.Table, pa.Table]:
    """Batches and workers of one attempt: each worker's lifetime, its age at its last commit, and how it died."""
    starved = list((starved_s or {}).items())
    lines, batches = [], []
    zeros = {field.name: 0 for field in WORKER if field.type in (pa.int64(), pa.float64())}
    texts = {field.name: "x" for field in WORKER if field.type == pa.string()}
    zero = {field.name: 0 for field in BATCH if field.type in (pa.int64(), pa.float64()) and not field.nullable}
    maps = {name: {} for name in ("finish_reasons", "error_kinds", "error_examples", "flags")}
    for number, (lifetime_s, last_commit_s, death) in enumerate(workers):
        name = f"w{number}"
        lines.append(
            {
                **zeros,
                **texts,
                "worker": name,
                "attempt": 1,
                "started_at": 0,
                "lifetime_s": lifetime_s,
                "death": death,
                "starved_s": starved,
            }
        )
        share = {"worker": name, "prefill_s": 0.0, "decode_s": 0.0, "cost": 0.0, "busy_s": 0.0}
        shares = [{**share, "lifetime_s": last_commit_s / 2}, {**share, "lifetime_s": last_commit_s}]
        told = {"worker": name, "node": "n", "accelerator": "H100", "currency": "USD", "started_at": 0}
        batches += [{**zero, **told, **maps, "num_rows": 256, "shares": [one]} for one in shares]
    return batch_table(batches), pa.Table.from_pylist(lines, schema=WORKER)


EVEN = tables((1_000, 990, None), (1_000, 950, None))


def waited(queue_s: float) -> dict[str, Quantiles]:
    quantiles = {"queue_s": Quantiles(p50=queue_s, p95=queue_s, p99=queue_s), "latency_s": Quantiles(p50=10, p95=10, p99=10)}
    return {**dict.fromkeys(("ttft_s", "time_per_output_token_s"), NOTHING), **quantiles}


LOW = use(concurrency_share=0.25, mean_running_requests=64.0)
FEW = {"num_rows": 1_000, "engine_use": LOW}
CASES: list[tuple[dict[str, Any], str, list[str]]] = [
    ({"num_failed": 60, "error_kinds": {"invalid_json": 50}}, "failed rows", ["60 rows", "50 of them", "allow 100"]),
    ({"num_failed": 1, "error_kinds": {"truncated": 1}, "num_failures_allowed": 0}, "failed rows", ["allow 0"]),
    ({"finish_reasons": {"stop": 800, "length": 200}}, "cut answers", ["20%", "sampling.max_tokens=128"]),
    ({"record": record(accelerator="cpu")}, "price", ["pricing.accelerator=cpu", H100]),
    ({"record": record(accelerator="L4", hardware="1 x NVIDIA L40S, 46068 MiB")}, "price", ["L40S"]),
    ({"engine_use": LOW}, "engine not full", ["64 requests", "max_num_seqs=256", "engine.rows_per_batch=256"]),
    (FEW, "engine not full", ["1,000 rows", "cluster.workers"]),
    ({"engine_use": LOW, "latencies": waited(3.0)}, "engine not full", ["3.0 s", "gpu_memory_utilization"]),
    (
        {"engine_use": use(concurrency_share=0.95, memory_share=0.2)},
        "engine too narrow", ["20%", "engine.kwargs.max_num_seqs"],
    ),
    ({"record": record(LONG_PROMPT)}, "prefix cache", ["0%", "72%", "gpu_memory_utilization"]),
    ({"record": record(LONG_PROMPT, enable_prefix_caching=False)}, "prefix cache", ["enable_prefix_caching=true"]),
    ({"costs": costs(lost=10), "num_deaths": 3}, "lost time", ["9%", "3 worker(s) died", "engine.rows_per_batch"]),
    ({"costs": costs(loading=50)}, "loading", ["33%", "4 worker lifetime(s)", "cluster.workers"]),
    ({"costs": costs(idle=25)}, "idle time", ["20%", "cluster.cpus_per_worker"]),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "topic", "fragments"), CASES)
def test_what_is_worth_acting_on_is_found_with_its_number_and_remedy(
    changes: dict[str, Any], topic: str, fragments: list[str]
) -> None:
    found = find(summary(**changes), *EVEN)
    assert list(found) == [topic]
    assert not [fragment for fragment in fragments if fragment not in found[topic]], found[topic]
    assert found[topic].endswith(".")


@pytest.mark.parametrize(
    ("starved_s", "fragment"),
    [
        ({"rendering": 300.0, "input": 10.0}, "620 s, prompts are rendered and tokenised too slowly"),
        ({"long answers": 250.0}, "500 s, batches wait for their longest answers"),
        ({"input": 10.0}, "raise engine.rows_per_batch"),  # of 4,000 s
    ],
)
def test_an_engine_that_is_not_full_says_what_it_waited_for(starved_s: dict[str, float], fragment: str) -> None:
    found = find(summary(engine_use=LOW), *tables((1_000, 990, None), (1_000, 950, None), starved_s=starved_s))
    assert fragment in found["engine not full"]


SMALL = {"worker_s": 300.0}


@pytest.mark.parametrize("changes", [
    {},
    {"num_failed": 49, "error_kinds": {"invalid_json": 49}},
    {"finish_reasons": {"stop": 900, "length": 100}},
    {"finish_reasons": {}},
    {"record": record(accelerator="A100-80GB", hardware="2 x NVIDIA A100-SXM4-80GB, 81920 MiB, 80GB")},
    {"record": record(accelerator="cpu", hardware="64 cores of AMD EPYC 9354")},
    {"record": record(accelerator="H100", hardware="unknown")},
    {"engine_use": use(concurrency_share=0.5)},
    {"engine_use": use(**dict.fromkeys(EngineUse.model_fields))},
    {"engine_use": use(memory_share=0.2)},
    {"engine_use": use(concurrency_share=0.95)},
    {"engine_use": use(concurrency_share=0.95, memory_share=None, compute_share=None)},
    {"record": record("Be brief.")},
    {"record": record(LONG_PROMPT), "num_cached_tokens": 800_000},
    {"record": record(LONG_PROMPT), "num_prompt_tokens": 0},
    {"prefix_hits": HITS, "num_cached_tokens": 800_000},
    {"prefix_hits": HITS.model_copy(update={"as_is": 990_000})},
    {"prefix_hits": HITS, "record": {**record(), "engine": None}},
    {"record": {**record(LONG_PROMPT), "engine": None}},
    {"costs": costs(lost=5), "num_deaths": 1},
    {"costs": costs(loading=20)},
    {"costs": costs(idle=10)},
    {"costs": costs(prefill=0, decode=0)},
    {**SMALL, **FEW},
    {**SMALL, "costs": costs(loading=500, idle=500, lost=500)},
    {**SMALL, "engine_use": use(concurrency_share=0.95, memory_share=0.2)},
])  # fmt: skip
def test_where_there_is_nothing_to_gain_nothing_is_said(changes: dict[str, Any]) -> None:
    assert find(summary(**changes), *EVEN) == {}


@pytest.mark.parametrize(("workers", "is_found"), [
    ([(4_000, 3_000, None), (4_000, 4_000, None)], True),
    ([(4_000, 3_700, None), (4_000, 4_000, None)], False),  # 300 s of 4,000
    ([(4_000, 3_000, "killed"), (4_000, 4_000, None)], False),  # who died early left no tail
    ([(40, 20, None), (40, 40, None)], False),  # half of it, and nothing in money
    ([(4_000, 4_000, None)], False),
    ([], False),
])  # fmt: skip
def test_a_tail_is_what_lies_between_the_workers_last_commits(
    workers: list[tuple[float, float, str | None]], is_found: bool
) -> None:
    found = find(summary(), *tables(*workers))
    assert list(found) == (["tail"] if is_found else [])
    if is_found:
        assert "1,000 s (25%)" in found["tail"]
        assert "engine.rows_per_batch=256" in found["tail"]


def test_an_order_that_brought_less_than_predicted_is_told() -> None:
    found = find(summary(prefix_hits=HITS, num_cached_tokens=700_000), *tables((1_000.0, 1_000.0, None)))
    assert "brought 700,000 tokens from the prefix cache where 1,000,000 were predicted" in found["prefix order"]
