"""Read a row as OpenAI's batch API writes it: {custom_id, method, url, body}, for chats, completions and embeddings.

Nothing in a body is passed over in silence: a key is a parameter, or is ignored or refused by name, or is unknown. The
values of sampling parameters are judged where they are merged over the run's.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pipelines.errors import ErrorKind, RowError
from pipelines.prompts import conversation, from_json, tools_of
from pipelines.suggest import did_you_mean, shown

_ENDPOINTS = {"/v1/chat/completions": "messages", "/v1/completions": "prompt", "/v1/embeddings": "input"}
"""The key that holds the prompt in the bodies of each endpoint."""

_SAME = (
    "max_tokens", "temperature", "top_p", "n", "seed", "presence_penalty", "frequency_penalty", "logit_bias", "logprobs",
    "top_k", "min_p", "repetition_penalty", "min_tokens", "stop_token_ids", "ignore_eos", "prompt_logprobs",
)  # fmt: skip
"""Parameters that have the same name here; the second line is vLLM's additions."""

_RENAMED = {
    "max_completion_tokens": "max_tokens",
    "guided_json": "json_schema",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}
_STRUCTURED = {"json": "json_schema", "regex": "regex", "choice": "choice", "grammar": "grammar"}
"""The keys of vLLM's `structured_outputs`."""

_IGNORED = {
    "model": "the run's model answers",
    "user": "tells the provider's users apart",
    "safety_identifier": "tells the provider's users apart",
    "metadata": "labels a stored answer",
    "store": "nothing leaves the run's folder",
    "service_tier": "there is one",
    "prompt_cache_key": "vLLM finds shared prefixes by itself",
    "prompt_cache_options": "vLLM finds shared prefixes by itself",
    "prompt_cache_retention": "vLLM finds shared prefixes by itself",
    "prediction": "a hint that only changes speed",
    "parallel_tool_calls": "the model decides",
    "stream_options": "says nothing without stream",
}
"""What does not change the answer here, and why."""

_REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "stream": ((False,), "a batch is not streamed; leave it out"),
    "audio": ((), "the answer is text; leave it out"),
    "modalities": ((["text"],), 'the answer is text; leave it out, or write ["text"]'),
    "suffix": (("",), "the model fills no gaps; leave it out, or write what surrounds the gap into the prompt"),
    "echo": ((False,), "the answer comes without the prompt; leave it out"),
    "functions": (([],), "use tools"),
    "function_call": ((), "use tools and tool_choice"),
    "reasoning_effort": ((), "use the model's own switch in chat_template_kwargs, such as enable_thinking"),
    "verbosity": ((), "say it in the prompt, or set max_tokens"),
    "web_search_options": ((), "nothing is looked up; leave it out"),
    "moderation": ((), "nothing is moderated; leave it out"),
    "dimensions": ((), "the model's own number of dimensions is the only one; leave it out"),
    "encoding_format": (("float",), 'leave it out, or write "float"'),
}
"""What would change the answer and is not offered: the values that ask for nothing, and what to do instead."""


@dataclass(frozen=True, slots=True)
class Body:
    """What a body asks for."""

    prompt: str | list[dict[str, Any]]
    changes: dict[str, Any] = field(default_factory=dict)
    """Sampling parameters under our names; their values are not judged yet."""
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    is_embedding: bool = False


def body_of(row: Mapping[str, Any], column: str) -> Body:
    """Read the body in a column of a row, and the row's `method` and `url` where it has them; raises RowError."""
    body = _body(row.get(column), column)
    endpoint = _endpoint(row, body, column)
    key = _ENDPOINTS[endpoint]
    _check_keys(body, endpoint, column)
    name = f"{column}.{key}"
    return Body(
        prompt=conversation(body[key], name) if key == "messages" else _one_text(body[key], name),
        changes=_changes(_with_one_logprobs(body, column) if key == "messages" else body, column),
        tools=_tools(body, column),
        chat_template_kwargs=_mapping(body.get("chat_template_kwargs", {}), f"{column}.chat_template_kwargs"),
        is_embedding=key == "input",
    )


def _body(value: Any, column: str) -> dict[str, Any]:
    """The body without its null keys, which are the same as absent ones."""
    if value is None or value == "":  # a CSV file has no other null
        raise RowError(ErrorKind.MISSING_VALUE, f"{column} is null")
    if isinstance(value, str):
        value = from_json(value, column, ErrorKind.INVALID_REQUEST)
    return {key: one for key, one in _mapping(value, column).items() if one is not None}


