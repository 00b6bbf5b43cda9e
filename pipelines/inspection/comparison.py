"""Compare the answers of two runs row by row, whatever their batches are."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from pipelines.inspection import WrittenRun, row_of

_ROWS_AT_ONCE = 4096  # of the first run, or one batch where that has more; of the second the batches that hold them
_ORDERED_ROWS_AT_ONCE = 2**16  # where these may be any
_PARTS_AT_ONCE = 256
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
    """Where the committed batches of one source begin, in order; where its rows were put into another order, each of them."""

    first_row: npt.NDArray[np.int64]
    batch_id: npt.NDArray[np.int64]

    def of_batches_with(self, rows: npt.NDArray[np.int64]) -> set[int]:
        """The batches that may hold some rows."""
        places = np.searchsorted(self.first_row, rows, side="right") - 1
        return set(np.unique(self.batch_id[places[places >= 0]]).tolist())


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

    Where both plans go through a source in its order, the other run's parts pass by once, and few are in memory. Where one
    does not, each may hold rows of any, so more rows are compared at a time, and the other's parts pass by seldom.
    """
    is_ordered = run.plan.is_ordered or other.plan.is_ordered
    kept: dict[int, pa.Table] = {}
    starts = _starts(other)
    for batch_ids in _groups(run, starts, _ORDERED_ROWS_AT_ONCE if is_ordered else _ROWS_AT_ONCE):
        before = pa.concat_tables(_read(run, batch_ids))
        needed = sorted(_overlapping(starts, before))
        for first in range(0, len(needed), _PARTS_AT_ONCE):
            some = needed[first : first + _PARTS_AT_ONCE]
            fresh = [batch_id for batch_id in some if batch_id not in kept]
            kept |= dict(zip(fresh, _read(other, fresh), strict=True))
            kept = {batch_id: kept[batch_id] for batch_id in some}
            yield _matched(before, pa.concat_tables(kept.values()))


def _starts(run: WrittenRun) -> dict[str, _Starts]:
    found = run.batches.select(["source", "first_row", "batch_id"])
    if run.plan.is_ordered:
        found = _places(run, found["batch_id"].to_pylist())
    return {
        source: _Starts(rows["first_row"].to_numpy(), rows["batch_id"].to_numpy())
        for source, rows in _by_source(found.sort_by("first_row"))
    }


def _places(run: WrittenRun, batch_ids: Sequence[int]) -> pa.Table:
    """Where each row of some parts comes from, as if it were a batch."""
    parts = zip(batch_ids, run.parts.read(batch_ids, _PLACE), strict=True)
    named = ((batch_id, part.replace_schema_metadata().rename_columns(["source", "first_row"])) for batch_id, part in parts)
    return pa.concat_tables(part.append_column("batch_id", pa.array(np.full(len(part), batch_id))) for batch_id, part in named)


def _groups(run: WrittenRun, starts: Mapping[str, _Starts], num_rows_at_once: int) -> Iterator[list[int]]:
    """The committed batches of the sources that both runs have, so many at a time that they hold enough rows."""
    group, num_rows = [], 0
    columns = (run.batches[name].to_pylist() for name in ("source", "batch_id", "num_rows"))
    for source, batch_id, size in zip(*columns, strict=True):
        if source not in starts and not run.plan.is_ordered:
            continue
        group.append(batch_id)
        num_rows += size
        if num_rows >= num_rows_at_once:
            yield group
            group, num_rows = [], 0
    if group:
        yield group


def _read(run: WrittenRun, batch_ids: Sequence[int]) -> Iterator[pa.Table]:
    return (part.replace_schema_metadata() for part in run.parts.read(batch_ids, ["id", *_PLACE, *_SHOWN]))


def _overlapping(starts: Mapping[str, _Starts], rows: pa.Table) -> set[int]:
    return {
        batch_id
        for source, some in _by_source(rows.select(_PLACE))
        if source in starts
        for batch_id in starts[source].of_batches_with(some["source_row"].to_numpy())
    }


def _by_source(rows: pa.Table) -> Iterator[tuple[str, pa.Table]]:
    """The rows of each source, in their order."""
    codes = rows["source"].combine_chunks().dictionary_encode()
    by_source = np.argsort(codes.indices.to_numpy(), kind="stable")
    sizes = np.bincount(codes.indices.to_numpy(), minlength=len(codes.dictionary))
    for source, start, size in zip(codes.dictionary.to_pylist(), np.cumsum(sizes) - sizes, sizes, strict=True):
        yield source, rows.take(by_source[start : start + size])


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
