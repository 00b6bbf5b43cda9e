"""From what an engine says to what a client gets, and what the request came to.

An engine's server says JSON texts: one for a whole answer, one for each piece of a stream, each piece with the token counts
so far. Clients add up what they find in pieces, so they get the counts only where they asked for them, at the end.
"""

import json
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from pipelines.serving.asking import Ask


@dataclass(slots=True)
class Tally:
    """What a request came to."""

    key: str
    started_at_s: float
    """Since the epoch."""
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    queue_s: float | None = None
    ttft_s: float | None = None
    generation_s: float | None = None
    finish_reason: str | None = None
    error_kind: str | None = None
    is_refused: bool = False
    """Whether the client got an error's status and nothing else."""

    @property
    def num_tokens(self) -> int:
        """Of prompt and answers together."""
        return self.num_prompt_tokens + self.num_output_tokens


class Answering:
    """Reads what an engine says about one request, and keeps its tally."""

    def __init__(self, ask: Ask, key: str, clock: Callable[[], float] = time.time):
        self._ask = ask
        self._clock = clock
        self.tally = Tally(key, clock())
        self._tokens_of_choices: dict[int, int] = {}
        self._first_at_s: float | None = None

    def whole(self, text: str) -> dict[str, Any]:
        """A whole answer, without what only we need."""
        answer: dict[str, Any] = json.loads(text)
        self._count(answer)
        if not self._ask.is_background:  # a batch's worker wants to know the times, too
            answer.pop("metrics", None)
        choices = answer.get("choices") or ()
        self.tally.finish_reason = next((one.get("finish_reason") for one in choices), "stop")  # of embeddings, too
        return answer

    def events(self, texts: Iterable[str]) -> Iterator[str]:
        """Pieces of a stream as the client gets them."""
        for text in texts:
            if (piece := self._piece(text)) is not None:
                yield f"data: {piece}\n\n"

    def _piece(self, text: str) -> str | None:
        """A piece; None for one that the client does not get."""
        if text == "[DONE]":
            return text
        piece: dict[str, Any] = json.loads(text)
        usage = piece.get("usage")
        choices = piece.get("choices") or ()
        self._count(piece)
        piece.pop("usage", None)
        piece.pop("metrics", None)
        if "error" in piece:
            self.tally.error_kind = "engine_error"
        if usage:  # a piece of one answer has the count of that answer; the last one, which has no answer, that of all
            self._tokens_of_choices |= {choice["index"]: usage.get("completion_tokens") or 0 for choice in choices}
            if choices:
                self.tally.num_output_tokens = sum(self._tokens_of_choices.values())
        for choice in choices:
            self.tally.finish_reason = choice.get("finish_reason") or self.tally.finish_reason
        if self.tally.num_output_tokens and self._first_at_s is None:
            self._first_at_s = self._clock()
        if self._ask.wants_usage:
            piece["usage"] = None if choices else usage
        return json.dumps(piece, ensure_ascii=False) if choices or self._ask.wants_usage or "error" in piece else None

    def end(self) -> Tally:
        """The tally of a request that has ended or was left: what the engine did not say about times is what we saw."""
        tally, now = self.tally, self._clock()
        if tally.ttft_s is None and self._first_at_s is not None:
            tally.ttft_s = self._first_at_s - tally.started_at_s
            tally.generation_s = now - self._first_at_s
        return tally

    def _count(self, said: dict[str, Any]) -> None:
        usage, times, tally = said.get("usage") or {}, said.get("metrics") or {}, self.tally
        if usage:
            tally.num_prompt_tokens = usage.get("prompt_tokens") or 0
            tally.num_output_tokens = usage.get("completion_tokens") or 0
            tally.num_cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        queue_ms, first_ms, rest_ms = (
            times.get(name) for name in ("queue_time_ms", "time_to_first_token_ms", "generation_time_ms")
        )
        if queue_ms is not None and first_ms is not None:  # which vLLM counts from the first scheduling on
            tally.queue_s, tally.ttft_s = queue_ms / 1000, (queue_ms + first_ms) / 1000
            tally.generation_s = (rest_ms or 0.0) / 1000
