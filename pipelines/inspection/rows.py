"""What became of a run's rows: counts, failed rows, a sample, single rows."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import numpy as np
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pipelines.errors import ConfigError, ErrorKind, Flag, RunFailed
from pipelines.inspection import WrittenRun, row_of
from pipelines.plan import BadFile
from pipelines.suggest import did_you_mean

_TALLIED = ["batch_id", "num_ok", "num_failed", "error_kinds", "flags", "finish_reasons"]
_FAILED = ["id", "source", "source_row", "error_kind", "error_message", "text"]
_ANSWERED = ["id", "source", "source_row", "num_prompt_tokens", "num_output_tokens", "finish_reason", "text"]


@dataclass(frozen=True, slots=True)
class FailedRow:
    """A row that failed, and why."""

    id: str | None
    source: str
    source_row: int
    line: int | None
    error_kind: str
    error_message: str
    text: str | None
    """What the model answered, where it failed after that."""


@dataclass(frozen=True, slots=True)
class KindCount:
    """How many rows failed in one way."""

    error_kind: str
    num_rows: int
    share: float
    """Of the rows that were run."""
    examples: tuple[FailedRow, ...]


@dataclass(frozen=True, slots=True)
class Counts:
    """What became of the planned rows: `num_planned` = `num_ok` + `num_failed` + `num_not_run`."""

    run: str
    is_finished: bool
    num_planned: int
    num_ok: int
    num_failed: int
    num_not_run: int
    error_kinds: tuple[KindCount, ...]
    flags: dict[str, int]
    filtered_by: dict[str, int]
    finish_reasons: dict[str, int]
    bad_files: tuple[BadFile, ...]


@dataclass(frozen=True, slots=True)
class FailedRows:
    """The first rows that failed in one way, and how many there are."""

    error_kind: str
    num_rows: int
    error_kinds: dict[str, int]
    """All ways in which rows of this run failed."""
    rows: tuple[FailedRow, ...]


@dataclass(frozen=True, slots=True)
class AnsweredRow:
    """A row that is ok."""

    id: str | None
    source: str
    source_row: int
    num_prompt_tokens: int
    num_output_tokens: int
    finish_reason: str
    text: str


@dataclass(frozen=True, slots=True)
class FoundRows:
    """The first rows with certain ids, and how many there are; of each row the columns that are not null."""

    num_rows: int
    not_found: tuple[str, ...]
    rows: tuple[dict[str, Any], ...]


@dataclass(slots=True)
class _Tally:
    """What the parts say about their rows."""

    num_failed: int = 0
    oks: list[int] = field(default_factory=list)  # of each part
    error_kinds: Counter[str] = field(default_factory=Counter)
    flags: Counter[str] = field(default_factory=Counter)
    finish_reasons: Counter[str] = field(default_factory=Counter)
    failing: dict[str, list[int]] = field(default_factory=dict)  # the first batches with each kind of error
    filtered: list[int] = field(default_factory=list)  # all batches with filtered rows


def count(run: WrittenRun, *, num_examples: int = 3) -> Counts:
    """Count what became of the planned rows. Raises RunFailed where a part does not belong to the run."""
    tally = _tally(run, num_examples)
    num_ok = sum(tally.oks)
    num_run = num_ok + tally.num_failed
    kinds = [
        KindCount(kind, num_rows, num_rows / num_run, _failed(run, tally, kind, num_examples))
        for kind, num_rows in tally.error_kinds.most_common()
    ]
    return Counts(
        run=run.folder.url,
        is_finished=run.is_finished,
        num_planned=run.plan.num_rows,
        num_ok=num_ok,
        num_failed=tally.num_failed,
        num_not_run=run.plan.num_rows - num_run,
        error_kinds=tuple(kinds),
        flags=dict(tally.flags.most_common()),
        filtered_by=_count_filters(run, tally.filtered),
        finish_reasons=dict(tally.finish_reasons.most_common()),
        bad_files=run.plan.bad_files,
    )


def failed_rows(run: WrittenRun, kind: str, *, limit: int) -> FailedRows:
    """The first rows that failed with an error kind. Raises ConfigError for a kind that does not exist."""
    if kind not in list(ErrorKind):
        raise ConfigError(f"--kind={kind} is not an error kind{did_you_mean(kind, ErrorKind)}")
    tally = _tally(run, limit)
    kinds = dict(tally.error_kinds.most_common())
    return FailedRows(kind, kinds.get(kind, 0), kinds, _failed(run, tally, kind, limit))


def sample(run: WrittenRun, num_rows: int, *, seed: int) -> tuple[AnsweredRow, ...]:
    """Rows that are ok, drawn at random; from the same parts the same seed draws the same rows.

    Of the parts, only those of the drawn rows are read, and the others' footers where the run is not finished.
    """
    oks = np.array(_tally(run, 0).oks, np.int64)
    ends = np.cumsum(oks)
    total = int(oks.sum())
    drawn = np.array(sorted(Random(seed).sample(range(total), min(num_rows, total))), np.int64)
    parts = np.searchsorted(ends, drawn, side="right")
    rows: list[dict[str, Any]] = []
    for part in np.unique(parts).tolist():
        batch_id = run.batches["batch_id"][part].as_py()
        (ok,) = run.rows([batch_id], pc.field("status") == "ok", [*_ANSWERED, "status"])
        rows += ok.select(_ANSWERED).take(drawn[parts == part] - (ends - oks)[part]).to_pylist()
    return tuple(AnsweredRow(**row) for row in rows)


def rows_with_ids(run: WrittenRun, ids: Sequence[str], *, limit: int) -> FoundRows:
    """The first rows that have one of the ids; of the parts without one, only the ids are read."""
    wanted = pc.field("id").isin(list(ids))
    num_rows, found, batches = 0, set[str](), set[int]()
    for chunk in run.rows(run.batches["batch_id"].to_pylist(), wanted, ["id", "request_key"]):
        first = chunk.slice(0, max(0, limit - num_rows))
        batches.update(int(key.partition("-")[0]) for key in first["request_key"].to_pylist())
        found.update(chunk["id"].unique().to_pylist())
        num_rows += len(chunk)
    tables = run.first_rows(limit, sorted(batches), wanted)
    missing = tuple(one for one in dict.fromkeys(ids) if one not in found)
    return FoundRows(num_rows, missing, tuple(row_of(rows, index) for rows in tables for index in range(len(rows))))


def _tally(run: WrittenRun, num_batches: int) -> _Tally:
    """Add up what the parts say about their rows; of each kind of error note the first batches that have it."""
    tally = _Tally()
    for line in _from_table(run) if run.is_finished and run.has_all_parts else _from_footers(run):
        _add(tally, line, num_batches)
    return tally


def _from_table(run: WrittenRun) -> Iterator[dict[str, Any]]:
    """The statistics of a run that verified its parts: one file instead of all their footers."""
    table = pq.ParquetFile(run.folder.path("stats/batches.parquet"), filesystem=run.folder.arrow)
    for lines in table.iter_batches(columns=_TALLIED):
        yield from lines.to_pylist(maps_as_pydicts="strict")


def _from_footers(run: WrittenRun) -> Iterator[dict[str, Any]]:
    start = 0
    for lines in run.parts.statistics(run.batches["batch_id"].to_pylist()):
        for line, batch in zip(lines, run.batches.slice(start, len(lines)).to_pylist(), strict=True):
            if (line.get("fingerprint"), line["num_rows_written"]) != (run.fingerprint, batch["num_rows"]):
                name = run.parts.name(batch["batch_id"])
                raise RunFailed(f"{name} is no part of this run, or not as its plan says; delete it and resume the run")
            yield line
        start += len(lines)


def _add(tally: _Tally, line: dict[str, Any], num_batches: int) -> None:
    tally.oks.append(line["num_ok"])
    tally.num_failed += line["num_failed"]
    tally.error_kinds.update(line["error_kinds"])
    tally.flags.update(line["flags"])
    tally.finish_reasons.update(line["finish_reasons"])
    if Flag.FILTERED in line["flags"]:
        tally.filtered.append(line["batch_id"])
    for kind in line["error_kinds"]:
        batches = tally.failing.setdefault(kind, [])
        if len(batches) < num_batches:
            batches.append(line["batch_id"])


def _failed(run: WrittenRun, tally: _Tally, kind: str, limit: int) -> tuple[FailedRow, ...]:
    batches = tally.failing.get(kind)
    if not batches:
        return ()
    tables = run.first_rows(limit, batches, pc.field("error_kind") == kind, _FAILED)
    rows = (row for table in tables for row in table.to_pylist())
    return tuple(FailedRow(**row, line=run.line_of(row["source"], row["source_row"])) for row in rows)


def _count_filters(run: WrittenRun, batch_ids: Sequence[int]) -> dict[str, int]:
    names: Counter[str] = Counter()
    for chunk in run.rows(batch_ids, pc.field("filtered_by").is_valid(), ["filtered_by"]):
        names.update({one["values"]: one["counts"] for one in chunk["filtered_by"].value_counts().to_pylist()})
    return dict(names.most_common())
