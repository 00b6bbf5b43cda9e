"""Write a run's results as OpenAI's batch API does: `openai/output.jsonl` and `openai/errors.jsonl`.

A row is in exactly one of the two, in the order of the plan. Where vLLM knows more than OpenAI's format can say, the
format wins, and never so that a cut answer looks whole; the columns of `results/` say it all.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any

from pipelines.errors import ErrorKind
from pipelines.parts import Parts, statistics_in
from pipelines.plan import Plan
from pipelines.storage import Folder

OPENAI = "openai"
OUTPUT_FILE = f"{OPENAI}/output.jsonl"
ERRORS_FILE = f"{OPENAI}/errors.jsonl"

_COLUMNS = [
    "id", "status", "prompt_kind", "text", "finish_reason", "num_prompt_tokens", "num_cached_tokens", "num_output_tokens",
    "error_kind", "error_message", "request_key", "sampling", "completions", "logprobs", "reasoning", "tool_calls", "embedding",
]  # fmt: skip
_UNANSWERED = {ErrorKind.UNREADABLE_FILE, ErrorKind.ENGINE_KILLED}
"""No server would have given a response: the row was never sent, or the server died."""
_SERVER_ERRORS = {
    ErrorKind.ENGINE_ERROR,
    ErrorKind.TRUNCATED,
    ErrorKind.INVALID_JSON,
    ErrorKind.INVALID_OUTPUT,
    ErrorKind.POSTPROCESS_ERROR,
}
"""The request was fine; all other kinds are the request's own fault."""
_LEAST_LOGPROB = -9999.0  # OpenAI's own word for minus infinity, which JSON cannot hold
_HALF_CHARACTER = "\ufffd"  # in the text of a token that holds a part of a character only

Candidates = Sequence[Mapping[str, Any]]
"""The log probabilities at one place of an answer; the token that was taken comes first."""

Kind = tuple[str, str, Callable[[int, Mapping[str, Any]], dict[str, Any]]]
"""What tells chats and completions apart: the prefix of their ids, the name of their bodies, and their choices."""


def write_openai(run: Folder, plan: Plan, model_name: str) -> None:
    """Write both files, each whole or not at all; one without rows is empty. Every batch must have its part."""
    _write(run, Parts(run), plan.batches["batch_id"].to_pylist(), model_name)


def write_committed(run: Folder, model_name: str) -> None:
    """Write both files for the batches that have their part, of a run that does not go on; no files where none has one."""
    parts = Parts(run)
    if batch_ids := parts.batch_ids:
        _write(run, parts, batch_ids, model_name)


def _write(run: Folder, parts: Parts, batch_ids: Sequence[int], model_name: str) -> None:
    with run.create(OUTPUT_FILE) as output, run.create(ERRORS_FILE) as errors:
        for part in parts.read(batch_ids):
            created = statistics_in(part)["started_at"] // 1_000_000
            for row in part.select(_COLUMNS).to_pylist():
                is_ok = row["status"] == "ok"
                line = _answered(row, model_name, created) if is_ok else _failed(row)
                # ASCII only: some readers also split lines at U+2028 and its like.
                (output if is_ok else errors).write(json.dumps(line, allow_nan=False).encode("ascii") + b"\n")
    run.sweep(OPENAI)


def _answered(row: Mapping[str, Any], model_name: str, created: int) -> dict[str, Any]:
    if row["embedding"] is not None:
        body = _embedding_body(row, model_name)
    elif row["prompt_kind"] == "chat":
        body = _completion_body(row, model_name, created, ("chatcmpl", "chat.completion", _message_choice))
    else:
        body = _completion_body(row, model_name, created, ("cmpl", "text_completion", _text_choice))
    return _line(row, _response(row, 200, body), None)


def _failed(row: Mapping[str, Any]) -> dict[str, Any]:
    kind, message = ErrorKind(row["error_kind"]), row["error_message"]
    if kind in _UNANSWERED:
        return _line(row, None, {"code": kind, "message": message})
    status, fault = (500, "server_error") if kind in _SERVER_ERRORS else (400, "invalid_request_error")
    body = {"error": {"message": message, "type": fault, "param": None, "code": kind}}
    return _line(row, _response(row, status, body), None)


def _line(row: Mapping[str, Any], response: dict[str, Any] | None, error: dict[str, Any] | None) -> dict[str, Any]:
    return {"id": f"batch_req_{row['request_key']}", "custom_id": row["id"], "response": response, "error": error}


