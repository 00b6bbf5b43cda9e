"""Metrics: what is counted, and that code, docs and dashboard use the same names."""

import ast
import json
import re
import shutil
import subprocess
import time
from collections import defaultdict
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from pipelines import metrics
from pipelines.batch import job_of
from pipelines.config import BatchConfig
from pipelines.errors import ErrorKind
from pipelines.metrics import BOUNDARIES_S, OF_RUN, OF_WORKER, Load, RunMetrics, WorkerMetrics
from pipelines.placement import Placement
from pipelines.schema import RESULT
from pipelines.statistics import Origin
from tests.unit.conftest import PRICING
from tests.unit.story import answer, echo

ROOT = Path(__file__).parents[2]
ALL = (*OF_WORKER, *OF_RUN.values())
ORIGIN = Origin("f" * 64, "w1", "node", "H100", 2, 1, PRICING)
TAGS = {"run": "night-ffffffff", "model": "m", "experiment": ""}
Values = dict[str, dict[tuple[tuple[str, str], ...], float]]


class Instrument:
    """Stands for Ray's counters and gauges, with their rules."""

    shown: Values

    def __init__(self, name: str, description: str, tag_keys: tuple[str, ...]) -> None:
        self._series = self.shown.setdefault(name, defaultdict(float))
        self._tag_keys = tag_keys

    def set_default_tags(self, tags: dict[str, str]) -> "Instrument":
        self._tags = tags
        return self

    def inc(self, value: float, tags: dict[str, str] | None = None) -> None:
        assert value > 0
        self._series[self._key(tags)] += value

    def set(self, value: float | None) -> None:
        if value is not None:
            self._series[self._key(None)] = value

    def _key(self, tags: dict[str, str] | None) -> tuple[tuple[str, str], ...]:
        final = {**self._tags, **(tags or {})}
        assert set(final) == set(self._tag_keys)
        return tuple(sorted((key, value) for key, value in final.items() if key not in TAGS and key != "worker"))


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> Values:
    """What Prometheus would find: name, tags beside those of all, value."""
    Instrument.shown = {}
    for kind in ("Counter", "Gauge"):
        monkeypatch.setattr(metrics.ray_metrics, kind, Instrument)
    return Instrument.shown


def rows(*values: dict[str, Any]) -> pa.Table:
    base = {"source": "a", "source_row": 0, "status": "ok", "attempts": 1, "request_key": "k", "flags": []}
    return pa.Table.from_pylist([{**base, **value} for value in values], schema=RESULT)


def answered(ttft_s: float, generation_s: float, num_output_tokens: int) -> dict[str, Any]:
    return {
        "num_prompt_tokens": 10, "num_cached_tokens": 4, "num_output_tokens": num_output_tokens,
        "queue_s": 0.0, "ttft_s": ttft_s, "generation_s": generation_s,
    }  # fmt: skip


def failed(kind: str) -> dict[str, Any]:
    return {"status": "failed", "error_kind": kind}


def no_time() -> dict[str, float]:
    return dict.fromkeys(("loading", "busy", "idle"), 0.0)


def test_a_committed_batch_is_counted(shown: Values) -> None:
    worker = WorkerMetrics(TAGS, ORIGIN, no_time)
    worker.committed(rows(answered(0.5, 2.0, 5), answered(0.003, 0.0, 1), failed("empty_prompt"), failed("empty_prompt")))
    worker.committed(rows(failed("missing_value")))
    assert shown["fournee_rows_total"] == {(("status", "ok"),): 2, (("status", "failed"),): 3}
    kinds = {key[0][1]: value for key, value in shown["fournee_failed_rows_total"].items()}
    assert kinds == {**dict.fromkeys(ErrorKind, pytest.approx(0)), "empty_prompt": 2, "missing_value": 1}
    tokens = {key[0][1]: value for key, value in shown["fournee_tokens_total"].items()}
    assert tokens == {"prompt": 20, "cached": 8, "output": 6}
    assert shown["fournee_batches_total"] == {(): 2}
    buckets = {key[0][1]: value for key, value in shown["fournee_ttft_seconds_bucket_total"].items()}
    assert [buckets[le] for le in ("0.002", "0.004", "0.256", "0.512", "+Inf")] == pytest.approx([0, 1, 1, 2, 2])
    assert shown["fournee_latency_seconds_sum_total"] == {(): pytest.approx(2.503)}
    assert shown["fournee_time_per_output_token_seconds_sum_total"] == {(): 0.5}


