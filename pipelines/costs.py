"""What a run cost, of what that is made up, and what a million tokens came to.

Every price per million tokens names what it is spread over. The bill is the workers' lifetimes and the overheads; loading,
idle and lost time belong to no token of their own, so they are spread over prefill and decode as these share the engine.
"""

import math
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc
from pydantic import BaseModel, ConfigDict

from pipelines.config import PricingConfig
from pipelines.ledger import PHASES
from pipelines.statistics import cost_per_million


@dataclass(frozen=True, slots=True)
class Tokens:
    """The tokens of the rows that are ok."""

    prompt: int
    cached: int
    """Of the prompts' tokens, those that vLLM had in its prefix cache."""
    output: int

    @property
    def uncached(self) -> int:
        """Those that were computed."""
        return self.prompt - self.cached + self.output


class Hosted(BaseModel):
    """What a hosted API would have asked for the same tokens."""

    model_config = ConfigDict(frozen=True)
    name: str
    cost: float
    source: str


class Costs(BaseModel):
    """The bill and its parts, in one currency; null where there is nothing to spread it over."""

    model_config = ConfigDict(frozen=True)
    currency: str
    total: float
    """Workers and overhead."""
    loading: float
    prefill: float
    decode: float
    idle: float
    lost: float
    """What workers worked on and did not commit: retries."""
    overhead: float
    saved_by_caching: float | None
    """What the prompt tokens that came from the cache would have cost, at the price of prefilling one."""
    per_million_output_tokens: float | None
    per_million_total_tokens: float | None
    """Over prompt + output tokens."""
    per_million_uncached_tokens: float | None
    """Over prompt - cached + output tokens: those that were computed."""
    input_per_million_tokens: float | None
    """The bill's part for prefill over prompt tokens; the bill is split as prefill and decode share the engine."""
    output_per_million_tokens: float | None
    """The bill's part for decode over output tokens."""
    hosted: list[Hosted]


def costs_of(workers: pa.Table, pricing: PricingConfig, tokens: Tokens, wall_s: float) -> Costs:
    """Add up the bill of a run from `stats/workers.parquet`."""
    rate = pc.divide(pc.multiply(workers["price_per_accelerator_hour"], workers["num_accelerators"]), 3600.0)
    parts = {name.removesuffix("_s"): pc.sum(pc.multiply(rate, workers[name])).as_py() or 0.0 for name in PHASES}
    overhead = wall_s / 3600 * pricing.overhead_per_hour + pricing.overhead_per_run
    total = math.fsum([*parts.values(), overhead])
    worked = parts["prefill"] + parts["decode"]
    input_cost, output_cost = (total * parts[name] / worked if worked else 0.0 for name in ("prefill", "decode"))
    per_prefilled = cost_per_million(parts["prefill"], tokens.prompt - tokens.cached)
    return Costs(
        currency=pricing.currency,
        total=total,
        **parts,
        overhead=overhead,
        saved_by_caching=None if per_prefilled is None else per_prefilled * tokens.cached / 1e6,
        per_million_output_tokens=cost_per_million(total, tokens.output),
        per_million_total_tokens=cost_per_million(total, tokens.prompt + tokens.output),
        per_million_uncached_tokens=cost_per_million(total, tokens.uncached),
        input_per_million_tokens=cost_per_million(input_cost, tokens.prompt) if worked else None,
        output_per_million_tokens=cost_per_million(output_cost, tokens.output) if worked else None,
        hosted=[
            Hosted(
                name=one.name,
                cost=(tokens.prompt * one.input_per_million_tokens + tokens.output * one.output_per_million_tokens) / 1e6,
                source=one.source,
            )
            for one in pricing.hosted
        ],
    )
