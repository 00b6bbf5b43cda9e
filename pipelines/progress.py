"""The live line: rows, tokens per second, cost so far, time left, failures; a plain line now and then without a terminal."""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from pipelines.board import Board, BoardLost
from pipelines.config import BatchConfig
from pipelines.meter import Meter

_POLL_S = 0.5
_WINDOW_S = 60.0  # the rate shown is that of the last minute

logger = logging.getLogger(__name__)


class Pace:
    """What has been done in this attempt, and how fast."""

    def __init__(self, total_rows: int, done_rows: int, meter: Meter):
        self.total_rows = total_rows
        self.done_rows = done_rows
        self.num_failed = 0
        self._num_tokens = self._num_workers = 0
        self.meter = meter
        self._first_rows = done_rows
        self._recent: deque[tuple[float, int, int]] = deque([(time.perf_counter(), done_rows, 0)])

    @property
    def num_left(self) -> int:
        """Rows that are still to do."""
        return self.total_rows - self.done_rows

    def update(self, totals: Mapping[str, float]) -> None:
        """Take the board's sums."""
        self.meter.update(totals)
        self.done_rows = self._first_rows + int(totals["num_rows"])
        self.num_failed, self._num_tokens = int(totals["num_failed"]), int(totals["num_output_tokens"])
        self._num_workers = int(totals["num_workers"])
        now = time.perf_counter()
        if totals["num_rows"] == 0:  # loading does not count towards the speed
            self._recent.clear()
        self._recent.append((now, self.done_rows, self._num_tokens))
        while now - self._recent[0][0] > _WINDOW_S:
            self._recent.popleft()

    def numbers(self) -> dict[str, float | None]:
        """What metrics show of the run (`metrics.OF_RUN`)."""
        return {
            "planned_rows": self.total_rows,
            "done_rows": self.done_rows,
            "failed_rows": self.num_failed,
            "workers": self._num_workers,
            "cost": self.meter.cost,
            "left_seconds": self.left_s(),
        }

    def left_s(self) -> float | None:
        """How long the rest takes at the speed of the last minute; None where nothing was done in it."""
        start, rows, _ = self._recent[0]
        done_rows = self.done_rows - rows
        return self.num_left * (time.perf_counter() - start) / done_rows if done_rows else None

    def describe(self) -> str:
        """One line: rows, tokens per second, cost so far, time left, failures."""
        start, _, tokens = self._recent[0]
        span_s = max(time.perf_counter() - start, 1e-9)
        left_s = self.left_s()
        if left_s is not None:
            left = f"{_duration(left_s)} left"
        else:
            left = "loading" if self.done_rows == self._first_rows else "no batch for a minute"
        return (
            f"{self.done_rows:,} / {self.total_rows:,} rows · {(self._num_tokens - tokens) / span_s:,.1f} output tokens/s · "
            f"{self.meter.cost:.4f} {self.meter.currency} · {left} · {self.num_failed:,} failed"
        )


@contextmanager
def progress(
    config: BatchConfig, board: Board, pace: Pace, told: Callable[[Mapping[str, float | None]], None]
) -> Iterator[None]:
    """Show during the block what the workers report to the board; the pace follows, and whoever is told its numbers."""
    done = threading.Event()
    show = _show_live if Console(stderr=True).is_terminal else _show_lines
    thread = threading.Thread(target=show, args=(config, pace, _fetch(pace, board, told, done)), name="progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _show_live(config: BatchConfig, pace: Pace, fetched: Iterator[bool]) -> None:
    columns = (TextColumn("{task.percentage:>3.0f}%"), BarColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=pace.total_rows)
        for _ in fetched:
            bar.update(task, completed=pace.done_rows, description=pace.describe())


def _show_lines(config: BatchConfig, pace: Pace, fetched: Iterator[bool]) -> None:
    last = time.perf_counter()
    for is_last in fetched:
        if is_last or time.perf_counter() - last >= config.progress_interval_s:
            last = time.perf_counter()
            logger.info("%s", pace.describe())


def _fetch(
    pace: Pace, board: Board, told: Callable[[Mapping[str, float | None]], None], done: threading.Event
) -> Iterator[bool]:
    """Fetch what was committed, twice a second and once more at the end; yields whether that was the end."""
    while True:
        is_last = done.wait(_POLL_S)
        try:
            pace.update(board.totals())
            told(pace.numbers())
        except TimeoutError:
            logger.debug("the board did not answer in time")
        except BoardLost:
            logger.warning("progress is not known any more: Ray has lost the process that counts it")
            return
        yield is_last
        if is_last:
            return


def _duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"
