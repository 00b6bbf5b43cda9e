"""What every setting is; the files under `conf/` say what it is set to, and hold the only defaults.

Nothing behind `parse_config` sees a dict, and nothing here is changed after parsing.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue, NonNegativeFloat, PositiveFloat, PositiveInt
from pydantic import ValidationError, model_validator
from pydantic_core import to_json

from pipelines.errors import ConfigError
from pipelines.suggest import did_you_mean


class Strict(BaseModel):
    """A frozen group of settings: an unknown key or a value of another type is an error, never a guess."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, protected_namespaces=())


class ModelConfig(Strict):
    """The language model."""

    name: str
    """A short name for reports."""
    path: str
    """A hub id, a model folder, or `package://<package>/<file>.gguf` (converted once into the cache folder)."""
    revision: str | None
    """The hub revision; null takes the newest, and the run records which it was."""
    dtype: str
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
    """`auto` takes GPUs where the Ray cluster has some."""
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
    refuse_text: str | None
    """A row whose prompt contains this text is refused."""
    die_text: str | None
    """A row whose prompt contains this text ends the worker's process."""


class InputConfig(Strict):
    """The rows to answer."""

    format: Literal["parquet", "jsonl"]
    path: str | tuple[str, ...]
    """Files, folders or globs, local or on object storage; `package://<package>/<file>` is a file that a package ships."""
    id_column: str | None
    """The column that names a row; null takes the row's number. Ids are carried through as text, never used as keys."""
    prompt_column: str | None
    """The column with the prompt's text."""
    messages_column: str | None
    """The column with a whole conversation, instead of `prompt_column`."""
    carry_columns: tuple[str, ...]
    """Input columns to copy into the results."""
    limit: PositiveInt | None
    """Only the first so many rows."""


class PromptConfig(Strict):
    """How a row becomes what the model reads."""

    kind: Literal["raw", "chat"]
    """`raw` hands the text to the model as it is; `chat` wraps it in the model's chat template."""
    system: str | None
    """A system message before each conversation (chat only)."""
    template: str | None
    """A Jinja template over the row's columns that gives the text; null takes `input.prompt_column` as it is."""
    template_file: str | None
    """A file that holds the template, for texts that are awkward to quote."""
    chat_template_kwargs: dict[str, JsonValue]
    """Variables for the model's chat template, such as `enable_thinking`."""

    @model_validator(mode="after")
    def _check(self) -> "PromptConfig":
        if self.kind == "raw" and (self.system is not None or self.chat_template_kwargs):
            raise ValueError("prompt.system and prompt.chat_template_kwargs need prompt.kind=chat")
        return self


class SamplingConfig(Strict):
    """vLLM's sampling parameters, under vLLM's names."""

    max_tokens: PositiveInt
    min_tokens: Annotated[int, Field(ge=0)]
    temperature: NonNegativeFloat
    top_p: Annotated[float, Field(gt=0, le=1)]
    top_k: Annotated[int, Field(ge=0)]
    """0 considers every token."""
    min_p: Annotated[float, Field(ge=0, le=1)]
    repetition_penalty: PositiveFloat
    presence_penalty: Annotated[float, Field(ge=-2, le=2)]
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)]
    stop: tuple[str, ...]
    seed: int | None
    n: PositiveInt
    """Answers per row; the first is `text`, the others stand in `completions`."""
    logprobs: Annotated[int, Field(ge=0, le=20)] | None
    """Log probabilities of so many likeliest tokens at each place of the answer."""
    ignore_eos: bool


class OutputConfig(Strict):
    """Where the run folder lies."""

    path: str | None
    """The run folder; null names it `runs/<input>-<fingerprint>`, so that the same command finds it again."""
    on_existing: Literal["resume", "refuse", "replace"]
    """What to do where the folder already holds a run."""
    compression: Literal["zstd", "snappy", "none"]


class ErrorsConfig(Strict):
    """How many rows may fail before the job counts as failed (exit code 3)."""

    max_failed_fraction: Annotated[float, Field(ge=0, le=1)]


class PricingConfig(Strict):
    """What an accelerator costs."""

    accelerator: str
    price_per_accelerator_hour: NonNegativeFloat
    """On CPUs the whole worker counts as one accelerator."""
    currency: str
    source: str
    """Where the price stands, and of which day it is."""


