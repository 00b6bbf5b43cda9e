"""vLLM: a thread that owns an `LLMEngine`, adds requests as batches arrive, and steps it. The only importer of vLLM.

`vllm.LLM` works the same way and gets the same defaults (`UsageContext.LLM_CLASS`), so raw `LLM.generate` is the
yardstick. Requests of several batches run together: there is no barrier between batches.
"""

import ast
import queue
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipelines.config import BatchConfig, Device, VllmEngineConfig
from pipelines.engines import Ticket
from pipelines.engines.fair_clock import FairClock
from pipelines.errors import ConfigError, EngineDead, ErrorKind, RowError
from pipelines.rows import Answer, Completion, Request
from pipelines.suggest import did_you_mean

if TYPE_CHECKING:
    from vllm import RequestOutput

_TOO_LONG = {"input_tokens", "input_text"}  # VLLMValidationError.parameter where a prompt exceeds max_model_len
_CPU_OPTIONS = {
    "enforce_eager": True,  # compiling takes minutes on CPUs and gains nothing for short runs
    "distributed_executor_backend": "uni",  # the engine in our own process: one import of vLLM instead of three
}
_OURS = {
    "model": "model.path",
    "revision": "model.revision",
    "dtype": "model.dtype",
    "max_model_len": "model.max_model_len",
    "trust_remote_code": "model.trust_remote_code",
    "hf_token": "the environment variable HF_TOKEN",
    "disable_log_stats": "nothing: statistics are always on",
}


def check_options(kwargs: dict[str, Any]) -> None:
    """Refuse options that vLLM does not have, without importing it (which takes tens of seconds).

    Raises ConfigError that names the option. Values are checked by vLLM itself, when the worker builds its engine.
    """
    for name in kwargs:
        if name in _OURS:
            raise ConfigError(f"engine.kwargs.{name} is set by {_OURS[name]}")
    known = engine_options()
    for name in kwargs:
        if known and name not in known:
            raise ConfigError(f"engine.kwargs.{name} is not an option of vLLM's EngineArgs{did_you_mean(name, known)}")


def engine_options() -> set[str]:
    """The fields of vLLM's `EngineArgs`, read from its source; empty where vLLM is not installed, as on a CPU head node."""
    spec = find_spec("vllm")
    if spec is None or spec.origin is None:
        return set()
    tree = ast.parse((Path(spec.origin).parent / "engine" / "arg_utils.py").read_text(encoding="utf-8"))
    body = next(node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "EngineArgs")
    return {node.target.id for node in body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)}


