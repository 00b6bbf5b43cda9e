"""Where a job runs, what it writes, what it may cost, and how much of it may fail."""

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from pipelines.config.strict import Strict, Text


class OutputConfig(Strict):
    """Where the run folder lies."""

    path: Text | None
    """The run folder; null names it `runs/<input>-<fingerprint>`, so that the same command finds it again."""
    on_existing: Literal["resume", "refuse", "replace"]
    """What to do where the folder already holds a run."""
    compression: Literal["zstd", "snappy", "none"]
    """How the Parquet files are compressed."""
    rows_per_file: PositiveInt | None
    """Put neighbouring batches together, at the end, into files of up to so many rows; null leaves a file for each batch."""
    patience_s: NonNegativeFloat
    """How long the storage may refuse before the job gives up."""
    openai: bool
    """Also write the results as OpenAI's batch API does: `openai/output.jsonl` and `openai/errors.jsonl`."""


class ErrorsConfig(Strict):
    """How many rows may fail. A job that is above one of them, or is bound to be, stops and ends with exit code 3."""

    max_failed_fraction: Annotated[float, Field(ge=0, le=1)]
    max_failed_rows: Annotated[int, Field(ge=0)] | None


class HostedPrice(Strict):
    """What a hosted API asks for a million tokens, to compare with."""

    name: Text
    """What the report calls it."""
    input_per_million_tokens: NonNegativeFloat
    """In `pricing.currency`."""
    output_per_million_tokens: NonNegativeFloat
    """In `pricing.currency`, too."""
    source: Text
    """Where the price stands, and of which day it is."""


class PricingConfig(Strict):
    """What an accelerator costs, and what else a run costs."""

    accelerator: Text
    """Its name, for reports."""
    market: Literal["on_demand", "spot"]
    """Which of the two prices is paid."""
    price_per_accelerator_hour: NonNegativeFloat
    """On demand. On CPUs the whole worker counts as one accelerator."""
    spot_price_per_accelerator_hour: NonNegativeFloat | None
    """On spot machines; `market=spot` needs it."""
    overhead_per_hour: NonNegativeFloat
    """What runs beside the workers as long as there are any: the head node, nodes without accelerators."""
    overhead_per_run: NonNegativeFloat
    """What a run costs however long it takes: storage, requests to it."""
    currency: Text
    """What all prices are in, such as USD."""
    source: Text
    """Where the prices stand, and of which day they are."""
    peak_tflops: PositiveFloat | None
    """What the accelerator can compute at most in the model's number format; null where it is not known."""
    peak_memory_gb_per_s: PositiveFloat | None
    """What the accelerator can read from its memory at most."""
    hosted: tuple[HostedPrice, ...]
    """For the report's line on what hosted APIs ask for the same tokens."""

    @property
    def paid_per_accelerator_hour(self) -> float:
        """The price that counts."""
        if self.market == "on_demand":
            return self.price_per_accelerator_hour
        assert self.spot_price_per_accelerator_hour is not None, "checked below"
        return self.spot_price_per_accelerator_hour

    @model_validator(mode="after")
    def _check(self) -> "PricingConfig":
        if self.market == "spot" and self.spot_price_per_accelerator_hour is None:
            raise ValueError("pricing.market=spot needs a price: set pricing.spot_price_per_accelerator_hour")
        return self


class BudgetConfig(Strict):
    """How much a run may cost and take, over all of its attempts. It is stopped, resumable, before it goes past either."""

    max_cost: PositiveFloat | None
    max_hours: PositiveFloat | None
    """The most hours with workers, as `wall_s` counts them."""


class EstimateSettings(Strict):
    """What an estimate is made from."""

    sample_rows: PositiveInt
    """So many rows, drawn at random, are rendered and tokenised."""
    pilot_rows: NonNegativeInt
    """So many rows, drawn at random, are answered, as the job would answer them; 0 answers none."""
    like: Text | None
    """The folder of a finished run of the same kind, whose pace is taken instead of a pilot's."""
    seed: NonNegativeInt
    """Draws the rows: the same seed draws the same ones."""

    @model_validator(mode="after")
    def _check(self) -> "EstimateSettings":
        if self.pilot_rows and self.like is not None:
            raise ValueError(
                f"the pace comes from one place, but estimate.pilot_rows={self.pilot_rows} and estimate.like={self.like} "
                "are set; set one of them to 0 or null"
            )
        return self


class ClusterConfig(Strict):
    """Where the workers run."""

    address: Text | None
    """A Ray cluster; null takes the one this process belongs to (RAY_ADDRESS), else starts one on this machine."""
    workers: PositiveInt
    max_workers: PositiveInt | None
    """Grow up to so many workers with the cluster; null keeps `workers`."""
    cpus_per_worker: PositiveFloat
    """CPUs that Ray sets aside for one worker."""
    accelerator_type: Text | None
    """Ray's name of the accelerator to run on, such as H100; null takes any."""
    worker_restarts: Annotated[int, Field(ge=0)]
    """How often a worker that died is started again; a row that kills engines takes three to five to find."""
    heartbeat_s: PositiveFloat
    """How often a worker notes down that it still runs, and what it has cost."""
    start_timeout_s: PositiveFloat
    """How long to wait while the cluster has no room for any worker, at the start or later."""
    load_timeout_s: PositiveFloat
    """How long a worker may take to load the model before it is taken for stuck, and replaced."""
    hang_timeout_s: PositiveFloat
    """How long a worker with rows to answer may show no progress before it is taken for stuck, and replaced."""
    drain_s: NonNegativeFloat
    """How long a job that is told to stop goes on with what is in its engines; within Ray's own limit for a Ray job."""

    @model_validator(mode="after")
    def _check(self) -> "ClusterConfig":
        if self.max_workers is not None and self.max_workers < self.workers:
            raise ValueError(
                f"cluster.max_workers={self.max_workers} is below cluster.workers={self.workers}; null keeps workers"
            )
        if self.hang_timeout_s < 3 * self.heartbeat_s:
            raise ValueError(
                f"cluster.hang_timeout_s={self.hang_timeout_s:g} takes workers for stuck that are not: "
                f"it must be at least three times cluster.heartbeat_s={self.heartbeat_s:g}"
            )
        return self
