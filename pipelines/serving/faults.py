"""Errors as OpenAI's API shapes them, each with its status."""

from http import HTTPStatus
from typing import Any

from pipelines.errors import ErrorKind, RowError

_OWN_FAULT = 500  # and above: the server's
_LATER_S = 10.0  # a replica that died is noticed within seconds, and another loads its model first
_TYPES = {
    HTTPStatus.UNAUTHORIZED: "authentication_error",
    HTTPStatus.FORBIDDEN: "permission_error",
    HTTPStatus.TOO_MANY_REQUESTS: "rate_limit_error",
}


class ApiError(Exception):
    """A request that is not answered: what the client is told, and when it may come again."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        retry_after_s: float | None = None,
    ):
        super().__init__(message)
        self.status = HTTPStatus(status)
        self.message = message
        self.code = code
        self.param = param
        self.retry_after_s = retry_after_s

    def body(self) -> dict[str, Any]:
        """The response's body."""
        kind = "server_error" if self.status >= _OWN_FAULT else _TYPES.get(self.status, "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def headers(self) -> dict[str, str]:
        """The response's headers."""
        headers = {"WWW-Authenticate": "Bearer"} if self.status == HTTPStatus.UNAUTHORIZED else {}
        if self.retry_after_s is not None:
            headers["Retry-After"] = str(max(1, round(self.retry_after_s + 0.5)))  # whole seconds; never too early
        return headers


class Unavailable(Exception):
    """No replica can answer now: none is loaded, or the one that was asked has died."""


class Full(Exception):
    """As many requests wait for a replica as may."""


def of_row(error: RowError) -> ApiError:
    """What a fault that would fail a row of a batch is at the endpoint."""
    code = "context_length_exceeded" if error.kind == ErrorKind.PROMPT_TOO_LONG else str(error.kind)
    return ApiError(HTTPStatus.BAD_REQUEST, error.message, code=code)


def of_engine(error: dict[str, Any]) -> ApiError:
    """What the engine's own error says; vLLM puts the status where OpenAI has a word."""
    status, message = error.get("code"), str(error.get("message"))
    if not isinstance(status, int) or not HTTPStatus.BAD_REQUEST <= status <= 599:
        status = HTTPStatus.INTERNAL_SERVER_ERROR
    is_too_long = "maximum context length" in message or "maximum model length" in message or "max_model_len" in message
    code = "context_length_exceeded" if is_too_long and status < _OWN_FAULT else None
    later_s = _LATER_S if status == HTTPStatus.SERVICE_UNAVAILABLE else None
    return ApiError(status, message, code=code, param=error.get("param"), retry_after_s=later_s)
