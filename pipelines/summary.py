"""Count what a run really holds, refuse it where it does not add up, and sum it up."""

import io
import json
import logging
from collections import Counter
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pipelines.budget import allowed_failures
from pipelines.compaction import compact
from pipelines.config import BatchConfig, EchoEngineConfig
from pipelines.costs import Tokens, costs_of
from pipelines.engine_use import engine_use
from pipelines.errors import ExitCode, RunFailed
from pipelines.findings import find
from pipelines.heartbeat import heartbeats
from pipelines.intervals import share_interval
from pipelines.ledger import PHASES, check_ledger, wall_s_of, worker_table
from pipelines.openai_results import write_openai
from pipelines.parts import PARTS, RESULTS, Parts
from pipelines.plan import Plan
from pipelines.row_profile import RowProfile, profile_rows
from pipelines.run import ATTEMPTS, Run, versions
from pipelines.run_table import one_row_file, run_table
from pipelines.schema import BATCH, BATCH_TABLE, RUN_TABLE, SUCCESS_FILE
from pipelines.sizing import sizes_of
from pipelines.statistics import batch_table, tokens_per_s
from pipelines.totals import SUMMARY_FILE, Summary, read_totals

logger = logging.getLogger(__name__)


def finish(run: Run, plan: Plan, config: BatchConfig) -> Summary:
    """Verify the run, write its statistics, its summary and its report, and mark it finished.

    Raises RunFailed where the parts do not match the plan.
    """
    batches, workers = verify(run, plan, Parts(run.folder))
    if config.output.rows_per_file is not None:
        compact(run.folder, plan, config.output)
        batches, workers = verify(run, plan, Parts(run.folder, [RESULTS]))
        run.folder.remove_below(PARTS)
    profile = profile_rows(run.folder, batches["batch_id"].to_pylist(), workers)
    summary = _sum_up(run, plan, config, batches, workers, profile)
    _write_table(run, BATCH_TABLE, batches)
    _write_table(run, "stats/workers.parquet", workers)
    run.folder.write(RUN_TABLE, one_row_file(run_table(run, config, summary, workers)))
    if config.output.openai:
        write_openai(run.folder, plan, config.model.name)
    for folder in ("", RESULTS, ATTEMPTS, "stats", "plan", "spool", "openai"):
        run.folder.sweep(folder)
    run.folder.write(SUMMARY_FILE, summary.model_dump_json(indent=2).encode())
    _write_report(run, summary, workers, profile)
    run.folder.write(SUCCESS_FILE, b"")
    return summary


def read_summary(run: Run, config: BatchConfig) -> Summary:
    """The summary of a finished run, judged by the error budget of now."""
    summary = read_totals(run.folder)
    code = exit_code(config, summary.num_rows, summary.num_failed, len(summary.bad_files))
    allowed = allowed_failures(config.errors, summary.num_rows)
    return summary.model_copy(update={"exit_code": code, "num_failures_allowed": allowed})


def verify(run: Run, plan: Plan, parts: Parts) -> tuple[pa.Table, pa.Table]:
    """Check that every batch has its part, every part the rows of its batch, and every second of every worker its use.

    Returns `stats/batches.parquet` and `stats/workers.parquet`. Raises RunFailed that names what is missing or wrong.
    """
    batches = plan.batches.select(["batch_id", "source", "first_row", "num_rows"])
    planned = batches["batch_id"].to_pylist()
    found = set(parts.batch_ids)
    if missing := sorted(set(planned) - found):
        raise RunFailed(f"{len(missing)} of {len(planned)} batches have no part, the first is batch {missing[0]}")
    if foreign := sorted(found - set(planned)):
        raise RunFailed(f"{len(foreign)} parts are in no plan, the first is {parts.name(foreign[0])}; move them away")
    tables, start = [BATCH.empty_table()], 0
    for statistics in parts.statistics(planned):
        for line, batch in zip(statistics, batches.slice(start, len(statistics)).to_pylist(), strict=True):
            _check_part(parts.name(batch["batch_id"]), line, batch, run.fingerprint)
        tables.append(batch_table(statistics))
        start += len(statistics)
    table = pa.concat_tables(tables)
    workers = worker_table(heartbeats(run.folder), table)
    check_ledger(workers, table)
    return table, workers


def _check_part(name: str, found: dict[str, Any], batch: dict[str, Any], fingerprint: str) -> None:
    if found.get("fingerprint") != fingerprint:
        raise RunFailed(f"{name} belongs to another run, whose worker outlived it; delete it and resume the run")
    wrong = {key: (found.get(key), batch[key]) for key in batch if found.get(key) != batch[key]}
    for key in ("num_rows_written", "num_settled"):
        count = {**found, "num_settled": found["num_ok"] + found["num_failed"]}[key]
        if count != batch["num_rows"]:
            wrong[key] = (count, batch["num_rows"])
    if wrong:
        differences = ", ".join(f"{key} {there} instead of {planned}" for key, (there, planned) in wrong.items())
        raise RunFailed(f"{name} does not match the plan: {differences}; delete it and resume the run")


def exit_code(config: BatchConfig, num_rows: int, num_failed: int, num_bad_files: int) -> ExitCode:
    """Whether so many failed rows are too many; a file that was left out always is."""
    if num_bad_files or num_failed > allowed_failures(config.errors, num_rows):
        return ExitCode.ROWS_FAILED
    return ExitCode.OK