@given(st.lists(st.floats(min_value=0, max_value=1e5), max_size=50))
def test_a_histogram_counts_each_value_in_every_bucket_that_it_fits_into(seconds: list[float]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        Instrument.shown = {}
        patch.setattr(metrics.ray_metrics, "Counter", Instrument)
        patch.setattr(metrics.ray_metrics, "Gauge", Instrument)
        worker = WorkerMetrics(TAGS, ORIGIN, no_time)
        worker.committed(rows(*(answered(value, 0.0, 1) for value in seconds)))
        found = Instrument.shown["fournee_ttft_seconds_bucket_total"]
    expected = [sum(value <= boundary for value in seconds) for boundary in BOUNDARIES_S]
    assert list(found.values()) == pytest.approx([*expected, len(seconds)])


def test_cost_and_phases_follow_the_workers_lifetime_and_never_go_back(shown: Values) -> None:
    lives = [
        {"loading": 5.0, "busy": 0.0, "idle": 0.0},
        {"loading": 6.0, "busy": 3.0, "idle": 1.0},
        {"loading": 6.0, "busy": 5.0, "idle": 0.9},
    ]

    def phases() -> dict[str, float]:
        return lives.pop(0) if len(lives) > 1 else lives[0]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(metrics, "_SAMPLE_S", 0.01)
        worker = WorkerMetrics(TAGS, ORIGIN, phases)
        worker.ready(lambda: Load(running=3, waiting=2, capacity=8, batches_open=1))
        wait_for(lambda: shown["fournee_worker_seconds_total"].get((("phase", "busy"),), 0) >= 5)
    seconds = {key[0][1]: value for key, value in shown["fournee_worker_seconds_total"].items()}
    assert seconds == pytest.approx({"loading": 6.0, "busy": 5.0, "idle": 1.0})
    assert shown["fournee_cost_total"] == {(("currency", "USD"),): pytest.approx(11.9 * 2)}
    gauges = ("running", "waiting", "capacity")
    assert [shown[f"fournee_requests_{name}"][()] for name in gauges] == [3, 2, 8]
    assert shown["fournee_batches_open"] == {(): 1}


def wait_for(condition: Callable[[], bool]) -> None:
    for _ in range(500):
        if condition():
            return
        time.sleep(0.01)
    pytest.fail("it did not happen within five seconds")


def test_what_goes_wrong_with_metrics_stops_no_worker(shown: Values, caplog: pytest.LogCaptureFixture) -> None:
    WorkerMetrics(TAGS, ORIGIN, no_time).committed(pa.table({"nothing": [1]}))
    assert "metrics could not be updated" in caplog.text


def test_a_run_shows_what_is_known_of_it(shown: Values) -> None:
    numbers = {"planned_rows": 100, "done_rows": 0, "failed_rows": 0, "workers": 2, "cost": 1.5, "left_seconds": None}
    RunMetrics(TAGS, "EUR", attempts=3).update(numbers)
    assert shown["fournee_run_planned_rows"] == {(): 100}
    assert shown["fournee_run_cost"] == {(("currency", "EUR"),): 1.5}
    assert shown["fournee_run_attempts"] == {(): 3}
    assert shown["fournee_run_left_seconds"] == {}


def test_the_run_is_named_by_its_folder_and_its_fingerprint(
    batch_config: Callable[..., BatchConfig], jsonl: Callable[..., Path], tmp_path: Path
) -> None:
    command = echo(jsonl([{"id": "a", "prompt": "hi"}]), str(tmp_path / "night"))
    config = batch_config("experiment=nightly", "run_date=2026-11-30", *command)
    run, plan, _ = answer(config)
    tags = job_of(config, run, plan, Placement("cpu", 1, {})).tags
    assert tags == {"run": f"night-{run.fingerprint[:8]}", "model": "echo", "experiment": "nightly"}


# Names.


def dashboard() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((ROOT / "infra/grafana/fournee.json").read_text(encoding="utf-8"))
    return loaded


def queries() -> list[str]:
    return [target["expr"] for panel in dashboard()["panels"] for target in panel["targets"]]


def names_in(text: str) -> set[str]:
    return set(re.findall(r"\bray_(?:fournee|vllm)_\w+", text))


def documented() -> dict[str, list[str]]:
    """The lines of the tables of our metrics: name, and the other cells."""
    lines = (ROOT / "docs/metrics.md").read_text(encoding="utf-8").splitlines()
    cells = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| `fournee_"))
    return {name.strip("`"): rest for name, *rest in cells}


def test_docs_and_code_have_the_same_metrics() -> None:
    described = {
        name: (tuple(names.replace("`", "").split()), kind, tags) for name, (names, kind, tags, *_) in documented().items()
    }
    assert described == {one.name: (one.exported, one.kind, ", ".join(f"`{tag}`" for tag in one.tags)) for one in ALL}
    assert all(unit and meaning for *_, unit, meaning in documented().values())


def test_names_say_what_prometheus_wants_to_know() -> None:
    for metric in ALL:
        assert metric.name.endswith("_total") == (metric.kind == "counter"), metric.name
        assert metric.name.endswith("_seconds") or metric.kind != "histogram", metric.name


def test_the_dashboard_asks_for_metrics_that_exist() -> None:
    ours = {name for metric in ALL for name in metric.exported}
    asked = names_in(json.dumps(dashboard()))
    assert {name for name in asked if name.startswith("ray_fournee_")} <= ours
    assert not [metric.name for metric in ALL if not set(metric.exported) & asked], "not on the dashboard"


def test_vllms_metrics_are_called_what_docs_and_dashboard_call_them() -> None:
    spec = find_spec("vllm")
    if spec is None or spec.submodule_search_locations is None:
        pytest.skip("vLLM is not installed")
    source = Path(spec.submodule_search_locations[0]) / "v1/metrics/loggers.py"
    suffixes = {"_gauge_cls": ("",), "_counter_cls": ("_total",), "_histogram_cls": ("_bucket", "_sum", "_count")}
    exported = set()
    for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in suffixes:
            for name in (key.value.value for key in node.keywords if key.arg == "name" and isinstance(key.value, ast.Constant)):
                exported |= {f"ray_{str(name).replace(':', '_')}{suffix}" for suffix in suffixes[node.func.attr]}
    used = names_in(json.dumps(dashboard())) | names_in((ROOT / "docs/metrics.md").read_text(encoding="utf-8"))
    assert {name for name in used if name.startswith("ray_vllm_")} <= exported


@pytest.fixture
def promtool() -> str:
    found = shutil.which("promtool")
    if found is None:
        pytest.skip("promtool, which comes with Prometheus, is not installed")
    return found


def test_prometheus_understands_every_query_of_the_dashboard(promtool: str, tmp_path: Path) -> None:
    rules = [{"record": f"query:{number}", "expr": expr} for number, expr in enumerate(queries())]
    (tmp_path / "rules.yml").write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": rules}]}))
    done = subprocess.run([promtool, "check", "rules", tmp_path / "rules.yml"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert f"{len(rules)} rules found" in done.stdout


def test_prometheus_takes_its_configuration(promtool: str) -> None:
    config = ROOT / "infra/prometheus/prometheus.yml"
    done = subprocess.run([promtool, "check", "config", config], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_dashboard_works_with_any_data_source_and_shows_any_run() -> None:
    board = dashboard()
    assert {one["name"] for one in board["templating"]["list"]} == {"datasource", "model", "run"}
    assert {panel["datasource"]["uid"] for panel in board["panels"]} == {"${datasource}"}
    assert not [expr for expr in queries() if 'run=~"$run",model=~"$model"' not in expr]
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
