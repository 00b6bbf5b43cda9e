"""Run a job on a Ray cluster: `fournee submit [key=value ...] -- <job> [its own arguments]`."""

import argparse
import logging
import shlex
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape

from jobs.cli import JOBS
from jobs.help import settings_help
from jobs.terminal import facts_table
from pipelines.compose import compose_settings
from pipelines.config import SubmitConfig
from pipelines.errors import ConfigError, ExitCode, RunFailed
from pipelines.parse import parse_submit
from pipelines.submit import Call, prepare
from pipelines.suggest import did_you_mean

if TYPE_CHECKING:
    from pipelines.submit.server import JobServer

_EXAMPLES = """examples:
  fournee submit -- batch input.path=s3://bucket/rows.parquet input=parquet output.path=s3://bucket/run
  fournee submit address=http://head:8265 pass_env=[HF_TOKEN] -- batch --config-dir my_conf experiment=nightly
  fournee submit --no-wait -- batch experiment=nightly output.path=/mnt/shared/nightly
  fournee submit logs fournee-nightly-1a2b3c4d-1       follow a job to its end
  fournee submit status fournee-nightly-1a2b3c4d-1
  fournee submit stop fournee-nightly-1a2b3c4d-1       let it finish what is in its engines; returns when it has ended

exit codes: the job's own (0 done, 1 failed, 2 bad configuration, 3 more rows failed than allowed, 4 stopped: resumable);
2 also where the submission is refused, 1 where the job server does not answer or is lost, or where the run is alive already,
130 on Ctrl-C, after which the job goes on.
status and stop end with 0 where they did what they say, --no-wait where the cluster took the job."""
_INTERRUPTED = 128 + 2  # as a shell says SIGINT
_ACTIONS = ("status", "stop", "logs")

