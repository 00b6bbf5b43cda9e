"""The totals of a run: what `stats/summary.json` holds, and what the terminal and the report show."""

from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from pipelines.costs import Costs
from pipelines.engine_use import EngineUse
from pipelines.errors import ConfigError, ExitCode
from pipelines.histograms import Quantiles
from pipelines.intervals import Interval
from pipelines.prefix_order import PrefixHits
from pipelines.schema import RUN_FILE, SUCCESS_FILE
from pipelines.storage import Folder

SUMMARY_FILE = "stats/summary.json"


class Summary(BaseModel):
    """The totals of a run: `stats/summary.json`."""

    model_config = ConfigDict(frozen=True, protected_namespaces=())

    exit_code: ExitCode
    engine: str
    fingerprint: str
    num_rows: int
    num_ok: int
    num_failed: int
    num_failures_allowed: int
    """The most that may fail (`errors.*`)."""
    num_marked: int = 0
    """Rows with an expected answer, failed ones included."""
    num_correct: int = 0
    accuracy: Interval | None = None
    """`num_correct` of `num_marked`, and how far that says what the model would come to on more rows of the kind."""
    error_kinds: dict[str, int]
    error_examples: dict[str, str]
    """For each kind of error a row that failed with it: its id, or its place where it has none."""
    flags: dict[str, int]
    bad_files: dict[str, str]
    """Input files that were left out because they cannot be read, and why."""
    finish_reasons: dict[str, int]
    num_prompt_tokens: int
    num_cached_tokens: int
    prefix_hits: PrefixHits | None = None
    """With `input.order=by_prefix`: how many cached tokens there should be, in the order of the input and in that by prefix."""
    num_output_tokens: int
    num_generated_tokens: int
    """Every token that came out of an engine, also those of failed rows and of lost work."""
    num_batches: int
    num_attempts: int
    num_workers: int
    """Worker lifetimes, over all attempts."""
    num_deaths: int
    """Of them, those that ended because their engine or process died."""
    wall_s: float
    """From the first worker's start to the last heartbeat, summed over the attempts."""
    worker_s: float
    """The sum of all workers' lifetimes, and of the next five (`pipelines.ledger`)."""
    loading_s: float
    prefill_s: float
    decode_s: float
    idle_s: float
    lost_s: float
    output_tokens_per_s: float | None
    """Over `wall_s`: loading and idling included."""
    total_tokens_per_s: float | None
    busy_output_tokens_per_s: float | None
    """Over `prefill_s` + `decode_s`: what one busy engine gives."""
    engine_use: EngineUse
    sizes: dict[str, str]
    """Rows per batch, and what the engine resolved its own sizes to, each with its reason (`pipelines.sizing`)."""
    latencies: dict[str, Quantiles]
    costs: Costs
    record: dict[str, Any]
    """What it takes to do this run again: model, versions, hardware, sampling, input, command."""
    findings: dict[str, str]
    """What is worth acting on: for each topic a sentence with the number and the remedy (`pipelines.findings`)."""


def read_totals(run: Folder) -> Summary:
    """The totals of a finished run. Raises ConfigError where the folder holds none."""
    if not run.exists(RUN_FILE):
        raise ConfigError(f"{run.url} holds no run: there is no {RUN_FILE}; name the folder that `fournee batch` wrote to")
    if not run.exists(SUCCESS_FILE):
        raise ConfigError(
            f"{run.url} holds a run that is not finished; the command that began it resumes it, and `fournee inspect` shows "
            "how far it is"
        )
    try:
        return Summary.model_validate_json(run.read(SUMMARY_FILE))
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise ConfigError(f"{run.url}/{SUMMARY_FILE} is of another version of Fournée: {place}: {first['msg']}") from None
