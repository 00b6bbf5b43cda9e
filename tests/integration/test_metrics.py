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

from pipelines.metrics import LATENCIES, OF_RUN, OF_WORKER
from tests.integration.conftest import Fournee

WaitUntil = Callable[[Callable[[], bool], "subprocess.Popen[str]"], None]
_PORT = "import ray, sys; ray.init(sys.argv[1], log_to_driver=False); print(ray.nodes()[0]['MetricsExportPort'])"
_SHOWN = ("status", "kind", "phase", "error_kind", "currency", "le")


@pytest.fixture
def scrape(ray_address: str, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], dict[str, Counter[str]]]:
    """The metrics of one run folder: for each name the sum over workers, by what they are counted by."""
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    command = [sys.executable, "-c", _PORT, ray_address]
    port = int(subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout)

    def fetch(folder: str) -> dict[str, Counter[str]]:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as reply:
            text = reply.read().decode()
        found: dict[str, Counter[str]] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.labels.get("run", "").startswith(f"{folder}-"):
                    found.setdefault(sample.name, Counter())[counted_by(sample.labels)] += sample.value
        return found

    return fetch


def counted_by(labels: Mapping[str, str]) -> str:
    return next((labels[name] for name in _SHOWN if name in labels), "")


def test_prometheus_sees_a_run_while_it_goes_on_and_its_sums_in_the_end(
    fournee: Fournee,
    scrape: Callable[[str], dict[str, Counter[str]]],
    wait_until: WaitUntil,
    jsonl: Callable[..., Path],
) -> None:
    texts = [None if number % 50 == 0 else "word " * (10 + number % 30) for number in range(400)]
    rows = jsonl([{"id": str(number), "prompt": text} for number, text in enumerate(texts)])
    night = Fournee(fournee.folder.with_name("night"), fournee.address)
    process = night.start(
        "engine=echo", "engine.rows_per_batch=10", "engine.seconds_per_token=0.5", "cluster.workers=2",
        "input=jsonl", f"input.path={rows}", "input.id_column=id", "errors.max_failed_fraction=1",
    )  # fmt: skip
    live: dict[str, Counter[str]] = {}

    def is_under_way() -> bool:
        live.update(scrape("night"))
        return live.get("ray_fournee_requests_running", Counter())[""] > 0 and live["ray_fournee_run_workers"][""] == 2

    wait_until(is_under_way, process)
    assert live["ray_fournee_run_planned_rows"][""] == 400
    assert live["ray_fournee_run_attempts"][""] == 1
    assert live["ray_fournee_requests_capacity"][""] > 0
    assert live["ray_fournee_batches_open"][""] > 0
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, f"{out}\n{err}"

    last = scrape("night")
    summary = json.loads((night.folder / "stats/summary.json").read_text())
    assert rounded(last["ray_fournee_rows_total"]) == {"ok": summary["num_ok"], "failed": summary["num_failed"]}
    assert rounded(last["ray_fournee_failed_rows_total"]) == summary["error_kinds"]
    tokens = {kind: summary[f"num_{kind}_tokens"] for kind in ("prompt", "cached", "output")}
    assert rounded(last["ray_fournee_tokens_total"]) == tokens
    assert rounded(last["ray_fournee_batches_total"]) == {"": summary["num_batches"]}
    for latency in LATENCIES.values():
        bucket, total = latency.exported
        assert last[bucket]["+Inf"] == summary["num_ok"]
        assert total in last
    ttft_s = last["ray_fournee_ttft_seconds_sum_total"][""]
    assert ttft_s == pytest.approx(0.5 * summary["num_ok"])
    assert 0 < last["ray_fournee_cost_total"]["USD"] <= summary["costs"]["total"]
    assert sum(last["ray_fournee_worker_seconds_total"].values()) == pytest.approx(summary["worker_s"], rel=0.2)
    names = {name for metric in (*OF_WORKER, *OF_RUN.values()) for name in metric.exported}
    assert names <= set(live) | set(last)


def rounded(counts: Counter[str]) -> dict[str, int]:
    """Counters begin a very little above nothing."""
    return {name: round(count) for name, count in counts.items()}
