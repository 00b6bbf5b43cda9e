"""Answer every row of a data set once: `fournee batch [group=choice] [key=value ...]`."""

import argparse
import logging
import sys
import tempfile
from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape

from jobs.help import settings_help
from pipelines.batch import check_settings, plan_input, run_batch, stop_on_signal
from pipelines.compose import compose_settings, to_yaml
from pipelines.config import BatchConfig
from pipelines.errors import ConfigError, ExitCode, RunFailed, Stopped, TooManyFailures
from pipelines.parse import parse_config
from pipelines.parts import committed
from pipelines.plan import PLAN_FILE, Plan
from pipelines.report import example_report, plan_report, summary_report
from pipelines.run import find_run
from pipelines.sources import list_sources
from pipelines.storage import Folder

_EXAMPLES = """examples:
  fournee batch                                        the embedded model answers the 64 demo prompts
  fournee batch input=parquet input.path='data/*.parquet' input.prompt_column=question model=qwen3_8b
  fournee batch input=jsonl input.path=rows.jsonl --dry-run
  fournee batch --config-dir my_conf experiment=nightly

exit codes: 0 done, 1 the job failed, 2 bad configuration, 3 more rows failed than allowed, 4 stopped (resumable)"""

_console = Console(stderr=True, highlight=False, emoji=False)
_out = Console(highlight=False, emoji=False)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the job; returns its exit code (`pipelines.errors.ExitCode`)."""
    options, overrides = _parser().parse_known_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", datefmt="%H:%M:%S")
    config = None
    try:
        with stop_on_signal():
            settings = compose_settings("batch", [*options.overrides, *overrides], options.config_dir)
            if options.dry_run:
                settings["dry_run"] = True
            config = parse_config(settings)
            return _dry_run(config, settings) if config.dry_run else _run(config)
    except ConfigError as error:
        return _end(ExitCode.BAD_CONFIG, str(error))
    except TooManyFailures as error:
        return _end(ExitCode.ROWS_FAILED, f"{error}; raise the limit, and {_how_to_resume(config)}")
    except Stopped as error:
        return _end(ExitCode.STOPPED, f"stopped by {error}; {_how_to_resume(config)}")
    except Exception as error:  # noqa: BLE001 - the last resort: storage, hub and cluster clients raise kinds of their own
        if config is not None and config.verbose:
            _console.print_exception()
        reason = str(error) if isinstance(error, RunFailed) else f"{type(error).__name__}: {error} (verbose=true shows where)"
        return _end(ExitCode.FAILED, f"the run failed: {reason}; {_how_to_resume(config)}")


def _run(config: BatchConfig) -> int:
    run, summary = run_batch(config)
    _out.print(summary_report(run, summary))
    if summary.num_rows:
        _out.print(example_report(run))
    return summary.exit_code


def _end(code: ExitCode, message: str) -> ExitCode:
    _console.print(f"[bold red]fournee:[/] {escape(message)}", soft_wrap=True)
    return code


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
    _out.print(plan_report(plan, sources, num_committed=0 if run.is_new else len(committed(run.folder))))
    _out.print(f"would write to {run.folder.url}", markup=False)
    return ExitCode.OK


if __name__ == "__main__":
    sys.exit(main())
