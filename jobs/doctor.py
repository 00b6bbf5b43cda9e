"""Say what this machine can run, and what is missing: `fournee doctor`."""

import argparse
import sys
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from pipelines.doctor import Finding, examine
from pipelines.errors import ExitCode

_EPILOG = """states:
  ok      as it should be
  note    good to know; the embedded model runs all the same
  fault   keeps the embedded model from running here; the line below says the way out

exit codes: 0 `fournee batch` can run here, 1 it cannot"""
_COLOURS = {"ok": "green", "note": "yellow", "fault": "bold red"}

_out = Console(highlight=False)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the job; returns its exit code (`pipelines.errors.ExitCode`)."""
    _parser().parse_args(arguments)
    findings = examine()
    _out.print(findings_table(findings))
    faults = [finding.name for finding in findings if finding.state == "fault"]
    if faults:
        _out.print(f"[bold red]not ready[/]: see {', '.join(faults)}", soft_wrap=True)
        return ExitCode.FAILED
    _out.print("[bold green]ready[/]: `fournee batch` answers the demo prompts here", soft_wrap=True)
    return ExitCode.OK


def findings_table(findings: Sequence[Finding]) -> Table:
    """One line per finding, a remedy below it; plain texts, because `fournee[cpu]` would be markup to rich."""
    table = Table(title="this machine", show_header=False, title_justify="left")
    table.add_column(style="bold")
    table.add_column()
    table.add_column(overflow="fold")
    for finding in findings:
        value = Text(finding.value)
        if finding.remedy:
            value.append(f"\n-> {finding.remedy}", style="italic")
        table.add_row(finding.name, Text(finding.state, style=_COLOURS[finding.state]), value)
    return table


def _parser() -> argparse.ArgumentParser:
    return argparse.ArgumentParser(
        prog="fournee doctor",
        description=__doc__,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


if __name__ == "__main__":
    sys.exit(main())
