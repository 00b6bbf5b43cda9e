"""Is the newest run worse than those before it? For schedulers: `fournee history check <folder> [key=value ...]`."""

import argparse
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from jobs.help import settings_help
from jobs.terminal import add_row, rows_table, show_table
from pipelines.compose import compose_settings
from pipelines.errors import ExitCode
from pipelines.history import History
from pipelines.history.check import Judgement, Measure, judge
from pipelines.parse import parse_history

_EXAMPLES = """examples:
  fournee history check runs/nightly
  fournee history check runs/nightly --run 2026-11-29 tolerances.output_tokens_per_s=0.3 tolerances.num_rows=0.5
  fournee batch experiment=nightly run_date=2026-11-30 && fournee history check runs/nightly last_n=30

Compared are finished runs of the same job (settings, experiment, engine) on the same accelerator that finished before it,
whatever rows they were given.

exit codes: 0 as good as usual, or nothing to judge by; 3 worse than allowed; 2 bad usage; 1 the runs cannot be read"""
_COLOURS = {"fine": "green", "worse": "bold red", "not judged": "dim"}

_out = Console(highlight=False, emoji=False)


def check(arguments: Sequence[str]) -> int:
    """Judge a run; returns the exit code. Raises ConfigError."""
    options, more = _parser().parse_known_args(arguments)
    config = parse_history(compose_settings("history", [*options.overrides, *more], options.config_dir))
    found = judge(History(options.folder), config, options.run)
    if options.json:
        print(found.model_dump_json(indent=2))
    else:
        show_table(_out, _table(found))
        _out.print(Text(_verdict(found, config.min_runs)), soft_wrap=True)
    # Exit code 3 means for a run that more rows failed than allowed; here that anything is worse than allowed.
    return ExitCode.ROWS_FAILED if found.is_worse else ExitCode.OK


def _table(found: Judgement) -> Table:
    table = rows_table(f"{found.day} against the median of up to {found.num_comparable} runs before it", "measure")
    for name in ("tonight", "median", "of runs", "change", "limit"):
        table.add_column(name, justify="right")
    table.add_column("verdict")
    for one in found.measures:
        verdict = Text(one.verdict, style=_COLOURS[one.verdict]).append(f": {one.reason}" if one.reason else "")
        change = "none" if one.change is None else f"{one.change:+.1%}"
        cells = (_number(one.tonight), _number(one.median), f"{one.num_runs}", change, _limit(one))
        add_row(table, one.name, *cells, verdict)
    return table


def _verdict(found: Judgement, min_runs: int) -> str:
    if found.num_comparable < min_runs:
        return f"{found.run}: nothing is judged: {found.num_comparable} comparable runs before it, min_runs={min_runs}"
    worse = [one.name for one in found.measures if one.verdict == "worse"]
    if worse:
        return f"{found.run}: worse than allowed: {', '.join(worse)}"
    fine = [one for one in found.measures if one.verdict == "fine"]
    return f"{found.run}: {'as good as usual' if fine else 'nothing is judged'}"


def _limit(one: Measure) -> str:
    limits = ((">=", one.at_least), ("<=", one.at_most))
    return " ".join(f"{sign} {_number(value)}" for sign, value in limits if value is not None) or "none"


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="fournee history check",
        usage="fournee history check <folder> [--run RUN] [key=value ...]",
        description=__doc__,
        epilog=f"{settings_help('history')}\n\n{_EXAMPLES}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("folder", help="where the run folders lie, at any depth; local or s3://, gs://, abfs://")
    parser.add_argument("overrides", nargs="*", metavar="override", help="key=value, in Hydra's grammar")
    parser.add_argument("--run", help="judge this one, named by its folder, below the other or in full; default: the newest")
    parser.add_argument("--config-dir", help="a folder with a history.yaml of your own that holds every key")
    parser.add_argument("--json", action="store_true", help="print the same facts as JSON")
    return parser
