"""The engine: one protocol, two engines, and a way to an endpoint's. Only the package `engines/vllm` imports vLLM."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

from pipelines.config import BatchConfig, Device, EchoEngineConfig
from pipelines.engines.fair_clock import FairClock
from pipelines.errors import EngineDead
from pipelines.rows import EngineWork, Outcome, Request


class Ticket:
    """A batch in an engine: resolved once when all of its requests have entered, and once when all are answered."""

    def __init__(self, prepared: Sequence[Any]):
        self.prepared = prepared
        self.admitted: Future[None] = Future()
        self.answered: Future[None] = Future()
        self._outcomes: dict[int, Callable[[], Outcome]] = {}
        # From here on nobody can cancel them: a batch that is given up must not look to the engine like a fault of its own.
        self.admitted.set_running_or_notify_cancel()
        self.answered.set_running_or_notify_cancel()
        if not prepared:
            self.admitted.set_result(None)
            self.answered.set_result(None)

    def settle(self, index: int, outcome: Callable[[], Outcome]) -> None:
        """Note one request's outcome; each comes once, and is made by whoever asks for it: parsing is not the engine's work."""
        self._outcomes[index] = outcome
        if len(self._outcomes) == len(self.prepared):
            self.answered.set_result(None)

    @property
    def num_left(self) -> int:
        """How many requests are not answered yet."""
        return len(self.prepared) - len(self._outcomes)

    def outcomes(self, timeout_s: float | None = None) -> list[Outcome]:
        """Wait for all outcomes, in the order of the requests; raises EngineDead."""
        self.answered.result(timeout_s)
        return [self._outcomes[index]() for index in range(len(self.prepared))]

    def fail(self, death: EngineDead) -> None:
        """Give the batch up."""
        for future in (self.admitted, self.answered):
            if not future.done():
                future.set_exception(death)


class Engine(Protocol):
    """Answers requests of several batches together; used from several threads."""

    @property
    def special_tokens(self) -> Sequence[str]:
        """The texts that the tokenizer takes for more than text."""

    def prepare(self, request: Request) -> Any:
        """Render, tokenise and check a request ahead of time, in one thread; raises RowError."""

    def submit(self, prepared: Sequence[Any]) -> Ticket:
        """Take the prepared requests of a batch."""

    @property
    def clock(self) -> FairClock:
        """The time that its requests share."""

    def work(self) -> EngineWork:
        """What it has done so far."""

    def num_steps(self) -> int:
        """How often the engine has moved on so far: where this stands still while it holds requests, it hangs."""

    def describe(self) -> dict[str, Any]:
        """What the engine resolved its options to, for the record."""


def build_engine(
    config: BatchConfig, folder: str, *, revision: str | None, device: Device, exports_metrics: bool = False
) -> Engine:
    """Load the configured engine with the model in a folder, or at a revision of the hub; vLLM can export metrics through Ray.

    Raises ConfigError where its options are refused.
    """
    if config.endpoint is not None:
        from pipelines.engines.served import ServedEngine

        return ServedEngine(config, config.endpoint)
    if isinstance(config.engine, EchoEngineConfig):
        from pipelines.engines.echo import EchoEngine

        return EchoEngine(config.engine, config.prompt)
    # Importing vLLM takes tens of seconds, so only a process that runs it pays for it.
    from pipelines.engines.vllm.engine import VllmEngine

    return VllmEngine(config, folder=folder, revision=revision, device=device, exports_metrics=exports_metrics)
