"""A run as one page that opens anywhere: no script, no request, its charts drawn into it."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import jinja2
import pyarrow as pa
from markupsafe import Markup

from pipelines.charts import distribution, named_bars, over_time, stacked
from pipelines.histograms import Histogram
from pipelines.ledger import PHASES
from pipelines.row_profile import RowProfile
from pipelines.totals import Summary

REPORT_FILE = "report.html"
_TEMPLATE = "report.html.j2"
_MOST_BARS = 40
_PHASES = {
    "loading": "until the engine was ready",
    "prefill": "reading prompts",
    "decode": "writing answers",
    "idle": "nothing ran in a loaded engine",
    "lost": "work that was never committed",
}
_DISTRIBUTIONS = {
    "num_prompt_tokens": ("Prompt length", "tokens"),
    "num_output_tokens": ("Answer length", "tokens"),
    "ttft_s": ("Time to first token, waiting included", "seconds"),
    "time_per_output_token_s": ("Time per output token", "seconds"),
    "latency_s": ("End to end, from the engine's door to the last token", "seconds"),
}
_LATENCIES = {
    "queue_s": "waiting in the engine",
    "ttft_s": "to the first token",
    "time_per_output_token_s": "per output token",
    "latency_s": "end to end",
}


@dataclass(frozen=True, slots=True)
class Figure:
    """A chart with its title and what else is to be said of it."""

    title: str
    note: str
    svg: Markup


def html_report(url: str, summary: Summary, workers: pa.Table, profile: RowProfile) -> str:
    """The whole page. What comes from rows and settings is escaped; charts are only drawn where there is something to draw."""
    return _environment().get_template(_TEMPLATE).render(
        url=url,
        summary=summary,
        profile=profile,
        model=_model(summary),
        timeline=_timeline(profile),
        workers=_workers(workers),
        distributions=_distributions(profile),
        phases=[
            {"name": name, "meaning": meaning, "seconds": getattr(summary, f"{name}_s"), "cost": getattr(summary.costs, name)}
            for name, meaning in _PHASES.items()
        ],
        comparison=_comparison(summary),
        finish_reasons=_finish_reasons(summary),
        prices=_prices(summary),
        latencies={_LATENCIES[name]: quantiles for name, quantiles in summary.latencies.items()},
        started=min((one.as_py() for one in workers["started_at"]), default=None),
        record=json.dumps(summary.record, indent=2, ensure_ascii=False),
    )  # fmt: skip


def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"number": number, "rate": rate, "seconds": seconds, "share": share, "money": money}
    return environment


def number(value: float | None, digits: int = 0) -> str:
    """With thousands apart; a dash where there is none."""
    return "–" if value is None else f"{value:,.{digits}f}"


def rate(value: float | None) -> str:
    """A number for each second: tenths only where they say something."""
    return number(value, 0 if value and value >= 1000 else 1)


def money(value: float | None, whole: float | None = None) -> str:
    """To the cent, and small amounts to four places; parts as precisely as their whole."""
    return "–" if value is None else f"{value:,.{2 if abs(value if whole is None else whole) >= 10 else 4}f}"


def seconds(value: float | None) -> str:
    """In the unit in which it is read most easily."""
    if value is None:
        return "–"
    for unit, size, least in (("h", 3600, 3 * 3600), ("min", 60, 3 * 60), ("s", 1, 1)):
        if value >= least:
            return f"{value / size:,.1f} {unit}"
    return f"{value * 1000:,.1f} ms" if value else "0 s"


def share(part: float | None, whole: float = 1.0) -> str:
    """In percent; a dash where there is nothing to have a share of."""
    return "–" if part is None or not whole else f"{part / whole:.1%}"


def _model(summary: Summary) -> str:
    model = summary.record["model"]
    return str(model["name"]) if isinstance(model, Mapping) else str(model)


def _timeline(profile: RowProfile) -> list[Figure]:
    timeline = profile.timeline
    series = {
        "Output tokens per second": timeline.output_tokens_per_s,
        "Running requests": timeline.running_requests,
        "Finished rows per second": timeline.finished_rows_per_s,
    }
    note = f"means over {seconds(timeline.bin_s)}"
    return [Figure(title, note, Markup(over_time(timeline, values))) for title, values in series.items() if any(values)]


def _workers(workers: pa.Table) -> Figure | None:
    """A bar for each worker; of very many, the others share one that shows their mean."""
    lines = [line for line in workers.to_pylist() if line["lifetime_s"] > 0]
    if not lines:
        return None
    several = len({line["attempt"] for line in lines}) > 1
    bars = {}
    for number_, line in enumerate(lines[:_MOST_BARS], 1):
        words = [f"worker {number_}", f"attempt {line['attempt']}" if several else "", "died" if line["death"] else ""]
        bars[", ".join(word for word in words if word)] = {phase.removesuffix("_s"): line[phase] for phase in PHASES}
    if others := lines[_MOST_BARS:]:
        means = {phase.removesuffix("_s"): sum(line[phase] for line in others) / len(others) for phase in PHASES}
        bars[f"other {len(others)}, their mean"] = means
    colours = {phase: (f"var(--{phase})", f"var(--on-{phase})") for phase in _PHASES}
    return Figure("Each worker's time", "in the order of their starts", Markup(stacked(bars, colours)))


def _distributions(profile: RowProfile) -> list[Figure]:
    return [
        Figure(title, _quantiles(profile.histograms[name], unit), Markup(distribution(profile.histograms[name], unit)))
        for name, (title, unit) in _DISTRIBUTIONS.items()
        if profile.histograms[name].num_values
    ]


def _quantiles(histogram: Histogram, unit: str) -> str:
    shown = number if unit == "tokens" else seconds
    parts = [f"{name} {shown(value)}" for name, value in histogram.quantiles.model_dump().items()]
    if histogram.num_above:
        parts.append(f"{histogram.num_above:,} beyond the right end")
    return " · ".join(parts)


def _comparison(summary: Summary) -> Figure | None:
    """What hosted APIs would have asked, beside what was paid."""
    costs = summary.costs
    if not costs.hosted or not costs.total:
        return None
    values = {"this run": costs.total, **{one.name: one.cost for one in costs.hosted}}
    labels = {name: f"{money(cost, costs.total)} {costs.currency}" for name, cost in values.items()}
    labels |= {one.name: f"{labels[one.name]}, {one.cost / costs.total:.2g} times this run" for one in costs.hosted}
    colours = {name: "var(--accent)" if name == "this run" else "var(--idle)" for name in values}
    return Figure("What the same tokens would have cost at", "", Markup(named_bars(values, labels, colours)))


def _finish_reasons(summary: Summary) -> Figure | None:
    reasons = summary.finish_reasons
    if not reasons:
        return None
    whole = sum(reasons.values())
    labels = {name: f"{count:,} ({share(count, whole)})" for name, count in reasons.items()}
    return Figure("Why answers ended", "", Markup(named_bars(reasons, labels, {})))


def _prices(summary: Summary) -> list[tuple[str, str, float | None]]:
    costs = summary.costs
    return [
        ("output tokens", "the whole bill over what was written", costs.per_million_output_tokens),
        ("input + output tokens", "the whole bill over all that was read and written", costs.per_million_total_tokens),
        ("uncached tokens", "the same without what came from the prefix cache", costs.per_million_uncached_tokens),
        ("input tokens, apart", "prefill's part of the bill over what was read", costs.input_per_million_tokens),
        ("output tokens, apart", "decode's part of the bill over what was written", costs.output_per_million_tokens),
    ]
