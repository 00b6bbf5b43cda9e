"""Look into a run's folder: what came out, what failed and why, and what differs from another run."""

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic_core import to_json
from rich.console import Console, RenderableType
from rich.markup import escape
from rich.text import Text

from jobs.terminal import add_row, facts_table, inline_diff, one_line, rows_table
from pipelines.errors import ConfigError, ExitCode, RunFailed
from pipelines.inspection import read_run
from pipelines.inspection.comparison import Comparison, Difference, compare
from pipelines.inspection.rows import (
    AnsweredRow,
    Counts,
    FailedRow,
    FailedRows,
    FoundRows,
    count,
    failed_rows,
    rows_with_ids,
    sample,
)

_EPILOG = """examples:
  fournee inspect runs/rows-1a2b3c4d5e                              counts, and the first failed rows of each kind
  fournee inspect s3://bucket/run --kind prompt_too_long            the rows that failed in this way
  fournee inspect runs/rows-1a2b3c4d5e --sample 5 --seed 1          five answered rows, drawn at random
  fournee inspect runs/rows-1a2b3c4d5e --id q17 --id q18            all that is known about the rows with these ids
  fournee inspect runs/rows-1a2b3c4d5e --diff runs/rows-0f9e8d7c6b  which answers differ, row by row

exit codes: 0 shown, 1 the run cannot be read, 2 there is no such run or kind"""
_LIMIT = 20
_LIMIT_DIFF = 10
_WHOLE = 2000  # characters of a value, where a single row is looked at
_CHANGES = {"ok_to_failed": "ok -> failed", "failed_to_ok": "failed -> ok", "different": "different"}

_console = Console(stderr=True, highlight=False, emoji=False)
_out = Console(highlight=False, emoji=False)

