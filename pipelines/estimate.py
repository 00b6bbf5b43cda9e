"""What a job will come to, before it runs: tokens, hours and cost, each with the range that holds it nine times out of ten."""

import tempfile

import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import BaseModel, ConfigDict

from pipelines.batch import check_settings, plan_input, run_batch
from pipelines.config import EstimateConfig
from pipelines.errors import ConfigError
from pipelines.intervals import Interval
from pipelines.pace import Pace, pace_of_pilot, pace_of_run
from pipelines.pilot import Story, run_pilot
from pipelines.prompt_counts import Prompts, count_prompts
from pipelines.sample import draw
from pipelines.sources import list_sources
from pipelines.statistics import cost_per_million
from pipelines.storage import Folder
from pipelines.totals import read_totals

_LOADING_SHARE = 0.5
_FULL_ENGINE = 0.8  # of the requests that it could run at once


class Spending(BaseModel):
    """What the rows take at a pace that was measured."""

    model_config = ConfigDict(frozen=True)
    measured_by: str
    num_workers: int
    num_output_tokens: Interval
    hours: Interval
    """With workers."""
    cost: Interval
    cost_per_million_output_tokens: float | None
    cost_per_million_total_tokens: float | None
    limited_by: str
    uncertainty: dict[str, float]
    """Where the range of the hours comes from: half of what each source adds, relative to the hours."""


class Estimate(BaseModel):
    """All that can be said before a job runs."""

    model_config = ConfigDict(frozen=True)
    engine: str
    num_rows: int
    prompts: Prompts
    spending: Spending | None
    """Null where nothing tells the pace."""
    currency: str
    notes: list[str]
    """What is worth acting on: a budget that will not do, a pilot that is too small."""


def estimate(config: EstimateConfig, story: Story = run_batch) -> Estimate:
    """Say what the job will come to; writes nothing to the run's folder.

    Raises ConfigError like `fournee batch`, and what a pilot raises.
    """
    check_settings(config)
    earlier = _earlier_pace(config)
    sources = list_sources(config.input)
    with tempfile.TemporaryDirectory() as spool:
        as_is = config.model_copy(update={"input": config.input.model_copy(update={"order": "as_is"})})
        plan = plan_input(as_is, sources, Folder(spool))  # rows are drawn at random, whatever order they will come in
        num_rows = plan.num_rows
        prompts = count_prompts(config, plan)
        pace = earlier
        if config.estimate.pilot_rows and num_rows:
            sample = draw(num_rows, config.estimate.pilot_rows, config.estimate.seed + 1)  # rows of its own
            pace = pace_of_pilot(run_pilot(config, sources, plan, sample, story))
    spending = spending_of(config, pace, prompts, num_rows) if pace is not None and num_rows else None
    return Estimate(
        engine=config.engine.kind,
        num_rows=num_rows,
        prompts=prompts,
        spending=spending,
        currency=config.pricing.currency,
        notes=_notes(config, pace, spending, num_rows),
    )


def spending_of(config: EstimateConfig, pace: Pace, prompts: Prompts, num_rows: int) -> Spending:
    """The hours and the cost of all rows at a pace."""
    num_workers, pricing = config.cluster.workers, config.pricing
    worker_s = pace.seconds(num_rows, num_workers)
    each_s = worker_s.times(1 / num_workers)
    hours = Interval(  # how far apart workers start is chance
        value=(each_s.value + pace.stagger_s) / 3600, low=each_s.low / 3600, high=(each_s.high + 2 * pace.stagger_s) / 3600
    )
    rate = pace.num_accelerators * pricing.paid_per_accelerator_hour / 3600

    def cost_of(seconds: float, wall_h: float) -> float:
        return seconds * rate + wall_h * pricing.overhead_per_hour + pricing.overhead_per_run

    cost = Interval(
        value=cost_of(worker_s.value, hours.value),
        low=cost_of(worker_s.low, hours.low),
        high=cost_of(worker_s.high, hours.high),
    )
    output = pace.output_tokens.times(num_rows)
    num_output = round(output.value)
    num_prompt = round(prompts.num_tokens.value) if prompts.num_tokens else 0
    return Spending(
        measured_by="an earlier run" if config.estimate.like else "a pilot",
        num_workers=num_workers,
        num_output_tokens=output,
        hours=hours,
        cost=cost,
        cost_per_million_output_tokens=cost_per_million(cost.value, num_output),
        cost_per_million_total_tokens=cost_per_million(cost.value, num_prompt + num_output),
        limited_by=_limited_by(pace, num_rows, num_workers),
        uncertainty=pace.sources(num_rows, num_workers),
    )


def _limited_by(pace: Pace, num_rows: int, num_workers: int) -> str:
    fixed_share = pace.fixed_s * num_workers / pace.seconds(num_rows, num_workers).value
    if fixed_share > _LOADING_SHARE:
        return f"loading and the last answers: {fixed_share:.0%} of the workers' time; fewer workers, or more rows in one run"
    if not pace.is_steady:
        return "not known: the pilot did not fill its engines"
    if pace.concurrency is None or pace.max_num_seqs is None:
        return "not known"
    running = f"an engine ran {pace.concurrency:.0f} of {pace.max_num_seqs} requests at once"
    if pace.concurrency >= _FULL_ENGINE * pace.max_num_seqs:
        return f"the engines: {running}; more workers, or a higher max_num_seqs where memory allows it"
    return f"the memory for running requests, or what feeds the engines: {running}"


def _notes(config: EstimateConfig, pace: Pace | None, spending: Spending | None, num_rows: int) -> list[str]:
    if not num_rows:
        return ["the input has no rows"]
    if pace is None:
        if config.estimate.pilot_rows or config.estimate.like is not None:
            return ["no row was answered, so hours and cost are not known"]
        return [
            "hours and cost need a pilot: the same command and estimate.pilot_rows=512, "
            "or estimate.like=<a finished run of the same kind>"
        ]
    notes = []
    if not pace.is_steady and num_rows > config.estimate.pilot_rows:
        enough = 2 * (pace.max_num_seqs or 256) * config.cluster.workers
        notes.append(
            f"the pilot's rows all ran at once ({pace.concurrency or 0:.0f} in an engine), so the job may well be faster: the "
            f"range reaches down to a full engine's pace. estimate.pilot_rows={min(enough, num_rows)} narrows it"
        )
    assert spending is not None, "there is a pace"
    for key, most, found in (
        ("max_cost", config.budget.max_cost, spending.cost),
        ("max_hours", config.budget.max_hours, spending.hours),
    ):
        if most is not None and found.high > most:
            will = "would be passed" if found.value > most else "may be passed"
            notes.append(f"budget.{key}={most:g} {will}: {found.value:.4g}, at most {found.high:.4g}")
    return notes


def _earlier_pace(config: EstimateConfig) -> Pace | None:
    """The pace of the run that `estimate.like` names; raises ConfigError where it holds none that is finished."""
    if config.estimate.like is None:
        return None
    folder = Folder(config.estimate.like)
    try:
        summary = read_totals(folder)
    except ConfigError as error:
        raise ConfigError(f"estimate.like: {error}") from None
    batches, workers = (pq.read_table(pa.BufferReader(folder.read(f"stats/{name}.parquet"))) for name in ("batches", "workers"))
    if summary.engine != config.engine.kind:
        raise ConfigError(
            f"estimate.like={config.estimate.like} ran engine={summary.engine}, and this job engine={config.engine.kind}"
        )
    return pace_of_run(summary, batches, workers)
