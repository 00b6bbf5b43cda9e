"""The model, and the engine that runs it."""

from typing import Literal

from pydantic import JsonValue, NonNegativeFloat, PositiveInt

from pipelines.config.strict import Strict, Text

Device = Literal["cpu", "gpu"]
"""What an engine runs on."""


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
    reasoning_parser: Text | None
    """vLLM's parser that splits the model's reasoning from its answer, such as qwen3; null leaves it in the text."""
    tool_call_parser: Text | None
    """vLLM's parser that finds tool calls in the model's answer, such as hermes; null leaves them in the text."""
    engine_kwargs: dict[str, JsonValue]
    """Engine options that this model wants; `engine.kwargs` go over them."""


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
    """Further engine options, handed to vLLM's `EngineArgs` untouched; they go over `model.engine_kwargs`, and null takes one
    of those away."""


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
    hang_text: Text | None
    """A row whose prompt contains this text is never answered."""
    die_text: Text | None
    """A row whose prompt contains this text ends the worker's process."""
