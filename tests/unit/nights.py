"""Finished runs as `fournee history` finds them, without running anything."""

from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa

from pipelines.run_table import one_row_file
from pipelines.schema import RUN, RUN_FILE, RUN_TABLE, SUCCESS_FILE

# 1,000 rows, a million output tokens in 1,000 s for 2 USD, and as many prompt tokens.
_USUAL: dict[str, Any] = {
    "fingerprint": "f" * 64, "workload": "w" * 64, "experiment": "nightly", "model": "qwen3-8b", "model_digest": "d",
    "engine": "vllm", "input_format": "parquet", "num_files": 1, "input_bytes": 2**20,
    "num_rows": 1000, "num_failed": 0, "num_marked": 0, "num_correct": 0,
    "num_prompt_tokens": 1_000_000, "num_cached_tokens": 0, "num_output_tokens": 1_000_000,
    "num_generated_tokens": 1_000_000, "num_batches": 10, "num_attempts": 1, "num_workers": 1, "num_deaths": 0,
    "wall_s": 1000.0, "worker_s": 1000.0, "loading_s": 100.0, "prefill_s": 100.0, "decode_s": 700.0, "idle_s": 100.0,
    "lost_s": 0.0, "ttft_s_p95": 0.5, "currency": "USD", "cost": 2.0, "loading_cost": 0.2, "prefill_cost": 0.2,
    "decode_cost": 1.4, "idle_cost": 0.2, "lost_cost": 0.0, "overhead_cost": 0.0, "accelerator": "H100",
    "num_accelerators": 1, "exit_code": 0,
}  # fmt: skip


def night(place: Path, day: date, *, without: tuple[str, ...] = (), **changes: Any) -> Path:
    """A finished run of that day, usual but for the changes; `without` the columns that an older one did not have."""
    line = {**_USUAL, "run_date": day, **changes}
    output, total = line["num_output_tokens"], line["num_prompt_tokens"] + line["num_output_tokens"]
    line = {
        "num_ok": line["num_rows"] - line["num_failed"],
        "started_at": datetime.combine(day, datetime.min.time(), UTC) + timedelta(hours=23),
        "finished_at": datetime.combine(day, datetime.min.time(), UTC) + timedelta(hours=30),
        "output_tokens_per_s": output / line["wall_s"] if output and line["wall_s"] else None,
        "cost_per_million_output_tokens": line["cost"] / output * 1e6 if output else None,
        "cost_per_million_total_tokens": line["cost"] / total * 1e6 if total else None,
        **line,
    }
    table = pa.Table.from_pylist([line], schema=RUN)
    write(place, table.drop_columns(list(without)))
    return place


def write(place: Path, table: pa.Table) -> None:
    """Make a finished run of a row."""
    (place / "stats").mkdir(parents=True, exist_ok=True)
    (place / RUN_TABLE).write_bytes(one_row_file(table))
    for name in (RUN_FILE, SUCCESS_FILE):
        (place / name).touch()
