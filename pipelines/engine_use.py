"""How much of what an engine could do it did: how many requests ran at once, and how near the accelerator came to its peaks."""

import json

import pyarrow as pa
import pyarrow.compute as pc
from pydantic import BaseModel, ConfigDict

from pipelines.config import PricingConfig


class EngineUse(BaseModel):
    """Means over the time in which engines were busy; null where nothing was measured or no peak is known."""

    model_config = ConfigDict(frozen=True)
    mean_running_requests: float | None
    """For one engine."""
    max_num_seqs: int | None
    """How many requests one engine could run at once."""
    concurrency_share: float | None
    """The first over the second."""
    compute_share: float | None
    """Operations per second over `pricing.peak_tflops`."""
    memory_share: float | None
    """Bytes moved per second over `pricing.peak_memory_gb_per_s`."""

    @property
    def roofline_share(self) -> float | None:
        """How near the nearer of the two peaks was (the roofline model: Williams, Waterman and Patterson, 2009)."""
        shares = [share for share in (self.compute_share, self.memory_share) if share is not None]
        return max(shares, default=None)


def engine_use(workers: pa.Table, pricing: PricingConfig) -> EngineUse:
    """Sum up `stats/workers.parquet`; operations and bytes are what vLLM estimates for each step and accelerator."""
    ready = workers.filter(pc.is_valid(workers["engine"]))
    busy_s, request_s, num_flops, num_bytes = (
        float(pc.sum(column).as_py() or 0)
        for column in (
            pc.add(pc.add(ready["prefill_s"], ready["decode_s"]), ready["lost_s"]),
            ready["request_s"],
            ready["num_flops"],
            ready["num_moved_bytes"],
        )
    )
    limits = {json.loads(text)["max_num_seqs"] for text in ready["engine"].to_pylist()}
    most = max(limits, default=None)
    running = request_s / busy_s if busy_s else None

    def share(amount: float, peak: float | None) -> float | None:
        return amount / busy_s / peak if amount and busy_s and peak else None

    return EngineUse(
        mean_running_requests=running,
        max_num_seqs=most,
        concurrency_share=None if running is None or most is None else running / most,
        compute_share=share(num_flops / 1e12, pricing.peak_tflops),
        memory_share=share(num_bytes / 1e9, pricing.peak_memory_gb_per_s),
    )
