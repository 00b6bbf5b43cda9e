"""The live line: rows, tokens per second, cost so far, time left, failures; a plain line now and then without a terminal."""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as Bar

from pipelines.board import Board, BoardLost
from pipelines.config import BatchConfig
from pipelines.meter import Meter

_POLL_S = 0.5
_WINDOW_S = 60.0  # the speed shown is that of the last minute, or of the last batch where that took longer

logger = logging.getLogger(__name__)


class Progress:
    """How far a run is, and how fast it goes in this attempt."""

    def __init__(self, total_rows: int, done_rows: int, meter: Meter, failed_before: Callable[[], int]):
        self.total_rows = total_rows
        self.done_rows = done_rows
        self.num_failed = 0
        """In this attempt; what is shown counts those of earlier ones, too."""
        self._failed_before = failed_before
        self._num_tokens = self._num_workers = 0
        self._is_loading = True
        self.meter = meter
        self._first_rows = done_rows
        self._moves: deque[tuple[float, int, int]] = deque([(time.perf_counter(), done_rows, 0)])
        """When loading ended or batches came in, and the rows and tokens done until then: those of the last minute and the one
        before, at least two, so that a batch that takes ten minutes counts as one in ten minutes."""

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
        self._is_loading = totals["num_ready"] == 0
        if self._is_loading:  # which does not count towards the speed
            self._moves.clear()
        if self._is_loading or self.done_rows > self._moves[-1][1]:
            self._moves.append((now, self.done_rows, self._num_tokens))
        while len(self._moves) > 2 and now - self._moves[1][0] > _WINDOW_S:
            self._moves.popleft()

    def numbers(self) -> dict[str, float | None]:
        """What metrics show of the run (`metrics.OF_RUN`)."""
        return {
            "planned_rows": self.total_rows,
            "done_rows": self.done_rows,
            "failed_rows": self.num_failed + self._failed_before(),
            "workers": self._num_workers,
            "cost": self.meter.cost,
            "left_seconds": self.left_s(),
        }

    def left_s(self) -> float | None:
        """How long the rest takes at the present speed; None where no batch has come in yet."""
        start, rows, _ = self._moves[0]
        done_rows = self.done_rows - rows
        return self.num_left * (time.perf_counter() - start) / done_rows if done_rows else None

    def describe(self) -> str:
        """One line: rows, tokens per second, cost so far, time left, failures."""
        now = time.perf_counter()
        start, _, tokens = self._moves[0]
        tokens_per_s = (self._num_tokens - tokens) / max(now - start, 1e-9)
        left_s = self.left_s()
        if left_s is None:
            left = "loading" if self._is_loading else "no batch yet"
        else:
            left = f"{_duration(left_s)} left"
            if now - self._moves[-1][0] > _WINDOW_S:
                left = f"no batch for a minute, {left}"
        return (
            f"{self.done_rows:,} / {self.total_rows:,} rows · {tokens_per_s:,.1f} output tokens/s · "
            f"{self.meter.cost:.4f} {self.meter.currency} · {left} · {self.num_failed + self._failed_before():,} failed"
        )


@contextmanager
def show_progress(
    config: BatchConfig, board: Board, progress: Progress, told: Callable[[Mapping[str, float | None]], None]
) -> Iterator[None]:
    """Show during the block what the workers report to the board; the progress follows, and whoever is told its numbers."""
    done = threading.Event()
    show = _show_live if Console(stderr=True).is_terminal else _show_lines
    thread = threading.Thread(
        target=show, args=(config, progress, _fetch(progress, board, told, done)), name="progress", daemon=True
    )
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _show_live(config: BatchConfig, progress: Progress, fetched: Iterator[bool]) -> None:
    columns = (TextColumn("{task.percentage:>3.0f}%"), BarColumn(), TextColumn("{task.description}"))
    with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=progress.total_rows)
        for _ in fetched:
            bar.update(task, completed=progress.done_rows, description=progress.describe())


def _show_lines(config: BatchConfig, progress: Progress, fetched: Iterator[bool]) -> None:
    last = time.perf_counter()
    for is_last in fetched:
        if is_last or time.perf_counter() - last >= config.progress_interval_s:
            last = time.perf_counter()
            logger.info("%s", progress.describe())


def _fetch(
    progress: Progress, board: Board, told: Callable[[Mapping[str, float | None]], None], done: threading.Event
) -> Iterator[bool]:
    """Fetch what was committed, twice a second and once more at the end; yields whether that was the end."""
    while True:
        is_last = done.wait(_POLL_S)
        try:
            progress.update(board.totals())
            told(progress.numbers())
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
