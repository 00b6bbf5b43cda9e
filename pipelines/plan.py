"""The plan: an immutable list of batches, made once from the outlines of all sources, and cut into shards."""

import hashlib
import io
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pipelines.config import InputConfig
from pipelines.errors import ConfigError
from pipelines.readers import Outline, jsonl, parquet
from pipelines.rows import BATCH_FIELDS, Batch
from pipelines.schema import PLAN, result_schema
from pipelines.sources import Source
from pipelines.storage import Folder, file_system
from pipelines.suggest import did_you_mean

PLAN_FILE = "plan/plan.parquet"
_SPOOL_FOLDER = "spool"
_OUTLINE_THREADS = {"parquet": 32, "jsonl": 4}  # a JSONL outline holds tens of MiB of text
_SPOOL_THREADS = 4
_JSONL_STRIDE = 16  # every automatic batch size is a multiple of it
_SHARDS_PER_ROW_GROUP = 8  # more only where workers outnumber row groups; then 4 for each worker
_MAX_BATCHES_PER_SHARD = 64
_SHARDS_PER_WORKER = 16
_SHARD = pa.schema([("batches", pa.list_(pa.struct(list(PLAN))))])


@dataclass(frozen=True, slots=True)
class Plan:
    """The batches of a run, and the types of the input columns that its results carry."""

    batches: pa.Table
    carried: pa.Schema

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
        metadata = {b"carried": self.carried.serialize().to_pybytes()}
        pq.write_table(self.batches.replace_schema_metadata(metadata), sink, compression="zstd")
        run.write(PLAN_FILE, sink.getvalue())

    @classmethod
    def load(cls, run: Folder) -> "Plan":
        """Read the plan of a run."""
        table = pq.read_table(io.BytesIO(run.read(PLAN_FILE)))
        carried = pa.ipc.read_schema(pa.py_buffer(table.schema.metadata[b"carried"]))
        return cls(table.cast(PLAN), carried)


def make_plan(
    config: InputConfig, sources: Sequence[Source], needed: Sequence[str], rows_per_batch: int | None, run: Folder
) -> Plan:
    """Look into every source, check that the `needed` columns are there, and cut the rows into batches.

    Compressed sources are copied to `run` first. Raises ConfigError that names the files or columns that are wrong.
    """
    with ThreadPoolExecutor(_SPOOL_THREADS) as pool:
        spooled = list(pool.map(lambda source: _spool(source, config, run), sources))
    outlines = _outline_all(config, sources, spooled, rows_per_batch)
    carried = _check_columns(config, sources, outlines, needed)
    limit = config.limit if config.limit is not None else sum(o.num_rows for o in outlines)
    size = rows_per_batch or automatic_rows_per_batch(min(limit, sum(o.num_rows for o in outlines)))
    lines: list[tuple[Any, ...]] = []
    rows_before = 0
    for source, copy, outline in zip(sources, spooled, outlines, strict=True):
        for cut in outline.cut(size, limit - rows_before):
            lines.append(
                (len(lines), source.path, copy, source.num_bytes, source.version, cut.first_row, cut.num_rows, rows_before,
                 cut.first_byte, cut.num_bytes, cut.row_group)
            )  # fmt: skip
            rows_before += cut.num_rows
    columns = list(zip(*lines, strict=True)) if lines else [()] * len(PLAN)
    return Plan(pa.table([pa.array(c, f.type) for c, f in zip(columns, PLAN, strict=True)], schema=PLAN), carried)


def automatic_rows_per_batch(num_rows: int) -> int:
    """Small inputs get small batches, so that progress, resume and several workers have something to work with."""
    return int(min(256, max(16, 2 ** int(np.log2(max(num_rows, 1) / 16)))))


