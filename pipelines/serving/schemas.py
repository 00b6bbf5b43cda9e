"""What bodies look like, for the served OpenAPI description; they are judged where they are read, with more to say."""

from typing import Any

from pipelines.serving.asking import CHAT, EMBEDDINGS, TEXT

_Schema = dict[str, Any]

_TEXT: _Schema = {"type": "string", "minLength": 1}
_SAMPLING: dict[str, _Schema] = {
    "max_tokens": {"type": "integer", "minimum": 1},
    "temperature": {"type": "number", "minimum": 0, "maximum": 2},
    "top_p": {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
    "top_k": {"type": "integer", "minimum": 0},
    "min_p": {"type": "number", "minimum": 0, "maximum": 1},
    "repetition_penalty": {"type": "number", "exclusiveMinimum": 0},
    "presence_penalty": {"type": "number", "minimum": -2, "maximum": 2},
    "frequency_penalty": {"type": "number", "minimum": -2, "maximum": 2},
    "n": {"type": "integer", "minimum": 1},
    "seed": {"type": "integer", "minimum": 0},
    "stop": {"anyOf": [_TEXT, {"type": "array", "items": _TEXT}]},
    "stream": {"type": "boolean"},
    "structured_outputs": {"type": "object"},
    "response_format": {"type": "object"},
}
_MESSAGE: _Schema = {
    "type": "object",
    "required": ["role", "content"],
    "properties": {"role": {"enum": ["system", "user", "assistant"]}, "content": _TEXT},
}
_TOOL: _Schema = {
    "type": "object",
    "required": ["type", "function"],
    "properties": {
        "type": {"const": "function"},
        "function": {"type": "object", "required": ["name"], "properties": {"name": _TEXT, "parameters": {"type": "object"}}},
    },
}
_OWN: dict[str, dict[str, _Schema]] = {
    CHAT: {
        "messages": {"type": "array", "minItems": 1, "items": _MESSAGE},
        "tools": {"type": "array", "items": _TOOL},
        "logprobs": {"type": "boolean"},
        "top_logprobs": {"type": "integer", "minimum": 0, "maximum": 20},
        **_SAMPLING,
    },
    TEXT: {"prompt": _TEXT, "logprobs": {"type": "integer", "minimum": 0, "maximum": 20}, **_SAMPLING},
    EMBEDDINGS: {"input": {"anyOf": [_TEXT, {"type": "array", "minItems": 1, "items": _TEXT}]}},
}
_BATCH = {
    "type": "object",
    "required": ["input_file_id", "endpoint", "completion_window"],
    "properties": {
        "input_file_id": _TEXT,
        "endpoint": {"enum": list(_OWN)},
        "completion_window": {"const": "24h"},
        "metadata": {"type": "object", "additionalProperties": {"type": "string"}},
    },
}
_UPLOAD = {
    "type": "object",
    "required": ["file", "purpose"],
    "properties": {"file": {"type": "string", "format": "binary"}, "purpose": {"const": "batch"}},
}


def body_of_endpoint(endpoint: str, model: str) -> dict[str, Any]:
    """What an endpoint's operation says of its body."""
    own = _OWN[endpoint]
    schema = {"type": "object", "required": ["model", next(iter(own))], "properties": {"model": {"const": model}, **own}}
    return _required("application/json", schema)


def _required(kind: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"requestBody": {"required": True, "content": {kind: {"schema": schema}}}}


BATCH_BODY = _required("application/json", _BATCH)
UPLOAD_BODY = _required("multipart/form-data", _UPLOAD)