class VllmEngine:
    """One replica of the model. Raises ConfigError where vLLM refuses the options."""

    def __init__(self, config: BatchConfig, *, folder: str, revision: str | None, device: Device):
        assert isinstance(config.engine, VllmEngineConfig)
        model = config.model
        self._options = {
            "use_tqdm_on_load": False,  # a progress bar in each of many workers' logs
            **(_CPU_OPTIONS if device == "cpu" else {}),
            "dtype": model.dtype,
            "max_model_len": model.max_model_len,
            "trust_remote_code": model.trust_remote_code,
            "revision": revision,
            **config.engine.kwargs,
            "model": folder,
            "disable_log_stats": False,
        }
        self._prompt = config.prompt
        self._sampling = config.sampling
        self._clock = FairClock()
        self._inbox: queue.SimpleQueue[Ticket] = queue.SimpleQueue()
        self._waiting: dict[str, tuple[Ticket, int, float]] = {}
        self._entering: tuple[Ticket, Iterator[tuple[int, Any]]] | None = None
        self._num_requests = 0
        self._death: EngineDead | None = None
        ready: Future[None] = Future()
        threading.Thread(target=self._run, args=(ready,), name="vllm-engine", daemon=True).start()
        ready.result()

    def prepare(self, request: Request) -> Any:
        """Apply the chat template and tokenise; raises RowError."""
        from vllm.exceptions import VLLMClientError

        renderer = self._engine.renderer
        is_text = isinstance(request.prompt, str)
        try:
            if is_text:
                (rendered,) = renderer.render_cmpl([{"prompt": request.prompt}])
            else:
                _, (rendered,) = renderer.render_chat([request.prompt], self._chat_params)
        except VLLMClientError as error:
            raise _row_error(error) from None
        except MemoryError:
            raise
        except Exception as error:  # noqa: BLE001 - templates and vLLM's parsers raise anything, asserts included, over one row
            what = "the tokenizer cannot take the text" if is_text else "the chat template cannot take the messages"
            raise RowError(ErrorKind.INVALID_MESSAGES, f"{what}: {type(error).__name__}: {error}") from None
        num_tokens, most = len(rendered["prompt_token_ids"]), self._engine.vllm_config.model_config.max_model_len
        if num_tokens == 0:
            raise RowError(ErrorKind.EMPTY_PROMPT, "the prompt has no tokens")
        if num_tokens >= most:  # vLLM's renderer lets exactly `most` pass, and its engine refuses it
            raise RowError(ErrorKind.PROMPT_TOO_LONG, f"the prompt has {num_tokens} tokens and model.max_model_len={most}")
        return request.key, rendered

    def submit(self, prepared: Sequence[Any]) -> Ticket:
        """Queue a batch; its requests enter the engine as others leave it."""
        ticket = Ticket(prepared)
        if prepared:
            self._inbox.put(ticket)
        if self._death is not None:  # nobody reads the inbox any more
            self._fail_inbox(self._death)
        return ticket

    def busy_s(self) -> float:
        """Seconds so far in which at least one request was in the engine."""
        return self._clock.busy_s()

    def describe(self) -> dict[str, Any]:
        """What vLLM resolved its options to."""
        config = self._engine.vllm_config
        return {
            "max_num_seqs": self._max_num_seqs,
            "max_num_batched_tokens": config.scheduler_config.max_num_batched_tokens,
            "max_model_len": config.model_config.max_model_len,
            "dtype": str(config.model_config.dtype).removeprefix("torch."),
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
        try:
            while True:
                self._admit()
                for output in self._engine.step():
                    if output.finished:
                        self._finish(output)
        except BaseException as error:  # noqa: BLE001 - raised again in every thread that waits for an answer
            self._death = EngineDead(f"vLLM's engine died: {type(error).__name__}: {error}")
            for ticket in [ticket for ticket, _, _ in self._waiting.values()] + ([self._entering[0]] if self._entering else []):
                ticket.fail(self._death)
            self._fail_inbox(self._death)

    def _build(self) -> None:
        from vllm import SamplingParams
        from vllm.engine.arg_utils import EngineArgs
        from vllm.renderers import ChatParams
        from vllm.sampling_params import RequestOutputKind
        from vllm.usage.usage_lib import UsageContext
        from vllm.v1.engine.llm_engine import LLMEngine

        options = self._sampling.model_dump(exclude={"stop"})
        try:
            self._params = SamplingParams(**options, stop=list(self._sampling.stop), output_kind=RequestOutputKind.FINAL_ONLY)
            config = EngineArgs(**self._options).create_engine_config(UsageContext.LLM_CLASS)
            self._engine = LLMEngine.from_vllm_config(config, usage_context=UsageContext.LLM_CLASS)
        except (ValueError, TypeError, OSError) as error:  # a model length that does not fit the KV cache is found last
            raise ConfigError(f"vLLM refuses the options: {error}; see model.*, sampling.* and engine.*") from None
        self._max_num_seqs = config.scheduler_config.max_num_seqs
        self._chat_params = ChatParams(
            chat_template_kwargs={"add_generation_prompt": True, "tokenize": False, **self._prompt.chat_template_kwargs}
        )

    def _admit(self) -> None:
        """Move requests into the engine until it holds twice what it can run; wait only while it holds none."""
        while len(self._waiting) < 2 * self._max_num_seqs:
            if self._entering is None:
                try:
                    ticket = self._inbox.get(block=not self._waiting)
                except queue.Empty:
                    return
                self._entering = ticket, iter(enumerate(ticket.prepared))
            ticket, requests = self._entering
            request = next(requests, None)
            if request is None:
                self._entering = None
                ticket.admitted.set_result(None)
            else:
                self._add(ticket, *request)

    def _add(self, ticket: Ticket, index: int, prepared: Any) -> None:
        from vllm.exceptions import VLLMClientError

        key, rendered = prepared
        self._num_requests += 1
        request_id = f"{key}-{self._num_requests}"  # a retried batch must not meet its own earlier requests
        try:
            self._engine.add_request(request_id, rendered, self._params, arrival_time=time.time())
        except (VLLMClientError, ValueError, TypeError) as error:
            ticket.settle(index, _row_error(error))
            return
        self._waiting[request_id] = (ticket, index, self._clock.start())

    def _finish(self, output: "RequestOutput") -> None:
        reasons = {one.finish_reason for one in output.outputs}
        if "abort" in reasons:  # we abort nothing, so the engine is being shut down, and its texts are cut short
            raise RuntimeError("vLLM aborted the requests that it held")
        ticket, index, mark = self._waiting.pop(output.request_id)
        share_s = self._clock.end(mark)
        if "error" in reasons:
            ticket.settle(index, RowError(ErrorKind.ENGINE_ERROR, "vLLM gave the request up (finish_reason=error)"))
        else:
            ticket.settle(index, _answer(output, share_s))

    def _fail_inbox(self, death: EngineDead) -> None:
        with suppress(queue.Empty):
            while True:
                self._inbox.get_nowait().fail(death)


def _answer(output: "RequestOutput", engine_s: float) -> Answer:
    times = output.metrics
    assert times is not None, "statistics are always on"
    return Answer(
        completions=[_completion(one) for one in sorted(output.outputs, key=lambda one: one.index)],
        num_prompt_tokens=len(output.prompt_token_ids or ()),
        num_cached_tokens=output.num_cached_tokens or 0,
        queue_s=times.scheduled_ts - times.queued_ts,
        ttft_s=times.first_token_latency,
        generation_s=times.last_token_ts - times.first_token_ts,
        engine_s=engine_s,
    )


def _completion(one: Any) -> Completion:
    return Completion(
        text=one.text,
        finish_reason=one.finish_reason,
        stop_reason=None if one.stop_reason is None else str(one.stop_reason),
        num_output_tokens=len(one.token_ids),
        logprobs=None if one.logprobs is None else [_candidates(place) for place in one.logprobs],
    )


def _candidates(place: Any) -> list[dict[str, Any]]:
    return [
        {"token_id": token_id, "logprob": found.logprob, "rank": found.rank, "text": found.decoded_token}
        for token_id, found in place.items()
    ]


def _row_error(error: Any) -> RowError:
    parameter = getattr(error, "parameter", None)
    if parameter in _TOO_LONG:
        return RowError(ErrorKind.PROMPT_TOO_LONG, str(error))
    return RowError(ErrorKind.INVALID_PARAMETER if parameter else ErrorKind.ENGINE_REFUSED, str(error))
