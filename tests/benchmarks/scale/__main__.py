"""How the job behaves at scale, without a model: `python -m tests.benchmarks.scale [measurement ...] [options]`.

run       the whole command: seconds of each phase, rows per second, the driver's memory
resume    the same where 99 % of the parts are there
plan      a folder of footers becomes a plan and shards; nothing is read but footers
finalise  all parts are there: verify, row pass, tables, report
far       the same parts where each request takes --request-ms, and how many requests there are
board     so many workers report to the board and wait for its orders (driven, not real workers)
beats     the heartbeat files of so many workers
tasks     what Ray Data takes for so many shards that cost nothing

Those that start Ray are `run`, `resume`, `board` and `tasks`. `run --workers 50` starts 50 real workers, which share the cores.
"""

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from shutil import rmtree

from tests.benchmarks.scale.apart import Numbers, apart
from tests.benchmarks.scale.crowd import beats, board, tasks
from tests.benchmarks.scale.endtoend import end_to_end, resume
from tests.benchmarks.scale.finalise import far_away, finalise
from tests.benchmarks.scale.inputs import work_folder, write_footers
from tests.benchmarks.scale.planning import planning

MEASUREMENTS = ("run", "resume", "plan", "finalise", "far", "board", "beats", "tasks")


def main() -> None:
    options = _options()
    found = []
    with work_folder(options.folder) as folder:
        for name in options.measurements:
            numbers = _measurements(options, folder)[name]()
            found.append({"measurement": name, **numbers})
            _say(f"{name}:")
            for key, value in numbers.items():
                _say(f"  {key:28} {value:>14,.2f}" if value % 1 else f"  {key:28} {value:>14,.0f}")
    if options.json:
        options.json.write_text(json.dumps(found, indent=2))


def _measurements(options: argparse.Namespace, folder: Path) -> dict[str, Callable[[], Numbers]]:
    sizes = (options.rows, options.rows_per_batch, options.workers)
    return {
        "run": lambda: end_to_end(folder, *sizes),
        "resume": lambda: resume(folder, *sizes),
        "plan": lambda: _plan(options, folder),
        "finalise": lambda: apart(finalise, folder, options.rows, options.parts),
        "far": lambda: apart(far_away, folder, options.rows, options.parts, options.request_ms),
        "board": lambda: apart(board, options.workers),
        "beats": lambda: apart(beats, folder, options.workers, options.request_ms),
        "tasks": lambda: apart(tasks, options.shards, 1),
    }


def _plan(options: argparse.Namespace, folder: Path) -> Numbers:
    run = folder / "planned"
    rmtree(run, ignore_errors=True)
    return apart(planning, write_footers(folder, options.files, options.rows), run, options.rows_per_batch)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("measurements", nargs="*", default=["run"], metavar="measurement", help=" ".join(MEASUREMENTS))
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--rows-per-batch", type=int, default=2000)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--files", type=int, default=10_000, help="of `plan`")
    parser.add_argument("--parts", type=int, default=4000, help="of `finalise` and `far`")
    parser.add_argument("--shards", type=int, default=2000, help="of `tasks`")
    parser.add_argument("--request-ms", type=float, default=30.0, help="of `far` and `beats`")
    parser.add_argument("--folder", type=Path, help="where input and made runs stay, for another time")
    parser.add_argument("--json", type=Path, help="write what was measured")
    options = parser.parse_args()
    if unknown := set(options.measurements) - set(MEASUREMENTS):
        parser.error(f"no measurement: {', '.join(sorted(unknown))}")
    return options


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
