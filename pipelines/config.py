"""What every setting is; the files under `conf/` say what it is set to, and hold the only defaults.

Nothing behind `parse_config` sees a dict, and nothing here is changed after parsing.
"""

from typing import Annotated, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    JsonValue,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    Tag,
    model_validator,
)

from pipelines.suggest import shown

Text = Annotated[str, Field(min_length=1)]
"""Where an empty text is most likely a shell variable that was not set."""

TextOrList = Annotated[
    Annotated[Text, Tag("text")] | Annotated[tuple[Text, ...], Field(min_length=1), Tag("list")],
    Discriminator(lambda value: "list" if isinstance(value, list | tuple) else "text"),
]


Device = Literal["cpu", "gpu"]
"""What an engine runs on."""


class Strict(BaseModel):
    """A frozen group of settings: an unknown key or a value of another type is an error, never a guess."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False, protected_namespaces=())


class ModelConfig(Strict):
    """The language model."""

    name: Text
    """A short name for reports."""
    path: Text
    """A hub id, a model folder, or `package://<package>/<file>.gguf` (converted once into the cache folder)."""
    revision: Text | None
    """The hub revision; null takes the newest, and the run records which it was."""
    dtype: Text
    """The weights' type, as vLLM spells it; `auto` takes the checkpoint's."""
    max_model_len: PositiveInt | None
    """The most tokens of prompt and answer together; null takes the model's own limit."""
    trust_remote_code: bool
    """Let the model's repository run its own Python code."""


class VllmEngineConfig(Strict):
    """vLLM, the engine of every real run."""

    kind: Literal["vllm"]
    rows_per_batch: PositiveInt | None
    """Rows that are committed together; null chooses by the size of the input."""
    device: Literal["auto", "cpu", "gpu"]
    """`auto` takes GPUs, or CPUs where vLLM's CPU build is installed."""
    cpu_threads: PositiveInt | None
    """Threads of one worker's engine on CPUs; null shares the machine's cores among its workers."""
    cpu_kv_cache_gib: PositiveInt
    """Memory for the KV cache of one worker on CPUs, in GiB."""
    kwargs: dict[str, JsonValue]
    """Further engine options, handed to vLLM's `EngineArgs` untouched."""


class EchoEngineConfig(Strict):
    """A deterministic engine without a model, for tests and dry runs only."""

    kind: Literal["echo"]
    rows_per_batch: PositiveInt | None
    """Rows that are committed together; null chooses by the size of the input."""
    max_model_len: PositiveInt
    """The most tokens (here: words) of prompt and answer together."""
    max_num_seqs: PositiveInt
    """Requests that run together."""
    seconds_per_token: NonNegativeFloat
    """How long one token takes."""
    refuse_text: Text | None
    """A row whose prompt contains this text is refused."""
    die_text: Text | None
    """A row whose prompt contains this text ends the worker's process."""


class InputConfig(Strict):
    """The rows to answer."""

    format: Literal["parquet", "jsonl"]
    path: TextOrList
    """Files, folders or globs, local or on object storage; `package://<package>/<file>` is a file that a package ships."""
    id_column: Text | None
    """The column that names a row; null takes the row's number. Ids are carried through as text, never used as keys."""
    prompt_column: Text | None
    """The column with the prompt's text."""
    messages_column: Text | None
    """The column with a whole conversation, instead of `prompt_column`."""
    carry_columns: tuple[Text, ...]
    """Input columns to copy into the results."""
    limit: PositiveInt | None
    """Only the first so many rows."""


class PromptConfig(Strict):
    """How a row becomes what the model reads."""

    kind: Literal["raw", "chat"]
    """`raw` hands the text to the model as it is; `chat` wraps it in the model's chat template."""
    system: str | None
    """A system message before each conversation (chat only)."""
    template: Text | None
    """A Jinja template over the row's columns that gives the text; null takes `input.prompt_column` as it is."""
    template_file: Text | None
    """A file that holds the template, for texts that are awkward to quote."""
    chat_template_kwargs: dict[str, JsonValue]
    """Variables for the model's chat template, such as `enable_thinking`."""

    @model_validator(mode="after")
    def _check(self) -> "PromptConfig":
        if self.kind == "raw" and self.system is not None:
            raise ValueError(f"prompt.system={shown(self.system)} needs prompt.kind=chat; set that, or prompt.system=null")
        if self.kind == "raw" and self.chat_template_kwargs:
            raise ValueError(f"prompt.chat_template_kwargs={shown(self.chat_template_kwargs)} need prompt.kind=chat")
        return self


