"""The one door to Ray's metrics: what workers and their driver show to Prometheus while a run goes on (docs/metrics.md).

A worker counts batch by batch, as it commits them, and looks at itself every few seconds; nothing is done row by row, and
nothing in the engine's loop. How many series there are follows from the number of workers, never from that of the rows.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from ray.util import metrics as ray_metrics

from pipelines.config import BatchConfig, EchoEngineConfig
from pipelines.errors import ErrorKind
from pipelines.statistics import Origin, latencies_of, sum_of
from pipelines.storage import Folder

logger = logging.getLogger(__name__)

RUN_TAGS = ("run", "model", "experiment")
WORKER_TAGS = (*RUN_TAGS, "worker")
# Powers of two from a millisecond to 35 minutes, for every kind of latency: a cached prompt on a GPU and a full queue on a
# CPU both fall in between, and a quantile is off by no more than half its size. The summary has exact ones.
BOUNDARIES_S = np.array([0.001 * 2**k for k in range(22)])
_LE = (*(f"{boundary:g}" for boundary in BOUNDARIES_S), "+Inf")
_SAMPLE_S = 5.0  # Ray exports every 10 s, and forgets a gauge that was not set for 20 s
_NEXT_TO_NOTHING = 5e-324  # Ray refuses to add zero; whatever is added to the smallest number of all swallows it


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric as the docs explain it."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    meaning: str
    tags: tuple[str, ...] = ()
    """Besides those of the run, and of the worker."""

    @property
    def exported(self) -> tuple[str, ...]:
        """Under which names Prometheus finds it: Ray puts its own before them, and `_total` behind those of counters."""
        if self.kind == "histogram":
            return f"ray_{self.name}_bucket_total", f"ray_{self.name}_sum_total"
        return (f"ray_{self.name}",)


ROWS = Metric("fournee_rows_total", "counter", "rows committed", ("status",))
FAILED_ROWS = Metric("fournee_failed_rows_total", "counter", "failed rows committed", ("error_kind",))
TOKENS = Metric("fournee_tokens_total", "counter", "tokens of committed rows that are ok", ("kind",))
BATCHES = Metric("fournee_batches_total", "counter", "batches committed")
COST = Metric("fournee_cost_total", "counter", "cost of the worker's lifetime so far", ("currency",))
SECONDS = Metric("fournee_worker_seconds_total", "counter", "the worker's lifetime so far, by what it did", ("phase",))
RUNNING = Metric("fournee_requests_running", "gauge", "answers that the engine works on")
WAITING = Metric("fournee_requests_waiting", "gauge", "requests in the engine that it does not work on yet")
CAPACITY = Metric("fournee_requests_capacity", "gauge", "answers that the engine can work on at once (max_num_seqs)")
BATCHES_OPEN = Metric("fournee_batches_open", "gauge", "batches read and not yet committed")
LATENCIES = {
    "queue_s": Metric("fournee_queue_seconds", "histogram", "from arrival in the engine to the first scheduling"),
    "ttft_s": Metric("fournee_ttft_seconds", "histogram", "from arrival in the engine to the first token"),
    "time_per_output_token_s": Metric("fournee_time_per_output_token_seconds", "histogram", "per token after the first"),
    "latency_s": Metric("fournee_latency_seconds", "histogram", "from arrival in the engine to the last token"),
}
OF_WORKER = (
    *(ROWS, FAILED_ROWS, TOKENS, BATCHES, COST, SECONDS, RUNNING, WAITING, CAPACITY, BATCHES_OPEN),
    *LATENCIES.values(),
)
OF_RUN = {
    "planned_rows": Metric("fournee_run_planned_rows", "gauge", "rows of the run"),
    "done_rows": Metric("fournee_run_done_rows", "gauge", "rows committed, those of earlier attempts included"),
    "failed_rows": Metric("fournee_run_failed_rows", "gauge", "failed rows committed, those of earlier attempts included"),
    "workers": Metric("fournee_run_workers", "gauge", "workers that are alive, loading ones included"),
    "cost": Metric("fournee_run_cost", "gauge", "cost so far, earlier attempts and overhead included", ("currency",)),
    "left_seconds": Metric("fournee_run_left_seconds", "gauge", "estimated time left, at the speed of late"),
    "attempts": Metric("fournee_run_attempts", "gauge", "attempts so far, this one included"),
}


class Load(NamedTuple):
    """What a worker has to do at a moment."""

    running: int
    waiting: int
    capacity: int
    batches_open: int


class Metrics(Protocol):
    """What a worker tells about itself."""

    is_exported: bool
    """Whether anybody hears it; then the engine tells, too."""

    def ready(self, load: Callable[[], Load]) -> None:
        """The engine is loaded; from now on the worker tells what it has to do."""

    def committed(self, rows: pa.Table) -> None:
        """Count the new rows of a batch, and the batch."""


BuildMetrics = Callable[[Mapping[str, str], Origin, Callable[[], Mapping[str, float]]], Metrics]
"""From the tags of the run, the worker, and what tells how its lifetime has passed so far."""


def run_tags(config: BatchConfig, run: Folder, fingerprint: str) -> dict[str, str]:
    """What tells the metrics of one run from those of another."""
    folder, short = run.url.rstrip("/").rpartition("/")[2], fingerprint[:8]
    return {
        "run": folder if short in folder else f"{folder}-{short}",
        "model": "echo" if isinstance(config.engine, EchoEngineConfig) else config.model.name,
        "experiment": config.experiment or "",
    }


class WorkerMetrics:
    """A worker's metrics, through Ray. From its start on it looks in a thread of its own how the worker stands."""

    is_exported = True

    def __init__(self, run_tags: Mapping[str, str], origin: Origin, phases: Callable[[], Mapping[str, float]]):
        self._origin = origin
        self._phases = phases
        self._load: Callable[[], Load] | None = None
        tags = {**run_tags, "worker": origin.worker}
        self._rows = _Counter(ROWS, tags, ("ok", "failed"))
        self._failed = _Counter(FAILED_ROWS, tags, tuple(ErrorKind))
        self._tokens = _Counter(TOKENS, tags, ("prompt", "cached", "output"))
        self._batches = _Counter(BATCHES, tags)
        self._cost = _Counter(COST, tags, (origin.pricing.currency,))
        self._seconds = _Counter(SECONDS, tags, ("loading", "busy", "idle"))
        self._gauges = [_gauge(metric, tags) for metric in (RUNNING, WAITING, CAPACITY, BATCHES_OPEN)]
        self._histograms = {name: _Histogram(metric, tags) for name, metric in LATENCIES.items()}
        threading.Thread(target=self._sample_forever, name="metrics", daemon=True).start()

    def ready(self, load: Callable[[], Load]) -> None:
        """The engine is loaded; from now on the worker tells what it has to do."""
        self._load = load

    def committed(self, rows: pa.Table) -> None:
        """Count the new rows of a batch, and the batch."""
        with _harmless():
            ok = rows.filter(pc.equal(rows["status"], "ok"))
            self._rows.add(len(ok), "ok")
            self._rows.add(len(rows) - len(ok), "failed")
            for line in pc.value_counts(rows["error_kind"].drop_null()).to_pylist():
                self._failed.add(line["counts"], line["values"])
            for kind in ("prompt", "cached", "output"):
                self._tokens.add(sum_of(ok[f"num_{kind}_tokens"]), kind)
            for name, values in latencies_of(rows).items():
                self._histograms[name].add(values)
            self._batches.add(1)

    def _sample_forever(self) -> None:
        while True:
            with _harmless():
                self._sample()
            time.sleep(_SAMPLE_S)

    def _sample(self) -> None:
        phases = self._phases()
        self._cost.reach(self._origin.cost(sum(phases.values())), self._origin.pricing.currency)
        for phase, seconds in phases.items():
            self._seconds.reach(seconds, phase)
        if self._load is not None:
            for gauge, value in zip(self._gauges, self._load(), strict=True):
                gauge.set(value)


