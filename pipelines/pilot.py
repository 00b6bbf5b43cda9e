"""A pilot: the job itself over some of its rows, drawn at random, in a folder of its own that is removed again.

The rows are copied as their readers store them, so that every format, template and parameter of a row means what it means in
the job. They come in random order, so that a pilot's last rows are rows like any other, whatever the input is sorted by.
"""

import io
import logging
import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pipelines.batch import run_batch
from pipelines.config import BatchConfig
from pipelines.pace import Pilot
from pipelines.parts import Parts
from pipelines.plan import Plan
from pipelines.readers import for_file, read_stored
from pipelines.requests import RequestBuilder
from pipelines.rows import Batch
from pipelines.run import Run, find_run, open_run
from pipelines.sample import Sample, read_sample
from pipelines.schema import PLAN
from pipelines.sizing import batch_size
from pipelines.sources import Source
from pipelines.storage import Folder
from pipelines.totals import Summary

logger = logging.getLogger(__name__)

_COLUMNS = [
    "status", "arrived_at", "queue_s", "ttft_s", "generation_s", "num_prompt_tokens", "num_cached_tokens", "num_output_tokens",
]  # fmt: skip


Story = Callable[[BatchConfig, Callable[[Run], None]], tuple[Run, Summary]]


def run_pilot(config: BatchConfig, sources: list[Source], plan: Plan, sample: Sample, story: Story = run_batch) -> Pilot:
    """Answer the sample as the job would; raises what the story raises."""
    beside = f"{find_run(config, sources).folder.url.rstrip('/')}.pilot-{uuid.uuid4().hex[:8]}"
    config = _settings(config, beside)
    run = open_run(config, sources)
    try:
        piloted, order = plan_pilot(config, plan, sample, run.folder)
        piloted.save(run.folder)
        logger.info("a pilot of %d rows, in %s until it is measured", piloted.num_rows, beside)
        run, summary = story(config, lambda _: None)
        return read_pilot(run.folder, piloted, sample, order, summary.engine_use.max_num_seqs)
    finally:
        run.folder.remove()


def plan_pilot(config: BatchConfig, plan: Plan, sample: Sample, folder: Folder) -> tuple[Plan, np.ndarray]:
    """Copy the sampled rows into the pilot's folder, in random order, and cut them into batches as a job of that size would.

    Returns the index in the sample of each row of the plan. Rows of damaged files are left out, where that is allowed.
    """
    workers = config.cluster.max_workers or config.cluster.workers
    size = batch_size(config.engine.rows_per_batch, num_rows=len(sample.rows), num_bytes=0, num_workers=workers)
    shuffled = np.random.default_rng(0)
    lines: list[dict[str, object]] = []
    order: list[int] = []
    for number, (source, table, indices) in enumerate(_by_schema(config, plan, sample)):
        mixed = shuffled.permutation(len(table))
        copy = f"spool/pilot-{number}.parquet"
        sink = io.BytesIO()
        pq.write_table(table.take(mixed), sink, write_page_checksum=True)
        folder.write(copy, sink.getvalue())
        place = str(folder.fs.unstrip_protocol(folder.path(copy)))
        for first in range(0, len(table), size.num_rows):
            num_rows = min(size.num_rows, len(table) - first)
            line = {"batch_id": len(lines), "source": source, "spooled": place, "source_bytes": 0, "source_version": ""}
            lines.append({**line, "first_row": first, "num_rows": num_rows, "rows_before": len(order) + first, "row_group": 0})
        order += np.array(indices)[mixed].tolist()
    batches = pa.Table.from_pylist(lines, schema=PLAN)
    return replace(plan, batches=batches, batch_size=str(size)), np.array(order, np.int64)


def read_pilot(folder: Folder, plan: Plan, sample: Sample, order: np.ndarray, max_num_seqs: int | None) -> Pilot:
    """Read what a finished pilot left behind."""
    tables = [part.replace_schema_metadata() for part in Parts(folder).read(plan.batches["batch_id"].to_pylist(), _COLUMNS)]
    return Pilot(
        rows=pa.concat_tables(tables) if tables else pa.table({}),
        places=sample.places[order],
        num_places=sample.num_places,
        batches=pq.read_table(pa.BufferReader(folder.read("stats/batches.parquet"))),
        workers=pq.read_table(pa.BufferReader(folder.read("stats/workers.parquet"))),
        max_num_seqs=max_num_seqs,
    )


def _by_schema(config: BatchConfig, plan: Plan, sample: Sample) -> Iterator[tuple[str, pa.Table, list[int]]]:
    """The sampled rows as their readers store them, those of one format and schema together, with a source of theirs."""
    own = [config.input.id_column] if config.input.id_column else []
    columns = list(dict.fromkeys([*RequestBuilder(config).columns, *own, *plan.carried.names]))
    found: dict[tuple[str, pa.Schema], tuple[str, list[pa.Table], list[int]]] = {}
    done = 0
    for batch, offsets, table in read_sample(plan, sample, config.input, partial(_stored, config, columns)):
        indices = range(done, done + len(offsets))
        done += len(offsets)
        if table is not None:
            taken = table.take(offsets).replace_schema_metadata()
            key = (for_file(config.input, batch.source).format, taken.schema)
            _, tables, rows = found.setdefault(key, (batch.source, [], []))
            tables.append(taken)
            rows.extend(indices)
    for source, tables, rows in found.values():
        yield source, pa.concat_tables(tables), rows


def _stored(config: BatchConfig, columns: list[str], batches: list[Batch]) -> Iterator[pa.Table]:
    return read_stored(config.input, batches, columns)


def _settings(config: BatchConfig, folder: str) -> BatchConfig:
    """Nothing may stop a pilot but a fault: it is measured whatever comes out."""
    alone = {"path": folder, "on_existing": "resume", "openai": False, "rows_per_file": None}
    return config.model_copy(
        update={
            "output": config.output.model_copy(update=alone),
            "errors": config.errors.model_copy(update={"max_failed_fraction": 1.0, "max_failed_rows": None}),
            "budget": config.budget.model_copy(update={"max_cost": None, "max_hours": None}),
            "retry_failed": False,
        }
    )
