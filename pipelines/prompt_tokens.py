"""The tokens of a request's prompt, counted without an engine, as the engine would."""

import json
from collections.abc import Sequence
from typing import Any, Protocol

from pipelines.config import BatchConfig, EchoEngineConfig
from pipelines.engines.echo import EchoEngine
from pipelines.errors import ErrorKind, RowError
from pipelines.model import load_tokenizer
from pipelines.rows import Request


class Tokens(Protocol):
    """Tells the tokens of prompts."""

    @property
    def special_tokens(self) -> Sequence[str]:
        """The texts that the tokenizer takes for more than text."""

    @property
    def max_model_len(self) -> int | None:
        """The most tokens of prompt and answer together; None where it is not known."""

    def of(self, request: Request) -> Sequence[Any]:
        """The tokens of a prompt; of one that is cut, so many of them; raises RowError where the engine would."""


def tokens_for(config: BatchConfig) -> Tokens:
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
        try:
            tokens = self._tokenise(request)
        except MemoryError:
            raise
        except Exception as error:  # noqa: BLE001 - templates and tokenizers raise anything over one row
            kind = ErrorKind.INVALID_TEXT if isinstance(request.prompt, str) else ErrorKind.INVALID_MESSAGES
            raise RowError(kind, f"the prompt cannot be tokenised: {type(error).__name__}: {error}") from None
        if not tokens:
            raise RowError(ErrorKind.EMPTY_PROMPT, "the prompt has no tokens")
        limit = self._limit(request)
        if limit is None or len(tokens) <= limit:
            return tokens
        if self._prompt.too_long == "fail" or limit < 1:
            raise RowError(ErrorKind.PROMPT_TOO_LONG, f"the prompt has {len(tokens)} tokens; {max(limit, 0)} are allowed")
        return tokens[:limit]

    def _tokenise(self, request: Request) -> Sequence[Any]:
        if isinstance(request.prompt, str):
            return list(self._tokenizer(request.prompt)["input_ids"])
        text = self._tokenizer.apply_chat_template(
            [_as_template_takes(message) for message in request.prompt],
            tools=request.tools,
            chat_template=self._prompt.chat_template,
            add_generation_prompt=True,
            tokenize=False,
            **{**self._prompt.chat_template_kwargs, **request.chat_template_kwargs},
        )
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])  # the template has written its own

    def _limit(self, request: Request) -> int | None:
        """The most tokens of the prompt, as `engines.vllm.requests` has it."""
        answer = 0 if request.embeds else 1 if self._prompt.too_long == "fail" else request.sampling.max_tokens
        limits = [self._prompt.max_tokens, None if self.max_model_len is None else self.max_model_len - answer]
        return min((limit for limit in limits if limit is not None), default=None)


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
