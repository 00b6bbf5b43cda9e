"""Say what a job will cost before it runs: `fournee estimate [group=choice] [key=value ...]`, as for `fournee batch`."""

import argparse
import logging
import sys
from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.markup import escape

from jobs.help import settings_help
from jobs.terminal import facts_table
from pipelines.batch import stop_on_signal
from pipelines.compose import compose_settings
from pipelines.errors import ConfigError, ExitCode, Stopped
from pipelines.estimate import Estimate, Spending, estimate
from pipelines.intervals import Interval
from pipelines.parse import parse_estimate
from pipelines.prompt_counts import Prompts

_EXAMPLES = """examples:
  fournee estimate input=parquet input.path='data/*.parquet' model=qwen3_8b
  fournee estimate estimate.pilot_rows=512 input=parquet input.path='data/*.parquet' model=qwen3_8b cluster.workers=8
  fournee estimate estimate.like=runs/yesterday input=parquet input.path=today.parquet --json

exit codes: 0 done (also where a budget would be passed), 1 the pilot failed, 2 bad configuration, 4 stopped"""

_console = Console(stderr=True, highlight=False, emoji=False)
_out = Console(highlight=False, emoji=False)


def main(arguments: Sequence[str] | None = None) -> int:
    """Estimate the job; returns the exit code (`pipelines.errors.ExitCode`)."""
    options, more = _parser().parse_known_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", datefmt="%H:%M:%S")
    try:
        with stop_on_signal():
            config = parse_estimate(compose_settings("estimate", [*options.overrides, *more], options.config_dir))
            found = estimate(config)
    except ConfigError as error:
        return _end(ExitCode.BAD_CONFIG, str(error))
    except Stopped as error:
        return _end(ExitCode.STOPPED, f"stopped by {error}")
    except Exception as error:  # noqa: BLE001 - the last resort: storage, hub and cluster clients raise kinds of their own
        return _end(ExitCode.FAILED, f"the estimate failed: {type(error).__name__}: {error}")
    if options.json:
        print(found.model_dump_json(indent=2))
        return ExitCode.OK
    _out.print(facts_table("estimate", dict(_lines(found))))
    for note in found.notes:
        _out.print(f"[yellow]note[/]  {escape(note)}", soft_wrap=True)
    if found.engine == "echo":
        _out.print("[bold red]ECHO ENGINE: no model, tokens are words[/]")
    return ExitCode.OK


def _lines(found: Estimate) -> Iterator[tuple[str, str]]:
    yield "rows", f"{found.num_rows:,}, of which {found.prompts.num_sampled_rows:,} were looked at"
    yield from _prompt_lines(found.prompts)
    if found.spending is not None:
        yield from _spending_lines(found.spending, found.currency)


def _prompt_lines(prompts: Prompts) -> Iterator[tuple[str, str]]:
    for kind, count in prompts.failing.items():
        yield f"  {kind}", f"{count:,} of those looked at ({count / prompts.num_sampled_rows:.1%}) would fail"
    if prompts.num_tokens is None or prompts.mean is None:
        return
    yield "prompt tokens", _range(prompts.num_tokens, ",.0f")
    yield "  of one row", f"mean {prompts.mean:,.1f}, p50 {prompts.p50:,.0f}, p95 {prompts.p95:,.0f}, most {prompts.max:,}"
    if prompts.shared_prefix_share is not None:
        yield "  shared by all", f"{prompts.shared_prefix_share:.1%}: what prefix caching can save"
    if prompts.most_output_tokens is not None:
        yield "output tokens", f"at most {_range(prompts.most_output_tokens, ',.0f')}, by each row's max_tokens"


def _spending_lines(spending: Spending, currency: str) -> Iterator[tuple[str, str]]:
    yield "  likely", f"{_range(spending.num_output_tokens, ',.0f')}"
    yield "hours", f"{_range(spending.hours, ',.4g')} with {spending.num_workers} worker(s), measured by {spending.measured_by}"
    yield "cost", f"{_range(spending.cost, ',.4g')} {currency}"
    prices = {
        "output": spending.cost_per_million_output_tokens,
        "input + output": spending.cost_per_million_total_tokens,
    }
    shown = [f"{price:,.2f} {over}" for over, price in prices.items() if price is not None]
    yield f"{currency} per million", f"{', '.join(shown)} tokens" if shown else ""
    yield "limited by", spending.limited_by
    yield "the range's sources", ", ".join(f"{name} ±{error:.1%}" for name, error in spending.uncertainty.items())


def _range(interval: Interval, form: str) -> str:
    return f"{interval.value:{form}} ({interval.low:{form}} to {interval.high:{form}})"


def _end(code: ExitCode, message: str) -> ExitCode:
    _console.print(f"[bold red]fournee:[/] {escape(message)}", soft_wrap=True)
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="fournee estimate",
        description=__doc__,
        epilog=f"{settings_help('estimate')}\n\n{_EXAMPLES}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("overrides", nargs="*", metavar="override", help="group=choice or key=value, in Hydra's grammar")
    parser.add_argument("--config-dir", help="a folder of your own YAML, laid out like the shipped one")
    parser.add_argument("--json", action="store_true", help="print the estimate as JSON, ranges and all")
    return parser


if __name__ == "__main__":
    sys.exit(main())