class ClusterConfig(Strict):
    """Where the workers run."""

    address: str | None
    """A Ray cluster; null takes the one this process belongs to (RAY_ADDRESS), else starts one on this machine."""
    workers: PositiveInt
    max_workers: PositiveInt | None
    """Grow up to so many workers with the cluster; null keeps `workers`."""
    cpus_per_worker: PositiveFloat
    """CPUs that Ray sets aside for one worker."""
    accelerator_type: str | None
    """Ray's name of the accelerator to run on, such as H100; null takes any."""
    worker_restarts: Annotated[int, Field(ge=0)]
    """How often a worker that died is started again."""
    heartbeat_s: PositiveFloat
    """How often a worker notes down that it still runs, and what it has cost."""

    @model_validator(mode="after")
    def _check(self) -> "ClusterConfig":
        if self.max_workers is not None and self.max_workers < self.workers:
            raise ValueError(f"cluster.max_workers={self.max_workers} is below cluster.workers={self.workers}")
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
        sources = [
            name
            for name, is_set in {
                "input.prompt_column": self.input.prompt_column is not None,
                "input.messages_column": self.input.messages_column is not None,
                "prompt.template": self.prompt.template is not None,
            }.items()
            if is_set
        ]
        if len(sources) != 1:
            given = " and ".join(sources) or "none of them"
            raise ValueError(
                "a row's prompt comes from exactly one of input.prompt_column, input.messages_column and "
                f"prompt.template (or prompt.template_file); set: {given}. Set the others to null"
            )
        if self.input.messages_column is not None and self.prompt.kind == "raw":
            raise ValueError("input.messages_column holds conversations and needs prompt.kind=chat")
        return self


def parse_config(values: Mapping[str, Any]) -> BatchConfig:
    """Turn composed settings into a `BatchConfig`.

    Raises ConfigError with one line for each wrong setting.
    """
    values = {**values, "prompt": _with_template_text(values.get("prompt"))}
    try:
        return BatchConfig.model_validate_json(to_json(values))
    except ValidationError as error:
        raise ConfigError("\n".join(_explain(detail, values) for detail in error.errors())) from None


def _with_template_text(prompt: Any) -> Any:
    """Read `template_file` here, once: workers elsewhere may not see the file, and its text belongs to the run."""
    if not isinstance(prompt, Mapping) or not prompt.get("template_file"):
        return prompt
    if prompt.get("template") is not None:
        raise ConfigError("prompt.template and prompt.template_file are both set; set one of them to null")
    path = Path(str(prompt["template_file"]))
    try:
        return {**prompt, "template": path.read_text(encoding="utf-8")}
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"prompt.template_file={path} cannot be read as UTF-8 text: {error}") from None


def _explain(detail: Any, values: Mapping[str, Any]) -> str:
    """Say which key is wrong, what it was set to, and what would be right."""
    path = [str(part) for part in detail["loc"] if part not in ("vllm", "echo", "constrained-str", "str")]
    key = ".".join(path)
    if detail["type"] == "extra_forbidden":
        known = _keys_at(values, path[:-1]) | _field_names(path[:-1])
        return f"{key} is not a setting{did_you_mean(path[-1], known - {path[-1]})}"
    if detail["type"] == "missing":
        return f"{key} is not set"
    if detail["type"] == "value_error":
        return str(detail["ctx"]["error"])
    return f"{key}={detail['input']!r}: {detail['msg'][0].lower()}{detail['msg'][1:]}"


def _keys_at(values: Mapping[str, Any], path: list[str]) -> set[str]:
    for part in path:
        inner = values.get(part)
        values = inner if isinstance(inner, Mapping) else {}
    return set(values)


def _field_names(path: list[str]) -> set[str]:
    """The settings of the group at `path`: engines share one group, so both are listed."""
    match path:
        case []:
            return set(BatchConfig.model_fields)
        case ["engine"]:
            return set(VllmEngineConfig.model_fields) | set(EchoEngineConfig.model_fields)
        case [group] if group in BatchConfig.model_fields:
            annotation = BatchConfig.model_fields[group].annotation
            return set(annotation.model_fields) if isinstance(annotation, type) and issubclass(annotation, Strict) else set()
        case _:
            return set()
