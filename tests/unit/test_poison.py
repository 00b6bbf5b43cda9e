"""The hunt for a row that kills engines: from a crowd of batches to one row, and nobody else convicted."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelines.poison import Cell, Suspicions


def hunt(num_batches: int, num_rows: int, deadly: set[tuple[int, int]]) -> tuple[int, set[tuple[int, int]]]:
    """Play a worker that is started again whenever its engine dies; returns the deaths, and the rows it did not run."""
    deaths: list[list[Cell]] = []
    settled: set[int] = set()
    convicted: set[tuple[int, int]] = set()

    def dies(cells: list[Cell]) -> bool:
        if any(cell.batch_id == b and cell.first <= r < cell.first + cell.num_rows for cell in cells for b, r in deadly):
            deaths.append(cells)
            return True
        return False

    def live() -> bool:
        """One lifetime: the suspects alone, the others together; False where it ended before its time."""
        suspicions = Suspicions(deaths)
        pending = [batch for batch in range(num_batches) if batch not in settled]
        for batch in [batch for batch in pending if suspicions.num_deaths(batch)]:
            for cell in suspicions.cells(batch, num_rows):
                if suspicions.is_convicted(cell):
                    convicted.add((batch, cell.first))
                elif dies([cell]):
                    return False
            settled.add(batch)
        crowd = [Cell(batch, 0, num_rows) for batch in pending if not suspicions.num_deaths(batch)]
        if crowd and dies(crowd):
            return False
        settled.update(cell.batch_id for cell in crowd)
        return True

    while not live():
        assert len(deaths) < 100
    assert settled == set(range(num_batches))
    return len(deaths), convicted


@pytest.mark.parametrize(("num_rows", "num_deaths"), [(256, 5), (200, 5), (18, 5), (16, 4), (1, 3)])
def test_one_deadly_row_costs_a_handful_of_engines_and_is_the_only_one_convicted(num_rows: int, num_deaths: int) -> None:
    assert hunt(5, num_rows, {(3, num_rows - 1)}) == (num_deaths, {(3, num_rows - 1)})


@given(data=st.data(), num_batches=st.integers(1, 6), num_rows=st.integers(1, 300))
def test_exactly_the_deadly_rows_are_convicted_however_many_there_are(
    data: st.DataObject, num_batches: int, num_rows: int
) -> None:
    row = st.tuples(st.integers(0, num_batches - 1), st.integers(0, num_rows - 1))
    deadly = data.draw(st.sets(row, max_size=4))
    num_deaths, convicted = hunt(num_batches, num_rows, deadly)
    assert convicted == deadly
    assert num_deaths <= 6 * len(deadly)


def test_the_cells_of_a_batch_hold_each_of_its_rows_once() -> None:
    died = [[Cell(0, 0, 300)], [Cell(0, 19, 19)], [Cell(0, 19, 2)]]
    cells = Suspicions(died).cells(0, 300)
    assert sorted(row for cell in cells for row in range(cell.first, cell.first + cell.num_rows)) == list(range(300))


@pytest.mark.parametrize("num_deaths", [0, 1, 7])
def test_a_single_row_is_convicted_when_it_has_died_alone_twice_whatever_died_before(num_deaths: int) -> None:
    row, crowd = Cell(7, 0, 1), [Cell(7, 0, 1), Cell(8, 0, 1)]
    died = [crowd] * num_deaths
    assert not Suspicions([*died, [row]]).is_convicted(row)
    assert Suspicions([*died, [row], [row]]).is_convicted(row)


@given(st.integers(2, 300))
def test_kills_from_outside_that_strike_whatever_runs_first_convict_nobody(num_rows: int) -> None:
    deaths: list[list[Cell]] = []
    for _ in range(12):
        cells = Suspicions(deaths).cells(0, num_rows)
        assert not any(Suspicions(deaths).is_convicted(cell) for cell in cells)
        if all(Suspicions([*deaths, [cell]]).is_convicted(cell) for cell in cells):
            break  # each row of a small batch was killed alone once
        deaths.append([cells[0]])
