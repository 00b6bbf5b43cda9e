"""The plan: an immutable list of batches, made once from the outlines of all sources, and cut into shards."""

import io
import json
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pipelines.columns import Look, check_columns
from pipelines.config import InputConfig
from pipelines.errors import ConfigError
from pipelines.ids import check_ids
from pipelines.prefix_order import PrefixHits
from pipelines.readers import for_file, outline
from pipelines.rows import BATCH_FIELDS, Batch
from pipelines.schema import PLAN
from pipelines.sizing import LEAST_ROWS, BatchSize, batch_size, rows_per_shard
from pipelines.sources import Source, is_bad_file
from pipelines.spool import check_settings, spool
from pipelines.storage import Folder

PLAN_FILE = "plan/plan.parquet"
_FOOTER_THREADS = 32
_TEXT_THREADS = 4  # an outline of JSON lines holds tens of MiB of text, a copy in the making a row group
_SHARDS_PER_ROW_GROUP = 8  # more only where workers outnumber row groups; then 4 for each worker
_SHOWN_FILES = 10
_SHARD = pa.schema([("batches", pa.list_(pa.struct(list(PLAN))))])


@dataclass(frozen=True, slots=True)
class BadFile:
    """An input file that was left out, and why."""

    path: str
    reason: str


@dataclass(frozen=True, slots=True)
class Plan:
    """The batches of a run, the types of the input columns that its results carry, and the files that were left out."""

    batches: pa.Table
    carried: pa.Schema
    bad_files: tuple[BadFile, ...]
    batch_size: str
    """How many rows are committed together, and why."""
    prefix_hits: PrefixHits | None = None
    """Where it was looked for an order that makes more of the prefix cache: what was found."""

    @property
    def is_ordered(self) -> bool:
        """Whether the rows come in another order than that of the input."""
        return self.prefix_hits is not None and self.prefix_hits.is_ordered

    @property
    def num_batches(self) -> int:
        """All batches of the run."""
        return len(self.batches)

    @property
    def num_rows(self) -> int:
        """All rows of the run."""
        return pc.sum(self.batches["num_rows"]).as_py() or 0

    def without(self, committed: Iterable[int]) -> pa.Table:
        """The batches that are not in `committed`."""
        done = pa.array(sorted(committed), pa.int64())
        return self.batches.filter(pc.invert(pc.is_in(self.batches["batch_id"], done)))

    def save(self, run: Folder) -> None:
        """Write the plan: from here on the run's batches are fixed."""
        sink = io.BytesIO()
        bad_files = json.dumps([[bad.path, bad.reason] for bad in self.bad_files]).encode()
        metadata = {"carried": self.carried.serialize().to_pybytes(), "bad_files": bad_files, "batch_size": self.batch_size}
        if self.prefix_hits is not None:
            metadata["prefix_hits"] = self.prefix_hits.model_dump_json()
        pq.write_table(self.batches.replace_schema_metadata(metadata), sink, compression="zstd")
        run.write(PLAN_FILE, sink.getvalue())

    @classmethod
    def load(cls, run: Folder) -> "Plan":
        """Read the plan of a run."""
        table = pq.read_table(pa.BufferReader(run.read(PLAN_FILE)))
        carried = pa.ipc.read_schema(pa.py_buffer(table.schema.metadata[b"carried"]))
        bad_files = tuple(BadFile(*bad) for bad in json.loads(table.schema.metadata[b"bad_files"]))
        size, hits = table.schema.metadata[b"batch_size"].decode(), table.schema.metadata.get(b"prefix_hits")
        hits = None if hits is None else PrefixHits.model_validate_json(hits)
        return cls(table.cast(PLAN), carried, bad_files, size, hits)