Facts = Counts | FailedRows | FoundRows | Comparison | tuple[AnsweredRow, ...]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the job; returns its exit code (`pipelines.errors.ExitCode`)."""
    options = _options(arguments)
    try:
        facts = _look(options)
    except ConfigError as error:
        return _end(ExitCode.BAD_CONFIG, str(error))
    except RunFailed as error:
        return _end(ExitCode.FAILED, str(error))
    except Exception as error:  # noqa: BLE001 - the last resort: storage clients raise kinds of their own
        return _end(ExitCode.FAILED, f"{options.run} cannot be read: {type(error).__name__}: {error}")
    if options.json:
        _out.out(to_json(facts, indent=2, bytes_mode="base64", inf_nan_mode="null", fallback=str).decode(), highlight=False)
        return ExitCode.OK
    for block in _blocks(facts):
        _out.print(block, soft_wrap=isinstance(block, Text))
    return ExitCode.OK


def _look(options: argparse.Namespace) -> Facts:
    run = read_run(options.run)
    if options.kind is not None:
        return failed_rows(run, options.kind, limit=options.limit or _LIMIT)
    if options.id is not None:
        return rows_with_ids(run, options.id, limit=options.limit or _LIMIT)
    if options.diff is not None:
        return compare(run, read_run(options.diff), limit=options.limit or _LIMIT_DIFF)
    if options.sample is not None:
        return sample(run, options.sample, seed=options.seed or 0)
    return count(run)


def _blocks(facts: Facts) -> Iterator[RenderableType]:
    match facts:
        case Counts():
            return _counts(facts)
        case FailedRows():
            return _failed_rows(facts)
        case FoundRows():
            return _found_rows(facts)
        case Comparison():
            return _comparison(facts)
        case _:
            return _sample(facts)


def _counts(counts: Counts) -> Iterator[RenderableType]:
    num_run = counts.num_ok + counts.num_failed
    lines = {
        "folder": one_line(counts.run),
        "state": "finished" if counts.is_finished else "not finished: it is going on, or was stopped",
        "rows planned": f"{counts.num_planned:,}",
        "  ok": _with_share(counts.num_ok, num_run),
        "  failed": _with_share(counts.num_failed, num_run),
        "  not run yet": f"{counts.num_not_run:,}",
        "flags": _listed(counts.flags),
        "filtered by": _listed(counts.filtered_by),
        "finish reasons": _listed(counts.finish_reasons),
        "files left out": "\n".join(one_line(f"{file.path}: {file.reason}") for file in counts.bad_files),
    }
    yield facts_table("run", lines)
    if counts.error_kinds:
        table = rows_table("failed rows", "kind", "rows", "of those run", "such as")
        for kind in counts.error_kinds:
            examples = "\n".join(f"{_name(row)}: {one_line(row.error_message)}" for row in kind.examples)
            add_row(table, kind.error_kind, f"{kind.num_rows:,}", f"{kind.share:.2%}", examples)
        yield table
        yield Text(f"more of them: fournee inspect {counts.run} --kind {counts.error_kinds[0].error_kind}")


def _failed_rows(found: FailedRows) -> Iterator[RenderableType]:
    if not found.rows:
        yield Text(f"no row failed with {found.error_kind}; error kinds of this run: {_listed(found.error_kinds) or 'none'}")
        return
    table = rows_table(f"{found.error_kind}: {_some(len(found.rows), found.num_rows)}", "id", "row", "message", "answer")
    for row in found.rows:
        add_row(table, one_line(row.id or ""), _place(row), one_line(row.error_message), one_line(row.text or ""))
    yield table


def _sample(rows: Sequence[AnsweredRow]) -> Iterator[RenderableType]:
    if not rows:
        yield Text("no row was answered")
        return
    table = rows_table(f"{len(rows):,} answered rows, prompt and output in tokens", "id", "prompt", "output", "finish", "text")
    for row in rows:
        tokens = (f"{row.num_prompt_tokens:,}", f"{row.num_output_tokens:,}")
        add_row(table, one_line(row.id or ""), *tokens, row.finish_reason, one_line(row.text))
    yield table


def _found_rows(found: FoundRows) -> Iterator[RenderableType]:
    for row in found.rows:
        yield facts_table(f"row {one_line(row['id'])}", {name: one_line(str(value), _WHOLE) for name, value in row.items()})
    if found.num_rows > len(found.rows):
        yield Text(f"{_some(len(found.rows), found.num_rows)} rows with these ids; --limit shows more")
    for one in found.not_found:
        yield Text(f"no row that was run has the id {one_line(one)}", style="yellow")


def _comparison(found: Comparison) -> Iterator[RenderableType]:
    lines = {
        "from": one_line(found.run),
        "to": one_line(found.other),
        "rows in both": f"{found.num_both:,}",
        "  same answers": _with_share(found.num_same, found.num_both),
        "  different answers": _with_share(found.num_different, found.num_both),
        "  ok -> failed": _with_share(found.num_ok_to_failed, found.num_both),
        "  failed -> ok": _with_share(found.num_failed_to_ok, found.num_both),
        "  failed in both": _with_share(found.num_both_failed, found.num_both),
        "only in the first": f"{found.num_only_run:,}",
        "only in the second": f"{found.num_only_other:,}",
    }
    yield facts_table("two runs", lines)
    if not found.num_both:
        yield Text("rows are matched by input file and row: these runs have none in common", style="yellow")
    if found.examples:
        table = rows_table("the first ones of each change", "change", "row", "difference")
        for one in found.examples:
            add_row(table, _CHANGES[one.change], _name(one), _difference(one))
        yield table


def _difference(one: Difference) -> Text:
    if one.change != "different":
        return Text("\n").join(Text(_outcome(side)) for side in (one.before, one.after))
    names = ("text", "tool_calls", "parsed", "embedding")
    pairs = {name: tuple(str(side.get(name, "")) for side in (one.before, one.after)) for name in names}
    differing = {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}
    return Text("\n").join(
        Text("" if name == "text" else f"{name}: ").append(inline_diff(*pair)) for name, pair in differing.items()
    )


def _outcome(side: Mapping[str, Any]) -> str:
    if side["status"] == "ok":
        return f"ok: {one_line(side.get('text') or side.get('tool_calls') or '')}"
    return f"{side['error_kind']}: {one_line(side['error_message'])}"


def _place(row: FailedRow | Difference) -> str:
    """As compilers name a line; editors open it by that."""
    return one_line(f"{row.source} row {row.source_row}" if row.line is None else f"{row.source}:{row.line}")


def _name(row: FailedRow | Difference) -> str:
    return _place(row) if row.id is None else f"{one_line(row.id)} ({_place(row)})"


def _listed(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {num:,}" for name, num in counts.items())


def _with_share(num: int, whole: int) -> str:
    return f"{num:,} ({num / whole:.2%})" if whole else f"{num:,}"


def _some(num_shown: int, num: int) -> str:
    return f"{num:,}" if num_shown == num else f"the first {num_shown:,} of {num:,}"


def _end(code: ExitCode, message: str) -> ExitCode:
    _console.print(f"[bold red]fournee:[/] {escape(message)}", soft_wrap=True)
    return code


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="fournee inspect",
        description=__doc__,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("run", help="the folder that `fournee batch` wrote to, local or s3://, gs://, abfs://")
    looks = parser.add_mutually_exclusive_group()
    looks.add_argument("--kind", metavar="KIND", help="show the rows that failed with this error kind")
    looks.add_argument("--sample", metavar="N", type=_positive, help="show so many answered rows, drawn at random")
    looks.add_argument("--id", metavar="ID", action="append", help="show all about the rows with this id; may be repeated")
    looks.add_argument("--diff", metavar="OTHER", help="compare with another run of the same input, from RUN to OTHER")
    more = f"the most rows to show; of each change with --diff (default: {_LIMIT}, with --diff {_LIMIT_DIFF})"
    parser.add_argument("--limit", metavar="N", type=_positive, help=more)
    parser.add_argument("--seed", metavar="N", type=int, help="of --sample: the same seed draws the same rows (default: 0)")
    parser.add_argument("--json", action="store_true", help="print the same facts as JSON, texts in full")
    options = parser.parse_args(arguments)
    if options.limit is not None and (options.kind, options.id, options.diff) == (None, None, None):
        parser.error("--limit goes with --kind, --id or --diff")
    if options.seed is not None and options.sample is None:
        parser.error("--seed goes with --sample")
    return options


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ValueError
    return number


if __name__ == "__main__":
    sys.exit(main())
