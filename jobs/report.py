"""Say what runs came to: their totals here, their charts in `report.html`, and several side by side."""

import argparse
import sys
from collections.abc import Sequence

import pyarrow as pa
import pyarrow.parquet as pq
from rich.console import Console
from rich.markup import escape

from pipelines.errors import ConfigError, ExitCode
from pipelines.report import comparison_report, summary_report
from pipelines.row_profile import profile_rows
from pipelines.storage import Folder
from pipelines.totals import Summary, read_totals

_EPILOG = """examples:
  fournee report runs/rows-1a2b3c4d5e                         its totals; its report.html is written anew
  fournee report runs/2026-11-29 runs/2026-11-30              two nights, and a table that compares them
  fournee report s3://bucket/run --html reports               where the run's own folder is not to be written to

exit codes: 0 shown, 1 a run cannot be read or a report not be written, 2 there is no such run, or it is not finished"""

_console = Console(stderr=True, highlight=False, emoji=False)
_out = Console(highlight=False, emoji=False)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the job; returns its exit code (`pipelines.errors.ExitCode`)."""
    options = _parser().parse_args(arguments)
    try:
        runs = [Folder(url) for url in options.runs]
        summaries = {run.url: read_totals(run) for run in runs}
        for run in runs:
            _out.print(summary_report(run, summaries[run.url]))
            place = _write(run, summaries[run.url], options.html)
            if options.html is not None:
                _out.print(f"wrote    {place}", markup=False, soft_wrap=True)
    except ConfigError as error:
        return _end(ExitCode.BAD_CONFIG, str(error))
    except Exception as error:  # noqa: BLE001 - the last resort: storage clients raise kinds of their own
        return _end(ExitCode.FAILED, f"{type(error).__name__}: {error}; --html FOLDER writes reports to another folder")
    if len(summaries) > 1:
        _out.print(comparison_report(summaries))
    return ExitCode.OK


def _write(run: Folder, summary: Summary, elsewhere: str | None) -> str:
    """Make a run's page from its rows and tables; returns where it stands."""
    from pipelines.html_report import REPORT_FILE, html_report  # Altair takes two seconds, and --help can do without

    workers, batches = (pq.read_table(pa.BufferReader(run.read(f"stats/{name}.parquet"))) for name in ("workers", "batches"))
    profile = profile_rows(run, batches["batch_id"].to_pylist(), workers)
    folder = run if elsewhere is None else Folder(elsewhere)
    name = REPORT_FILE if elsewhere is None else f"report-{summary.fingerprint[:10]}.html"
    folder.write(name, html_report(run.url, summary, workers, profile).encode())
    return f"{folder.url}/{name}"


def _end(code: ExitCode, message: str) -> ExitCode:
    _console.print(f"[bold red]fournee:[/] {escape(message)}", soft_wrap=True)
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="fournee report",
        description=__doc__,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("runs", nargs="+", metavar="run", help="a folder that `fournee batch` wrote to, local or s3://, gs://")
    parser.add_argument("--html", metavar="FOLDER", help="write the pages there, as report-<fingerprint>.html")
    return parser


if __name__ == "__main__":
    sys.exit(main())
