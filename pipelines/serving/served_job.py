"""The settings of a batch that came over the endpoint: the server's own, with the batch's input and output."""

import re
from typing import Any

from pipelines.config import (
    BatchConfig,
    BudgetConfig,
    ErrorsConfig,
    JsonlInput,
    PostprocessConfig,
    ServeConfig,
)
from pipelines.storage import Folder

_REFUSAL = "-refusal.txt"
_PLACE = re.compile(r"(?:\b[a-z][a-z0-9+.-]*://|(?<![\w./-])/)(?:[^\s/:;,'\"]*/)*", re.ASCII)
"""All of a path or URL but its last part."""
_CPUS = 0.1  # its worker only asks the endpoint
_LINES: dict[str, Any] = {
    "format": "jsonl", "id_column": "custom_id", "ids": "allow", "prompt_column": None, "messages_column": None,
    "request_column": "body", "tools_column": None, "sampling_column": None, "schema_column": None,
    "expected_column": None, "carry_columns": (), "limit": None, "order": "as_is", "on_bad_file": "fail",
}  # fmt: skip
"""OpenAI's batch lines, as conf/input/openai.yaml has them: what the server's own input is set to is of no use here."""


def batch_config(config: ServeConfig, *, input_url: str, run_url: str) -> BatchConfig:
    """A job over an uploaded file whose rows the endpoint answers."""
    own = {name: getattr(config, name) for name in BatchConfig.model_fields}
    changed = {
        "endpoint": config.serve.url,
        "input": JsonlInput.model_validate({**_LINES, "path": input_url}),
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


def note_refusal(config: BatchConfig, reason: str) -> None:
    """Write down why a batch cannot be run, beside its run folder, which has to stay as it is."""
    assert config.output.path is not None, "set by `batch_config`"
    folder, name = config.output.path.rsplit("/", 1)
    Folder(folder, config.output.patience_s).write(f"{name}{_REFUSAL}", reason.encode())


def refusal(folder: Folder, run_path: str) -> str:
    """Why a batch cannot be run, without the places of this server's files."""
    if not folder.exists(f"{run_path}{_REFUSAL}"):
        return "the server's log says why"
    reason = folder.read(f"{run_path}{_REFUSAL}").decode()
    return _PLACE.sub("", reason.replace(folder.path(), ""))
