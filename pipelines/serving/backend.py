"""What answers behind the endpoint, and who hears of what was answered: Ray Serve's replicas, or a stand-in for tests."""

from collections.abc import AsyncGenerator, Sequence
from typing import Protocol

from pipelines.serving.answering import Tally
from pipelines.serving.asking import Ask


class Backend(Protocol):
    """The replicas of a model."""

    def answer(self, ask: Ask, *, request_id: str, key: str) -> AsyncGenerator[Sequence[str], None]:
        """Yield JSON texts as they come, some at a time: one whole answer, or the pieces of a stream, or an error's body.

        Raises Full or Unavailable. Closing it cancels the generation.
        """

    async def num_ready(self) -> int:
        """How many replicas can answer now."""


class Observer(Protocol):
    """Hears of every request."""

    def refused(self, key: str, status: int) -> None:
        """A request was not answered, for that status."""

    def began(self, tally: Tally) -> None:
        """A request goes to a replica."""

    def answered(self, tally: Tally) -> None:
        """It is answered, or was given up."""
