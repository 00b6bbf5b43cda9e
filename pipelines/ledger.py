"""The ledger: what became of every second of every worker, from its last heartbeat and from the parts that it committed.

`loading + prefill + decode + idle + lost = lifetime`. Prefill and decode are its shares in committed batches (`fair_clock`),
lost is what its engine worked on besides, and idle is the rest: time in which nothing ran in a loaded engine.
"""

import math
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from pipelines.errors import RunFailed
from pipelines.schema import BATCH, WORKER
from pipelines.statistics import Age

PHASES = ("loading_s", "prefill_s", "decode_s", "idle_s", "lost_s")
NO_BATCHES = BATCH.empty_table()
_TOLERANCE = 1e-6  # of the sum: floating-point sums of millions of shares


def worker_table(beats: Sequence[dict[str, Any]], batches: pa.Table = NO_BATCHES) -> pa.Table:
    """`stats/workers.parquet`, from the last heartbeats of all attempts and the batches that are committed.

    Without the batches, what workers did in their engines counts as lost; lifetimes and costs are the same, but for a commit
    after a last heartbeat.
    """
    committed = _committed(batches)
    unknown = set(committed) - {beat["worker"] for beat in beats}
    beats = [*beats, *(_lost_beat(worker, batches) for worker in unknown)]
    lines = [_line(beat, committed.get(beat["worker"])) for beat in beats]
    return pa.Table.from_pylist(sorted(lines, key=lambda line: line["started_at"]), schema=WORKER)


def cost_of(workers: pa.Table) -> float:
    """What workers have cost: lifetime / 3600 x accelerators x price per accelerator-hour, summed up."""
    return float(pc.sum(workers["cost"]).as_py() or 0.0)


def wall_s_of(workers: pa.Table) -> float:
    """Seconds during which a run had workers: for each attempt, from the first start to the last sign."""
    return sum(end - start for start, end in attempt_spans(workers).values())


def attempt_spans(workers: pa.Table) -> dict[int, tuple[float, float]]:
    """When each attempt had workers, in seconds since the epoch: from the first start to the last sign."""
    columns = workers.select(["attempt", "lifetime_s"]).append_column("started_s", _seconds(workers["started_at"]))
    spans: dict[int, tuple[float, float]] = {}
    for line in columns.to_pylist():
        start, end = line["started_s"], line["started_s"] + line["lifetime_s"]
        first, last = spans.get(line["attempt"], (start, end))
        spans[line["attempt"]] = (min(first, start), max(last, end))
    return spans


def check_ledger(workers: pa.Table, batches: pa.Table) -> None:
    """See that the parts make up the whole, in seconds and in money; raises RunFailed."""
    for line in workers.to_pylist():
        parts = [line[phase] for phase in PHASES]
        if min(parts) < 0 or not math.isclose(math.fsum(parts), line["lifetime_s"], rel_tol=_TOLERANCE):
            raise RunFailed(f"the ledger of worker {line['worker']} does not add up: {parts} of {line['lifetime_s']} s")
    spent = pc.sum(batches["cost"]).as_py() or 0.0
    rate = pc.divide(pc.multiply(workers["price_per_accelerator_hour"], workers["num_accelerators"]), 3600.0)
    rest = [pc.sum(pc.multiply(rate, workers[phase])).as_py() or 0.0 for phase in ("loading_s", "idle_s", "lost_s")]
    bill = cost_of(workers)
    if not math.isclose(math.fsum([spent, *rest]), bill, rel_tol=_TOLERANCE, abs_tol=1e-9):
        raise RunFailed(f"the batches' costs {spent} and loading, idle and lost time {rest} do not add up to the bill, {bill}")


def _line(beat: dict[str, Any], committed: dict[str, float] | None) -> dict[str, Any]:
    """One worker. What it said last counts: its last heartbeat, or its last commit, which may be younger."""
    age = Age(beat["lifetime_s"], beat["busy_s"])
    prefill_s = decode_s = 0.0
    if committed is not None:
        prefill_s, decode_s = committed["prefill_s"], committed["decode_s"]
        age = max(age, Age(committed["lifetime_s"], committed["busy_s"]))
    busy_s = max(age.busy_s, prefill_s + decode_s)
    loading_s = age.lifetime_s - busy_s if beat["engine"] is None else beat["loading_s"]
    lifetime_s = max(age.lifetime_s, loading_s + busy_s)
    return {
        **beat,
        "lifetime_s": lifetime_s,
        "loading_s": loading_s,
        "prefill_s": prefill_s,
        "decode_s": decode_s,
        "idle_s": lifetime_s - (loading_s + busy_s),
        "lost_s": busy_s - (prefill_s + decode_s),
        "starved_s": list(beat["starved_s"].items()),
        "cost": lifetime_s / 3600 * beat["num_accelerators"] * beat["price_per_accelerator_hour"],
        "num_in_flight": len({batch_id for batch_id, *_ in beat["in_flight"]}),
    }


def _committed(batches: pa.Table) -> dict[str, dict[str, float]]:
    """What the committed batches say of each worker."""
    shares = pa.Table.from_struct_array(pc.list_flatten(batches["shares"]))
    sums = [("prefill_s", "sum"), ("decode_s", "sum"), ("lifetime_s", "max"), ("busy_s", "max")]
    lines = shares.group_by("worker").aggregate(sums).to_pylist()
    return {line["worker"]: {name: line[f"{name}_{kind}"] for name, kind in sums} for line in lines}


def _lost_beat(worker: str, batches: pa.Table) -> dict[str, Any]:
    """A heartbeat for a worker whose file is gone: what one of its batches tells of it."""
    place = pc.index(pc.struct_field(pc.list_flatten(batches["shares"]), "worker"), worker).as_py()
    batch = batches.slice(pc.list_parent_indices(batches["shares"])[place].as_py(), 1).to_pylist()[0]
    share = next(share for share in batch["shares"] if share["worker"] == worker)
    accelerator_s = (share["prefill_s"] + share["decode_s"]) * batch["num_accelerators"]
    told = {name: batch[name] for name in ("attempt", "node", "accelerator", "num_accelerators", "currency")}
    none = dict.fromkeys(("pid", "num_batches", "num_generated_tokens", "num_flops", "num_moved_bytes"), 0)
    return {
        **told,
        **none,
        **dict.fromkeys(("lifetime_s", "busy_s", "loading_s", "request_s"), 0.0),
        "worker": worker,
        "started_at": int(batch["started_at"].timestamp() * 1e6),
        "price_per_accelerator_hour": share["cost"] * 3600 / accelerator_s if accelerator_s else 0.0,
        "hardware": "unknown",
        "engine": None,
        "starved_s": {},
        "in_flight": [],
        "death": "unknown: its heartbeat file is gone",
    }


def _seconds(column: pa.ChunkedArray) -> pa.ChunkedArray:
    return pc.divide(column.cast(pa.int64()).cast(pa.float64()), 1e6)
