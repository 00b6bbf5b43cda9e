"""What is worth acting on after a run: for each topic one sentence, with the number and the setting to change.

Each threshold says when acting pays; below it there is nothing to say.
"""

import re
from collections import Counter
from collections.abc import Callable, Mapping
from datetime import datetime

import pyarrow as pa
import pyarrow.compute as pc

from pipelines.ledger import attempt_spans
from pipelines.starvation import REMEDIES, Cause
from pipelines.totals import Summary

MANY_CUT = 0.1  # of the answers: so many that max_tokens is likely too small
NEAR_LIMIT = 0.5  # of the failed rows that are allowed: a night twice as bad ends with exit code 3
WORTH_ACTING_S = 600.0  # of worker time: what a run below it wastes is less than what it costs to read about it
LOW_CONCURRENCY = 0.5  # of max_num_seqs: decoding costs nearly the same however many requests share a step
FULL_CONCURRENCY = 0.9  # from here on max_num_seqs itself is what holds the engine back
LONG_QUEUE = 0.1  # of a request's time: there were requests, and the engine had no room for them
MUCH_STARVED = 0.1  # of the workers' time
LOW_ROOFLINE = 0.3  # of the nearer peak: well-fed engines reach half of it and more
LONG_TAIL = 0.1  # of an attempt: accelerators that are paid for while the last batches are answered
MUCH_LOADING = 0.2  # of the cost, and so on: a saving that shows on the bill
MUCH_IDLE = 0.1
MUCH_LOST = 0.05
LONG_SHARED_TOKENS = 64  # of a system prompt: vLLM caches blocks of 16, so little can be saved on a shorter one
CHARACTERS_PER_TOKEN = 4  # of English prose, roughly
LOW_CACHE = 0.5  # of the tokens that could have come from the cache
FEW_HITS = 0.8  # of those that the order by prefix should have brought; each worker and each resume begins with an empty cache


def find(summary: Summary, batches: pa.Table, workers: pa.Table) -> dict[str, str]:
    """Judge a run by its totals and its tables; sentences by topic, the most telling first."""
    judges: dict[str, Callable[[], str | None]] = {
        "failed rows": lambda: _failed(summary),
        "cut answers": lambda: _cut(summary),
        "price": lambda: _price(summary),
        "engine not full": lambda: _concurrency(summary, batches, workers),
        "engine too narrow": lambda: _roofline(summary),
        "prefix cache": lambda: _cache(summary),
        "prefix order": lambda: _order(summary),
        "lost time": lambda: _lost(summary),
        "loading": lambda: _loading(summary),
        "idle time": lambda: _idle(summary),
        "tail": lambda: _tail(batches, workers),
    }
    found = {topic: judge() for topic, judge in judges.items()}
    return {topic: sentence for topic, sentence in found.items() if sentence is not None}


def _failed(summary: Summary) -> str | None:
    if not summary.num_failed or summary.num_failed < NEAR_LIMIT * summary.num_failures_allowed:
        return None
    kind, count = next(iter(summary.error_kinds.items()))
    return (
        f"{summary.num_failed:,} rows failed, {count:,} of them with {kind}, and errors.max_failed_fraction and "
        f"errors.max_failed_rows allow {summary.num_failures_allowed:,}: look at them with fournee inspect, then repair them "
        "or raise the limit."
    )


def _cut(summary: Summary) -> str | None:
    num_answers, num_cut = sum(summary.finish_reasons.values()), summary.finish_reasons.get("length", 0)
    if num_cut <= MANY_CUT * num_answers:
        return None
    return (
        f"{num_cut / num_answers:.0%} of the answers were cut (finish reason length): raise "
        f"sampling.max_tokens={summary.record['identity']['sampling']['max_tokens']}, or ask for shorter answers."
    )


def _price(summary: Summary) -> str | None:
    """Only where the hardware names a GPU: what a processor costs follows from no name."""
    accelerator = summary.record["pricing"]["accelerator"]
    hardware = {line["hardware"] for line in summary.record["hardware"]["workers"]}
    gpus = [text for text in sorted(hardware) if re.match(r"\d+ x ", text)]
    strangers = [text for text in gpus if not _words(accelerator) <= _words(text)]
    if not strangers:
        return None
    return f"The price is that of pricing.accelerator={accelerator}, but workers had {strangers[0]}: choose their own pricing."


def _concurrency(summary: Summary, batches: pa.Table, workers: pa.Table) -> str | None:
    use = summary.engine_use
    if use.concurrency_share is None or use.concurrency_share >= LOW_CONCURRENCY or summary.worker_s < WORTH_ACTING_S:
        return None
    fact = f"{use.mean_running_requests:,.0f} requests ran at once, and the engine takes max_num_seqs={use.max_num_seqs:,}"
    if summary.num_rows < 2 * summary.num_workers * (use.max_num_seqs or 0):
        return f"{fact}: {summary.num_rows:,} rows do not fill {summary.num_workers} worker(s), so lower cluster.workers."
    queue_s, latency_s = summary.latencies["queue_s"].p50, summary.latencies["latency_s"].p50
    if queue_s and latency_s and queue_s > LONG_QUEUE * latency_s:
        return (
            f"{fact}, though others waited ({queue_s:,.1f} s at the median): its memory was full, so raise "
            "engine.kwargs.gpu_memory_utilization, lower model.max_model_len, or set engine.kwargs.kv_cache_dtype=fp8."
        )
    starved_s: Counter[Cause] = Counter()
    for worker in workers["starved_s"].to_pylist():
        starved_s.update(dict(worker))
    if starved_s.total() > MUCH_STARVED * summary.worker_s:
        return f"{fact}: for {starved_s.total():,.0f} s, {REMEDIES[max(starved_s, key=lambda cause: starved_s[cause])]}."
    return f"{fact}: raise engine.rows_per_batch={pc.max(batches['num_rows']).as_py():,}, so that more rows are at hand."


