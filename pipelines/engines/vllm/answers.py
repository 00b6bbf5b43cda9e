"""From vLLM's outputs to our answers, with reasoning and tool calls split off by vLLM's own parsers."""

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pipelines.config import ModelConfig
from pipelines.engines.vllm.requests import Parse, Prepared
from pipelines.errors import ConfigError, ErrorKind, RowError
from pipelines.rows import Answer, Completion, EngineTime, Request

if TYPE_CHECKING:
    from vllm import PoolingRequestOutput, RequestOutput
    from vllm.tokenizers import TokenizerLike

Logprobs = list[list[dict[str, Any]]]
# What vLLM calls the parsers of gpt-oss: they only stand for its HarmonyParser, which takes reasoning and calls apart together.
_HARMONY = {"openai_gptoss", "openai"}


class AnswerParser:
    """The parsers that `model.reasoning_parser` and `model.tool_call_parser` name; raises ConfigError where there are none."""

    def __init__(self, model: ModelConfig, tokenizer: "TokenizerLike"):
        from vllm.parser.parser_manager import ParserManager

        try:
            self._parser = ParserManager.get_parser(
                tool_parser_name=model.tool_call_parser,
                reasoning_parser_name=model.reasoning_parser,
                enable_auto_tools=model.tool_call_parser is not None,
                is_harmony=not _HARMONY.isdisjoint({model.reasoning_parser, model.tool_call_parser}),
            )
            self._tokenizer = tokenizer
            if self._parser is not None:
                self._parser(tokenizer)
        except Exception as error:  # noqa: BLE001 - an unknown name, or a parser that misses its tokens in the tokenizer
            raise ConfigError(
                f"model.reasoning_parser={model.reasoning_parser}, model.tool_call_parser={model.tool_call_parser}: {error}"
            ) from None

    @classmethod
    def of(cls, model: ModelConfig, tokenizer: "TokenizerLike") -> "AnswerParser | None":
        """The parser of a model; None where it names none."""
        return cls(model, tokenizer) if model.reasoning_parser or model.tool_call_parser else None

    def for_request(self, request: Request) -> tuple[bool, Parse]:
        """Whether the answer's special tokens are left out of its text, and how to parse it; raises RowError."""
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

        try:
            asked = ChatCompletionRequest(messages=request.prompt, tools=request.tools or None)
            parser = self._parser(self._tokenizer, asked.tools, chat_template_kwargs=dict(request.chat_template_kwargs))
            asked = parser.adjust_request(asked)
        except Exception as error:  # noqa: BLE001 - vLLM's models of messages and tools raise anything over one row
            raise RowError(
                ErrorKind.INVALID_REQUEST, f"vLLM's parsers cannot take the row's messages or tools: {error}"
            ) from None

        def parse(text: str, token_ids: Sequence[int]) -> tuple[str | None, str, str | None]:
            reasoning, content, calls = parser.parse(
                text, asked, enable_auto_tools=bool(asked.tools), model_output_token_ids=token_ids
            )
            return reasoning, content or "", _tool_calls(calls)

        return asked.skip_special_tokens, parse


def _tool_calls(calls: Sequence[Any] | None) -> str | None:
    if not calls:
        return None
    return json.dumps(
        [
            {
                "id": call.id or f"call_{index}",
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for index, call in enumerate(calls)
        ],
        ensure_ascii=False,
    )


def answer_of(output: "RequestOutput", request: Prepared, engine_time: EngineTime) -> Answer:
    """What vLLM gave for a request."""
    times = output.metrics
    assert times is not None, "statistics are always on"
    return Answer(
        completions=[_completion(one, request.parse) for one in sorted(output.outputs, key=lambda one: one.index)],
        num_prompt_tokens=len(output.prompt_token_ids or ()),
        num_cached_tokens=output.num_cached_tokens or 0,
        queue_s=times.scheduled_ts - times.queued_ts,
        ttft_s=times.first_token_latency,
        generation_s=times.last_token_ts - times.first_token_ts,
        engine_time=engine_time,
        num_truncated_tokens=request.num_truncated_tokens,
        prompt_logprobs=_logprobs(output.prompt_logprobs),
    )


def embedding_of(output: "PoolingRequestOutput", request: Prepared, took_s: float, engine_time: EngineTime) -> Answer:
    """The embedding that vLLM gave for a request; it has no tokens, and vLLM notes no times for it."""
    vector = output.outputs.data.float().flatten().tolist()
    return Answer(
        completions=[Completion("", "stop", None, 0, embedding=vector)],
        num_prompt_tokens=len(output.prompt_token_ids),
        num_cached_tokens=output.num_cached_tokens,
        queue_s=0.0,
        ttft_s=took_s,
        generation_s=0.0,
        engine_time=engine_time,
        num_truncated_tokens=request.num_truncated_tokens,
    )


def _completion(one: Any, parse: Parse | None) -> Completion:
    text, reasoning, tool_calls, error = one.text, None, None, None
    if parse is not None:
        try:
            reasoning, text, tool_calls = parse(one.text, one.token_ids)
        except Exception as fault:  # noqa: BLE001 - what a model says can break vLLM's parsers in any way
            error = RowError(ErrorKind.POSTPROCESS_ERROR, f"vLLM's parsers cannot take the answer: {fault}")
    return Completion(
        text=text,
        finish_reason=one.finish_reason,
        stop_reason=None if one.stop_reason is None else str(one.stop_reason),
        num_output_tokens=len(one.token_ids),
        logprobs=_logprobs(one.logprobs),
        reasoning=reasoning,
        tool_calls=tool_calls,
        error=error,
    )


def _logprobs(places: Any) -> Logprobs | None:
    """For each token its candidates; the first token of a prompt has none."""
    if places is None:
        return None
    return [
        [
            {"token_id": token_id, "logprob": found.logprob, "rank": found.rank, "text": found.decoded_token}
            for token_id, found in (place or {}).items()
        ]
        for place in places
    ]