_console = Console(stderr=True, highlight=False, emoji=False)
_out = Console(highlight=False, emoji=False)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the job; returns its exit code (`pipelines.errors.ExitCode`), or 130 on Ctrl-C."""
    own, job = _split(sys.argv[1:] if arguments is None else arguments)
    options, more = _parser().parse_known_args(own)
    words = [*options.words, *more]
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", datefmt="%H:%M:%S")
    try:
        action = [word for word in words if "=" not in word]
        if action and action[0] in _ACTIONS:
            config = _settings([word for word in words if "=" in word], options.config_dir)
            return _act(config, *action, has_job=job is not None)
        config = _settings(words, options.config_dir)
        return _submit(config, _call(job), no_wait=options.no_wait)
    except ConfigError as error:
        return _end(ExitCode.BAD_CONFIG, str(error))
    except RunFailed as error:
        return _end(ExitCode.FAILED, str(error))
    except KeyboardInterrupt:
        return _INTERRUPTED
    except Exception as error:  # noqa: BLE001 - the last resort: Ray's job client raises kinds of its own
        return _end(ExitCode.FAILED, f"the submission failed: {type(error).__name__}: {error}")


def _submit(config: SubmitConfig, call: Call, *, no_wait: bool) -> int:
    request = prepare(config, call)
    from pipelines.submit.server import JobServer  # Ray takes two seconds to import, and a typo is refused before
    from pipelines.submit.upload import find_upload, mib

    upload = find_upload(request.working_dir, config.excludes, request.config_dir)
    _say(f"{request.working_dir}: {len(upload.sizes):,} files, {mib(upload.num_bytes)} to upload")
    server = JobServer(config)
    submission = server.submit(request)
    _say(f"submitted {submission} to {server.address}: {request.entrypoint}")
    if no_wait:
        _say(_commands(config, submission))
        print(submission)
        return ExitCode.OK
    return _follow(server, config, submission)


def _act(config: SubmitConfig, action: str, *ids: str, has_job: bool) -> int:
    if len(ids) != 1 or has_job:
        raise ConfigError(f"fournee submit {action} takes one submission id, and no job")
    from pipelines.submit.server import JobServer

    server = JobServer(config)
    if action == "logs":
        return _follow(server, config, ids[0])
    details = server.stop(ids[0]) if action == "stop" else server.details(ids[0])
    _out.print(facts_table(ids[0], _facts(details)))
    return ExitCode.OK


def _follow(server: "JobServer", config: SubmitConfig, submission: str) -> int:
    from pipelines.submit.server import exit_code

    try:
        details = server.follow(submission, _show)
    except KeyboardInterrupt:
        _say(f"{submission} goes on\n{_commands(config, submission)}")
        return _INTERRUPTED
    code = exit_code(details)
    _say(f"{submission} has ended: {details.status}, exit code {int(code)}{_reason(details)}")
    return code


def _reason(details: Any) -> str:
    """Why a job failed whose driver could not say so itself."""
    if details.status != "FAILED" or details.driver_exit_code in set(ExitCode):
        return ""
    if details.driver_exit_code is not None:
        return f": its driver ended with {details.driver_exit_code}"
    return f": {(details.message or 'Ray does not say why').strip()}"


def _facts(details: Any) -> dict[str, str]:
    metadata = details.metadata or {}
    return {
        "status": str(details.status),
        "says": (details.message or "").partition("\n")[0],
        "exit code": "" if details.driver_exit_code is None else str(details.driver_exit_code),
        "run": metadata.get("fournee_run", ""),
        "attempt": metadata.get("fournee_attempt", ""),
        "submitted by": metadata.get("user", ""),
        "started": _moment(details.start_time),
        "ended": _moment(details.end_time),
        "command": details.entrypoint,
    }


def _moment(milliseconds: int | None) -> str:
    return datetime.fromtimestamp(milliseconds / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S UTC") if milliseconds else ""


def _commands(config: SubmitConfig, submission: str) -> str:
    where = [] if config.address is None else [f"address={config.address}"]
    names = {"follow": "logs", "look": "status", "stop": "stop"}
    lines = (f"{name:8}{shlex.join(['fournee', 'submit', *where, action, submission])}" for name, action in names.items())
    return "\n".join(lines)


def _settings(overrides: Sequence[str], config_dir: str | None) -> SubmitConfig:
    return parse_submit(compose_settings("submit", overrides, config_dir))


def _call(words: Sequence[str] | None) -> Call:
    """The job and its arguments, with what its own script takes for settings and for a folder of YAML."""
    if not words:
        raise ConfigError("what to run is missing: fournee submit [key=value ...] -- batch [its own arguments]")
    job, *arguments = words
    known = [name for name in JOBS if name != "submit"]
    if job not in known:
        raise ConfigError(f"{job} is not a job that can be submitted{did_you_mean(job, known)}")
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--config-dir")
    for flag in ("--dry-run", "--json"):
        parser.add_argument(flag, action="store_true")
    try:
        options, overrides = parser.parse_known_args(arguments)
    except argparse.ArgumentError as error:
        raise ConfigError(f"{job}: {error}") from None
    return Call(job, tuple(arguments), tuple(overrides), options.config_dir)


def _split(arguments: Sequence[str]) -> tuple[list[str], list[str] | None]:
    """What stands left and right of the first `--`; None where there is none."""
    words = list(arguments)
    return (words[: words.index("--")], words[words.index("--") + 1 :]) if "--" in words else (words, None)


def _show(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _say(message: str) -> None:
    _console.print(f"[bold]fournee:[/] {escape(message)}", soft_wrap=True)


def _end(code: ExitCode, message: str) -> ExitCode:
    _console.print(f"[bold red]fournee:[/] {escape(message)}", soft_wrap=True)
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="fournee submit",
        usage="fournee submit [key=value ...] -- <job> [its own arguments]\n"
        "       fournee submit [key=value ...] status|stop|logs <submission id>",
        description=__doc__,
        epilog=f"{settings_help('submit')}\n\n{_EXAMPLES}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("words", nargs="*", metavar="override", help="key=value, in Hydra's grammar; all about the cluster")
    parser.add_argument("--config-dir", help="a folder with a submit.yaml of your own that holds every key")
    parser.add_argument("--no-wait", action="store_true", help="print the submission id, and do not follow the job")
    return parser


if __name__ == "__main__":
    sys.exit(main())