def _roofline(summary: Summary) -> str | None:
    use = summary.engine_use
    if use.roofline_share is None or use.roofline_share >= LOW_ROOFLINE or summary.worker_s < WORTH_ACTING_S:
        return None
    if use.concurrency_share is None or use.concurrency_share < FULL_CONCURRENCY:
        return None
    return (
        f"The engine was full with max_num_seqs={use.max_num_seqs:,} requests and came to {use.roofline_share:.0%} of the "
        "accelerator's nearer peak: raise engine.kwargs.max_num_seqs and engine.kwargs.max_num_batched_tokens."
    )


def _cache(summary: Summary) -> str | None:
    shared_tokens = len(summary.record["identity"]["prompt"]["system"] or "") / CHARACTERS_PER_TOKEN
    engine = summary.record["engine"] or {}
    if shared_tokens < LONG_SHARED_TOKENS or summary.num_ok < 2 or "enable_prefix_caching" not in engine:
        return None
    possible = min(1.0, shared_tokens * summary.num_ok / summary.num_prompt_tokens) if summary.num_prompt_tokens else 0.0
    share = summary.num_cached_tokens / summary.num_prompt_tokens if summary.num_prompt_tokens else 0.0
    if share >= LOW_CACHE * possible:
        return None
    remedy = (
        "raise engine.kwargs.gpu_memory_utilization, or let nothing that differs stand before what rows share"
        if engine["enable_prefix_caching"]
        else "set engine.kwargs.enable_prefix_caching=true"
    )
    return (
        f"{share:.0%} of the prompts' tokens came from the prefix cache, where the shared prompt.system makes up about "
        f"{possible:.0%}: {remedy}."
    )


def _order(summary: Summary) -> str | None:
    hits, engine = summary.prefix_hits, summary.record["engine"] or {}
    if hits is None or not hits.is_ordered or not engine.get("enable_prefix_caching"):
        return None
    expected = hits.predicted * summary.num_ok / summary.num_rows
    if summary.num_cached_tokens >= FEW_HITS * expected:
        return None
    return (
        f"input.order=by_prefix brought {summary.num_cached_tokens:,} tokens from the prefix cache where {expected:,.0f} were "
        "predicted: the cache did not hold one prefix until its last row, so give it more memory "
        "(engine.kwargs.gpu_memory_utilization, engine.cpu_kv_cache_gib), or lower engine.kwargs.max_num_seqs."
    )


def _wasted(summary: Summary, part: float, most: float, on_what: str) -> str | None:
    """A part of the cost that bought no answers; None where it is small, or the whole is too little to talk about."""
    if summary.worker_s < WORTH_ACTING_S or part <= most * summary.costs.total:
        return None
    return f"{part / summary.costs.total:.0%} of the cost was {on_what}."


def _lost(summary: Summary) -> str | None:
    return _wasted(
        summary,
        summary.costs.lost,
        MUCH_LOST,
        f"work that was never committed ({summary.num_deaths} worker(s) died): lower engine.rows_per_batch, so that less is in "
        "flight, and see stats/workers.parquet for why they died",
    )


def _loading(summary: Summary) -> str | None:
    return _wasted(
        summary,
        summary.costs.loading,
        MUCH_LOADING,
        f"loading the model, in {summary.num_workers} worker lifetime(s): lower cluster.workers, or answer more rows in a run",
    )


def _idle(summary: Summary) -> str | None:
    return _wasted(
        summary,
        summary.costs.idle,
        MUCH_IDLE,
        "engines with nothing to do: lower cluster.workers, or give each more cores to read and prepare rows with "
        "(cluster.cpus_per_worker)",
    )


def _tail(batches: pa.Table, workers: pa.Table) -> str | None:
    spans = attempt_spans(workers)
    for attempt, last_commits in _last_commits(batches, workers).items():
        start, end = spans[attempt]
        tail_s = max(last_commits) - min(last_commits)
        if tail_s > LONG_TAIL * (end - start) and tail_s * len(last_commits) >= WORTH_ACTING_S:
            return (
                f"In attempt {attempt}, {tail_s:,.0f} s ({tail_s / (end - start):.0%}) passed between the first worker's last "
                f"batch and the last one's: lower engine.rows_per_batch={pc.max(batches['num_rows']).as_py():,}, so that the "
                "rest can be shared, or lower cluster.workers."
            )
    return None


def _last_commits(batches: pa.Table, workers: pa.Table) -> Mapping[int, list[float]]:
    """When each worker that lived to its attempt's end committed for the last time, by attempt, in seconds since the epoch."""
    shares = pa.Table.from_struct_array(pc.list_flatten(batches["shares"]))
    ages = {
        line["worker"]: line["lifetime_s_max"]
        for line in shares.group_by("worker").aggregate([("lifetime_s", "max")]).to_pylist()
    }
    commits: dict[int, list[float]] = {}
    for line in workers.select(["worker", "attempt", "started_at", "death"]).to_pylist():
        if line["worker"] in ages and line["death"] is None:
            started_at: datetime = line["started_at"]
            commits.setdefault(line["attempt"], []).append(started_at.timestamp() + ages[line["worker"]])
    return commits


def _words(text: str) -> set[str]:
    return set(re.findall(r"[a-z0-9]+", text.lower()))
