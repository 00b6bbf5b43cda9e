"""A thread that owns vLLM's `LLMEngine`, adds requests as batches arrive, and steps it.

`vllm.LLM` works the same way and gets the same defaults (`UsageContext.LLM_CLASS`), so raw `LLM.generate` is the
yardstick. Requests of several batches run together: there is no barrier between batches.
"""

import queue
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from pipelines.config import BatchConfig, Device, VllmEngineConfig
from pipelines.engines import Ticket
from pipelines.engines.fair_clock import FairClock, Share
from pipelines.engines.vllm.answers import AnswerParser, answer_of, embedding_of
from pipelines.engines.vllm.requests import Prepared, Requests, longest_first, row_error
from pipelines.engines.vllm.step_counts import StepCounts
from pipelines.engines.vllm.turns import Turns
from pipelines.errors import ConfigError, EngineDead, ErrorKind, RowError
from pipelines.rows import EngineTime, EngineWork, Request

_CPU_OPTIONS = {
    "enforce_eager": True,  # compiling takes minutes on CPUs and gains nothing for short runs
    "distributed_executor_backend": "uni",  # the engine in our own process: one import of vLLM instead of three
}

_WATCH_S = 1.0


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A request in the engine."""

    ticket: Ticket
    index: int
    request: Prepared
    shares: list[Share]
    """One for each of the answers that it asks for."""
    arrived_at_s: float


class VllmEngine:
    """One replica of the model. Raises ConfigError where vLLM refuses the options."""

    def __init__(
        self, config: BatchConfig, *, folder: str, revision: str | None, device: Device, exports_metrics: bool = False
    ):
        assert isinstance(config.engine, VllmEngineConfig)
        model = config.model
        self._options = {
            "use_tqdm_on_load": False,  # a progress bar in each of many workers' logs
            **(_CPU_OPTIONS if device == "cpu" else {}),
            "dtype": model.dtype,
            "max_model_len": model.max_model_len,
            "trust_remote_code": model.trust_remote_code,
            "revision": revision,
            "reasoning_parser": model.reasoning_parser or "",
            "served_model_name": model.name,  # in vLLM's metrics
            "enable_mfu_metrics": True,  # operations and bytes of every step, for the roofline
            **config.engine_kwargs,
            "model": folder,
            "disable_log_stats": False,
        }
        self._config = config
        self._turns = Turns()
        self._counts = StepCounts()
        self._exports_metrics = exports_metrics
        self._inbox: queue.SimpleQueue[Ticket] = queue.SimpleQueue()
        self._waiting: dict[str, _Waiting] = {}
        self._entering: tuple[Ticket, Iterator[tuple[int, Prepared]]] | None = None
        self._num_requests = 0
        self._num_steps = 0
        self._death: EngineDead | None = None
        ready: Future[None] = Future()
        threading.Thread(target=self._run, args=(ready,), name="vllm-engine", daemon=True).start()
        ready.result()

    @property
    def special_tokens(self) -> Sequence[str]:
        """The texts that the tokenizer takes for more than text."""
        tokenizer: Any = self._engine.get_tokenizer()
        added = getattr(tokenizer, "added_tokens_decoder", {}).values()
        return sorted({*tokenizer.all_special_tokens, *(str(token) for token in added if token.special)})

    def prepare(self, request: Request) -> Prepared:
        """Apply the chat template, tokenise and verify; raises RowError."""
        return self._requests.prepare(request)

    def submit(self, prepared: Sequence[Any]) -> Ticket:
        """Queue a batch; its requests enter the engine as others leave it."""
        ticket = Ticket(prepared)
        if prepared:
            self._inbox.put(ticket)
        if self._death is not None:  # nobody reads the inbox any more
            self._fail_inbox(self._death)
        return ticket

    @property
    def clock(self) -> FairClock:
        """The time that requests share."""
        return self._turns.clock

    def work(self) -> EngineWork:
        """What vLLM says that it has done so far."""
        return self._counts.work

    def num_steps(self) -> int:
        """How often vLLM was asked for its next tokens."""
        return self._num_steps

    def describe(self) -> dict[str, Any]:
        """What vLLM resolved its options to."""
        config = self._engine.vllm_config
        return {
            "max_num_seqs": self._max_num_seqs,
            "max_num_batched_tokens": config.scheduler_config.max_num_batched_tokens,
            "max_model_len": config.model_config.max_model_len,
            "dtype": str(config.model_config.dtype).removeprefix("torch."),
            "kv_cache_tokens": (config.cache_config.num_gpu_blocks or 0) * config.cache_config.block_size or None,
            "quantization": config.model_config.quantization,
            "enable_prefix_caching": config.cache_config.enable_prefix_caching,
            "tensor_parallel_size": config.parallel_config.tensor_parallel_size,
            "pipeline_parallel_size": config.parallel_config.pipeline_parallel_size,
        }

    def _run(self, ready: "Future[None]") -> None:
        """The thread's life: build the engine, then admit and step until it dies."""
        try:
            self._build()
        except BaseException as error:  # noqa: BLE001 - raised again in the thread that waits for the engine
            ready.set_exception(error)
            return
        ready.set_result(None)
        if hasattr(self._engine.engine_core, "outputs_queue"):
            threading.Thread(target=self._watch_process, name="vllm-watch", daemon=True).start()
        try:
            while True:
                self._admit()
                self._step()
        except BaseException as error:  # noqa: BLE001 - raised again in every thread that waits for an answer
            self._death = EngineDead(f"vLLM's engine died: {type(error).__name__}: {error}")
            for ticket in [one.ticket for one in self._waiting.values()] + ([self._entering[0]] if self._entering else []):
                ticket.fail(self._death)
            self._fail_inbox(self._death)

    def _step(self) -> None:
        self._num_steps += 1
        self._counts.begin()
        finished = [output for output in self._engine.step() if output.finished]
        self._turns.stepped(
            num_running=self._counts.num_running,
            num_first_tokens=self._counts.num_first_tokens,
            finished=[share for output in finished for share in self._waiting[output.request_id].shares],
        )
        for output in finished:
            self._finish(output)

    def _watch_process(self) -> None:
        """Wake the engine's thread when the engine's process has been killed: vLLM 0.29 notes it, but waits for its answers."""
        from vllm.v1.engine.exceptions import EngineDeadError

        core = self._engine.engine_core
        while not core.resources.engine_dead:
            time.sleep(_WATCH_S)
        core.outputs_queue.put(EngineDeadError())

    def _build(self) -> None:
        from vllm.engine.arg_utils import EngineArgs
        from vllm.usage.usage_lib import UsageContext
        from vllm.v1.engine.llm_engine import LLMEngine

        try:
            config = EngineArgs(**self._options).create_engine_config(UsageContext.LLM_CLASS)
            self._engine = LLMEngine.from_vllm_config(
                config, usage_context=UsageContext.LLM_CLASS, stat_loggers=self._stat_loggers()
            )
        except (ValueError, TypeError, OSError) as error:  # a model length that does not fit the KV cache is found last
            raise ConfigError(f"vLLM refuses the options: {error}; see model.* and engine.*") from None
        self._max_num_seqs = config.scheduler_config.max_num_seqs
        parser = AnswerParser.of(self._config.model, self._engine.get_tokenizer())
        self._requests = Requests(self._engine, self._config.prompt, self._config.sampling, parser)

    def _stat_loggers(self) -> list[Any]:
        """Who hears of each step: our counts, and Ray's metrics in the place of vLLM's own."""
        if not self._exports_metrics:
            return [lambda *_: self._counts]
        from pipelines.engines.vllm.ray_metrics import StepMetrics

        return [lambda *_: self._counts, StepMetrics]

    def _admit(self) -> None:
        """Move requests into the engine until it holds twice what it can run; wait only while it holds none."""
        while len(self._waiting) < 2 * self._max_num_seqs:
            if self._entering is None:
                try:
                    ticket = self._inbox.get(block=not self._waiting)
                except queue.Empty:
                    return
                self._entering = ticket, iter(longest_first(ticket.prepared))
            ticket, requests = self._entering
            request = next(requests, None)
            if request is None:
                self._entering = None
                ticket.admitted.set_result(None)
            else:
                self._add(ticket, *request)

    def _add(self, ticket: Ticket, index: int, request: Prepared) -> None:
        from vllm.exceptions import VLLMClientError

        self._num_requests += 1
        request_id = f"{request.key}-{self._num_requests}"  # a retried batch must not meet its own earlier requests
        now = time.time()
        try:
            self._engine.add_request(request_id, request.rendered, request.params, arrival_time=now)
        except (VLLMClientError, ValueError, TypeError) as error:
            refusal = row_error(error, self._config.sampling)
            ticket.settle(index, lambda: refusal)
            return
        shares = [Share() for _ in range(getattr(request.params, "n", 1))]
        self._turns.add(shares)
        self._waiting[request_id] = _Waiting(ticket, index, request, shares, now)

    def _finish(self, output: Any) -> None:
        reasons = set() if self._requests.embeds else {completion.finish_reason for completion in output.outputs}
        if "abort" in reasons:  # we abort nothing, so the engine is being shut down, and its texts are cut short
            raise RuntimeError("vLLM aborted the requests that it held")
        one = self._waiting.pop(output.request_id)
        time_taken = EngineTime(
            arrived_at_s=one.arrived_at_s,
            prefill_s=sum(share.prefill_s for share in one.shares),
            decode_s=sum(share.decode_s for share in one.shares),
        )
        if self._requests.embeds:
            took_s = time.time() - one.arrived_at_s
            one.ticket.settle(one.index, partial(embedding_of, output, one.request, took_s, time_taken))
        elif "error" in reasons:
            one.ticket.settle(one.index, lambda: RowError(ErrorKind.ENGINE_ERROR, "vLLM gave the request up"))
        else:
            one.ticket.settle(one.index, partial(answer_of, output, one.request, time_taken))

    def _fail_inbox(self, death: EngineDead) -> None:
        with suppress(queue.Empty):
            while True:
                self._inbox.get_nowait().fail(death)
