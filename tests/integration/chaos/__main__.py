"""Play runs until so many faults have struck: `python -m tests.integration.chaos --faults 200 [--seed N] [--kinds A,B]`."""

import argparse
import json
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from random import Random, SystemRandom
from typing import Any

from rich.console import Console
from rich.table import Table

from tests.integration.chaos.case import draw_case
from tests.integration.chaos.check import Counts
from tests.integration.chaos.cluster import ray_cluster
from tests.integration.chaos.faults import FAULTS, WEIGHTS
from tests.integration.chaos.job import Broken
from tests.integration.chaos.play import play, run_folder

_console = Console(highlight=False)


def main() -> int:
    """Play, show what it came to, and return 1 where a promise was not kept."""
    options = _parser().parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # ends what has been started
    folder = Path(options.folder or tempfile.mkdtemp(prefix="fournee-chaos-"))
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / "faults.jsonl"
    _console.print(f"seed {options.seed}, log {log}", soft_wrap=True)
    struck: Counter[str] = Counter()
    totals, number, started = Counts(), options.first_run, time.monotonic()
    with ray_cluster() as cluster, log.open("a", encoding="utf-8") as file:

        def write(line: dict[str, Any]) -> None:
            struck.update([line["fault"]] if "fault" in line else [])
            file.write(json.dumps({"seed": options.seed, "run": number, **line}) + "\n")
            file.flush()
            _console.print(f"run {number}: {line}", soft_wrap=True)

        while struck.total() < options.faults:
            rng = Random(f"{options.seed}/{number}")
            try:
                with run_folder(folder / f"run-{number}") as disk_is_small:
                    weights = {kind: WEIGHTS[kind] for kind in options.kinds if disk_is_small or kind != "disk full"}
                    totals += play(draw_case(rng, weights), cluster, folder / f"run-{number}", rng, write)
            except Broken as broken:
                again = f"--seed {options.seed} --first-run {number} --kinds {','.join(options.kinds)!r}"
                _console.print(f"BROKEN: {broken}\nkept in {folder / f'run-{number}'}; again with {again}", soft_wrap=True)
                return 1
            number += 1
    _console.print(_table(struck, totals, time.monotonic() - started))
    return 0


def _table(struck: Counter[str], totals: Counts, seconds: float) -> Table:
    table = Table("what", "count")
    for kind, count in struck.most_common():
        table.add_row(kind, f"{count:,}")
    table.add_section()
    for name, value in {"faults": struck.total(), **vars(totals), "minutes": round(seconds / 60)}.items():
        table.add_row(name.replace("_", " "), f"{value:,}")
    return table


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.integration.chaos", description=__doc__)
    parser.add_argument("--seed", type=int, default=SystemRandom().randrange(10**6), help="what all choices follow from")
    parser.add_argument("--faults", type=int, default=200, help="how many faults must strike")
    parser.add_argument("--first-run", type=int, default=0, help="the run to begin with, to repeat one")
    parser.add_argument("--kinds", type=_kinds, default=list(FAULTS), help=f"which of: {', '.join(FAULTS)}")
    parser.add_argument("--folder", help="where to work; a temporary folder by default")
    return parser


def _kinds(text: str) -> Sequence[str]:
    kinds = [kind.strip() for kind in text.split(",")]
    if unknown := set(kinds) - set(FAULTS):
        raise argparse.ArgumentTypeError(f"unknown: {', '.join(sorted(unknown))}")
    return kinds


if __name__ == "__main__":
    sys.exit(main())
