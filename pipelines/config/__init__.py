"""What every setting is; the files under `conf/` say what it is set to, and hold the only defaults.

Nothing behind `parse_config` sees a dict, and nothing here is changed after parsing.
"""

from datetime import date
from typing import Annotated, Any

from pydantic import Field, JsonValue, PositiveFloat, field_validator, model_validator

from pipelines.config.answer import (
    FORMS,
    FilterStep,
    FunctionStep,
    JsonStep,
    PostprocessConfig,
    PromptConfig,
    RegexStep,
    SamplingConfig,
    Step,
    StripReasoningStep,
)
from pipelines.config.engine import Device, EchoEngineConfig, ModelConfig, VllmEngineConfig
from pipelines.config.history import HistoryConfig, Tolerances
from pipelines.config.input import (
    AnyInput,
    CsvInput,
    DeltaInput,
    FileInput,
    FilesInput,
    HuggingFaceInput,
    IcebergInput,
    InputConfig,
    JsonlInput,
    LanceInput,
    ParquetInput,
    SqlInput,
    TableInput,
)
from pipelines.config.job import (
    BudgetConfig,
    ClusterConfig,
    ErrorsConfig,
    EstimateSettings,
    HostedPrice,
    OutputConfig,
    PricingConfig,
)
from pipelines.config.serve import QuotaConfig, ServeSettings
from pipelines.config.strict import Strict, Text, TextOrList
from pipelines.config.submit import SubmitConfig
from pipelines.suggest import shown

__all__ = [
    "FORMS",
    "AnyInput",
    "BatchConfig",
    "BudgetConfig",
    "ClusterConfig",
    "CsvInput",
    "DeltaInput",
    "Device",
    "EchoEngineConfig",
    "ErrorsConfig",
    "EstimateConfig",
    "EstimateSettings",
    "FileInput",
    "FilesInput",
    "FilterStep",
    "FunctionStep",
    "HistoryConfig",
    "HostedPrice",
    "HuggingFaceInput",
    "IcebergInput",
    "InputConfig",
    "JsonStep",
    "JsonlInput",
    "LanceInput",
    "ModelConfig",
    "OutputConfig",
    "ParquetInput",
    "PostprocessConfig",
    "PricingConfig",
    "PromptConfig",
    "QuotaConfig",
    "RegexStep",
    "SamplingConfig",
    "ServeConfig",
    "ServeSettings",
    "SqlInput",
    "Step",
    "Strict",
    "StripReasoningStep",
    "SubmitConfig",
    "TableInput",
    "Text",
    "TextOrList",
    "Tolerances",
    "VllmEngineConfig",
]


class BatchConfig(Strict):
    """Everything that `fournee batch` can be told."""

    model: ModelConfig
    engine: Annotated[VllmEngineConfig | EchoEngineConfig, Field(discriminator="kind")]
    input: Annotated[InputConfig, Field(discriminator="format")]
    prompt: PromptConfig
    sampling: SamplingConfig
    postprocess: PostprocessConfig
    output: OutputConfig
    errors: ErrorsConfig
    budget: BudgetConfig
    pricing: PricingConfig
    cluster: ClusterConfig
    endpoint: Text | None
    """The URL of a `fournee serve` whose replicas answer, when they have room, instead of engines of the workers' own; its key
    is in the environment variable FOURNEE_API_KEY. It is told `model.name`, the prompt and the job's `sampling`; what is null
    there, and all else of `model`, `engine` and `prompt`, is its own: start it with the same. No part of the run's identity."""
    experiment: str | None
    """The name of the experiment that was chosen, if one was; no part of the run's identity."""
    run_date: date | None
    """The day that this run is for: `${run_date}` in a path gives each day its own; no part of the run's identity."""
    retry_failed: bool
    """Answer the failed rows of the run again, and put what comes in their place."""
    dry_run: bool
    """Check, plan, show both, and stop."""
    verbose: bool
    """Show what Ray and vLLM say about themselves."""
    progress_interval_s: PositiveFloat
    """Seconds between two progress lines where there is no terminal."""

    @property
    def engine_kwargs(self) -> dict[str, JsonValue]:
        """The options that vLLM is given: the model's, and `engine.kwargs` over them; a null there takes the model's away."""
        if not isinstance(self.engine, VllmEngineConfig):
            return {}
        wanted, chosen = self.model.engine_kwargs, self.engine.kwargs
        taken_away = {name for name in wanted if name in chosen and chosen[name] is None}
        return {name: value for name, value in {**wanted, **chosen}.items() if name not in taken_away}

    def key_of(self, option: str) -> str:
        """The setting that an engine option comes from, or that would set it."""
        chosen = self.engine.kwargs if isinstance(self.engine, VllmEngineConfig) else {}
        is_the_models = option in self.model.engine_kwargs and option not in chosen
        return f"model.engine_kwargs.{option}" if is_the_models else f"engine.kwargs.{option}"

    @field_validator("run_date", mode="before")
    @classmethod
    def _check_date(cls, value: Any) -> date | None:
        """Take one spelling only: the text itself stands in paths."""
        if value is None:
            return None
        try:
            day = date.fromisoformat(value)
        except (TypeError, ValueError):
            day = None
        if day is None or str(day) != value:
            raise ValueError(f"run_date={shown(value)} must be a date as YYYY-MM-DD, such as run_date=2026-11-30")
        return day

    @model_validator(mode="after")
    def _check(self) -> "BatchConfig":
        if self.endpoint is not None and not self.endpoint.startswith(("http://", "https://")):
            raise ValueError(f"endpoint={self.endpoint} must be a URL, such as http://127.0.0.1:8000")
        template = "prompt.template" if self.prompt.template_file is None else "prompt.template_file"
        sources = {
            "input.prompt_column": self.input.prompt_column,
            "input.messages_column": self.input.messages_column,
            "input.request_column": self.input.request_column,
            template: self.prompt.template_file or self.prompt.template,
        }
        given = [f"{key}={shown(value)}" for key, value in sources.items() if value is not None]
        if len(given) > 1:
            raise ValueError(f"a row has one prompt, but {' and '.join(given)} are set; set all but one to null")
        if not given:
            raise ValueError(f"a row needs a prompt, but {', '.join(sources)} are all null; set one of them")
        if self.input.request_column is not None:
            for name in ("tools", "sampling", "schema"):
                if (column := getattr(self.input, f"{name}_column")) is not None:
                    raise ValueError(
                        f"input.{name}_column={shown(column)} has no effect: the request bodies of input.request_column say "
                        "that themselves; set it to null"
                    )
        caching = "enable_prefix_caching"
        if self.input.order == "by_prefix" and self.engine_kwargs.get(caching) is False:
            raise ValueError(
                f"input.order=by_prefix has no effect without a prefix cache, but {self.key_of(caching)}=false; "
                "set that to true, or input.order=as_is"
            )
        if self.input.messages_column is not None and self.prompt.kind == "raw":
            column = shown(self.input.messages_column)
            raise ValueError(f"input.messages_column={column} holds conversations and needs prompt.kind=chat")
        return self


class EstimateConfig(BatchConfig):
    """Everything that `fournee estimate` can be told: the settings of the job, and what to estimate from."""

    estimate: EstimateSettings


class ServeConfig(BatchConfig):
    """Everything that `fournee serve` can be told: the settings of the job, and how to serve its model."""

    serve: ServeSettings
