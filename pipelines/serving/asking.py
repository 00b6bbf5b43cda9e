"""From a client's body to what the engine is asked: the job's own prompt and sampling settings, and the body's over them.

A body is read as a row of a batch is (`openai_requests`), so that the endpoint answers what the nightly job would, and
refuses what it would, with the same words. The engine is told every parameter, so none is left to its own defaults.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from http import HTTPStatus
from typing import Any

from pipelines.config import SamplingConfig, ServeConfig
from pipelines.errors import RowError
from pipelines.openai_bodies import parameters_body
from pipelines.openai_requests import body_of
from pipelines.parameters import merge, row_seed
from pipelines.prompts import Renderer
from pipelines.serving.faults import ApiError, of_row
from pipelines.structured import check_form

CHAT, TEXT, EMBEDDINGS = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
_EMBEDDING_KEYS = {"model", "input", "encoding_format", "dimensions", "user"}
# What a row cannot ask for and a client can: it changes how the answer comes, or makes the model call a tool.
_LIVE = ("stream", "stream_options", "return_token_ids")


@dataclass(frozen=True, slots=True)
class Ask:
    """What an engine is asked."""

    endpoint: str
    body: dict[str, Any]
    is_stream: bool = False
    wants_usage: bool = False
    """Whether a stream ends with its token counts."""
    is_background: bool = False
    """Whether it is a row of a batch, which live requests go before."""


class Asking:
    """Makes asks from bodies, as the settings say."""

    def __init__(self, config: ServeConfig, special_tokens: Sequence[str] = ()):
        self._config = config
        self._renderer = Renderer(config.prompt, config.input, special_tokens)
        # Without a parser that finds calls in answers, tools are part of the prompt and nothing else, as in a batch.
        self._usual_choice = "none" if config.model.tool_call_parser is None else "auto"

    def ask(self, endpoint: str, body: dict[str, Any], *, is_background: bool = False) -> Ask:
        """Return what to ask the engine for a body; raises ApiError."""
        self._check_model(body.get("model"))
        try:
            asked = self._embedding(body) if endpoint == EMBEDDINGS else self._generation(endpoint, body)
            return replace(asked, is_background=is_background)
        except RowError as error:
            raise of_row(error) from None
        except RecursionError:
            raise ApiError(HTTPStatus.BAD_REQUEST, "the body is nested too deeply") from None

    def _check_model(self, model: Any) -> None:
        name = self._config.model.name
        if model is None:
            raise ApiError(HTTPStatus.BAD_REQUEST, f"model is missing; this server has {name}", param="model")
        if model != name:
            message = f"the model {json.dumps(model)[:100]} does not exist; this server has {name}"
            raise ApiError(HTTPStatus.NOT_FOUND, message, code="model_not_found", param="model")

    def _embedding(self, body: dict[str, Any]) -> Ask:
        given = {key: value for key, value in body.items() if value is not None}
        if unknown := sorted(set(given) - _EMBEDDING_KEYS):
            raise ApiError(HTTPStatus.BAD_REQUEST, f"{unknown[0]} is no parameter of {EMBEDDINGS}", param=unknown[0])
        if not isinstance(given.get("input"), str | list) or not given["input"]:
            raise ApiError(HTTPStatus.BAD_REQUEST, "input must be a text, or a list of texts", param="input")
        return Ask(EMBEDDINGS, given)

    def _generation(self, endpoint: str, body: dict[str, Any]) -> Ask:
        is_stream = _switch(body, "stream")
        options = body.get("stream_options") or {}
        if not isinstance(options, dict) or (options and not is_stream):
            raise ApiError(HTTPStatus.BAD_REQUEST, "stream_options goes with stream=true", param="stream_options")
        choice = body.get("tool_choice")
        makes_call = choice not in (None, "auto", "none")
        kept = {key: value for key, value in body.items() if key not in _LIVE and not (key == "tool_choice" and makes_call)}
        asked = body_of({"body": kept, "url": endpoint}, "body")
        prompt, _ = self._renderer.complete(asked.prompt, "body.messages" if endpoint == CHAT else "body.prompt")
        sampling = self._sampling(asked.changes)
        engine_body = {"model": self._config.model.name, **parameters_body(sampling, is_chat=endpoint == CHAT)}
        if "max_tokens" not in asked.changes:
            del engine_body["max_tokens"]  # the engine's default, which it cuts to what a long prompt leaves room for
        if endpoint == CHAT:
            engine_body |= {"messages": prompt, **self._template(asked.chat_template_kwargs)}
            if asked.tools is not None:
                engine_body |= {"tools": asked.tools, "tool_choice": choice if makes_call else self._usual_choice}
            elif makes_call:
                raise ApiError(HTTPStatus.BAD_REQUEST, "tool_choice needs tools", param="tool_choice")
        else:
            engine_body["prompt"] = prompt
        if _switch(body, "return_token_ids"):
            engine_body["return_token_ids"] = True
        if is_stream:  # counted in every piece, so that what a client took that leaves half-way is known
            engine_body |= {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
        return Ask(endpoint, engine_body, is_stream, is_stream and _switch(options, "include_usage"))

    def _sampling(self, changes: dict[str, Any]) -> SamplingConfig:
        run = self._config.sampling
        sampling = merge(run, changes, "body")
        if sampling is not run:
            check_form(sampling)
        if sampling.seed is not None and changes.get("seed") is None:
            sampling = sampling.model_copy(update={"seed": row_seed(sampling.seed, 0, 1)})  # as the job's first row
        most, asked = self._config.serve.max_answer_tokens, sampling.max_tokens * sampling.n
        if most is not None and asked > most:
            message = f"max_tokens={sampling.max_tokens} times n={sampling.n} is above this server's limit of {most} tokens"
            raise ApiError(HTTPStatus.BAD_REQUEST, message, param="max_tokens")
        return sampling

    def _template(self, own: dict[str, Any]) -> dict[str, Any]:
        variables = {**self._config.prompt.chat_template_kwargs, **own}
        return {"chat_template_kwargs": variables} if variables else {}


def _switch(body: dict[str, Any], name: str) -> bool:
    value = body.get(name)
    if value is not None and not isinstance(value, bool):
        raise ApiError(HTTPStatus.BAD_REQUEST, f"{name} must be true or false", param=name)
    return bool(value)
