"""What a worker is handed by its driver, and what it hands back."""

import json
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from pipelines.config import BatchConfig, Device
from pipelines.errors import ConfigError, RunFailed
from pipelines.schema import RUN_FILE
from pipelines.storage import Folder

_SUMMARY = pa.schema(
    [
        ("batch_id", pa.int64()),
        ("num_ok", pa.int64()),
        ("num_failed", pa.int64()),
        ("failure", pa.string()),  # instead of a batch: why the worker cannot go on, a name in _FAILURES and a message
        ("message", pa.string()),
    ]
)
_FAILURES: dict[str, type[Exception]] = {"config": ConfigError, "run": RunFailed}


@dataclass(frozen=True, slots=True)
class Job:
    """What a worker must know; travels to it once."""

    config: BatchConfig
    run: Folder
    attempt: int
    fingerprint: str
    model_revision: str | None
    carried: pa.Schema
    device: Device
    num_accelerators: int
    tags: dict[str, str]
    """What tells the metrics of this run from those of another."""


def summary_table(lines: Sequence[Mapping[str, Any]]) -> pa.Table:
    """One row for each batch that was committed."""
    return pa.Table.from_pylist(list(lines), schema=_SUMMARY)


def failure_table(error: ConfigError | RunFailed | OSError) -> pa.Table:
    """One row for why the worker cannot go on: of an exception, Ray hands on no more than a text."""
    if isinstance(error, OSError):
        return summary_table([{"failure": "run", "message": f"{type(error).__name__}: {error}"}])
    return summary_table([{"failure": "config" if isinstance(error, ConfigError) else "run", "message": str(error)}])


def raise_failure(summary: pa.Table) -> None:
    """Raise what a worker could not."""
    for line in summary.to_pylist():
        if line["failure"] is not None:
            raise _FAILURES[line["failure"]](line["message"])


def check_folder(job: Job) -> None:
    """Refuse to write where the driver will not look: a local path is another folder on each node of a cluster.

    Raises ConfigError, also where this node may not read the folder, and TimeoutError where its storage stays away.
    """
    try:
        record = json.loads(job.run.read(RUN_FILE))
    except (FileNotFoundError, ValueError):
        record = {}
    except TimeoutError:
        raise
    except Exception as error:  # storage clients raise kinds of their own where they find no credentials
        raise ConfigError(
            f"output.path={job.run.url} cannot be read on the node {socket.gethostname()}: {type(error).__name__}: {error}; "
            "every node needs its own credentials for it, from its environment or its role"
        ) from error
    if record.get("fingerprint") != job.fingerprint:
        raise ConfigError(
            f"output.path={job.run.url} is another folder on the node {socket.gethostname()}; "
            "name object storage, or a folder that all nodes mount"
        )
