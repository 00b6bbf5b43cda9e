"""What a pilot or an earlier run tells of the job's pace, and what that makes of all rows.

A worker's life has a part that grows with the rows, and one that does not: loading, the first and the last moments, when its
engine runs out of rows. The first is measured from a worker's first request to its last start of one, in which its engine is
as full as it ever was. The job is then so many workers' fixed parts, and all rows at the steady pace.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from pipelines.intervals import LEVEL, Interval, drift_of, mean_of_places, mean_of_rows
from pipelines.ledger import wall_s_of
from pipelines.totals import Summary

Numbers = npt.NDArray[np.float64]

_STEADY_SHARE = 1 / 3  # of a pilot's rows answered before the last one starts: as soon as it has two for each place
_SLICES = 5  # long ones: a request is in several, so that short ones look more alike than they are
_ENDS = 200
_DRIFT = 0.1  # of the same machine from one run to the next, at least; 0.02 to 0.12 was seen on one that others use, too
_OTHER_DAY_DRIFT = 0.15  # of another day's
_FIXED_DRIFT = 0.25  # of loading: caches, the network, what else a machine does


@dataclass(frozen=True, slots=True)
class Pilot:
    """What a run over some of the rows left behind."""

    rows: pa.Table
    """Those of its parts, in the order of its batches."""
    places: npt.NDArray[np.int64]
    """The place in the input that each comes from (`sample.Sample`)."""
    num_places: int
    """Of the whole input."""
    batches: pa.Table
    workers: pa.Table
    max_num_seqs: int | None


@dataclass(frozen=True, slots=True)
class Pace:
    """The seconds of workers, taken apart; errors are halves of 90 % intervals, relative to what they are errors of."""

    num_accelerators: int
    fixed_s: float
    """Of each worker: what does not grow with the rows."""
    row_s: float
    """Of a worker's time, for each row."""
    tail_rows: float
    """For each worker, the rows that are in `fixed_s`: answered while its engine ran empty."""
    stagger_s: float
    """How much longer than the mean worker's life it took from the first start to the last end."""
    output_tokens: Interval
    """For each row, whatever became of it."""
    rows_error: float
    """That the rows are others: their prompts and answers are longer or shorter."""
    drift: float
    """That the machine is faster or slower."""
    end_error_s: float
    """That the last answers of each worker take longer or shorter, in seconds."""
    concurrency: float | None
    """How many requests an engine ran at once; None where no answer tells."""
    max_num_seqs: int | None
    is_steady: bool
    """Whether more rows would not have been answered faster."""

    def seconds(self, num_rows: int, num_workers: int) -> Interval:
        """The lifetimes of so many workers that answer so many rows, summed up."""
        fixed_s, rows_s = self._parts(num_rows, num_workers)
        total_s, fastest_s = fixed_s + rows_s, fixed_s + rows_s * self._gain(num_rows, num_workers)
        error_s = total_s * math.hypot(*self.sources(num_rows, num_workers).values())
        return Interval(value=total_s, low=max(0.0, fastest_s - error_s), high=total_s + error_s)

    def sources(self, num_rows: int, num_workers: int) -> dict[str, float]:
        """What makes the seconds uncertain, and by how much, relative to them; the sources are independent of each other."""
        fixed_s, rows_s = self._parts(num_rows, num_workers)
        total_s = fixed_s + rows_s
        errors = {
            "which rows": self.rows_error * rows_s,
            "the machines' pace": self.drift * rows_s,
            "loading": _FIXED_DRIFT * fixed_s,
            "the last answers": self.end_error_s * math.sqrt(num_workers),
        }
        return {name: error / total_s for name, error in errors.items()}

    def _parts(self, num_rows: int, num_workers: int) -> tuple[float, float]:
        rows_s = max(0.0, num_rows - self.tail_rows * num_workers) * self.row_s
        return self.fixed_s * num_workers, rows_s

    def _gain(self, num_rows: int, num_workers: int) -> float:
        """What is left of a row's time in a full engine, at best; 1 where the engine was as full as it gets."""
        if self.is_steady or not self.concurrency:
            return 1.0
        most = min(self.max_num_seqs or math.inf, num_rows / num_workers)
        return min(1.0, self.concurrency / most)


def pace_of_run(summary: Summary, batches: pa.Table, workers: pa.Table) -> Pace | None:
    """The pace of a finished run, from its statistics; None where it answered nothing."""
    if not summary.num_ok:
        return None
    sizes = batches["num_rows"].to_numpy()
    engine_s = pc.add(batches["prefill_s"], batches["decode_s"]).to_numpy()
    return Pace(
        num_accelerators=workers["num_accelerators"][0].as_py(),
        fixed_s=summary.loading_s / summary.num_workers,
        row_s=(summary.worker_s - summary.loading_s) / summary.num_rows,
        tail_rows=0.0,
        stagger_s=0.0,
        output_tokens=mean_of_places(batches["num_output_tokens"].to_numpy(), sizes, math.inf),
        rows_error=mean_of_places(engine_s, sizes, math.inf).relative_error,
        drift=_OTHER_DAY_DRIFT,
        end_error_s=0.0,
        concurrency=summary.engine_use.mean_running_requests,
        max_num_seqs=summary.engine_use.max_num_seqs,
        is_steady=True,
    )


