"""Is a night worse than those before it? Each measure against the median of the last comparable runs."""

import math
from collections.abc import Sequence
from datetime import date
from statistics import median
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from pipelines.config import HistoryConfig
from pipelines.errors import ConfigError
from pipelines.file_systems import file_system
from pipelines.history import History

Kind = Literal["increase", "decrease", "increase_in_itself", "decrease_in_itself", "change"]
_KINDS: dict[str, Kind] = {
    "cost_per_million_output_tokens": "increase",
    "cost_per_million_total_tokens": "increase",
    "output_tokens_per_s": "decrease",
    "failed_share": "increase_in_itself",
    "accuracy": "decrease_in_itself",
    "ttft_s_p95": "increase",
    "num_rows": "change",
}
# The same job on the same kind of machine, paid in the same money.
_COMPARABLE = ("workload", "experiment", "engine", "accelerator", "currency")
_BEFORE = f"""
SELECT {", ".join(_KINDS)}
FROM runs, (SELECT run AS tonight, finished_at AS now, {", ".join(f"{name} AS its_{name}" for name in _COMPARABLE)}
            FROM runs WHERE run = $run)
WHERE run <> tonight AND finished_at <= now
      AND {" AND ".join(f"{name} IS NOT DISTINCT FROM its_{name}" for name in _COMPARABLE)}
ORDER BY finished_at DESC
LIMIT $last_n
"""


class Measure(BaseModel):
    """One measure of a run, and whether it is as it was."""

    model_config = ConfigDict(frozen=True)
    name: str
    tonight: float | None
    median: float | None
    num_runs: int
    """How many of the runs before have a value."""
    change: float | None
    """Against the median, as a share of it; null where that is 0."""
    at_least: float | None
    at_most: float | None
    verdict: Literal["fine", "worse", "not judged"]
    reason: str = ""
    """Why it is not judged."""


class Judgement(BaseModel):
    """A run, measure by measure."""

    model_config = ConfigDict(frozen=True)
    run: str
    day: date
    num_comparable: int
    """Runs before it, up to `last_n`, that it is compared with."""
    measures: list[Measure]

    @property
    def is_worse(self) -> bool:
        """Whether any measure is worse than allowed."""
        return any(measure.verdict == "worse" for measure in self.measures)


def judge(history: History, config: HistoryConfig, run: str | None = None) -> Judgement:
    """Compare a run with those that finished before it; without `run`, the one that finished last.

    Raises ConfigError where there is no such finished run.
    """
    tonight = _find(history, run)
    before = history.sql(_BEFORE, run=tonight["run"], last_n=config.last_n)
    return Judgement(
        run=tonight["run"],
        day=tonight["day"],
        num_comparable=len(before),
        measures=[
            _measure(name, tonight[name], before[name].drop_null().to_pylist(), config, is_empty=tonight["num_rows"] == 0)
            for name in _KINDS
        ],
    )


def _find(history: History, run: str | None) -> dict[str, Any]:
    runs = history.sql(f"SELECT run, day, {', '.join(_KINDS)} FROM runs ORDER BY finished_at DESC NULLS LAST").to_pylist()
    if run is None:
        return dict(runs[0])
    place = file_system(run)[1].rstrip("/")
    names = {place, f"{history.root.rstrip('/')}/{run.strip('/')}"}
    for line in runs:
        if file_system(line["run"])[1].rstrip("/") in names:
            return dict(line)
    raise ConfigError(f"--run {run} is no finished run in {history.url}; the newest is {runs[0]['run']}")


def _measure(name: str, tonight: float | None, before: Sequence[float], config: HistoryConfig, *, is_empty: bool) -> Measure:
    tolerance = getattr(config.tolerances, name)
    usual = median(before) if before else None
    if tolerance is None:
        reason = f"tolerances.{name}=null"
    elif tonight is None:
        reason = "no value: the run had no rows" if is_empty else "no value tonight"
    elif usual is None or len(before) < config.min_runs:
        reason = f"fewer than min_runs={config.min_runs} runs before have a value"
    else:
        reason = ""
    low, high = (None, None) if reason or usual is None else _limits(_KINDS[name], usual, tolerance)
    is_worse = tonight is not None and not reason and not (low or -math.inf) <= tonight <= (math.inf if high is None else high)
    return Measure(
        name=name,
        tonight=tonight,
        median=usual,
        num_runs=len(before),
        change=tonight / usual - 1 if tonight is not None and usual else None,
        at_least=low,
        at_most=high,
        verdict="not judged" if reason else "worse" if is_worse else "fine",
        reason=reason,
    )


def _limits(kind: Kind, usual: float, tolerance: float) -> tuple[float | None, float | None]:
    match kind:
        case "increase":
            return None, usual * (1 + tolerance)
        case "decrease":
            return usual * (1 - tolerance), None
        case "increase_in_itself":
            return None, usual + tolerance
        case "decrease_in_itself":
            return usual - tolerance, None
        case "change":
            return usual * (1 - tolerance), usual * (1 + tolerance)
