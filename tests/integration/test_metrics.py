"""Prometheus' view of a run: what Ray's agent of the node serves over HTTP, while it goes on and after it."""

import json
import os
import shutil
import socket
import subprocess
import sys
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import requests
import yaml
from prometheus_client.parser import text_string_to_metric_families

from pipelines.config import BatchConfig
from pipelines.metrics import LATENCIES, OF_RUN, OF_WORKER
from pipelines.model import model_folder
from tests.integration.conftest import Fournee
from tests.unit.test_metrics import dashboard

ROOT = Path(__file__).parents[2]
WaitUntil = Callable[[Callable[[], bool], "subprocess.Popen[str]"], None]
_PORT = "import ray, sys; ray.init(sys.argv[1], log_to_driver=False); print(ray.nodes()[0]['MetricsExportPort'])"
_SHOWN = ("status", "kind", "phase", "error_kind", "currency", "le")


def metrics_url_of(address: str) -> str:
    """Where the agent of a cluster's only node serves metrics."""
    environment = {**os.environ, "RAY_AUTH_MODE": "token"}
    command = [sys.executable, "-c", _PORT, address]
    port = int(subprocess.run(command, capture_output=True, text=True, check=True, timeout=120, env=environment).stdout)
    return f"http://127.0.0.1:{port}/metrics"


@pytest.fixture
def metrics_url(ray_address: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """That of the cluster which the tests share."""
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    return metrics_url_of(ray_address)


@dataclass(frozen=True)
class Prometheus:
    """Debian's Prometheus, which scrapes as the project's own configuration says, and knows the project's alerts."""

    url: str

    def ask(self, path: str, **parameters: str) -> Any:
        """What its API says."""
        reply = requests.get(f"{self.url}/api/v1/{path}", params=parameters, timeout=30)
        assert reply.status_code == 200, reply.text
        return reply.json()["data"]

    def by(self, tag: str, query: str) -> dict[str, float]:
        """The values of a query, by one of their tags."""
        return {one["metric"].get(tag, ""): float(one["value"][1]) for one in self.ask("query", query=query)["result"]}


@pytest.fixture
def prometheus(metrics_url: str, tmp_path: Path) -> Iterator[Prometheus | None]:
    """On loopback; the test writes down the cluster's nodes as Ray's dashboard would. None where it is not installed."""
    program = shutil.which("prometheus")
    if program is None:
        yield None
        return
    config = yaml.safe_load((ROOT / "infra/prometheus/prometheus.yml").read_text(encoding="utf-8"))
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    config["scrape_configs"][0]["file_sd_configs"][0]["files"] = [str(tmp_path / "nodes.json")]
    config["rule_files"] = [str(tmp_path / "alerts.yml")]
    alerts = yaml.safe_load((ROOT / "infra/k8s/base/alerts.yaml").read_text(encoding="utf-8"))
    (tmp_path / "nodes.json").write_text(json.dumps([{"targets": [metrics_url.split("/")[2]]}]))
    (tmp_path / "alerts.yml").write_text(yaml.safe_dump(alerts["spec"]))
    (tmp_path / "prometheus.yml").write_text(yaml.safe_dump(config))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    options = {
        "config.file": tmp_path / "prometheus.yml",
        "storage.tsdb.path": tmp_path / "tsdb",
        "web.listen-address": address,
    }
    process = subprocess.Popen(
        [program, *(f"--{name}={value}" for name, value in options.items())], stderr=subprocess.DEVNULL, cwd=tmp_path
    )
    try:
        yield Prometheus(f"http://{address}")
    finally:
        process.terminate()
        process.wait(30)


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
    prometheus: Prometheus | None,
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
    if prometheus is not None:
        check_prometheus(prometheus, night)

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
    if prometheus is None:
        pytest.skip("Prometheus is not installed: all else held, but what it makes of these metrics was not looked at")


def check_prometheus(prometheus: Prometheus, night: Fournee) -> None:
    """It has scraped sane values, the dashboard's panels have something to show, and the alerts can be judged."""
    summary = json.loads((night.folder / "stats/summary.json").read_text())
    (target,) = prometheus.ask("targets")["activeTargets"]
    assert (target["labels"]["job"], target["health"]) == ("ray", "up")
    rows = prometheus.by("status", 'sum by (status) (last_over_time(ray_fournee_rows_total{run=~"night-.*"}[2m]))')
    assert 0 < rows["ok"] <= summary["num_ok"] and rows["failed"] <= summary["num_failed"]
    silent = []
    for panel in dashboard()["panels"]:
        for target in panel["targets"]:
            query = target["expr"].replace("$run", "night-.*").replace("$model", ".*")
            if not prometheus.ask("query", query=query)["result"] and "ray_vllm_" not in query:
                silent.append(f"{panel['title']}: {query}")
    assert not silent, silent
    rules = [rule for group in prometheus.ask("rules")["groups"] for rule in group["rules"]]
    assert {rule["health"] for rule in rules} == {"ok"}
    assert "FourneeErrorBudget" in {rule["name"] for rule in rules}


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
