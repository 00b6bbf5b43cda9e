"""What a batch came to: sums, rates, quantiles and cost, from the rows of its part."""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipelines.config import PricingConfig
from pipelines.rows import Answer, Batch
from pipelines.schema import BATCH


@dataclass(frozen=True, slots=True)
class Origin:
    """Who answered a batch, and what its time costs."""

    fingerprint: str
    worker: str
    node: str
    accelerator: str
    num_accelerators: int
    attempt: int
    pricing: PricingConfig

    def cost(self, seconds: float) -> float:
        """What so many seconds of this worker's accelerators cost: seconds / 3600 x accelerators x price per hour."""
        return seconds / 3600 * self.num_accelerators * self.pricing.paid_per_accelerator_hour


@dataclass(frozen=True, slots=True)
class Timing:
    """When a batch was handed to the engine (seconds since the epoch), and how long its last answer took from there."""

    started_at_s: float
    wall_s: float


class Age(NamedTuple):
    """How old a worker is, and for how much of that something ran in its engine."""

    lifetime_s: float
    busy_s: float


def share_of(answers: Iterable[Answer], origin: Origin, age: Age) -> dict[str, Any]:
    """What answers took of a worker's engine, by the time that it had this age."""
    times = [answer.engine_time for answer in answers]
    prefill_s, decode_s = math.fsum(one.prefill_s for one in times), math.fsum(one.decode_s for one in times)
    return {
        "worker": origin.worker,
        "prefill_s": prefill_s,
        "decode_s": decode_s,
        "cost": origin.cost(prefill_s + decode_s),
        **age._asdict(),
    }


def statistics_of(
    batch: Batch, table: pa.Table, timing: Timing, shares: Sequence[dict[str, Any]], origin: Origin
) -> dict[str, Any]:
    """Sum up a batch from its rows: the line of `stats/batches.parquet` as JSON values, and which batch of which run it is."""
    ok = table.filter(pc.equal(table["status"], "ok"))
    num_prompt, num_output = sum_of(ok["num_prompt_tokens"]), sum_of(ok["num_output_tokens"])
    prefill_s, decode_s, cost = (math.fsum(share[name] for share in shares) for name in ("prefill_s", "decode_s", "cost"))
    return {
        "fingerprint": origin.fingerprint,
        "source": batch.source,
        "first_row": batch.first_row,
        "batch_id": batch.batch_id,
        "num_rows": len(table),
        "num_ok": len(ok),
        "num_failed": len(table) - len(ok),
        "num_marked": len(table) - table["correct"].null_count,
        "num_correct": sum_of(table["correct"]),
        "num_prompt_tokens": num_prompt,
        "num_cached_tokens": sum_of(ok["num_cached_tokens"]),
        "num_output_tokens": num_output,
        "started_at": int(timing.started_at_s * 1e6),
        "wall_s": timing.wall_s,
        "prefill_s": prefill_s,
        "decode_s": decode_s,
        "shares": shares,
        "output_tokens_per_s": tokens_per_s(num_output, timing.wall_s),
        "total_tokens_per_s": tokens_per_s(num_prompt + num_output, timing.wall_s),
        **_latency_quantiles(table),
        "finish_reasons": _counts([*table["finish_reason"].to_pylist(), *_other_reasons(table)]),
        "error_kinds": _counts(table["error_kind"].to_pylist()),
        "error_examples": _error_examples(table),
        "flags": _counts(pc.list_flatten(table["flags"]).to_pylist()),
        "worker": origin.worker,
        "node": origin.node,
        "accelerator": origin.accelerator,
        "num_accelerators": origin.num_accelerators,
        "attempt": origin.attempt,
        "currency": origin.pricing.currency,
        "cost": cost,
        "cost_per_million_output_tokens": cost_per_million(cost, num_output),
        "cost_per_million_total_tokens": cost_per_million(cost, num_prompt + num_output),
    }


def progress_of(rows: pa.Table) -> dict[str, int]:
    """How many rows, failures and tokens are new."""
    return {
        "num_rows": len(rows),
        "num_failed": len(rows) - sum_of(pc.equal(rows["status"], "ok")),
        "num_output_tokens": sum_of(rows["num_output_tokens"]),
    }


def tokens_per_s(num_tokens: int, seconds: float) -> float | None:
    """A speed; null where no tokens came, which is no speed at all."""
    return num_tokens / seconds if num_tokens and seconds > 0 else None


def cost_per_million(cost: float, num_tokens: int) -> float | None:
    """The cost of a million tokens; null where there are none to spread it over."""
    return cost * 1e6 / num_tokens if num_tokens else None


def batch_table(statistics: Sequence[dict[str, Any]]) -> pa.Table:
    """`stats/batches.parquet` from the statistics of all parts."""
    maps = ("finish_reasons", "error_kinds", "error_examples", "flags")
    lines = [{**line, **{name: list(line[name].items()) for name in maps}} for line in statistics]
    return pa.Table.from_pylist(lines, schema=BATCH)


def latencies_of(table: pa.Table) -> dict[str, np.ndarray]:
    """Seconds, for each of the rows that the model answered (the time per output token, for those of two tokens or more)."""
    answered = table.select(["queue_s", "ttft_s", "generation_s", "num_output_tokens"]).drop_null()
    queue, ttft, generation, tokens = (column.to_numpy() for column in answered.columns)
    later = tokens > 1
    return {
        "queue_s": queue,
        "ttft_s": ttft,
        "time_per_output_token_s": generation[later] / (tokens[later] - 1),
        "latency_s": ttft + generation,
    }


def _latency_quantiles(table: pa.Table) -> dict[str, float | None]:
    quantiles: dict[str, float | None] = {}
    for name, values in latencies_of(table).items():
        found = np.quantile(values, (0.5, 0.95, 0.99)).tolist() if len(values) else [None] * 3
        quantiles |= dict(zip((f"{name}_p50", f"{name}_p95", f"{name}_p99"), found, strict=True))
    return quantiles


def sum_of(column: pa.ChunkedArray) -> int:
    """The sum of a column; null counts as nothing."""
    total: int | None = pc.sum(column).as_py()
    return total or 0


def _counts(values: Iterable[str | None]) -> dict[str, int]:
    return dict(Counter(value for value in values if value is not None))


def _other_reasons(table: pa.Table) -> Iterator[str]:
    """The finish reasons of the answers after the first."""
    for others in table["completions"].to_pylist() if table["completions"].null_count < len(table) else ():
        yield from (one["finish_reason"] for one in others or ())


def _error_examples(table: pa.Table) -> dict[str, str]:
    """The first row of each kind of error: its id, or its place in the input where it has none."""
    examples: dict[str, str] = {}
    failed = table.select(["error_kind", "id", "source", "source_row"]).filter(pc.is_valid(table["error_kind"]))
    for line in failed.to_pylist():
        examples.setdefault(line["error_kind"], line["id"] or f"{line['source']} row {line['source_row']}")
    return examples
