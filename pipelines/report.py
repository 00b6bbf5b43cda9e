"""Show a plan and a summary on a terminal."""

from collections.abc import Iterator, Mapping
from typing import Any

import pyarrow.compute as pc
import pyarrow.parquet as pq
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table

from pipelines.ledger import PHASES
from pipelines.parts import RESULTS
from pipelines.plan import Plan
from pipelines.sources import Source
from pipelines.storage import Folder
from pipelines.totals import Summary

_EXAMPLE_CHARACTERS = 300
_SHOWN_KINDS = 5
_SHOWN_LATENCIES = {
    "ttft_s": "time to first token",
    "time_per_output_token_s": "per output token",
    "latency_s": "whole latency",
}


def plan_report(plan: Plan, sources: list[Source], num_committed: int) -> RenderableType:
    """What a run would do."""
    table = _table("plan")
    table.add_row("files", f"{len(sources):,} ({sum(s.num_bytes for s in sources) / 2**20:,.1f} MiB)")
    table.add_row("rows", f"{plan.num_rows:,}")
    table.add_row("batches", f"{plan.num_batches:,}, {num_committed:,} of them done")
    if plan.num_batches:
        table.add_row("rows per batch", plan.batch_size)
    if plan.prefix_hits is not None:
        table.add_row("prefix cache", plan.prefix_hits.describe())
    table.add_row("carried columns", escape(", ".join(plan.carried.names)) or "none")
    return table


def summary_report(run: Folder, summary: Summary) -> RenderableType:
    """What came out, how fast, what it cost, and what is worth acting on."""
    table = _table(f"run {summary.fingerprint[:10]}")
    for name, value in _lines(summary):
        table.add_row(name, value)
    url = escape(run.url)
    below = [f"[yellow]{topic}:[/] {escape(sentence)}" for topic, sentence in summary.findings.items()]
    below += [f"results  {url}/{RESULTS}", f"summary  {url}/stats/summary.json", f"report   {url}/report.html"]
    if summary.num_failed:
        below.append(f"failed rows  fournee inspect {url}")
    if summary.engine == "echo":
        below.insert(0, "[bold red]ECHO ENGINE: no model ran, these answers repeat their prompts[/]")
    return Group(table, *below)


def comparison_report(summaries: Mapping[str, Summary]) -> RenderableType:
    """Several runs side by side, by their names."""
    table = Table(title="runs", title_justify="left")
    columns = ("rows", "failed", "output tokens/s", "cost", "per million output", "per million input + output")
    table.add_column("run", style="bold", overflow="fold")
    for column in columns:
        table.add_column(column, justify="right")
    for name, summary in summaries.items():
        costs = summary.costs
        prices = (_number(price, 2) for price in (costs.per_million_output_tokens, costs.per_million_total_tokens))
        table.add_row(
            escape(name), f"{summary.num_rows:,}", f"{summary.num_failed:,}", _number(summary.output_tokens_per_s, 1),
            f"{costs.total:,.4f} {costs.currency}", *prices,
        )  # fmt: skip
    return table


def example_report(run: Folder) -> RenderableType:
    """The first answered row, to see at a glance whether the answers make sense."""
    first = next(_answered(run), None)
    if first is None:
        return "no row was answered"
    text = first["text"]
    shown = text if len(text) <= _EXAMPLE_CHARACTERS else f"{text[:_EXAMPLE_CHARACTERS]}..."
    return f"[dim]example[/]  {escape(str(first['id']))}: {escape(shown)}"


def _answered(run: Folder) -> Iterator[dict[str, Any]]:
    """Rows that are ok, file after file: Arrow's data sets would open all files, and keep 130 KiB of each, to show one row."""
    for name in run.names(RESULTS):
        with pq.ParquetFile(run.path(f"{RESULTS}/{name}"), filesystem=run.arrow) as file:
            for rows in file.iter_batches(columns=["id", "text", "status"], use_threads=False):
                yield from rows.filter(pc.equal(rows["status"], "ok")).slice(0, 1).to_pylist()


