"""Room for rows: how a worker bounds what it holds at each stage of their way."""

import asyncio


class Room:
    """Room for so many rows, and for a few batches however many rows they have. Used in one event loop, by one who waits."""

    def __init__(self, num_rows: int, num_batches: int):
        self._num_rows = num_rows
        self._num_batches = num_batches
        self._rows_taken = self._batches_taken = 0
        self._freed = asyncio.Event()
        self.is_waited_for = False

    async def enter(self, num_rows: int) -> None:
        """Take room for a batch of so many rows, as soon as there is."""
        self.is_waited_for = True
        while self._batches_taken >= self._num_batches and self._rows_taken + num_rows > self._num_rows:
            self._freed.clear()
            await self._freed.wait()
        self.is_waited_for = False
        self._batches_taken += 1
        self._rows_taken += num_rows

    def leave(self, num_rows: int) -> None:
        """Give the room for a batch back."""
        self._batches_taken -= 1
        self._rows_taken -= num_rows
        self._freed.set()
