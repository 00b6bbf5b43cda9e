"""The replicas of an endpoint (`fournee serve`) as an engine: its requests wait wherever live ones need the room.

It is told the job's sampling parameters, all that are not null; it renders and tokenises, and fills the rest in, with its own
settings. It answers 429 while live traffic leaves no room; such a request is asked again, for as long as it takes.
"""

import json
import logging
import os
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from http import HTTPStatus
from typing import Any

import requests

from pipelines.config import BatchConfig
from pipelines.engines import Ticket
from pipelines.engines.fair_clock import FairClock, Share
from pipelines.errors import EngineDead, ErrorKind, RowError
from pipelines.openai_bodies import parameters_body
from pipelines.rows import Answer, Completion, EngineTime, EngineWork, Outcome, Request

logger = logging.getLogger(__name__)

KEY_VARIABLE = "FOURNEE_API_KEY"
_AT_ONCE = 32  # requests of one worker
_LATER = (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.BAD_GATEWAY, HTTPStatus.SERVICE_UNAVAILABLE, HTTPStatus.GATEWAY_TIMEOUT)
_REFUSED = (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN, HTTPStatus.NOT_FOUND)
_PAUSE_S = 1.0  # where the endpoint does not say when to come again
_LONGEST_PAUSE_S = 60.0  # whatever it says: a date is as right as two clocks are
_TRIES = 3  # of a request that the endpoint has a fault with
_TIMEOUT_S = (10.0, 3600.0)


@dataclass(frozen=True, slots=True)
class _Prepared:
    path: str
    body: dict[str, Any]
    is_cut: bool = False
    """Whether a long prompt cuts its answer to what is left, as an engine here does: where its length is the job's."""


class ServedEngine:
    """Answers through an endpoint."""

    special_tokens: Sequence[str] = ()  # which the endpoint looks for

    def __init__(self, config: BatchConfig, url: str, pause_s: float = _PAUSE_S):
        self._model = config.model.name
        self._max_tokens = config.sampling.max_tokens
        self._url = url.rstrip("/")
        self._pause_s = pause_s
        self._headers = {"Authorization": f"Bearer {os.environ.get(KEY_VARIABLE, '')}"}
        self._pool = ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="served")
        self._lock = threading.Lock()
        self._sessions = threading.local()
        self._is_silent = False
        self.clock = FairClock()
        self._num_steps = 0
        self._num_generated = 0

    def prepare(self, request: Request) -> _Prepared:
        """Write the request down; the endpoint checks it."""
        if request.embeds:
            return _Prepared("/v1/embeddings", {"model": self._model, "input": request.prompt})
        is_chat = not isinstance(request.prompt, str)
        body = {"model": self._model, "return_token_ids": True, **parameters_body(request.sampling, is_chat=is_chat)}
        is_cut = request.sampling.max_tokens == self._max_tokens
        if not is_chat:
            return _Prepared("/v1/completions", {**body, "prompt": request.prompt}, is_cut)
        more = {"tools": request.tools, "chat_template_kwargs": dict(request.chat_template_kwargs)}
        chat = {"messages": request.prompt, **{name: value for name, value in more.items() if value}}
        return _Prepared("/v1/chat/completions", {**body, **chat}, is_cut)

    def submit(self, prepared: Sequence[_Prepared]) -> Ticket:
        """Ask for a batch, some requests at a time."""
        ticket = Ticket(prepared)
        if prepared:
            for index in range(len(prepared)):
                self._pool.submit(self._settle, ticket, index)
        return ticket

    def work(self) -> EngineWork:
        """How many tokens came."""
        return EngineWork(self._num_generated)

    def num_steps(self) -> int:
        """How often the endpoint has said anything."""
        return self._num_steps

    def describe(self) -> dict[str, Any]:
        """Where the answers come from."""
        return {"max_num_seqs": _AT_ONCE, "max_model_len": None, "endpoint": self._url}

    def _settle(self, ticket: Ticket, index: int) -> None:
        """Ask for one request, until there is an outcome. The pool takes them in order: with the last, all have entered."""
        if index == len(ticket.prepared) - 1 and not ticket.admitted.done():
            ticket.admitted.set_result(None)
        try:
            outcome = self._outcome(ticket.prepared[index])
            with self._lock:
                ticket.settle(index, lambda: outcome)
        except EngineDead as death:
            with self._lock:
                ticket.fail(death)
        except Exception as error:  # noqa: BLE001 - nobody sees what a thread of the pool raises, and the batch would hang
            with self._lock:
                ticket.fail(EngineDead(f"{self._url} cannot be asked: {type(error).__name__}: {error}"))

    def _outcome(self, request: _Prepared) -> Outcome:
        num_faults = 0
        while True:
            arrived_at_s, share = time.time(), Share()
            response = self._response(request, share)
            if response is None or response.status_code in _LATER:
                time.sleep(self._pause_s if response is None else _pause_s(response, self._pause_s))
                continue
            if response.status_code in _REFUSED:
                raise EngineDead(f"{self._url}{request.path} answered {response.status_code}: {_error_in(response).message}")
            if response.status_code >= HTTPStatus.INTERNAL_SERVER_ERROR and num_faults < _TRIES - 1:
                num_faults += 1
                continue
            if response.status_code != HTTPStatus.OK:
                refusal = _error_in(response)
                if refusal.kind != ErrorKind.PROMPT_TOO_LONG or not request.is_cut:
                    return refusal
                request = _Prepared(request.path, {**request.body, "max_tokens": None})  # its own, which it cuts
                continue
            return self._read(response, EngineTime(arrived_at_s, share.prefill_s, share.decode_s))

    def _response(self, request: _Prepared, share: Share) -> requests.Response | None:
        """What the endpoint says; None where it cannot be reached: it is started anew, or the way to it is."""
        url = self._url + request.path
        self.clock.advance()
        self.clock.enter(share)
        try:
            response = self._session().post(url, json=request.body, headers=self._headers, timeout=_TIMEOUT_S)
        except requests.RequestException as error:
            with self._lock:
                is_news, self._is_silent = not self._is_silent, True
            if is_news:
                logger.warning("%s does not answer, and is asked until it does: %s", url, error)
            return None
        finally:
            self.clock.advance()
            self.clock.leave(share)
        with self._lock:
            self._is_silent = False
            self._num_steps += 1
        return response

    def _read(self, response: requests.Response, engine_time: EngineTime) -> Answer:
        """The answer in a response that claims to hold one; raises EngineDead."""
        took_s = time.time() - engine_time.arrived_at_s
        try:
            said = response.json()
            answer = _answer(said, engine_time, took_s)
            num_generated = said["usage"].get("completion_tokens") or 0
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise EngineDead(
                f"{response.url} answered {response.status_code}, but not as fournee serve does "
                f"({type(error).__name__}: {error}); check endpoint={self._url}: {response.text[:200]}"
            ) from None
        with self._lock:
            self._num_generated += num_generated
        return answer

    def _session(self) -> requests.Session:
        if not hasattr(self._sessions, "one"):
            self._sessions.one = requests.Session()
        session: requests.Session = self._sessions.one
        return session


