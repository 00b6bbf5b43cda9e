"""What every request gets, whatever becomes of it: an id, a line in the access log, a limit to its size."""

import json
import logging
import re
import time
import uuid
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse

from pipelines.serving.faults import ApiError

access = logging.getLogger("fournee.access")

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}", re.ASCII)


class Marks:
    """Gives each request its id and its line in the access log; written as plain ASGI, which streams without a buffer.

    The id is the header's: Ray Serve's proxy puts one into every request that has none, and into the response.
    """

    def __init__(self, app: Any, refused: Callable[[Request, int], None]):
        self._app = app
        self._refused = refused

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Handle one connection."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request, began, status = Request(scope), time.perf_counter(), 0
        given = request.headers.get("x-request-id", "")
        request.state.request_id = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex

        async def noted(message: Any) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        try:
            await self._app(scope, receive, noted)
        except Exception:
            access.exception("request %s failed", request.state.request_id)
            if status:
                raise
            error = ApiError(HTTPStatus.INTERNAL_SERVER_ERROR, "the server has a fault; its log says more")
            self._refused(request, error.status)
            await JSONResponse(error.body(), error.status)(scope, receive, noted)
        finally:
            _log(request, status, time.perf_counter() - began)


def _log(request: Request, status: int, took_s: float) -> None:
    key, prompt = getattr(request.state, "key", "-"), getattr(request.state, "prompt", None)
    shown = "" if prompt is None else f" prompt={json.dumps(prompt, ensure_ascii=True)}"  # ASCII: one line, whatever it holds
    access.info(
        "%s %s %s key=%s id=%s %.3fs%s",
        request.method, json.dumps(request.url.path)[1:-1], status or "left", key, request.state.request_id, took_s, shown,
    )  # fmt: skip


async def body_of(request: Request, most_bytes: int) -> dict[str, Any]:
    """Read a JSON object of limited size; raises ApiError."""
    raw = await read(request, most_bytes)
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise ApiError(HTTPStatus.BAD_REQUEST, f"the body is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise ApiError(HTTPStatus.BAD_REQUEST, "the body must be a JSON object")
    return body


async def read(request: Request, most_bytes: int) -> bytes:
    """Read a body of limited size; raises ApiError (413), without reading on."""
    error = ApiError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"the body is larger than {most_bytes} bytes")
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length) > most_bytes:
        raise error
    raw = bytearray()
    async for chunk in request.stream():
        raw += chunk
        if len(raw) > most_bytes:
            raise error
    return bytes(raw)
