"""What the endpoint shows to Prometheus, through Ray (docs/metrics.md)."""

import asyncio

from ray.util import metrics as ray_metrics

from pipelines.config import ServeConfig
from pipelines.metrics import BOUNDARIES_S
from pipelines.serving.answering import Tally

_TAGS = ("model", "key")
_BOUNDARIES = BOUNDARIES_S.tolist()
_SHOW_S = 5.0


class ServeMetrics:
    """Counts requests and tokens by key, and how long answers took."""

    def __init__(self, config: ServeConfig):
        self._model = {"model": config.model.name}
        self._requests = ray_metrics.Counter(
            "fournee_serve_requests_total", "requests by what became of them", (*_TAGS, "status")
        )
        self._tokens = ray_metrics.Counter("fournee_serve_tokens_total", "tokens of prompts and answers", (*_TAGS, "kind"))
        self._running = ray_metrics.Gauge("fournee_serve_requests_running", "requests that are answered now", ("model",))
        self._num_running = 0
        self._times = {
            name: ray_metrics.Histogram(f"fournee_serve_{what}_seconds", meaning, _BOUNDARIES, ("model",))
            for name, (what, meaning) in {
                "queue_s": ("queue", "in the engine until the first scheduling"),
                "ttft_s": ("ttft", "in the engine until the first token"),
                "time_per_output_token_s": ("time_per_output_token", "per token after the first"),
                "latency_s": ("latency", "in the engine until the last token"),
            }.items()
        }

    async def show_for_ever(self) -> None:
        """Set what is counted now again and again: Ray forgets a gauge that was not set for a while."""
        while True:
            self._running.set(self._num_running, self._model)
            await asyncio.sleep(_SHOW_S)

    def refused(self, key: str, status: int) -> None:
        """A request was not answered, for that status."""
        self._requests.inc(1, {**self._model, "key": key, "status": str(int(status))})

    def began(self, tally: Tally) -> None:
        """A request goes to a replica."""
        self._num_running += 1

    def answered(self, tally: Tally) -> None:
        """It is answered, or given up."""
        self._num_running -= 1
        if tally.is_refused:
            return  # which is counted with its status
        tags = {**self._model, "key": tally.key}
        self._requests.inc(1, {**tags, "status": tally.error_kind or "ok"})
        for kind in ("prompt", "cached", "output"):
            if number := getattr(tally, f"num_{kind}_tokens"):
                self._tokens.inc(number, {**tags, "kind": kind})
        for name, seconds in _times(tally).items():
            if seconds is not None:
                self._times[name].observe(seconds, self._model)


def _times(tally: Tally) -> dict[str, float | None]:
    ttft, rest, later = tally.ttft_s, tally.generation_s, tally.num_output_tokens - 1
    return {
        "queue_s": tally.queue_s,
        "ttft_s": ttft,
        "time_per_output_token_s": None if rest is None or later < 1 else rest / later,
        "latency_s": None if ttft is None or rest is None else ttft + rest,
    }