def pace_of_pilot(pilot: Pilot) -> Pace | None:
    """The pace of a pilot, from its rows, batches and workers; None where the model answered none of its rows."""
    requests = _requests_of(pilot)
    all_work = sum(float(one.work.sum()) for one in requests)
    if not all_work:
        return None
    num_rows = len(pilot.rows)
    until = [float(one.starts.max()) for one in requests]
    # By work and not by rows: those that still run are the long ones.
    share_done = _sum(requests, until, _Requests.work_by) / all_work
    is_steady = share_done >= _STEADY_SHARE
    if not is_steady:
        until, share_done = [float(one.ends.max()) for one in requests], 1.0
    num_done = share_done * num_rows  # the rows that failed went along with the others
    window_s = _sum(requests, until, lambda one, moment: moment - one.first)
    request_s = _sum(requests, until, lambda one, moment: (one.done_by(moment) * one.lengths).sum())
    running = request_s / window_s if window_s else 0.0
    num_workers, worker_s = len(pilot.workers), pc.sum(pilot.workers["lifetime_s"]).as_py()
    output_tokens = mean_of_rows(_ok(pilot.rows) * _column(pilot.rows, "num_output_tokens"), pilot.places, pilot.num_places)
    work = mean_of_rows(_engine_s(pilot), pilot.places, pilot.num_places)
    assert output_tokens is not None and work is not None, "there are rows"
    return Pace(
        num_accelerators=pilot.workers["num_accelerators"][0].as_py(),
        fixed_s=max(0.0, worker_s - window_s) / num_workers,
        row_s=window_s / num_done,
        tail_rows=(num_rows - num_done) / num_workers,
        stagger_s=max(0.0, wall_s_of(pilot.workers) - worker_s / num_workers),
        output_tokens=output_tokens,
        rows_error=work.relative_error,
        drift=math.hypot(_DRIFT, drift_of(_speeds(requests, until))),
        end_error_s=_end_error_s(requests, running),
        concurrency=running or None,
        max_num_seqs=pilot.max_num_seqs,
        is_steady=is_steady,
    )


@dataclass(frozen=True, slots=True)
class _Requests:
    """When a worker's requests ran in its engine, in seconds, and how much of its time each is worth."""

    starts: Numbers
    ends: Numbers
    work: Numbers

    @property
    def first(self) -> float:
        return float(self.starts.min())

    @property
    def lengths(self) -> Numbers:
        lengths: Numbers = np.maximum(self.ends - self.starts, 1e-9)
        return lengths

    def done_by(self, moment: float) -> Numbers:
        """How much of each request is done by then, from 0 to 1."""
        done: Numbers = np.clip((moment - self.starts) / self.lengths, 0.0, 1.0)
        return done

    def work_by(self, moment: float) -> float:
        """How much of all work is done by then."""
        return float((self.done_by(moment) * self.work).sum())


def _requests_of(pilot: Pilot) -> list[_Requests]:
    """The requests of each worker, those that have times: what failed before or in the engine has none."""
    rows = pilot.rows
    arrived_s = rows["arrived_at"].cast(pa.int64()).cast(pa.float64()).to_numpy() / 1e6
    starts = arrived_s + rows["queue_s"].to_numpy()
    ends = arrived_s + rows["ttft_s"].to_numpy() + rows["generation_s"].to_numpy()
    work, is_timed = _engine_s(pilot), np.isfinite(ends)
    workers = np.repeat(pilot.batches["worker"].to_numpy(zero_copy_only=False), pilot.batches["num_rows"].to_numpy())
    mine = ((workers == worker) & is_timed for worker in np.unique(workers[is_timed]))
    return [_Requests(starts[one], ends[one], work[one]) for one in mine]


def _engine_s(pilot: Pilot) -> Numbers:
    """What each row took of the engines: its tokens' part of all prefill and of all decode."""
    parts = np.zeros(len(pilot.rows))
    cached = _column(pilot.rows, "num_cached_tokens")
    for name, tokens in {
        "prefill_s": _column(pilot.rows, "num_prompt_tokens") - cached,
        "decode_s": _column(pilot.rows, "num_output_tokens"),
    }.items():
        spent_s = pc.sum(pilot.batches[name]).as_py() or 0.0
        parts += spent_s * tokens / max(1.0, tokens.sum())
    return parts


def _speeds(requests: Sequence[_Requests], until: Sequence[float]) -> Numbers:
    """How much was done in each of some equally long slices of all workers' time."""
    done = np.zeros(_SLICES + 1)
    for one, moment in zip(requests, until, strict=True):
        done += [one.work_by(float(at)) for at in np.linspace(one.first, moment, _SLICES + 1)]
    return np.diff(done)


def _end_error_s(requests: Sequence[_Requests], running: float) -> float:
    """How far the longest of what still runs may differ between two ends: at any moment, the long ones are likely to run."""
    lengths, random = np.concatenate([one.lengths for one in requests]), np.random.default_rng(0)
    shape = (_ENDS, max(1, round(running)))
    lasts = (random.choice(lengths, shape, p=lengths / lengths.sum()) * random.random(shape)).max(axis=1)
    early, late = np.quantile(lasts, ((1 - LEVEL) / 2, (1 + LEVEL) / 2))
    return float(late - early) / 2 * math.sqrt(2)


def _column(rows: pa.Table, name: str) -> Numbers:
    """The numbers of all rows; 0 where a row was not answered."""
    return np.asarray(pc.fill_null(rows[name], 0).to_numpy(), np.float64)


def _ok(rows: pa.Table) -> Numbers:
    """1 for the rows whose tokens a run counts, else 0."""
    return np.asarray(pc.equal(rows["status"], "ok").to_numpy(), np.float64)


def _sum(requests: Sequence[_Requests], until: Sequence[float], of: Callable[[_Requests, float], float]) -> float:
    return float(sum(of(one, moment) for one, moment in zip(requests, until, strict=True)))