def _pause_s(response: requests.Response, usual_s: float) -> float:
    """When to come again: `Retry-After` is seconds, or a date."""
    said = response.headers.get("Retry-After", "")
    try:
        pause_s = float(said) if said.isdecimal() else max(parsedate_to_datetime(said).timestamp() - time.time(), usual_s)
    except (ValueError, OverflowError):
        return usual_s
    return min(pause_s, _LONGEST_PAUSE_S)


def _error_in(response: requests.Response) -> RowError:
    try:
        error = response.json()["error"]
        message, code = str(error["message"]), error["code"]
    except (ValueError, LookupError, TypeError):
        message, code = response.text[:200], None
    if response.status_code >= HTTPStatus.INTERNAL_SERVER_ERROR:
        return RowError(ErrorKind.ENGINE_ERROR, message)
    if code == "context_length_exceeded":
        return RowError(ErrorKind.PROMPT_TOO_LONG, message)
    return RowError(ErrorKind(code) if code in list(ErrorKind) else ErrorKind.ENGINE_REFUSED, message)


def _answer(said: dict[str, Any], engine_time: EngineTime, took_s: float) -> Answer:
    usage, times = said["usage"], said.get("metrics") or {}
    queue_s, first_s, rest_s = (
        (times.get(name) or 0.0) / 1000 for name in ("queue_time_ms", "time_to_first_token_ms", "generation_time_ms")
    )
    completions = [Completion("", "stop", None, 0, embedding=one["embedding"]) for one in said.get("data", ())]
    return Answer(
        completions=completions or [_completion(one, usage) for one in sorted(said["choices"], key=lambda one: one["index"])],
        num_prompt_tokens=usage["prompt_tokens"],
        num_cached_tokens=(usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0,
        queue_s=queue_s,
        ttft_s=queue_s + first_s if first_s else took_s,
        generation_s=rest_s,
        engine_time=engine_time,
    )


def _completion(choice: dict[str, Any], usage: dict[str, Any]) -> Completion:
    message = choice.get("message") or {"content": choice.get("text")}
    reason, stop_reason, calls = choice["finish_reason"], choice.get("stop_reason"), message.get("tool_calls")
    token_ids = choice.get("token_ids")
    return Completion(
        text=message.get("content") or "",
        finish_reason="stop" if reason == "tool_calls" else reason,
        stop_reason=None if stop_reason is None else str(stop_reason),
        num_output_tokens=usage["completion_tokens"] if token_ids is None else len(token_ids),
        logprobs=_logprobs(choice.get("logprobs")),
        reasoning=message.get("reasoning") or message.get("reasoning_content"),
        tool_calls=json.dumps(calls, ensure_ascii=False) if calls else None,
    )


def _logprobs(said: dict[str, Any] | None) -> list[list[dict[str, Any]]] | None:
    """The candidates at each place, the one that was taken first; the API says neither their ids nor their ranks."""
    if said is None:
        return None
    if "content" in said:
        places = [[one, *one["top_logprobs"]] for one in said["content"] or ()]
        pairs = [[(one["token"], one["logprob"]) for one in place] for place in places]
    else:
        tops = said["top_logprobs"] or [{}] * len(said["tokens"])
        taken = zip(said["tokens"], said["token_logprobs"], tops, strict=True)
        pairs = [[(token, logprob), *(top or {}).items()] for token, logprob, top in taken]
    return [
        [{"token_id": None, "logprob": logprob, "rank": None, "text": text} for text, logprob in dict(place).items()]
        for place in pairs
    ]
