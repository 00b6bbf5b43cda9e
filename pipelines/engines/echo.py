"""An engine without a model: it answers with the prompt's own words, deterministically, under the same contract.

For tests, dry runs and the measurement of our own overhead. A run that used it says so everywhere.
"""

import json
import os
import re
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

from pipelines.config import EchoEngineConfig, PromptConfig
from pipelines.engines import Ticket
from pipelines.engines.fair_clock import FairClock, Share
from pipelines.errors import ErrorKind, RowError
from pipelines.rows import Answer, Completion, EngineTime, EngineWork, Outcome, Request
from pipelines.truncate import truncate

_BATCHES_AT_ONCE = 16


@dataclass(frozen=True, slots=True)
class _Prepared:
    words: list[str]
    max_tokens: int
    n: int
    num_truncated_tokens: int
    is_refused: bool
    is_deadly: bool
    is_endless: bool


class EchoEngine:
    """One word is one token; the answer is the prompt's first `max_tokens` words, `stop` if that is all of them."""

    special_tokens = ("<|echo|>",)

    def __init__(self, config: EchoEngineConfig, prompt: PromptConfig):
        self._config = config
        self._prompt = prompt
        self.clock = FairClock()
        self._num_steps = 0
        self._num_generated = 0
        self._pool = ThreadPoolExecutor(_BATCHES_AT_ONCE, thread_name_prefix="echo")

    def prepare(self, request: Request) -> _Prepared:
        """Count the prompt's words, and cut them where the settings allow it; raises RowError where they are too many."""
        if request.embeds:
            raise RowError(ErrorKind.INVALID_REQUEST, "the row asks for an embedding, and the echo engine has none")
        text, num_removed = _text_of(request.prompt), 0
        answer = 1 if self._prompt.too_long == "fail" else request.sampling.max_tokens
        limit = min(self._config.max_model_len - answer, self._prompt.max_tokens or self._config.max_model_len)
        words = text.split()
        if len(words) > limit:
            if self._prompt.too_long == "fail" or limit < 1:
                raise RowError(
                    ErrorKind.PROMPT_TOO_LONG,
                    f"the prompt has {len(words)} tokens; engine.max_model_len={self._config.max_model_len} allows {limit}",
                )
            prompt, num_removed = truncate(request.prompt, self._prompt.too_long, limit=limit, spans=_spans, count=_count)
            text = _text_of(prompt)
            words = text.split()
        refuse, die, hang = self._config.refuse_text, self._config.die_text, self._config.hang_text
        return _Prepared(
            words=words,
            max_tokens=request.sampling.max_tokens,
            n=request.sampling.n,
            num_truncated_tokens=num_removed,
            is_refused=refuse is not None and refuse in text,
            is_deadly=die is not None and die in text,
            is_endless=hang is not None and hang in text,
        )

    def submit(self, prepared: Sequence[_Prepared]) -> Ticket:
        """Answer a batch in a thread of its own."""
        ticket = Ticket(prepared)
        if prepared:
            self._pool.submit(self._answer, ticket)
        return ticket

    def work(self) -> EngineWork:
        """How many words came out so far."""
        return EngineWork(self._num_generated)

    def num_steps(self) -> int:
        """How many times a batch has moved on by one token."""
        return self._num_steps

    def describe(self) -> dict[str, Any]:
        """The limits that a report shows."""
        return {"max_num_seqs": self._config.max_num_seqs, "max_model_len": self._config.max_model_len}

    def _answer(self, ticket: Ticket) -> None:
        prepared: Sequence[_Prepared] = ticket.prepared
        ticket.admitted.set_result(None)
        arrived_at_s = time.time()
        if any(request.is_deadly for request in prepared):
            os._exit(1)
        share = Share(len(prepared))
        self.clock.advance()
        self.clock.enter(share)
        if any(request.is_endless for request in prepared):
            threading.Event().wait()
        lengths = [self._num_output_tokens(request) for request in prepared]
        step_s = self._config.seconds_per_token
        for step in range(max(lengths) if step_s else 1):
            time.sleep(step_s)
            self._num_steps += 1
            self.clock.advance()
            if step == 0:
                self.clock.first_token(share)
        self.clock.leave(share)
        self._num_generated += sum(lengths)
        engine_time = EngineTime(arrived_at_s, share.prefill_s, share.decode_s)
        for index, (request, length) in enumerate(zip(prepared, lengths, strict=True)):
            ticket.settle(index, partial(self._outcome, request, length, step_s, engine_time))

    def _num_output_tokens(self, request: _Prepared) -> int:
        return min(len(request.words), request.max_tokens, self._config.max_model_len - len(request.words))

    def _outcome(self, request: _Prepared, length: int, step_s: float, engine_time: EngineTime) -> Outcome:
        if request.is_refused:
            return RowError(ErrorKind.ENGINE_REFUSED, f"the prompt contains engine.refuse_text={self._config.refuse_text!r}")
        reason = "stop" if length == len(request.words) else "length"
        completion = Completion(" ".join(request.words[:length]), reason, None, length)
        return Answer(
            completions=[completion] * request.n,
            num_prompt_tokens=len(request.words),
            num_cached_tokens=0,
            queue_s=0.0,
            ttft_s=step_s,
            generation_s=step_s * max(0, length - 1),
            engine_time=engine_time,
            num_truncated_tokens=request.num_truncated_tokens,
        )


def _text_of(prompt: str | Sequence[dict[str, Any]]) -> str:
    """A text as it is, of messages the last one's: what a chat model would answer to."""
    if isinstance(prompt, str):
        return prompt
    content = prompt[-1].get("content")
    return content if isinstance(content, str) else json.dumps(content)


def _count(prompt: str | Sequence[dict[str, Any]]) -> int:
    return len(_text_of(prompt).split())


def _spans(text: str) -> list[tuple[int, int]]:
    return [match.span() for match in re.finditer(r"\S+", text)]