def _lines(summary: Summary) -> Iterator[tuple[str, str]]:
    yield "rows", f"{summary.num_rows:,}: {summary.num_ok:,} ok, {summary.num_failed:,} failed"
    if (accuracy := summary.accuracy) is not None:
        span = f"{accuracy.low:.1%} to {accuracy.high:.1%}"
        yield "correct", f"{summary.num_correct:,} of {summary.num_marked:,}: {accuracy.value:.1%} (nine times in ten: {span})"
    for kind, count in list(summary.error_kinds.items())[:_SHOWN_KINDS]:
        yield f"  {kind}", f"{count:,}, such as {escape(summary.error_examples[kind])}"
    if len(summary.error_kinds) > _SHOWN_KINDS:
        yield "  other kinds", f"{len(summary.error_kinds) - _SHOWN_KINDS}; see stats/summary.json"
    if summary.bad_files:
        yield "files left out", "\n".join(escape(f"{path}: {reason}") for path, reason in summary.bad_files.items())
    if summary.flags:
        yield "flags", ", ".join(f"{flag} {count:,}" for flag, count in summary.flags.items())
    yield "finish reasons", ", ".join(f"{reason} {count:,}" for reason, count in summary.finish_reasons.items()) or "none"
    prompt, cached = summary.num_prompt_tokens, summary.num_cached_tokens
    yield "tokens", f"{prompt:,} prompt ({cached:,} from cache), {summary.num_output_tokens:,} output"
    if (hits := summary.prefix_hits) is not None:
        yield "  from cache, predicted", f"{hits.predicted:,} ({hits.as_is:,} in the order of the input)"
    yield (
        "speed",
        (
            f"{_number(summary.output_tokens_per_s, 1)} output tokens/s overall, "
            f"{_number(summary.busy_output_tokens_per_s, 1)} while an engine was busy"
        ),
    )
    yield (
        "time",
        (
            f"{summary.wall_s:,.1f} s with workers, "
            f"{summary.num_attempts} attempt(s), {summary.num_workers} worker(s), {summary.num_deaths} of them died"
        ),
    )
    if summary.worker_s:
        shares = [f"{phase.removesuffix('_s')} {getattr(summary, phase) / summary.worker_s:.0%}" for phase in PHASES]
        yield "  of all workers", f"{summary.worker_s:,.1f} s: {', '.join(shares)}"
    yield "sizes", "\n".join(f"{name} {escape(size)}" for name, size in summary.sizes.items())
    for name, label in _SHOWN_LATENCIES.items():
        values = summary.latencies[name]
        yield label, f"p50 {_number(values.p50, 3)} s, p95 {_number(values.p95, 3)} s, p99 {_number(values.p99, 3)} s"
    yield from _cost_lines(summary)


def _cost_lines(summary: Summary) -> Iterator[tuple[str, str]]:
    costs, currency = summary.costs, summary.costs.currency
    parts = {name: getattr(costs, name) for name in ("loading", "prefill", "decode", "idle", "lost", "overhead")}
    shares = [f"{name} {part / costs.total:.0%}" for name, part in parts.items() if part and costs.total]
    yield "cost", f"{costs.total:.4f} {currency}" + (f": {', '.join(shares)}" if shares else "")
    spread = {
        "output": costs.per_million_output_tokens,
        "input + output": costs.per_million_total_tokens,
        "uncached": costs.per_million_uncached_tokens,
    }
    yield f"{currency} per million", ", ".join(f"{_number(price, 2)} {over}" for over, price in spread.items()) + " tokens"
    yield (
        "  input and output apart",
        f"{_number(costs.input_per_million_tokens, 2)} input, {_number(costs.output_per_million_tokens, 2)} output",
    )
    for hosted in costs.hosted:
        yield f"  {escape(hosted.name)}", f"{hosted.cost:.4f} {currency} for the same tokens"


def _table(title: str) -> Table:
    table = Table(title=title, show_header=False, title_justify="left")
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    return table


def _number(value: float | None, digits: int) -> str:
    return "none" if value is None else f"{value:,.{digits}f}"
