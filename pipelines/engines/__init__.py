"""The engine: one protocol, two engines. Only `engines/vllm.py` imports vLLM."""

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, Literal, Protocol

from pipelines.config import BatchConfig, EchoEngineConfig
from pipelines.rows import Outcome, Request


class Engine(Protocol):
    """Answers requests of several batches together; used from several threads."""

    max_num_seqs: int
    """Requests that run at once; a worker keeps about twice as many in the engine."""

    def prepare(self, request: Request) -> Any:
        """Render, tokenise and check a request ahead of time, in one thread; raises RowError."""

    def submit(self, prepared: Sequence[Any]) -> "Future[list[Outcome]]":
        """Take the prepared requests of a batch; the result has one outcome for each, in order, or raises EngineDead."""

    def busy_s(self) -> float:
        """Seconds so far in which at least one request was in the engine."""

    def describe(self) -> dict[str, Any]:
        """What the engine resolved its options to, for the record."""


def build_engine(config: BatchConfig, model_folder: str, device: Literal["cpu", "gpu"]) -> Engine:
    """Load the configured engine; raises ConfigError where its options are refused."""
    if isinstance(config.engine, EchoEngineConfig):
        from pipelines.engines.echo import EchoEngine

        return EchoEngine(config.engine, config.sampling)
    # Importing vLLM takes tens of seconds, so only a process that runs it pays for it.
    from pipelines.engines.vllm import VllmEngine

    return VllmEngine(
        config.engine,
        model=config.model,
        prompt=config.prompt,
        sampling=config.sampling,
        folder=model_folder,
        device=device,
    )
