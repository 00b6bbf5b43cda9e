"""How long `fournee history` takes over many runs: `python -m tests.benchmarks.history [--runs 1000] [--batches 1000]`.

Writes finished runs as far as history reads them, runs the whole command some times with Python's start in it, and prints
the seconds: warm, and with the runs' own files dropped from the file cache before (Python and its packages stay in it).
"""

import argparse
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from time import perf_counter

import pyarrow as pa
import pyarrow.parquet as pq

from pipelines.schema import BATCH, BATCH_TABLE
from tests.unit.nights import night

_FIRST_DAY = date(2024, 1, 1)
_ROWS_PER_BATCH = 256
_COMMANDS = (["--by", "date,model,experiment"], ["--by", "node"], ["check"])


def batches_of(run: int, num_batches: int) -> pa.Table:
    """`stats/batches.parquet` of one run on eight nodes."""
    chance = random.Random(run)
    start = datetime.combine(_FIRST_DAY + timedelta(days=run), datetime.min.time(), UTC)
    lines = []
    for batch_id in range(num_batches):
        num_failed, num_output, wall_s = chance.randrange(3), chance.randrange(20_000, 40_000), chance.uniform(20, 60)
        share = {"worker": f"w{batch_id % 8}", "prefill_s": wall_s / 40, "decode_s": wall_s / 10, "cost": wall_s / 900}
        share |= {"lifetime_s": 60.0 + batch_id, "busy_s": 30.0 + batch_id}
        line = {field.name: chance.random() for field in BATCH if field.type == pa.float64()}
        lines.append({
            **line, "batch_id": batch_id, "num_rows": _ROWS_PER_BATCH, "num_ok": _ROWS_PER_BATCH - num_failed,
            "num_failed": num_failed, "num_marked": 0, "num_correct": 0,
            "num_prompt_tokens": 3 * num_output, "num_cached_tokens": 0,
            "num_output_tokens": num_output, "started_at": start + timedelta(seconds=batch_id), "wall_s": wall_s,
            "shares": [share], "prefill_s": wall_s / 40, "decode_s": wall_s / 10, "cost": wall_s / 900,
            "finish_reasons": {"stop": 200, "length": 56 - num_failed}, "error_kinds": {"truncated": num_failed},
            "error_examples": {"truncated": f"row {batch_id}"}, "flags": {}, "worker": share["worker"],
            "node": f"10.0.0.{batch_id % 8}", "accelerator": "H100", "num_accelerators": 1, "attempt": 1, "currency": "USD",
        })  # fmt: skip
    return pa.Table.from_pylist(lines, schema=BATCH)


def write_runs(folder: Path, num_runs: int, num_batches: int) -> None:
    """Finished runs, one a day."""
    tables = [batches_of(run, num_batches) for run in range(min(num_runs, 8))]
    for run in range(num_runs):
        place, chance = folder / f"{run:05d}", random.Random(run)
        (place / "stats").mkdir(parents=True)
        rows, output = num_batches * _ROWS_PER_BATCH, num_batches * chance.randrange(28_000, 32_000)
        night(place, _FIRST_DAY + timedelta(days=run), num_rows=rows, num_output_tokens=output, cost=output / 2e6)
        pq.write_table(tables[run % len(tables)], place / BATCH_TABLE, compression="zstd")


def forget(folder: Path) -> None:
    """Drop the files below a folder from the file cache."""
    os.sync()
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def seconds(arguments: Sequence[str], folder: Path) -> float:
    """How long the whole command takes."""
    words = ["check", str(folder)] if arguments == ["check"] else [str(folder), *arguments]
    started = perf_counter()
    command = [sys.executable, "-m", "jobs.cli", "history", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode in (0, 3), done.stderr
    return perf_counter() - started


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--batches", type=int, default=1000, help="of each run")
    parser.add_argument("--times", type=int, default=3)
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="history-"))
    try:
        write_runs(folder, options.runs, options.batches)
        size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        say(f"{options.runs:,} runs of {options.batches:,} batches, {size / 2**20:,.0f} MiB")
        for arguments in _COMMANDS:
            warm = [seconds(arguments, folder) for _ in range(options.times)]
            cold = [forget(folder) or seconds(arguments, folder) for _ in range(options.times)]
            shown = ("  ".join(f"{one:.2f}" for one in some) for some in (warm, cold))
            say(f"{' '.join(arguments):28} warm {next(shown)} s, cold {next(shown)} s")
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
