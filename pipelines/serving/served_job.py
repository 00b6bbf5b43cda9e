"""The settings of a batch that came over the endpoint: the server's own, with the batch's input and output."""

from pipelines.config import (
    BatchConfig,
    BudgetConfig,
    ErrorsConfig,
    JsonlInput,
    OutputConfig,
    PostprocessConfig,
    ServeConfig,
)

_CPUS = 0.1  # its worker only asks the endpoint


def batch_config(config: ServeConfig, *, input_url: str, run_url: str) -> BatchConfig:
    """A job over an uploaded file whose rows the endpoint answers."""
    own = {name: getattr(config, name) for name in BatchConfig.model_fields}
    changed = {
        "endpoint": f"http://{config.serve.host}:{config.serve.port}",
        "input": JsonlInput(
            format="jsonl", path=input_url, id_column="custom_id", ids="allow", prompt_column=None, messages_column=None,
            request_column="body", tools_column=None, sampling_column=None, schema_column=None, carry_columns=(), limit=None,
            on_bad_file="fail",
        ),
        "prompt": config.prompt.model_copy(update={"template": None, "template_file": None}),
        "postprocess": PostprocessConfig(steps=()),
        "output": OutputConfig(
            path=run_url, on_existing="resume", compression="zstd", patience_s=config.output.patience_s, openai=True
        ),
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
