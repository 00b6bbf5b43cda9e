"""A stand-in for a model's server: it answers with the prompt's own words, in OpenAI's shape. For tests and dry runs only."""

import asyncio
import json
import os
import time
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from pipelines.config import EchoEngineConfig, ServeConfig
from pipelines.engines.echo import EchoEngine
from pipelines.errors import RowError
from pipelines.rows import Request
from pipelines.serving.asking import CHAT, EMBEDDINGS, Ask
from pipelines.serving.faults import ApiError, of_row

_DONE = "[DONE]"


class EchoServer:
    """One word is one token, as the echo engine has it; each takes `engine.seconds_per_token`."""

    def __init__(self, config: ServeConfig):
        assert isinstance(config.engine, EchoEngineConfig)
        self._config = config
        self._settings = config.engine
        self._engine = EchoEngine(config.engine, config.prompt)
        self.num_running = 0
        """How many requests it works on."""

    async def answer(self, ask: Ask, *, request_id: str, key: str) -> AsyncGenerator[Sequence[str], None]:
        """Yield the answer's words as they come, or the answer."""
        try:
            words, asked = self._words(ask)
        except ApiError as error:
            yield [json.dumps({"error": {**error.body()["error"], "code": int(error.status)}})]
            return
        self.num_running += 1
        try:
            async for texts in self._say(ask, words, asked, request_id):
                yield texts
        finally:
            self.num_running -= 1

    async def num_ready(self) -> int:
        """It is."""
        return 1

    def _words(self, ask: Ask) -> tuple[list[str], list[str]]:
        """The words of the answer, and of the prompt."""
        if ask.endpoint == EMBEDDINGS:
            raise ApiError(400, "the echo engine has no embeddings")
        prompt = ask.body.get("messages") or ask.body["prompt"]
        own: dict[str, Any] = {name: ask.body[name] for name in ("max_tokens", "n") if name in ask.body}
        sampling = self._config.sampling.model_copy(update=own)
        try:
            prepared = self._engine.prepare(Request("", prompt, sampling))
        except RowError as error:
            raise of_row(error) from None
        if prepared.is_refused:
            raise ApiError(400, f"the prompt contains engine.refuse_text={self._settings.refuse_text!r}")
        if prepared.is_deadly:
            os._exit(1)
        number = min(len(prepared.words), prepared.max_tokens, self._settings.max_model_len - len(prepared.words))
        return prepared.words[:number] if not prepared.is_endless else ["again"] * 10**6, prepared.words

    async def _say(self, ask: Ask, words: list[str], asked: list[str], request_id: str) -> AsyncGenerator[Sequence[str], None]:
        shape, reason = _Shape(ask, request_id, len(asked)), "stop" if len(words) == len(asked) else "length"
        for number, word in enumerate(words):
            await asyncio.sleep(self._settings.seconds_per_token)
            if ask.is_stream:
                yield [shape.piece(word if number == 0 else f" {word}", None, number + 1)]
        if not ask.is_stream:
            yield [shape.whole(" ".join(words), reason, len(words))]
            return
        yield [shape.piece("", reason, len(words)), shape.piece(None, None, len(words)), _DONE]


class _Shape:
    """How one answer looks as JSON."""

    def __init__(self, ask: Ask, request_id: str, num_prompt_tokens: int):
        self._ask = ask
        self._is_chat = ask.endpoint == CHAT
        self._num_prompt_tokens = num_prompt_tokens
        self._head = {"id": f"{'chatcmpl' if self._is_chat else 'cmpl'}-{request_id}", "created": int(time.time()),
                      "model": ask.body["model"]}  # fmt: skip

    def whole(self, text: str, reason: str, num_tokens: int) -> str:
        """The whole answer."""
        said: dict[str, Any] = {"message": {"role": "assistant", "content": text}} if self._is_chat else {"text": text}
        choices = [{"index": index, "finish_reason": reason, "logprobs": None, **said} for index in range(self._ask.body["n"])]
        kind = "chat.completion" if self._is_chat else "text_completion"
        return json.dumps({**self._head, "object": kind, "choices": choices, "usage": self._usage(num_tokens * len(choices))})

    def piece(self, text: str | None, reason: str | None, num_tokens: int) -> str:
        """A piece of it; without a text, the one that has the token counts only."""
        said: dict[str, Any] = {"delta": {"role": "assistant", "content": text}} if self._is_chat else {"text": text}
        choices = [] if text is None else [{"index": 0, "finish_reason": reason, "logprobs": None, **said}]
        kind = "chat.completion.chunk" if self._is_chat else "text_completion"
        return json.dumps({**self._head, "object": kind, "choices": choices, "usage": self._usage(num_tokens)})

    def _usage(self, num_tokens: int) -> dict[str, int]:
        return {"prompt_tokens": self._num_prompt_tokens, "completion_tokens": num_tokens,
                "total_tokens": self._num_prompt_tokens + num_tokens}  # fmt: skip
