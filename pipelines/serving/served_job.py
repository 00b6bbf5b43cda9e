"""The settings of a batch that came over the endpoint: the server's own, with the batch's input and output."""

from typing import Any

from pipelines.config import (
    AnyInput,
    BatchConfig,
    BudgetConfig,
    ErrorsConfig,
    JsonlInput,
    PostprocessConfig,
    ServeConfig,
)

_CPUS = 0.1  # its worker only asks the endpoint
_LINES: dict[str, Any] = {
    "format": "jsonl", "id_column": "custom_id", "ids": "allow", "prompt_column": None, "messages_column": None,
    "request_column": "body", "tools_column": None, "sampling_column": None, "schema_column": None, "carry_columns": (),
    "limit": None, "on_bad_file": "fail",
}  # fmt: skip
"""OpenAI's batch lines, as conf/input/openai.yaml has them."""


def batch_config(config: ServeConfig, *, input_url: str, run_url: str) -> BatchConfig:
    """A job over an uploaded file whose rows the endpoint answers."""
    own = {name: getattr(config, name) for name in BatchConfig.model_fields}
    changed = {
        "endpoint": config.serve.url,
        "input": JsonlInput.model_validate({**_settings(config.input), **_LINES, "path": input_url}),
        "prompt": config.prompt.model_copy(update={"template": None, "template_file": None}),
        "postprocess": PostprocessConfig(steps=()),
        "output": config.output.model_copy(update={"path": run_url, "on_existing": "resume", "openai": True}),
        "errors": ErrorsConfig(max_failed_fraction=1.0, max_failed_rows=None),
        "budget": BudgetConfig(max_cost=None, max_hours=None),
        # What it costs is the replicas' time, which the endpoint's own usage holds.
        "pricing": config.pricing.model_copy(
            update={"market": "on_demand", "price_per_accelerator_hour": 0.0, "overhead_per_hour": 0.0, "overhead_per_run": 0.0}
        ),
        "cluster": config.cluster.model_copy(
            update={"workers": 1, "max_workers": None, "cpus_per_worker": _CPUS, "accelerator_type": None}
        ),
        "retry_failed": False,
        "dry_run": False,
        "run_date": None,
        "experiment": None,
    }  # fmt: skip
    return BatchConfig.model_construct(**{**own, **changed})


def _settings(source: AnyInput) -> dict[str, Any]:
    """What an input is set to, as far as every kind of input has it."""
    return {name: getattr(source, name) for name in AnyInput.model_fields}