def make_plan(
    config: InputConfig,
    sources: Sequence[Source],
    needed: Sequence[str],
    run: Folder,
    *,
    rows_per_batch: int | None,
    num_workers: int,
) -> Plan:
    """Look into every source, check that the `needed` columns are there, and cut the rows into batches.

    Sources that have no positions are copied to `run` first. Raises ConfigError that names the files, columns or ids that
    are wrong; what is wrong with the way to a file is raised as it is.
    """
    check_settings(config)
    looks, bad_files = _look_into(config, sources, rows_per_batch or LEAST_ROWS, run)
    carried = check_columns(config, looks, needed)
    outlines = [look.outline for look in looks]
    num_rows, num_bytes = sum(one.num_rows for one in outlines), sum(one.num_bytes for one in outlines)
    limit = num_rows if config.limit is None else min(config.limit, num_rows)
    size = batch_size(rows_per_batch, num_rows=limit, num_bytes=num_bytes * limit // max(1, num_rows), num_workers=num_workers)
    batches = _cut(looks, size, limit)
    check_ids(config, batches)
    return Plan(batches, carried, bad_files, str(size))


def make_shards(pending: pa.Table, num_workers: int) -> list[pa.Table]:
    """Cut the pending batches into shard descriptors, one table of one row each.

    Neighbouring batches share a shard, also across sources, so that small files fill an engine too. The last 2 x workers
    batches travel alone, so that no worker finishes long after the others; only where a row group has many batches, each
    of its shards keeps to a minimum size, since every shard decodes the group up to its own end.
    """
    batches = pending.select(BATCH_FIELDS).combine_chunks()
    most_rows, num_rows = pc.max(batches["num_rows"]).as_py() or 1, pc.sum(batches["num_rows"]).as_py() or 0
    size = max(1, rows_per_shard(num_rows, num_workers) // most_rows)
    group_sizes, num_groups = _row_groups(batches)
    most = max(_SHARDS_PER_ROW_GROUP, -(-4 * num_workers // max(1, num_groups)))
    starts: list[int] = []
    for index, least in enumerate((-(-group_sizes // most)).tolist()):
        fair = size if len(batches) - index > 2 * num_workers else 1
        if not starts or index - starts[-1] >= max(fair, least):
            starts.append(index)
    # Sliced and not built: as Python objects, the batches of a hundred million rows took six seconds and 130 MiB.
    lines = pa.StructArray.from_arrays([column.combine_chunks() for column in batches.columns], fields=list(PLAN))
    shards = pa.ListArray.from_arrays([*starts, len(batches)], lines, type=_SHARD.field("batches").type)
    return [pa.table([shards.slice(place, 1)], schema=_SHARD) for place in range(len(starts))]


def batches_of(shard: pa.Table) -> list[Batch]:
    """The batches that a shard descriptor carries."""
    return [Batch(**line) for line in shard["batches"][0].as_py()]


def num_rows_of(shard: pa.Table) -> int:
    """How many rows the batches of a shard have."""
    return int(pc.sum(pc.list_flatten(shard["batches"]).combine_chunks().field("num_rows")).as_py())


def _look_into(
    config: InputConfig, sources: Sequence[Source], stride: int, run: Folder
) -> tuple[list[Look], tuple[BadFile, ...]]:
    """Outline every source that can be read. Raises ConfigError with all that cannot, unless they are to be left out."""

    def look(source: Source) -> Look | BadFile:
        try:
            copy = spool(source, config, run)
            return Look(source, copy, outline(config, source.path, copy, stride))
        except Exception as error:
            if not is_bad_file(error):
                raise
            return BadFile(
                source.path,
                f"cannot be read as {for_file(config, source.path).format}: {str(error).strip() or type(error).__name__}",
            )

    with ThreadPoolExecutor(_FOOTER_THREADS if config.format == "parquet" else _TEXT_THREADS) as pool:
        found = list(pool.map(look, sources))
    bad_files = tuple(one for one in found if isinstance(one, BadFile))
    if bad_files and config.on_bad_file == "fail":
        shown = "\n".join(f"{bad.path} {bad.reason}" for bad in bad_files[:_SHOWN_FILES])
        more = f"\nand {len(bad_files) - _SHOWN_FILES} more" if len(bad_files) > _SHOWN_FILES else ""
        raise ConfigError(f"{shown}{more}\nRepair these files, take them out of input.path, or set input.on_bad_file=skip")
    return [one for one in found if isinstance(one, Look)], bad_files


def _cut(looks: Sequence[Look], size: BatchSize, limit: int) -> pa.Table:
    lines: list[tuple[Any, ...]] = []
    rows_before = 0
    for look in looks:
        source = look.source
        sizes = size.cut(min(look.outline.num_rows, limit - rows_before), limit - rows_before)
        for cut in look.outline.cut(list(sizes)):
            lines.append(
                (len(lines), source.path, look.spooled, source.num_bytes, source.version, cut.first_row, cut.num_rows,
                 rows_before, cut.first_byte, cut.num_bytes, cut.row_group)
            )  # fmt: skip
            rows_before += cut.num_rows
    columns = list(zip(*lines, strict=True)) if lines else [()] * len(PLAN)
    return pa.table([pa.array(c, f.type) for c, f in zip(columns, PLAN, strict=True)], schema=PLAN)


def _row_groups(batches: pa.Table) -> tuple[np.ndarray, int]:
    """How many batches begin in the row group of each of them, 0 where there is none; and how many row groups there are."""
    sources = batches["source"].combine_chunks().dictionary_encode().indices.to_numpy()
    groups = pc.fill_null(batches["row_group"], -1).to_numpy()
    has_group = groups >= 0
    keys = sources[has_group] * (groups.max(initial=0) + 1) + groups[has_group]
    _, places, counts = np.unique(keys, return_inverse=True, return_counts=True)
    sizes = np.zeros(len(batches), np.int64)
    sizes[has_group] = counts[places]
    return sizes, len(counts)