class RunMetrics:
    """The metrics of a run as its driver sees it, through Ray."""

    def __init__(self, run_tags: Mapping[str, str], currency: str, attempts: int):
        own = {"cost": {"currency": currency}}
        self._gauges = {name: _gauge(metric, {**run_tags, **own.get(name, {})}) for name, metric in OF_RUN.items()}
        self._attempts = attempts

    def update(self, numbers: Mapping[str, float | None]) -> None:
        """Show these numbers (`OF_RUN`); what is not known is not shown."""
        with _harmless():
            for name, value in {**numbers, "attempts": self._attempts}.items():
                self._gauges[name].set(value)


class _Counter:
    """A sum by the values of a tag. Those that are known exist from the start: else `rate` would miss their first step."""

    def __init__(self, metric: Metric, tags: Mapping[str, str], known: tuple[str, ...] = ()):
        keys = (*tags, *metric.tags)
        self._tag = metric.tags[0] if metric.tags else None
        self._counter = ray_metrics.Counter(metric.name, metric.meaning, keys).set_default_tags(dict(tags))
        self._reached: dict[str, float] = {}
        for value in known if self._tag else ("",):
            self.add(_NEXT_TO_NOTHING, value)

    def add(self, amount: float, value: str = "") -> None:
        """Add an amount, which may be nothing."""
        if amount > 0:
            self._counter.inc(amount, {self._tag: value} if self._tag else None)

    def reach(self, total: float, value: str) -> None:
        """Bring it up to a sum that is kept elsewhere."""
        self.add(total - self._reached.get(value, 0.0), value)
        self._reached[value] = max(total, self._reached.get(value, 0.0))


class _Histogram:
    """Prometheus' histogram made of counters.

    Ray's own takes 5 microseconds for each value here, some more in the one agent of its node, and guesses the sum; these
    cost the same for a batch of any size, and are exact.
    """

    def __init__(self, metric: Metric, tags: Mapping[str, str]):
        bucket, total = (name.removeprefix("ray_") for name in metric.exported)
        self._buckets = _Counter(Metric(bucket, "counter", metric.meaning, ("le",)), tags, _LE)
        self._sum = _Counter(Metric(total, "counter", metric.meaning), tags)

    def add(self, values_s: np.ndarray) -> None:
        """Count some values: each in every bucket that it fits into."""
        fits = np.searchsorted(BOUNDARIES_S, values_s)
        for le, count in zip(_LE, np.cumsum(np.bincount(fits, minlength=len(_LE))).tolist(), strict=True):
            self._buckets.add(count, le)
        self._sum.add(float(values_s.sum()))


def _gauge(metric: Metric, tags: Mapping[str, str]) -> ray_metrics.Gauge:
    return ray_metrics.Gauge(metric.name, metric.meaning, tuple(tags)).set_default_tags(dict(tags))


@contextmanager
def _harmless() -> Iterator[None]:
    """What goes wrong with metrics is said, and changes nothing."""
    try:
        yield
    except Exception:
        logger.warning("metrics could not be updated", exc_info=True)
