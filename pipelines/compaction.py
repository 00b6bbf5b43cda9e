"""Compaction: neighbouring batches are put together into files of a sensible size, at the end of a run.

Which batches a file holds follows from the plan and `output.rows_per_file` alone, and so does its name. So whatever dies on
the way, and however many drivers are at it, no two files of `results/` ever hold the same row: a writer can only write a file
that is missing, or replace one by the same rows. That is why a file's size is set in rows: sizes in bytes are known when the
answers are there, and two drivers might see different ones.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

import pyarrow as pa
import pyarrow.parquet as pq

from pipelines.config import OutputConfig
from pipelines.errors import RunFailed
from pipelines.parts import ALL_STATISTICS, RESULTS, Parts, file_name, statistics_in
from pipelines.plan import Plan
from pipelines.schema import result_schema
from pipelines.storage import Folder

# What a reader must hold at once, and what it may leave out or read in parallel: 64 Ki rows of short answers have some MiB,
# of long ones, vectors or log probabilities the bytes are the limit.
_GROUP_ROWS = 2**16
_GROUP_BYTES = 32 * 2**20  # in memory, before encoding and compression


def files_of(plan: Plan, rows_per_file: int) -> list[list[int]]:
    """Cut the plan into files: neighbouring batches of no more than so many rows together, and any larger one alone."""
    files: list[list[int]] = []
    room = 0
    for batch_id, num_rows in zip(*(plan.batches[name].to_pylist() for name in ("batch_id", "num_rows")), strict=True):
        if num_rows > room or not files:
            files.append([])
            room = rows_per_file
        files[-1].append(batch_id)
        room -= num_rows
    return files


def compact(run: Folder, plan: Plan, output: OutputConfig) -> None:
    """Write each file of `results/` that is missing, or whose batches are not those of the parts any more.

    All batches must be committed. Raises RunFailed where something else is among the results.
    """
    assert output.rows_per_file is not None
    files = {file_name(ids[0], ids[-1]): ids for ids in files_of(plan, output.rows_per_file)}
    there = Parts(run, [RESULTS])
    if foreign := sorted({there.name(batch_id) for batch_id in there.batch_ids} - files.keys()):
        raise RunFailed(f"{len(foreign)} files are none of this run's, the first is {foreign[0]}; move them away")
    parts = Parts(run)
    for name, batch_ids in files.items():
        if not _is_up_to_date(there, parts, batch_ids):
            _write(run, name, parts.read(batch_ids), result_schema(plan.carried), output.compression)


def _is_up_to_date(there: Parts, parts: Parts, batch_ids: Sequence[int]) -> bool:
    """Whether a file holds the very commits that the parts hold: statistics say by whom and when."""
    if batch_ids[0] not in there:
        return False
    written, wanted = (list(chain.from_iterable(one.statistics(batch_ids))) for one in (there, parts))
    return written == wanted


def _write(run: Folder, name: str, batches: Iterable[pa.Table], schema: pa.Schema, compression: str) -> None:
    statistics = []
    with run.create(name) as file, pq.ParquetWriter(file, schema, compression=compression) as writer:

        def told() -> Iterator[pa.Table]:
            for rows in batches:
                statistics.append(statistics_in(rows))
                yield rows.replace_schema_metadata()

        for group in _groups(told()):
            # Only a batch that is too large for a group by itself is cut.
            most = len(group) * _GROUP_BYTES // max(1, group.nbytes)
            writer.write_table(group, row_group_size=max(1, min(_GROUP_ROWS, most)))
        writer.add_key_value_metadata({ALL_STATISTICS: json.dumps(statistics)})


def _groups(batches: Iterable[pa.Table]) -> Iterator[pa.Table]:
    """Neighbouring batches that fit into one row group; what is larger comes alone."""
    held: list[pa.Table] = []
    num_rows = num_bytes = 0
    for rows in batches:
        if held and (num_rows + len(rows) > _GROUP_ROWS or num_bytes + rows.nbytes > _GROUP_BYTES):
            yield pa.concat_tables(held)
            held, num_rows, num_bytes = [], 0, 0
        held.append(rows)
        num_rows += len(rows)
        num_bytes += rows.nbytes
    yield pa.concat_tables(held)