def _mapping(value: Any, name: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _refusal(f"{name} is {shown(value)}, not a mapping")
    return value


def _endpoint(row: Mapping[str, Any], body: Mapping[str, Any], column: str) -> str:
    """The endpoint that a row is for: by its url, else by what its body has."""
    method, url = row.get("method") or "POST", row.get("url") or None
    if method != "POST":
        raise _refusal(f"method is {shown(method)}; it must be POST")
    fitting = [endpoint for endpoint, key in _ENDPOINTS.items() if key in body]
    if url is None and len(fitting) == 1:
        return fitting[0]
    if url is None:
        has = " and ".join(_ENDPOINTS[endpoint] for endpoint in fitting) or "none of them"
        raise _refusal(f"{column} must have one of messages, prompt and input; it has {has}")
    if url not in list(_ENDPOINTS):
        raise _refusal(f"url is {shown(url)}; it must be one of {', '.join(_ENDPOINTS)}")
    if url not in fitting:
        raise _refusal(f"{column}.{_ENDPOINTS[url]} is missing, which url={url} needs")
    return str(url)


def _check_keys(body: Mapping[str, Any], endpoint: str, column: str) -> None:
    known = _KNOWN[_ENDPOINTS[endpoint]]
    for key, value in body.items():
        if key in _REFUSED:
            harmless, remedy = _REFUSED[key]
            if value not in harmless:
                raise _refusal(f"{column}.{key}={shown(value)} is not offered: {remedy}")
        elif key not in known and key not in _IGNORED:
            raise _refusal(f"{column}.{key}={shown(value)} is no parameter of {endpoint}{did_you_mean(key, known)}")
    best_of, number = body.get("best_of", 1), body.get("n", 1)
    if best_of not in (1, number):
        raise _refusal(f"{column}.best_of={shown(best_of)} is not offered; set n to the number of answers, and choose yourself")


def _one_text(value: Any, name: str) -> str:
    texts = value if isinstance(value, list) else [value]
    if isinstance(value, list) and any(isinstance(one, int | list) for one in texts):
        raise _refusal(f"{name} is {shown(value)}: token ids are not taken; write the text")
    if not all(isinstance(one, str) for one in texts):
        raise _refusal(f"{name} is {shown(value)}, not text")
    if len(texts) != 1:
        raise _refusal(f"{name} is {shown(value)}, a list of {len(texts)} texts; write one text a line")
    return str(texts[0])


def _tools(body: Mapping[str, Any], column: str) -> list[dict[str, Any]] | None:
    tools, choice = tools_of(body.get("tools"), f"{column}.tools"), body.get("tool_choice", "auto")
    if choice not in ("auto", "none"):
        raise _refusal(f'{column}.tool_choice is {shown(choice)}; write "auto" or "none": no model is made to call a tool')
    return tools if choice == "auto" else None


def _with_one_logprobs(body: Mapping[str, Any], column: str) -> dict[str, Any]:
    """A chat's switch and number become the one number that completions have."""
    wanted, number = body.get("logprobs", False), body.get("top_logprobs", 0)
    if not isinstance(wanted, bool):
        raise _refusal(f"{column}.logprobs is {shown(wanted)}; in a chat it must be true or false")
    if number and not wanted:
        raise _refusal(f"{column}.top_logprobs={shown(number)} needs {column}.logprobs=true")
    others = {key: value for key, value in body.items() if key != "logprobs"}
    return {**others, "logprobs": number} if wanted else others


def _changes(body: Mapping[str, Any], column: str) -> dict[str, Any]:
    """The sampling parameters under our names; two keys may set the same one only to the same value."""
    changes: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for key, value in body.items():
        reshape = _PARAMETERS.get(key)
        for parameter, one in reshape(value, f"{column}.{key}").items() if reshape is not None else ():
            if parameter in changes and changes[parameter] != one:
                raise _refusal(f"{column}.{origins[parameter]} and {column}.{key} both set {parameter}; leave one of them out")
            changes[parameter], origins[parameter] = one, key
    return changes


def _as(parameter: str) -> "Reshape":
    return lambda value, name: {parameter: value}


def _stop(value: Any, name: str) -> dict[str, Any]:
    return {"stop": [value] if isinstance(value, str) else value}


def _response_format(value: Any, name: str) -> dict[str, Any]:
    match value:
        case {"type": "text"}:
            return {}
        case {"type": "json_object"}:
            return {"json_schema": {"type": "object"}}
        case {"type": "json_schema", "json_schema": {"schema": dict(schema)}}:
            return {"json_schema": schema}
    raise _refusal(
        f"{name} is {shown(value)}; it must be {{type: text}}, {{type: json_object}} or {{type: json_schema, "
        "json_schema: {name, schema}}"
    )


def _structured_outputs(value: Any, name: str) -> dict[str, Any]:
    given = {key: one for key, one in _mapping(value, name).items() if one is not None}
    for key, one in given.items():
        if key not in _STRUCTURED:
            raise _refusal(f"{name}.{key}={shown(one)} is not offered{did_you_mean(key, _STRUCTURED)}")
    return {_STRUCTURED[key]: one for key, one in given.items()}


def _refusal(message: str) -> RowError:
    return RowError(ErrorKind.INVALID_REQUEST, message)


Reshape = Callable[[Any, str], dict[str, Any]]
"""From the value of a key, and the name to call it by, to parameters under our names; raises RowError."""

_PARAMETERS: dict[str, Reshape] = {
    **{key: _as(key) for key in _SAME},
    **{key: _as(parameter) for key, parameter in _RENAMED.items()},
    "stop": _stop,
    "response_format": _response_format,
    "structured_outputs": _structured_outputs,
}
_KNOWN = {
    "messages": {*_PARAMETERS, "messages", "top_logprobs", "tools", "tool_choice", "chat_template_kwargs"},
    "prompt": {*_PARAMETERS, "prompt", "best_of"} - {"max_completion_tokens"},
    "input": {"input"},
}
"""The keys that a body may have, by the one that holds its prompt."""
