"""Compare the answers of two runs row by row, whatever their batches are."""

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pipelines.inspection import WrittenRun, row_of
from pipelines.parts import part_name

_ROWS_AT_ONCE = 4096  # of the first run, or one batch where that has more; of the second the batches that hold them
_THREADS = 16
_PLACE = ["source", "source_row"]
_TEXTS = ["text", "tool_calls", "parsed"]
_SHOWN = ["status", *_TEXTS, "embedding", "error_kind", "error_message"]

Change = Literal["ok_to_failed", "failed_to_ok", "different"]


@dataclass(frozen=True, slots=True)
class Difference:
    """A row that came out differently; of both sides the values that are not null."""

    change: Change
    id: str | None
    source: str
    source_row: int
    line: int | None
    before: dict[str, Any]
    after: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Comparison:
    """What became of the rows from the first run to the second.

    `num_both` = `num_same` + `num_different` + `num_ok_to_failed` + `num_failed_to_ok` + `num_both_failed`.
    """

    run: str
    other: str
    num_both: int
    num_only_run: int
    num_only_other: int
    num_same: int
    num_different: int
    num_ok_to_failed: int
    num_failed_to_ok: int
    num_both_failed: int
    examples: tuple[Difference, ...]
    """The first ones of each change."""


@dataclass(frozen=True, slots=True)
class _Starts:
    """Where the committed batches of one source begin, in order."""

    first_row: list[int]
    batch_id: list[int]

    def of_batches_with(self, first: int, last: int) -> list[int]:
        """The batches that may hold rows from `first` to `last`."""
        begin = max(0, bisect_right(self.first_row, first) - 1)
        return self.batch_id[begin : bisect_right(self.first_row, last)]


def compare(run: WrittenRun, other: WrittenRun, *, limit: int) -> Comparison:
    """Compare what came of the rows that have the same place in the input; up to `limit` examples of each change."""
    counts: Counter[str] = Counter()
    examples: dict[Change, list[Difference]] = {change: [] for change in get_args(Change)}
    for before, after in _pairs(run, other):
        outcomes = _outcomes(before, after)
        counts.update({outcome: int(np.count_nonzero(rows)) for outcome, rows in outcomes.items()})
        for change, found in examples.items():
            for row in np.flatnonzero(outcomes[change])[: limit - len(found)].tolist():
                found.append(_difference(run, change, before.slice(row, 1), after.slice(row, 1)))
    num_both = counts.total()
    return Comparison(
        run=run.folder.url,
        other=other.folder.url,
        num_both=num_both,
        num_only_run=_num_rows(run) - num_both,
        num_only_other=_num_rows(other) - num_both,
        num_same=counts["same"],
        num_different=counts["different"],
        num_ok_to_failed=counts["ok_to_failed"],
        num_failed_to_ok=counts["failed_to_ok"],
        num_both_failed=counts["both_failed"],
        examples=tuple(one for found in examples.values() for one in found),
    )


def _pairs(run: WrittenRun, other: WrittenRun) -> Iterator[tuple[pa.Table, pa.Table]]:
    """The rows that both runs have, side by side, some at a time.

    Both plans go through a source in its order, so the other run's parts pass by once, and few are in memory.
    """
    starts = _starts(other)
    kept: dict[int, pa.Table] = {}
    with ThreadPoolExecutor(_THREADS) as pool:
        for batch_ids in _groups(run, starts):
            before = list(pool.map(lambda batch_id: _read(run, batch_id), batch_ids))
            needed = sorted({batch_id for part in before for batch_id in _overlapping(starts, part)})
            fresh = [batch_id for batch_id in needed if batch_id not in kept]
            kept |= dict(zip(fresh, pool.map(lambda batch_id: _read(other, batch_id), fresh), strict=True))
            kept = {batch_id: kept[batch_id] for batch_id in needed}
            if kept:
                yield _matched(pa.concat_tables(before), pa.concat_tables(kept.values()))


def _starts(run: WrittenRun) -> dict[str, _Starts]:
    lists = [("first_row", "list"), ("batch_id", "list")]
    sources = run.batches.group_by("source", use_threads=False).aggregate(lists).to_pylist()  # threads would mix the order
    return {line["source"]: _Starts(line["first_row_list"], line["batch_id_list"]) for line in sources}


def _groups(run: WrittenRun, starts: Mapping[str, _Starts]) -> Iterator[list[int]]:
    """The committed batches of the sources that both runs have, so many at a time that they hold enough rows."""
    group, num_rows = [], 0
    columns = (run.batches[name].to_pylist() for name in ("source", "batch_id", "num_rows"))
    for source, batch_id, size in zip(*columns, strict=True):
        if source not in starts:
            continue
        group.append(batch_id)
        num_rows += size
        if num_rows >= _ROWS_AT_ONCE:
            yield group
            group, num_rows = [], 0
    if group:
        yield group


def _read(run: WrittenRun, batch_id: int) -> pa.Table:
    path = run.folder.path(part_name(batch_id))
    return pq.read_table(path, columns=["id", *_PLACE, *_SHOWN], filesystem=run.folder.arrow, partitioning=None)


def _overlapping(starts: Mapping[str, _Starts], part: pa.Table) -> list[int]:
    rows = part["source_row"]
    return starts[part["source"][0].as_py()].of_batches_with(rows[0].as_py(), rows[-1].as_py())


def _matched(before: pa.Table, after: pa.Table) -> tuple[pa.Table, pa.Table]:
    """The rows with the same place, in the order of the first table."""
    places = [table.select(_PLACE).append_column("at", pa.array(np.arange(len(table)))) for table in (before, after)]
    both = places[0].join(places[1], _PLACE, join_type="inner", right_suffix="_after").sort_by("at")
    return before.take(both["at"]), after.take(both["at_after"])


def _outcomes(before: pa.Table, after: pa.Table) -> dict[str, npt.NDArray[np.bool_]]:
    was_ok, is_ok = (pc.equal(table["status"], "ok").to_numpy() for table in (before, after))
    same = pc.equal(_as_bytes(before["embedding"]), _as_bytes(after["embedding"])).to_numpy(zero_copy_only=False)
    for name in _TEXTS:
        same &= pc.equal(before[name].fill_null(""), after[name].fill_null("")).to_numpy()
    return {
        "same": was_ok & is_ok & same,
        "different": was_ok & is_ok & ~same,
        "ok_to_failed": was_ok & ~is_ok,
        "failed_to_ok": ~was_ok & is_ok,
        "both_failed": ~was_ok & ~is_ok,
    }


def _as_bytes(vectors: pa.ChunkedArray) -> pa.Array:
    """Lists of float32 as their bytes: Arrow does not compare lists."""
    lists = vectors.combine_chunks()
    offsets = pa.py_buffer(lists.offsets.to_numpy().astype(np.int64) * 4)
    return pa.Array.from_buffers(pa.large_binary(), len(lists), [None, offsets, lists.values.buffers()[1]])


def _difference(run: WrittenRun, change: Change, before: pa.Table, after: pa.Table) -> Difference:
    row = row_of(before, 0)
    return Difference(
        change=change,
        id=row.get("id"),
        source=row["source"],
        source_row=row["source_row"],
        line=run.line_of(row["source"], row["source_row"]),
        before=row_of(before.select(_SHOWN), 0),
        after=row_of(after.select(_SHOWN), 0),
    )


def _num_rows(run: WrittenRun) -> int:
    return pc.sum(run.batches["num_rows"]).as_py() or 0