class SamplingConfig(Strict):
    """vLLM's sampling parameters, under vLLM's names."""

    max_tokens: PositiveInt
    min_tokens: Annotated[int, Field(ge=0)]
    temperature: Annotated[float, Field(ge=0, le=2)]
    top_p: Annotated[float, Field(gt=0, le=1)]
    top_k: Annotated[int, Field(ge=0)]
    """0 considers every token."""
    min_p: Annotated[float, Field(ge=0, le=1)]
    repetition_penalty: PositiveFloat
    presence_penalty: Annotated[float, Field(ge=-2, le=2)]
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)]
    stop: tuple[Text, ...]
    seed: int | None
    n: PositiveInt
    """Answers per row; the first is `text`, the others stand in `completions`."""
    logprobs: Annotated[int, Field(ge=0, le=20)] | None
    """Log probabilities of so many likeliest tokens at each place of the answer."""
    ignore_eos: bool

    @model_validator(mode="after")
    def _check(self) -> "SamplingConfig":
        if self.min_tokens > self.max_tokens:
            raise ValueError(f"sampling.min_tokens={self.min_tokens} is above sampling.max_tokens={self.max_tokens}")
        if self.n > 1 and self.temperature == 0:
            raise ValueError(f"sampling.n={self.n} would give the same answer {self.n} times; set sampling.temperature above 0")
        return self


class OutputConfig(Strict):
    """Where the run folder lies."""

    path: Text | None
    """The run folder; null names it `runs/<input>-<fingerprint>`, so that the same command finds it again."""
    on_existing: Literal["resume", "refuse", "replace"]
    """What to do where the folder already holds a run."""
    compression: Literal["zstd", "snappy", "none"]


class ErrorsConfig(Strict):
    """How many rows may fail before the job counts as failed (exit code 3)."""

    max_failed_fraction: Annotated[float, Field(ge=0, le=1)]


class PricingConfig(Strict):
    """What an accelerator costs."""

    accelerator: Text
    price_per_accelerator_hour: NonNegativeFloat
    """On CPUs the whole worker counts as one accelerator."""
    currency: Text
    source: Text
    """Where the price stands, and of which day it is."""


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
    """How often a worker that died is started again."""
    heartbeat_s: PositiveFloat
    """How often a worker notes down that it still runs, and what it has cost."""

    @model_validator(mode="after")
    def _check(self) -> "ClusterConfig":
        if self.max_workers is not None and self.max_workers < self.workers:
            raise ValueError(
                f"cluster.max_workers={self.max_workers} is below cluster.workers={self.workers}; null keeps workers"
            )
        return self


class BatchConfig(Strict):
    """Everything that `fournee batch` can be told."""

    model: ModelConfig
    engine: Annotated[VllmEngineConfig | EchoEngineConfig, Field(discriminator="kind")]
    input: InputConfig
    prompt: PromptConfig
    sampling: SamplingConfig
    output: OutputConfig
    errors: ErrorsConfig
    pricing: PricingConfig
    cluster: ClusterConfig
    dry_run: bool
    """Check, plan, show both, and stop."""
    verbose: bool
    """Show what Ray and vLLM say about themselves."""
    progress_interval_s: PositiveFloat
    """Seconds between two progress lines where there is no terminal."""

    @model_validator(mode="after")
    def _check(self) -> "BatchConfig":
        template = "prompt.template" if self.prompt.template_file is None else "prompt.template_file"
        sources = {
            "input.prompt_column": self.input.prompt_column,
            "input.messages_column": self.input.messages_column,
            template: self.prompt.template_file or self.prompt.template,
        }
        given = [f"{key}={shown(value)}" for key, value in sources.items() if value is not None]
        if len(given) != 1:
            found = f"these are set: {', '.join(given)}; set all but one to null" if given else "none of them is set; set one"
            raise ValueError(
                "a row's prompt comes from exactly one of input.prompt_column, input.messages_column and "
                f"prompt.template (or prompt.template_file), and {found}"
            )
        if self.input.messages_column is not None and self.prompt.kind == "raw":
            column = shown(self.input.messages_column)
            raise ValueError(f"input.messages_column={column} holds conversations and needs prompt.kind=chat")
        return self