def _write_report(run: Run, summary: Summary, workers: pa.Table, profile: RowProfile) -> None:
    from pipelines.html_report import REPORT_FILE, html_report  # Altair takes two seconds; dry runs need not wait for it

    try:
        run.folder.write(REPORT_FILE, html_report(run.folder.url, summary, workers, profile).encode())
    except Exception as error:  # noqa: BLE001 - all rows are answered and counted: no fault in a picture of it may undo that
        logger.warning("%s could not be made: %s: %s; `fournee report` tries again", REPORT_FILE, type(error).__name__, error)


def _sum_up(run: Run, plan: Plan, config: BatchConfig, batches: pa.Table, workers: pa.Table, profile: RowProfile) -> Summary:
    def total(name: str) -> int:
        return pc.sum(batches[name]).as_py() or 0

    num_rows, num_failed = total("num_rows"), total("num_failed")
    num_prompt, num_output = total("num_prompt_tokens"), total("num_output_tokens")
    tokens = Tokens(num_prompt, total("num_cached_tokens"), num_output)
    wall_s, spent_s = wall_s_of(workers), {phase: _sum(workers, phase) for phase in PHASES}
    summary = Summary(
        exit_code=exit_code(config, num_rows, num_failed, len(plan.bad_files)),
        engine=config.engine.kind,
        fingerprint=run.fingerprint,
        num_rows=num_rows,
        num_ok=total("num_ok"),
        num_failed=num_failed,
        num_failures_allowed=allowed_failures(config.errors, num_rows),
        num_marked=total("num_marked"),
        num_correct=total("num_correct"),
        accuracy=share_interval(total("num_correct"), total("num_marked")),
        error_kinds=_counts(batches["error_kinds"]),
        error_examples={kind: row for some in reversed(batches["error_examples"].to_pylist()) for kind, row in some},
        flags=_counts(batches["flags"]),
        bad_files={file.path: file.reason for file in plan.bad_files},
        finish_reasons=_counts(batches["finish_reasons"]),
        num_prompt_tokens=num_prompt,
        num_cached_tokens=tokens.cached,
        prefix_hits=plan.prefix_hits,
        num_output_tokens=num_output,
        num_generated_tokens=int(_sum(workers, "num_generated_tokens")),
        num_batches=len(batches),
        num_attempts=run.attempt,
        num_workers=len(workers),
        num_deaths=len(workers) - workers["death"].null_count,
        wall_s=wall_s,
        worker_s=_sum(workers, "lifetime_s"),
        **spent_s,
        output_tokens_per_s=tokens_per_s(num_output, wall_s),
        total_tokens_per_s=tokens_per_s(num_prompt + num_output, wall_s),
        busy_output_tokens_per_s=tokens_per_s(num_output, spent_s["prefill_s"] + spent_s["decode_s"]),
        engine_use=engine_use(workers, config.pricing),
        latencies=profile.latencies,
        costs=costs_of(workers, config.pricing, tokens, wall_s),
        sizes=sizes_of(
            config, _engine_of(workers), plan.batch_size, (num_prompt + num_output) / num_rows if num_rows else None
        ),
        record=_record(run, config, workers),
        findings={},
    )
    return summary.model_copy(update={"findings": find(summary, batches, workers)})


def _counts(column: pa.ChunkedArray) -> dict[str, int]:
    """Add up a column of maps from names to counts, the most frequent first."""
    total: Counter[str] = Counter()
    for chunk in column.chunks:
        pairs = pa.table([chunk.keys, chunk.items], names=["name", "count"])
        for line in pairs.group_by("name").aggregate([("count", "sum")]).to_pylist():
            total[line["name"]] += line["count_sum"]
    return dict(total.most_common())


def _engine_of(workers: pa.Table) -> dict[str, Any] | None:
    """What the last engine that was loaded resolved its options to."""
    engines: list[dict[str, Any]] = [json.loads(text) for text in workers["engine"].to_pylist() if text is not None]
    return engines[-1] if engines else None


def _record(run: Run, config: BatchConfig, workers: pa.Table) -> dict[str, Any]:
    last = json.loads(run.folder.read(f"{ATTEMPTS}/attempt-{run.attempt:04d}.json"))
    is_echo = isinstance(config.engine, EchoEngineConfig)
    hardware = workers.group_by(["node", "hardware", "accelerator", "num_accelerators"]).aggregate([("worker", "count")])
    return {
        "model": "none: the echo engine repeats prompts" if is_echo else {**config.model.model_dump(), **run.identity["model"]},
        "identity": run.identity,
        "versions": versions(),
        "hardware": {"driver": last["driver"], "workers": hardware.to_pylist()},
        "engine": _engine_of(workers),
        "concurrency": {"workers": config.cluster.workers, "max_workers": config.cluster.max_workers},
        "pricing": config.pricing.model_dump(mode="json"),
        "command": last["command"],
    }


def _sum(table: pa.Table, name: str) -> float:
    return float(pc.sum(table[name]).as_py() or 0.0)


def _write_table(run: Run, name: str, table: pa.Table) -> None:
    sink = io.BytesIO()
    pq.write_table(table, sink, compression="zstd")
    run.folder.write(name, sink.getvalue())