def make_shards(pending: pa.Table, num_workers: int) -> list[pa.Table]:
    """Cut the pending batches into shard descriptors, one table of one row each.

    Neighbouring batches share a shard, also across sources, so that small files fill an engine too. The last 2 x workers
    batches travel alone, so that no worker finishes long after the others; only where a row group has many batches, each
    of its shards keeps to a minimum size, since every shard decodes the group up to its own end.
    """
    batches = pending.select(BATCH_FIELDS).to_pylist()
    size = max(1, min(_MAX_BATCHES_PER_SHARD, len(batches) // (num_workers * _SHARDS_PER_WORKER)))
    counts = _count_by_row_group(batches)
    most = max(_SHARDS_PER_ROW_GROUP, -(-4 * num_workers // max(1, len(counts))))
    least = {group: -(-count // most) for group, count in counts.items()}
    shards: list[list[dict[str, Any]]] = []
    for index, batch in enumerate(batches):
        fair = size if len(batches) - index > 2 * num_workers else 1
        if shards and len(shards[-1]) < max(fair, least.get(_row_group(batch), 1)):
            shards[-1].append(batch)
        else:
            shards.append([batch])
    return [pa.table([[shard]], schema=_SHARD) for shard in shards]


def batches_of(shard: pa.Table) -> list[Batch]:
    """The batches that a shard descriptor carries."""
    return [Batch(**line) for line in shard["batches"][0].as_py()]


def _row_group(batch: dict[str, Any]) -> tuple[str, int | None]:
    return batch["source"], batch["row_group"]


def _count_by_row_group(batches: Sequence[dict[str, Any]]) -> dict[tuple[str, int | None], int]:
    counts: dict[tuple[str, int | None], int] = {}
    for batch in batches:
        if batch["row_group"] is not None:
            counts[_row_group(batch)] = counts.get(_row_group(batch), 0) + 1
    return counts


def _spool(source: Source, config: InputConfig, run: Folder) -> str | None:
    if config.format != "jsonl" or jsonl.compression_of(source.path) is None:
        return None
    name = f"{_SPOOL_FOLDER}/{hashlib.sha256(source.path.encode()).hexdigest()[:16]}.parquet"
    if not run.exists(name):
        fs, path = file_system(source.path)
        try:
            with run.create(name) as target:
                jsonl.spool(fs, path, target, config.limit)
        except (OSError, EOFError, pa.ArrowInvalid) as error:
            raise ConfigError(
                f"{source.path} cannot be decompressed: {error}; repair it or take it out of input.path"
            ) from None
    return str(run.fs.unstrip_protocol(run.path(name)))


def _outline_all(
    config: InputConfig, sources: Sequence[Source], spooled: Sequence[str | None], rows_per_batch: int | None
) -> list[Outline]:
    def outline(source: Source, copy: str | None) -> Outline | str:
        fs, path = file_system(copy or source.path)
        try:
            if copy is not None:
                found = parquet.outline(fs, path)
                return parquet.Outline(found.num_rows, jsonl.columns_of_spooled(fs, path), found.group_starts)
            if config.format == "parquet":
                return parquet.outline(fs, path)
            return jsonl.outline(fs, path, rows_per_batch or _JSONL_STRIDE, config.limit)
        except (OSError, UnicodeDecodeError, pa.ArrowException) as error:  # whatever a damaged footer may hold
            return f"{source.path} cannot be read as {config.format}: {str(error).strip()}"

    with ThreadPoolExecutor(_OUTLINE_THREADS[config.format]) as pool:
        outlines = list(pool.map(outline, sources, spooled))
    broken = [problem for problem in outlines if isinstance(problem, str)]
    if broken:
        shown = "\n".join(broken[:10]) + (f"\nand {len(broken) - 10} more" if len(broken) > 10 else "")
        raise ConfigError(f"{shown}\nRepair these files or take them out of input.path")
    return [found for found in outlines if not isinstance(found, str)]


def _check_columns(
    config: InputConfig, sources: Sequence[Source], outlines: Sequence[Outline], needed: Sequence[str]
) -> pa.Schema:
    """Refuse columns that are missing, doubled or change their type between files; return the carried ones."""
    wanted = [*needed, *config.carry_columns]
    first_seen: dict[str, tuple[pa.DataType, str]] = {}
    for source, outline in zip(sources, outlines, strict=True):
        if outline.num_rows == 0:
            continue
        if config.format == "parquet":
            _require(config, outline.columns.names, needed, source.path)
            _refuse_doubled(config, outline.columns.names, wanted, source.path)
        for field in outline.columns:
            known, where = first_seen.setdefault(field.name, (parquet.plain_type(field.type), source.path))
            if field.name in config.carry_columns and parquet.plain_type(field.type) != known:
                raise ConfigError(
                    f"input.carry_columns: {field.name!r} is {known} in {where} and {field.type} in {source.path}; "
                    "write the files with one type, or leave the column out"
                )
    if first_seen:
        _require(config, list(first_seen), wanted, sources[0].path)
    carried = pa.schema([(name, first_seen[name][0]) for name in dict.fromkeys(config.carry_columns) if name in first_seen])
    result_schema(carried)  # raises where a name is taken; the workers would find out after their answers
    return carried


def _require(config: InputConfig, names: Sequence[str], needed: Sequence[str], path: str) -> None:
    for name in needed:
        if name not in names:
            raise ConfigError(f"{_key_of(config, name)}: the column {name!r} is not in {path}{did_you_mean(name, names)}")


def _refuse_doubled(config: InputConfig, names: Sequence[str], wanted: Sequence[str], path: str) -> None:
    for name in wanted:
        if names.count(name) > 1:
            raise ConfigError(f"{_key_of(config, name)}: {path} has {names.count(name)} columns {name!r}; rename all but one")


def _key_of(config: InputConfig, column: str) -> str:
    """The setting that asks for a column."""
    for key in ("prompt_column", "messages_column", "id_column"):
        if getattr(config, key) == column:
            return f"input.{key}"
    return "input.carry_columns" if column in config.carry_columns else "prompt.template"
