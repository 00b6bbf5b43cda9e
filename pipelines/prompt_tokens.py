"""The tokens of a request's prompt, counted without an engine, as the engine would."""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import Any, Protocol, TypeVar
from zlib import crc32

from pipelines.config import BatchConfig, EchoEngineConfig
from pipelines.engines.echo import EchoEngine
from pipelines.errors import ErrorKind, RowError
from pipelines.model import load_tokenizer
from pipelines.rows import Request

T = TypeVar("T")


class PromptTokens(Protocol):
    """Tells the tokens of prompts."""

    @property
    def special_tokens(self) -> Sequence[str]:
        """The texts that the tokenizer takes for more than text."""

    @property
    def max_model_len(self) -> int | None:
        """The most tokens of prompt and answer together; None where it is not known."""

    def of(self, request: Request) -> Sequence[Any]:
        """The tokens of a prompt; of one that is cut, so many of them; raises RowError where the engine would."""

    def of_each(self, requests: Sequence[Request]) -> list[Sequence[int] | RowError]:
        """The same as numbers, for many at once."""


def tokens_for(config: BatchConfig) -> PromptTokens:
    """Tokens as the configured engine counts them."""
    return EchoTokens(config, config.engine) if isinstance(config.engine, EchoEngineConfig) else ModelTokens(config)


class EchoTokens:
    """Words."""

    special_tokens = EchoEngine.special_tokens

    def __init__(self, config: BatchConfig, engine: EchoEngineConfig):
        self._engine = EchoEngine(engine, config.prompt)
        self.max_model_len: int | None = engine.max_model_len

    def of(self, request: Request) -> Sequence[Any]:
        """The prompt's words."""
        return self._engine.prepare(request).words

    def of_each(self, requests: Sequence[Request]) -> list[Sequence[int] | RowError]:
        """Numbers for words: equal ones have the same."""
        found = (_or_error(self.of, request) for request in requests)
        return [one if isinstance(one, RowError) else [crc32(word.encode()) for word in one] for one in found]


class ModelTokens:
    """The model's own tokenizer and chat template."""

    def __init__(self, config: BatchConfig):
        self._prompt = config.prompt
        self._tokenizer, self.max_model_len = load_tokenizer(config)
        added = getattr(self._tokenizer, "added_tokens_decoder", {}).values()
        self.special_tokens: Sequence[str] = sorted(
            {*self._tokenizer.all_special_tokens, *(str(token) for token in added if token.special)}
        )

    def of(self, request: Request) -> Sequence[Any]:
        """Render the chat template as vLLM does, and tokenise; a prompt that would be cut counts as long as its limit."""
        return self._judged(request, self._ids([self._text(request)], has_own_tokens=not isinstance(request.prompt, str))[0])

    def of_each(self, requests: Sequence[Request]) -> list[Sequence[int] | RowError]:
        """Tokenised together, which the tokenizer does on all cores."""
        alike = groupby(requests, key=lambda request: isinstance(request.prompt, str))
        return [found for is_text, some in alike for found in self._of_alike(list(some), is_text)]

    def _of_alike(self, requests: Sequence[Request], is_text: bool) -> list[Sequence[int] | RowError]:
        try:
            tokens = self._ids([self._text(request) for request in requests], has_own_tokens=not is_text)
        except RowError:  # over one of them; one at a time tells which
            return [_or_error(self.of, request) for request in requests]
        pairs = zip(requests, tokens, strict=True)
        return [_or_error(self._judged, request, some) for request, some in pairs]

    def _judged(self, request: Request, tokens: Sequence[int]) -> Sequence[int]:
        if not tokens:
            raise RowError(ErrorKind.EMPTY_PROMPT, "the prompt has no tokens")
        limit = self._limit(request)
        if limit is None or len(tokens) <= limit:
            return tokens
        if self._prompt.too_long == "fail" or limit < 1:
            raise RowError(ErrorKind.PROMPT_TOO_LONG, f"the prompt has {len(tokens)} tokens; {max(limit, 0)} are allowed")
        return tokens[:limit]

    def _text(self, request: Request) -> str:
        if isinstance(request.prompt, str):
            return request.prompt
        with _as_row_error(ErrorKind.INVALID_MESSAGES):
            text: str = self._tokenizer.apply_chat_template(
                [_as_template_takes(message) for message in request.prompt],
                tools=request.tools,
                chat_template=self._prompt.chat_template,
                add_generation_prompt=True,
                tokenize=False,
                **{**self._prompt.chat_template_kwargs, **request.chat_template_kwargs},
            )
            return text

    def _ids(self, texts: list[str], *, has_own_tokens: bool) -> list[list[int]]:
        """Tokens; a chat template has written the special ones that frame a prompt itself."""
        with _as_row_error(ErrorKind.INVALID_MESSAGES if has_own_tokens else ErrorKind.INVALID_TEXT):
            ids: list[list[int]] = self._tokenizer(texts, add_special_tokens=not has_own_tokens)["input_ids"]
            return ids

    def _limit(self, request: Request) -> int | None:
        """The most tokens of the prompt, as `engines.vllm.requests` has it."""
        answer = 0 if request.embeds else 1 if self._prompt.too_long == "fail" else request.sampling.max_tokens
        limits = [self._prompt.max_tokens, None if self.max_model_len is None else self.max_model_len - answer]
        return min((limit for limit in limits if limit is not None), default=None)


@contextmanager
def _as_row_error(kind: ErrorKind) -> Iterator[None]:
    """Templates and tokenizers raise anything over one row."""
    try:
        yield
    except MemoryError:
        raise
    except Exception as error:  # noqa: BLE001 - see above
        raise RowError(kind, f"the prompt cannot be tokenised: {type(error).__name__}: {error}") from None


def _or_error(step: Callable[..., T], *arguments: Any) -> T | RowError:
    try:
        return step(*arguments)
    except RowError as error:
        return error


def _as_template_takes(message: dict[str, Any]) -> dict[str, Any]:
    """A message as vLLM hands it to templates: text parts as one text, the arguments of tool calls as mappings."""
    changed = dict(message)
    if isinstance(message.get("content"), list):
        changed["content"] = "\n".join(part.get("text") or "" for part in message["content"])
    if message.get("tool_calls"):
        changed["tool_calls"] = [_with_mapping(call) for call in message["tool_calls"]]
    return changed


def _with_mapping(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    arguments = function.get("arguments")
    return {**call, "function": {**function, "arguments": json.loads(arguments) if isinstance(arguments, str) else arguments}}