def _response(row: Mapping[str, Any], status: int, body: dict[str, Any]) -> dict[str, Any]:
    return {"status_code": status, "request_id": f"req_{row['request_key']}", "body": body}


def _embedding_body(row: Mapping[str, Any], model_name: str) -> dict[str, Any]:
    # A model in half precision may overflow; null is what JSON has for it.
    vector = [one if math.isfinite(one) else None for one in row["embedding"]]
    return {
        "object": "list",
        "data": [{"object": "embedding", "index": 0, "embedding": vector}],
        "model": model_name,
        "usage": {"prompt_tokens": row["num_prompt_tokens"], "total_tokens": row["num_prompt_tokens"]},
    }


def _completion_body(row: Mapping[str, Any], model_name: str, created: int, kind: Kind) -> dict[str, Any]:
    prefix, name, choice = kind
    num_prompt, num_output = row["num_prompt_tokens"], row["num_output_tokens"]
    return {
        "id": f"{prefix}-{row['request_key']}",
        "object": name,
        "created": created,
        "model": model_name,
        "choices": [choice(index, answer) for index, answer in enumerate(_answers(row))],
        "usage": {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_output,
            "total_tokens": num_prompt + num_output,
            "prompt_tokens_details": {"cached_tokens": row["num_cached_tokens"]},
        },
    }


def _answers(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """All answers to a row alike, also a later one that post-processing refused; only the first has log probabilities."""
    sampling = json.loads(row["sampling"]) if row["sampling"] is not None else {}
    first = {**row, "num_logprobs": sampling.get("logprobs")}
    return [first, *({**one, "logprobs": None} for one in row["completions"] or ())]


def _message_choice(index: int, answer: Mapping[str, Any]) -> dict[str, Any]:
    message = {"role": "assistant", "content": answer["text"], "refusal": None}
    if answer["reasoning"] is not None:
        message["reasoning"] = answer["reasoning"]
    if answer["tool_calls"] is not None:
        message |= {"content": answer["text"] or None, "tool_calls": json.loads(answer["tool_calls"])}
    reason = _finish_reason(answer)
    if reason == "stop" and answer["tool_calls"] is not None:  # calls that were cut are no calls to make
        reason = "tool_calls"
    return {"index": index, "message": message, "logprobs": _chat_logprobs(answer), "finish_reason": reason}


def _text_choice(index: int, answer: Mapping[str, Any]) -> dict[str, Any]:
    logprobs = _text_logprobs(answer)
    return {"index": index, "text": answer["text"], "logprobs": logprobs, "finish_reason": _finish_reason(answer)}


def _finish_reason(answer: Mapping[str, Any]) -> str:
    """OpenAI's word for it: what vLLM cut for a reason of its own, such as `repetition`, is as unfinished as `length`."""
    return "stop" if answer["finish_reason"] == "stop" else "length"


def _chat_logprobs(answer: Mapping[str, Any]) -> dict[str, Any] | None:
    if answer["logprobs"] is None:
        return None
    number = answer["num_logprobs"]
    content = [
        {**_token(place[0]), "top_logprobs": [_token(one) for one in _likeliest(place, number)]} for place in answer["logprobs"]
    ]
    return {"content": content, "refusal": None}


def _text_logprobs(answer: Mapping[str, Any]) -> dict[str, Any] | None:
    if answer["logprobs"] is None:
        return None
    tokens = [_token(place[0]) for place in answer["logprobs"]]
    # A completion's candidates include the token that was taken; of two with one text, the likelier stays.
    candidates = [[_token(one) for one in reversed(_likeliest(place, None))] for place in answer["logprobs"]]
    return {
        "tokens": [token["token"] for token in tokens],
        "token_logprobs": [token["logprob"] for token in tokens],
        "top_logprobs": [{one["token"]: one["logprob"] for one in place} for place in candidates],
        "text_offset": [*accumulate((len(token["token"]) for token in tokens), initial=0)][:-1],
    }


def _likeliest(place: Candidates, number: int | None) -> Candidates:
    """The likeliest candidates first; as many as the row asked for, or all where the run did."""
    return sorted(place, key=lambda one: -_logprob(one))[:number]


def _token(one: Mapping[str, Any]) -> dict[str, Any]:
    text = one["text"] or ""
    return {"token": text, "logprob": _logprob(one), "bytes": None if _HALF_CHARACTER in text else list(text.encode())}


def _logprob(one: Mapping[str, Any]) -> float:
    logprob = one["logprob"]
    return float(logprob) if logprob is not None and math.isfinite(logprob) else _LEAST_LOGPROB
