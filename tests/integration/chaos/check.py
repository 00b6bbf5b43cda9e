"""What must hold when a run has ended, whatever happened to it on the way."""

import json
import math
import time
from collections import Counter
from dataclasses import dataclass, fields
from typing import Any

import pyarrow.compute as pc
import pyarrow.dataset as ds
import pyarrow.parquet as pq

from pipelines.ledger import PHASES
from tests.integration.chaos.case import Case
from tests.integration.chaos.job import Broken, Job

_GONE_S = 40  # until the processes of a run that has ended are gone: Ray lets them go after their driver


@dataclass
class Counts:
    """What a run came to; adds up."""

    runs: int = 0
    rows: int = 0
    lost: int = 0
    doubled: int = 0
    wrong: int = 0
    batches: int = 0
    wasted_batches: int = 0
    """Those that a worker had in its engine when it died, and that another one answered; and those committed twice."""
    attempts: int = 0
    workers: int = 0
    deaths: int = 0

    def __iadd__(self, other: "Counts") -> "Counts":
        for field in fields(self):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))
        return self


def check(case: Case, job: Job) -> Counts:
    """Count everything that a finished run has left. Raises Broken with all that does not add up."""
    job.look()
    counts = _count(case, job)
    wrong = [f"{counts.lost} rows lost", f"{counts.doubled} doubled", f"{counts.wrong} answered wrongly"]
    problems = wrong if counts.lost or counts.doubled or counts.wrong else []
    problems += [*_disagreements(case, job), *_answered_again(job)]
    problems += [f"left behind: {path}" for path in job.run.rglob(".*.tmp")]
    problems += [] if (job.run / "_SUCCESS").exists() else ["no _SUCCESS"]
    problems += _processes_left(job)
    if problems:
        raise Broken("; ".join(problems))
    return counts


def _count(case: Case, job: Job) -> Counts:
    rows = (
        ds.dataset(job.run / "results", format="parquet").to_table(columns=["id", "status", "text", "error_kind"]).to_pylist()
    )
    found, planned = Counter(row["id"] for row in rows), Counter(row["id"] for row in case.rows)
    expected = {row["id"]: _outcome(row["id"], row["prompt"], case) for row in case.rows}
    workers = pq.read_table(job.run / "stats" / "workers.parquet")
    return Counts(
        runs=1,
        rows=len(rows),
        lost=(planned - found).total(),
        doubled=(found - planned).total(),
        wrong=sum((row["status"], row["text"], row["error_kind"]) != expected.get(row["id"]) for row in rows),
        batches=len(job.seen),
        wasted_batches=len(_wasted(job)),
        attempts=len(job.codes),
        workers=len(workers),
        deaths=len(workers) - workers["death"].null_count,
    )


def _wasted(job: Job) -> set[tuple[str, str]]:
    """The batches that were answered more than once, and by whom in vain."""
    in_flight = {(beat["worker"], f"part-{cell[0]:08d}.parquet") for beat in job.beats() for cell in beat["in_flight"]}
    twice = {(before.worker, name) for name, before, _ in job.rewritten}
    return {(worker, name) for worker, name in in_flight | twice if job.seen[name].worker != worker}


def _answered_again(job: Job) -> list[str]:
    """Whether more than what was in flight was answered again: what a worker had committed must still be its own."""
    own = Counter(part.worker for part in [*job.seen.values(), *(before for _, before, _ in job.rewritten)])
    return [
        f"worker {beat['worker']} had committed {beat['num_batches']} batches, but {own[beat['worker']]} parts are its own"
        for beat in job.beats()
        if own[beat["worker"]] < beat["num_batches"] and not job.has_company
    ]


def _outcome(row_id: str, prompt: str, case: Case) -> tuple[str, str | None, str | None]:
    """What an undisturbed run makes of a row."""
    return ("failed", None, "engine_killed") if row_id in case.deadly else ("ok", prompt, None)


def _disagreements(case: Case, job: Job) -> list[str]:
    """Where the statistics do not say what the rows say."""
    rows = ds.dataset(job.run / "results", format="parquet").to_table(
        columns=["status", "num_prompt_tokens", "num_output_tokens"]
    )
    batches = pq.read_table(job.run / "stats" / "batches.parquet")
    workers = set(pq.read_table(job.run / "stats" / "workers.parquet")["worker"].to_pylist())
    summary = json.loads((job.run / "stats" / "summary.json").read_text())
    plan = pq.read_table(job.run / "plan" / "plan.parquet")
    names = [f"part-{batch_id:08d}.parquet" for batch_id in plan["batch_id"].to_pylist()]
    sums: dict[str, tuple[Any, ...]] = {
        "num_rows": (len(case.rows), _sum(batches, "num_rows"), summary["num_rows"], _sum(plan, "num_rows")),
        "num_failed": (len(case.deadly), _sum(batches, "num_failed"), summary["num_failed"]),
        "num_prompt_tokens": (
            _sum(rows, "num_prompt_tokens"),
            _sum(batches, "num_prompt_tokens"),
            summary["num_prompt_tokens"],
        ),
        "num_output_tokens": (
            _sum(rows, "num_output_tokens"),
            _sum(batches, "num_output_tokens"),
            summary["num_output_tokens"],
        ),
        "batches": (
            sorted(job.seen),
            sorted(names),
            sorted(f"part-{one:08d}.parquet" for one in batches["batch_id"].to_pylist()),
        ),
        "exit_code": (0, summary["exit_code"]),
    }
    problems = [f"{name} differ: {values}" for name, values in sums.items() if any(one != values[0] for one in values)]
    problems += _ledger_faults(job)
    unknown = set(batches["worker"].to_pylist()) - workers
    return [*problems, *([f"workers that stats/workers.parquet does not know: {unknown}"] if unknown else [])]


def _ledger_faults(job: Job) -> list[str]:
    """Seconds of workers that have no use, and cents of the bill that have no cause."""
    workers = pq.read_table(job.run / "stats" / "workers.parquet").to_pylist()
    batches = pq.read_table(job.run / "stats" / "batches.parquet")
    parts = [math.fsum(line[phase] for phase in PHASES) for line in workers]
    faults = [
        f"worker {line['worker']} lived for {line['lifetime_s']} s, of which {found_s} s are told"
        for line, found_s in zip(workers, parts, strict=True)
        if not math.isclose(found_s, line["lifetime_s"], rel_tol=1e-3) or min(line[phase] for phase in PHASES) < 0
    ]
    worked_s = sum(line["prefill_s"] + line["decode_s"] for line in workers)
    shared_s = _sum(batches, "prefill_s") + _sum(batches, "decode_s")
    if not math.isclose(worked_s, shared_s, rel_tol=1e-6):
        faults.append(f"workers say that batches took {worked_s} s, batches say {shared_s} s")
    costs = json.loads((job.run / "stats" / "summary.json").read_text())["costs"]
    bill = sum(line["cost"] for line in workers)
    if abs(costs["total"] - bill) > 0.005:
        faults.append(f"the workers cost {bill}, the summary says {costs['total']}")
    return faults


def _processes_left(job: Job) -> list[str]:
    """Processes of the run that are alive when they have had time to end; they are ended here."""
    deadline = time.monotonic() + _GONE_S
    while (left := [*job.drivers(), *job.workers()]) and time.monotonic() < deadline:
        time.sleep(0.2)
    for process in left:
        process.kill()
    return [f"process {process.pid} is left" for process in left]


def _sum(table: Any, name: str) -> int:
    return pc.sum(table[name]).as_py() or 0
