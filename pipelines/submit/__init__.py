"""Submit a job to a Ray cluster: check it here, as far as that goes, and say what the cluster is to run.

`upload` and `server` need Ray, whose import takes two seconds; this module does not, so that a typo is refused at once.
"""

import hashlib
import os
import re
import shlex
from collections.abc import Mapping
from contextlib import chdir
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from pipelines.compose import compose_settings
from pipelines.config import BatchConfig, ServeConfig, SubmitConfig
from pipelines.config.submit import STOP_WAIT_VARIABLE
from pipelines.errors import ConfigError
from pipelines.parse import parse_config, parse_estimate, parse_serve

_CLUSTER = "cluster=job"
_USUAL_CLUSTER = "cluster=local"  # what conf/batch.yaml chooses
_PARSERS = {"batch": parse_config, "estimate": parse_estimate, "serve": parse_serve}  # of the jobs that run workers
_MAX_NAME = 40  # characters
_EXPANDED = re.compile(r"\$(\w+|\{[^}]*\})", re.ASCII)


@dataclass(frozen=True, slots=True)
class Call:
    """A job as it is called on a command line."""

    job: str
    arguments: tuple[str, ...]
    """All of them, as they were given."""
    overrides: tuple[str, ...] = ()
    """Those of them that are settings."""
    config_dir: str | None = None


@dataclass(frozen=True, slots=True)
class JobRequest:
    """What a cluster is asked to run."""

    job: str
    run: str
    """Names the run in submission ids; two requests for one run folder have the same."""
    entrypoint: str
    """The command line, for a shell in the uploaded folder."""
    working_dir: Path
    config_dir: str | None
    env_vars: Mapping[str, str]


def prepare(config: SubmitConfig, call: Call) -> JobRequest:
    """Check a job's own arguments as the cluster would, in the folder that is uploaded, and put its command line together.

    Raises ConfigError for anything that the job would refuse, and for what cannot end well on a cluster.
    """
    folder = Path(config.working_dir).expanduser().resolve()
    if not folder.is_dir():
        raise ConfigError(f"working_dir={config.working_dir} is not a folder")
    _check_config_dir(call.config_dir, folder)
    chosen: tuple[str, ...] = ()
    path = None
    if parse := _PARSERS.get(call.job):
        with chdir(folder):
            chosen = _cluster_choice(call)
            batch = parse(compose_settings(call.job, [*chosen, *call.overrides], call.config_dir))
        _check_stop_wait(batch, config)
        path = None if batch.dry_run or "--dry-run" in call.arguments else _output_path(batch)
    return JobRequest(
        job=call.job,
        run=_run_name(call, path),
        # Not jobs/batch.py: where Fournee is installed on the cluster, the uploaded folder need not hold its code.
        entrypoint=shlex.join(["python", "-m", "jobs.cli", call.job, *chosen, *call.arguments]),
        working_dir=folder,
        config_dir=call.config_dir,
        env_vars=_environment(config),
    )


def _check_config_dir(config_dir: str | None, folder: Path) -> None:
    if config_dir is None:
        return
    place = os.path.normpath(folder / Path(config_dir).expanduser())  # a link may lead anywhere: Ray uploads what it leads to
    if not Path(place).is_relative_to(folder):
        raise ConfigError(f"--config-dir={config_dir} lies outside of working_dir={folder}, and would not be on the cluster")
    if Path(config_dir).expanduser().is_absolute():
        inside = os.path.relpath(place, folder)
        raise ConfigError(
            f"--config-dir={config_dir} is a path on this machine; write --config-dir={inside}, as on the cluster"
        )


def _cluster_choice(call: Call) -> tuple[str, ...]:
    """`cluster=job`, unless the command line or an experiment chooses a cluster."""
    if any(override.lstrip("+").partition("=")[0] == "cluster" for override in call.overrides):
        return ()
    as_given = compose_settings(call.job, call.overrides, call.config_dir)
    usual = compose_settings(call.job, [_USUAL_CLUSTER, *call.overrides], call.config_dir)
    return (_CLUSTER,) if as_given["cluster"] == usual["cluster"] else ()


def _check_stop_wait(batch: BatchConfig, config: SubmitConfig) -> None:
    if config.stop_wait_s <= batch.cluster.drain_s:
        raise ConfigError(
            f"stop_wait_s={config.stop_wait_s} is not above the job's cluster.drain_s={batch.cluster.drain_s:g}: "
            "Ray would kill the job while it finishes what is in its engines; raise stop_wait_s or lower cluster.drain_s"
        )


def _output_path(batch: BatchConfig) -> str:
    """Where the job keeps its data; a place in the uploaded folder is refused, since Ray deletes its copy sooner or later."""
    key, name = ("serve.folder", "serve") if isinstance(batch, ServeConfig) else ("output.path", "run")
    path = batch.serve.folder if isinstance(batch, ServeConfig) else batch.output.path
    if path is None or not ("://" in path or Path(path).is_absolute()):
        raise ConfigError(
            f"{key}={'null' if path is None else path} would write into the cluster's copy of working_dir, which Ray "
            f"deletes; name a folder that all nodes see: {key}=s3://bucket/{name} or {key}=/mnt/shared/{name}"
        )
    return path.rstrip("/") if "://" in path else os.path.normpath(path)


def _run_name(call: Call, path: str | None) -> str:
    """A name to read and a digest to tell apart: of the run folder, else of the job's arguments."""
    name = call.job if path is None else PurePosixPath(path).name
    readable = re.sub(r"[^A-Za-z0-9_-]+", "-", name)[:_MAX_NAME].strip("-") or call.job
    whole = path or shlex.join([call.job, *call.arguments])
    return f"{readable}-{hashlib.sha256(whole.encode('utf-8', 'surrogateescape')).hexdigest()[:8]}"


def _environment(config: SubmitConfig) -> dict[str, str]:
    missing = [name for name in config.pass_env if name not in os.environ]
    if missing:
        raise ConfigError(f"pass_env names {', '.join(missing)}, which is not set here; export it, or drop it from pass_env")
    passed = {name: os.environ[name] for name in config.pass_env}
    if changed := [name for name, value in passed.items() if _EXPANDED.search(value)]:
        raise ConfigError(
            f"pass_env: the value of {', '.join(changed)} holds a $NAME, which Ray would replace; set it on the cluster instead"
        )
    return {**config.env_vars, **passed, STOP_WAIT_VARIABLE: str(config.stop_wait_s)}


def runtime_env(config: SubmitConfig, request: JobRequest) -> dict[str, Any]:
    """What Ray is told about the job's surroundings."""
    environment: dict[str, Any] = {
        "working_dir": str(request.working_dir),
        "excludes": list(config.excludes),
        "env_vars": dict(request.env_vars),
    }
    return {**environment, "pip": list(config.pip)} if config.pip else environment
