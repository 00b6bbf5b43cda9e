"""Find the rows that kill engines, from what dead workers had in flight.

A worker notes down what is in its engine. When it dies, every batch in flight is suspect, and is from then on run alone.
What dies alone is cut into pieces, which are run alone in turn, until the piece is one row. A row that dies alone twice is
convicted: once may have any cause, such as a node that was taken away. What has died before runs after what has not, so that
a killer from outside, which strikes whatever runs, does not strike the same row again.
A batch of 256 rows needs five deaths for that (crowd, batch, sixteenth, row, row), and its other rows are answered.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

_PIECES = 16  # more would save deaths, fewer would save runs of single rows


class Cell(NamedTuple):
    """Neighbouring rows of a batch that run together."""

    batch_id: int
    first: int
    num_rows: int


class Suspicions:
    """What the dead have had in flight, each a list of cells."""

    def __init__(self, deaths: Iterable[Sequence[Cell]] = ()):
        deaths = list(deaths)
        self._num_deaths = Counter(batch_id for cells in deaths for batch_id in {cell.batch_id for cell in cells})
        self._died_alone = Counter(cells[0] for cells in deaths if len(cells) == 1)

    def num_deaths(self, batch_id: int) -> int:
        """How many engines died while they worked on a batch."""
        return self._num_deaths[batch_id]

    def cells(self, batch_id: int, num_rows: int) -> list[Cell]:
        """What to run of a batch, one cell after the other: what has died before comes last. See `is_convicted`."""
        return sorted(self._narrow(Cell(batch_id, 0, num_rows)), key=lambda cell: self._died_alone[cell])

    def is_convicted(self, cell: Cell) -> bool:
        """Whether a cell is one row that must not be run again."""
        return cell.num_rows == 1 and self._died_alone[cell] > 1

    def _narrow(self, cell: Cell) -> Iterator[Cell]:
        if cell.num_rows == 1 or cell not in self._died_alone:
            yield cell
            return
        size = -(-cell.num_rows // _PIECES)
        for first in range(cell.first, cell.first + cell.num_rows, size):
            yield from self._narrow(Cell(cell.batch_id, first, min(size, cell.first + cell.num_rows - first)))
