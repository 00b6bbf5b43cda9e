"""Prometheus' view of a run: what Ray's agent of the node serves over HTTP, while it goes on and after it."""

import json
import subprocess
import sys
import urllib.request
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from pipelines.config import BatchConfig
from pipelines.metrics import LATENCIES, OF_RUN, OF_WORKER
from pipelines.model import model_folder
from tests.integration.conftest import Fournee

WaitUntil = Callable[[Callable[[], bool], "subprocess.Popen[str]"], None]
_PORT = "import ray, sys; ray.init(sys.argv[1], log_to_driver=False); print(ray.nodes()[0]['MetricsExportPort'])"
_SHOWN = ("status", "kind", "phase", "error_kind", "currency", "le")


@pytest.fixture
def metrics_url(ray_address: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Where the agent of the cluster's only node serves metrics."""
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    command = [sys.executable, "-c", _PORT, ray_address]
    port = int(subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout)
    return f"http://127.0.0.1:{port}/metrics"


def fetch(url: str) -> str:
    with urllib.request.urlopen(url, timeout=60) as reply:
        text: str = reply.read().decode()
    return text


def scrape(url: str, folder: str) -> dict[str, Counter[str]]:
    """The metrics of one run folder: for each name the sum over workers, by what they are counted by."""
    found: dict[str, Counter[str]] = {}
    for family in text_string_to_metric_families(fetch(url)):
        for sample in family.samples:
            if sample.labels.get("run", "").startswith(f"{folder}-"):
                found.setdefault(sample.name, Counter())[counted_by(sample.labels)] += sample.value
    return found


def counted_by(labels: Mapping[str, str]) -> str:
    return next((labels[name] for name in _SHOWN if name in labels), "")


def test_prometheus_sees_a_run_while_it_goes_on_and_its_sums_in_the_end(
    fournee: Fournee,
    metrics_url: str,
    wait_until: WaitUntil,
    jsonl: Callable[..., Path],
) -> None:
    texts = [None if number % 50 == 0 else "word " * (10 + number % 30) for number in range(400)]
    rows = jsonl([{"id": str(number), "prompt": text} for number, text in enumerate(texts)])
    night = Fournee(fournee.folder.with_name("night"), fournee.address)
    process = night.start(
        "engine=echo", "engine.rows_per_batch=10", "engine.max_num_seqs=10",
        "engine.seconds_per_token=0.5", "cluster.workers=2",
        "input=jsonl", f"input.path={rows}", "input.id_column=id", "errors.max_failed_fraction=1",
    )  # fmt: skip
    live: dict[str, Counter[str]] = {}

    def is_under_way() -> bool:
        live.update(scrape(metrics_url, "night"))
        return live.get("ray_fournee_requests_running", Counter())[""] > 0 and live["ray_fournee_run_workers"][""] == 2

    wait_until(is_under_way, process)
    assert live["ray_fournee_run_planned_rows"][""] == 400
    assert live["ray_fournee_run_attempts"][""] == 1
    assert live["ray_fournee_requests_capacity"][""] > 0
    assert live["ray_fournee_batches_open"][""] > 0
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, f"{out}\n{err}"

    last = scrape(metrics_url, "night")
    summary = json.loads((night.folder / "stats/summary.json").read_text())
    assert rounded(last["ray_fournee_rows_total"]) == {"ok": summary["num_ok"], "failed": summary["num_failed"]}
    assert rounded(last["ray_fournee_failed_rows_total"]) == summary["error_kinds"]
    tokens = {kind: summary[f"num_{kind}_tokens"] for kind in ("prompt", "cached", "output")}
    assert rounded(last["ray_fournee_tokens_total"]) == rounded(Counter(tokens))
    assert rounded(last["ray_fournee_batches_total"]) == {"": summary["num_batches"]}
    for latency in LATENCIES.values():
        bucket, total = latency.exported
        assert last[bucket]["+Inf"] == summary["num_ok"]
        assert total in last
    ttft_s = last["ray_fournee_ttft_seconds_sum_total"][""]
    assert ttft_s == pytest.approx(0.5 * summary["num_ok"])
    assert last["ray_fournee_cost_total"]["USD"] == pytest.approx(summary["costs"]["total"], rel=0.2)
    assert sum(last["ray_fournee_worker_seconds_total"].values()) == pytest.approx(summary["worker_s"], rel=0.2)
    names = {name for metric in (*OF_WORKER, *OF_RUN.values()) for name in metric.exported}
    assert names <= set(live) | set(last)


def rounded(counts: Counter[str]) -> dict[str, int]:
    """Counters begin a very little above nothing."""
    return {name: round(count) for name, count in counts.items() if round(count)}


_VLLM = """
import ray, sys, time
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.metrics.loggers import PrometheusStatLogger, StatLoggerManager
from vllm.v1.metrics.stats import IterationStats, SchedulerStats
from pipelines.engines.vllm.ray_metrics import StepMetrics

ray.init(sys.argv[1], log_to_driver=False)
config = EngineArgs(model=sys.argv[2], served_model_name="night-model", max_model_len=256).create_engine_config()
manager = StatLoggerManager(config, [0], [StepMetrics])
print([type(one).__name__ for one in manager.stat_loggers if isinstance(one, PrometheusStatLogger)])
step = IterationStats()
step.num_generation_tokens, step.inter_token_latencies_iter = 7, [0.02] * 7
manager.record(SchedulerStats(num_running_reqs=7), step)
print(len(step.inter_token_latencies_iter))
ray.shutdown()
"""


def test_vllm_tells_ray_what_it_would_tell_prometheus_but_for_the_time_between_tokens(
    ray_address: str, metrics_url: str, batch_config: Callable[..., BatchConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    command = [sys.executable, "-c", _VLLM, ray_address, model_folder(batch_config().model)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-2:] == ["['StepMetrics']", "7"]
    found = {
        sample.name: sample.value
        for family in text_string_to_metric_families(fetch(metrics_url))
        for sample in family.samples
        if sample.labels.get("model_name") == "night-model"
    }
    assert found["ray_vllm_num_requests_running"] == 7
    assert found["ray_vllm_generation_tokens_total"] == 7
    assert not [name for name in found if "inter_token" in name]
