"""Show many runs, night by night; `fournee history check` judges the newest by those before it."""

import argparse
import io
import sys
from collections.abc import Sequence
from datetime import date
from typing import Any

import pyarrow as pa
import pyarrow.csv
from pydantic_core import to_json
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from jobs.terminal import add_row, rows_table, show_table
from pipelines.errors import ConfigError, ExitCode
from pipelines.history import BEFORE, CHANGING, KEYS, History

_DEFAULT_BY = ("date", "model", "experiment")
_SHOWN = 30
_EPILOG = f"""examples:
  fournee history runs/nightly                       every night below the folder, by date, model and experiment
  fournee history s3://bucket/nights --since 2026-11-01 --by week,model
  fournee history runs --by node                     which node answers slowly, or fails: from the statistics of all batches
  fournee history runs --csv > nights.csv
  fournee history check runs/nightly                 is the newest run worse than those before it? for schedulers;
                                                     see fournee history check --help (a folder of that name is ./check)

Only finished runs count. The changes in brackets are against the median of the up to {BEFORE} lines before that have the
same other keys. By node, cost is that of the time in which engines worked on committed batches.

exit codes: 0 shown, 1 the runs cannot be read, 2 no such folder, or no finished run in it"""

_console = Console(stderr=True, highlight=False, emoji=False)
_out = Console(highlight=False, emoji=False)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the job; returns its exit code (`pipelines.errors.ExitCode`)."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        if given[:1] != ["check"]:
            return _show(_options(given))
        from jobs.history_check import check  # Hydra takes half a second to import, and only this has settings

        return check(given[1:])
    except ConfigError as error:
        code, message = ExitCode.BAD_CONFIG, str(error)
    except Exception as error:  # noqa: BLE001 - the last resort: DuckDB and storage clients raise kinds of their own
        code, message = ExitCode.FAILED, f"the runs cannot be read: {type(error).__name__}: {error}"
    _console.print(f"[bold red]fournee:[/] {escape(message)}", soft_wrap=True)
    return code


def _show(options: argparse.Namespace) -> int:
    lines = History(options.folder).lines(options.by, options.since, options.until)
    found, last = len(lines), options.last or (len(lines) if options.json or options.csv else _SHOWN)
    lines = lines.slice(max(0, found - last))
    if options.json:
        print(to_json(lines.to_pylist(), indent=2, inf_nan_mode="null").decode())
    elif options.csv:
        sink = io.BytesIO()
        pa.csv.write_csv(lines, sink)
        print(sink.getvalue().decode(), end="")
    elif not found:
        _out.print("no finished run of these days")
    else:
        show_table(_out, _table(options.by, lines.to_pylist()))
        if len(lines) < found:
            _out.print(f"the last {len(lines):,} of {found:,} lines; --last {found} shows all")
    return ExitCode.OK


def _table(by: Sequence[str], lines: Sequence[dict[str, Any]]) -> Table:
    # Most runs have no expected answers, and the table is wide already.
    correct = ["correct"] if any(line["accuracy"] is not None for line in lines) else []
    numbers = (
        "runs",
        "rows",
        "failed",
        *correct,
        "input",
        "output tokens/s",
        "busy",
        "cost",
        "per million output",
        "input + output",
    )
    table = rows_table("finished runs", *by, *numbers)
    for column in table.columns[len(by) :]:
        column.justify = "right"
    for line in lines:
        speed, output, total = (_with_change(line, name, digits) for name, digits in zip(CHANGING, (1, 3, 3), strict=True))
        add_row(
            table,
            *("none" if line[key] is None else str(line[key]) for key in by),
            f"{line['num_runs']:,}",
            _number(line["num_rows"], 0),
            _share(line["failed_share"]),
            *([_share(line["accuracy"])] if correct else []),
            "none" if line["input_bytes"] is None else f"{line['input_bytes'] / 2**20:,.1f} MiB",
            speed,
            _number(line["busy_output_tokens_per_s"], 1),
            f"{_number(line['cost'], 2)} {line['currency'] or ''}",
            output,
            total,
        )
    return table


def _with_change(line: dict[str, Any], name: str, digits: int) -> Text:
    change = line.get(f"{name}_change")
    shown = _number(line[name], digits)
    return Text(shown if change is None else f"{shown} ({change:+.0%})")


def _share(value: float | None) -> str:
    return "none" if value is None else f"{value:.2%}"


def _number(value: float | None, digits: int) -> str:
    return "none" if value is None else f"{value:,.{digits}f}"


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="fournee history",
        usage="fournee history <folder> [options]\n       fournee history check <folder> [key=value ...]",
        description=__doc__,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("folder", help="where the run folders lie, at any depth; local or s3://, gs://, abfs://")
    by = f"what a line is: some of {', '.join(KEYS)} (default: {','.join(_DEFAULT_BY)})"
    parser.add_argument("--by", metavar="KEY,...", type=_keys, default=_DEFAULT_BY, help=by)
    parser.add_argument("--since", metavar="DATE", type=date.fromisoformat, help="no run before this day (YYYY-MM-DD)")
    parser.add_argument("--until", metavar="DATE", type=date.fromisoformat, help="no run after this day")
    last = f"only the last so many lines (default: {_SHOWN} in the table, all with --json or --csv)"
    parser.add_argument("--last", metavar="N", type=_positive, help=last)
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print the same facts as JSON")
    form.add_argument("--csv", action="store_true", help="print them as CSV")
    options = parser.parse_args(arguments)
    if options.since and options.until and options.since > options.until:
        parser.error(f"--since {options.since} is after --until {options.until}")
    return options


def _keys(text: str) -> tuple[str, ...]:
    keys = tuple(dict.fromkeys(text.split(",")))
    if unknown := [key for key in keys if key not in KEYS]:
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)} is none of {', '.join(KEYS)}")
    return keys


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ValueError
    return number


if __name__ == "__main__":
    sys.exit(main())
