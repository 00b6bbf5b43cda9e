"""Answer every row of a data set once: `fournee batch [group=choice] [key=value ...]`."""

import argparse
import logging
import os
import sys
import tempfile
from collections.abc import Sequence
from functools import partial

from rich.console import Console
from rich.markup import escape

from jobs.help import settings_help
from pipelines.batch import check_settings, plan_input, run_batch, stop_on_signal
from pipelines.compose import compose_settings, to_yaml
from pipelines.config import BatchConfig
from pipelines.errors import ConfigError, ExitCode, RunFailed, Stopped, TooManyFailures
from pipelines.outcome import Outcome, describe, post
from pipelines.parse import parse_config
from pipelines.parts import Parts
from pipelines.plan import PLAN_FILE, Plan
from pipelines.report import example_report, plan_report, summary_report
from pipelines.run import Run, find_run
from pipelines.sources import list_sources
from pipelines.storage import Folder
from pipelines.totals import Summary

_EXAMPLES = """examples:
  fournee batch                                        the embedded model answers the 64 demo prompts
  fournee batch input=parquet input.path='data/*.parquet' input.prompt_column=question model=qwen3_8b
  fournee batch input=jsonl input.path=rows.jsonl --dry-run
  fournee batch --config-dir my_conf experiment=nightly run_date=2026-11-30

exit codes: 0 done, 1 the job failed, 2 bad configuration, 3 more rows failed than allowed, 4 stopped (resumable)
The run folder's status.json says it too, and is sent to the webhook in FOURNEE_WEBHOOK_URL, if that is set."""
_WEBHOOK = "FOURNEE_WEBHOOK_URL"  # no setting: it is a secret, and settings are printed and kept in the run's record

_console = Console(stderr=True, highlight=False, emoji=False)
_out = Console(highlight=False, emoji=False)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the job; returns its exit code (`pipelines.errors.ExitCode`)."""
    options, more = _parser().parse_known_args(arguments)
    overrides = [*options.overrides, *more]
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", datefmt="%H:%M:%S")
    for storage_client in ("botocore", "aiobotocore"):
        logging.getLogger(storage_client).setLevel(logging.WARNING)  # they say where they found credentials
    outcome, config, finished = Outcome(_experiment_in(overrides)), None, None
    try:
        with stop_on_signal():
            settings = compose_settings("batch", overrides, options.config_dir)
            if options.dry_run:
                settings["dry_run"] = True
            config = parse_config(settings)
            if config.dry_run:
                return _dry_run(config, settings)
            run, summary = finished = run_batch(config, partial(outcome.begin, config))
            _show(run, summary)
            code, message = summary.exit_code, describe(summary)
    except (Exception, Stopped) as error:  # noqa: BLE001 - the last resort: storage, hub and cluster clients raise kinds of their own
        code, message = _explain(error, config)
        _console.print(f"[bold red]fournee:[/] {escape(message)}", soft_wrap=True)
    if not (options.dry_run or (config is not None and config.dry_run)):
        status = outcome.end(code, message, config, finished)
        if webhook := os.environ.get(_WEBHOOK):
            post(webhook, status)
    return code


def _show(run: Run, summary: Summary) -> None:
    _out.print(summary_report(run.folder, summary))
    if summary.num_rows:
        _out.print(example_report(run.folder))


def _explain(error: BaseException, config: BatchConfig | None) -> tuple[ExitCode, str]:
    """The exit code of what ended a job early, and what to say."""
    match error:
        case ConfigError():
            return ExitCode.BAD_CONFIG, str(error)
        case TooManyFailures():
            return ExitCode.ROWS_FAILED, f"{error}; raise the limit, and {_how_to_resume(config)}"
        case Stopped():
            return ExitCode.STOPPED, f"stopped by {error}; {_how_to_resume(config)}"
        case RunFailed():
            reason = str(error)
        case _:
            reason = f"{type(error).__name__}: {error} (verbose=true shows where)"
    if config is not None and config.verbose:
        _console.print_exception()
    return ExitCode.FAILED, f"the run failed: {reason}; {_how_to_resume(config)}"


def _experiment_in(overrides: Sequence[str]) -> str | None:
    """The name that the last override gives; what is composed does not hold it any more."""
    named = [value for key, _, value in (one.partition("=") for one in overrides) if key.lstrip("+") == "experiment"]
    return named[-1] if named else None


def _how_to_resume(config: BatchConfig | None) -> str:
    if config is None or config.output.on_existing == "resume":
        return "every finished batch is safe, and the same command resumes"
    return "every finished batch is safe; resume with the same command and output.on_existing=resume"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="fournee batch",
        description=__doc__,
        epilog=f"{settings_help('batch')}\n\n{_EXAMPLES}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("overrides", nargs="*", metavar="override", help="group=choice or key=value, in Hydra's grammar")
    parser.add_argument("--config-dir", help="a folder of your own YAML, laid out like the shipped one")
    parser.add_argument("--dry-run", action="store_true", help="check, plan, show both, and stop")
    return parser


def _dry_run(config: BatchConfig, settings: dict[str, object]) -> int:
    """Show the resolved settings and the plan; compressed input is spooled into a temporary folder, nothing else is written."""
    check_settings(config)
    sources = list_sources(config.input)
    run = find_run(config, sources)
    with tempfile.TemporaryDirectory() as spool:
        is_planned = not run.is_new and run.folder.exists(PLAN_FILE)
        plan = Plan.load(run.folder) if is_planned else plan_input(config, sources, Folder(spool))
    _out.print(to_yaml(settings), markup=False, soft_wrap=True)
    _out.print(plan_report(plan, sources, num_committed=0 if run.is_new else len(Parts(run.folder).batch_ids)))
    _out.print(f"would write to {run.folder.url}", markup=False)
    return ExitCode.OK


if __name__ == "__main__":
    sys.exit(main())
