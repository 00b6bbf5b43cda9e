"""The endpoint as a web application: OpenAI's API in front of a backend, for whom it checks keys, quotas and sizes.

Nothing here knows Ray. A client that leaves cancels what runs for it: the server closes the response's generator, which
closes the backend's.
"""

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack, aclosing, contextmanager
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from pipelines.config import ServeConfig
from pipelines.serving.answering import Answering
from pipelines.serving.asking import CHAT, EMBEDDINGS, TEXT, Ask, Asking
from pipelines.serving.backend import Backend, Observer
from pipelines.serving.faults import ApiError, Full, Unavailable, of_engine
from pipelines.serving.keys import NOBODY, Client, Keys
from pipelines.serving.live_first import LiveFirst
from pipelines.serving.marks import Marks, body_of
from pipelines.serving.page import POLICY
from pipelines.serving.quotas import Quotas
from pipelines.serving.schemas import body_of_endpoint

_EVENTS = "text/event-stream"


class Gate:
    """Lets requests in, and sees them to their end."""

    def __init__(
        self,
        config: ServeConfig,
        backend: Backend,
        keys: Keys,
        observers: Sequence[Observer],
        special_tokens: Sequence[str] = (),
    ):
        self.config = config
        self.keys = keys
        self._settings = config.serve
        self._backend = backend
        self._observers = observers
        self._quotas = Quotas(config.serve.retry_after_s)
        self._live_first = LiveFirst(config.serve.target_running, config.serve.idle_s)
        self._asking = Asking(config, special_tokens)

    def client(self, request: Request) -> Client:
        """Who asks; raises ApiError (401)."""
        client = self.keys.client(request.headers.get("authorization"))
        if client is None:
            raise ApiError(HTTPStatus.UNAUTHORIZED, "the API key is missing or unknown", code="invalid_api_key")
        request.state.key = client.name
        return client

    async def num_ready(self) -> int:
        """How many replicas can answer now."""
        return await self._backend.num_ready()

    async def generate(self, request: Request, endpoint: str) -> Response:
        """Answer one request; raises ApiError."""
        client = self.client(request)
        body = await body_of(request, self._settings.max_body_bytes)
        if self._settings.log_prompts:
            request.state.prompt = body.get("messages") or body.get("prompt") or body.get("input")
        ask = self._asking.ask(endpoint, body, is_background=client.is_background)
        with ExitStack() as stack:
            stack.enter_context(self._quotas.admitted(client))
            num_ready = await self._backend.num_ready()
            stack.enter_context(self._live_first.taken(is_background=client.is_background, num_ready=num_ready))
            answering = stack.enter_context(self._observed(client, ask))
            said = self._said(ask, request.state.request_id, client.name)
            first = await self._first(said)
            if not ask.is_stream:
                return JSONResponse(answering.whole(first[0]))
            return _Events(_relayed(answering, first, said), said, stack.pop_all())

    @contextmanager
    def _observed(self, client: Client, ask: Ask) -> Iterator[Answering]:
        """A request goes to a replica, and comes to an end; an error that has a status is counted where it is told."""
        answering = Answering(ask, client.name)
        for observer in self._observers:
            observer.began(answering.tally)
        try:
            yield answering
        except ApiError as error:
            answering.tally.error_kind, answering.tally.is_refused = error.code or str(int(error.status)), True
            raise
        finally:
            tally = answering.end()
            if tally.finish_reason is None and tally.error_kind is None:
                tally.finish_reason = "left"
            self._quotas.spent(client, tally.num_tokens)
            for observer in self._observers:
                observer.answered(tally)

    async def _said(self, ask: Ask, request_id: str, key: str) -> AsyncGenerator[Sequence[str], None]:
        """What the backend says, within the time that a request may take."""
        deadline = asyncio.get_running_loop().time() + self._settings.timeout_s
        async with aclosing(self._backend.answer(ask, request_id=request_id, key=key)) as said:
            while True:
                try:
                    async with asyncio.timeout_at(deadline):
                        texts = await anext(said)
                except StopAsyncIteration:
                    return
                except TimeoutError:
                    message = f"the request took longer than {self._settings.timeout_s:g} s"
                    raise ApiError(HTTPStatus.GATEWAY_TIMEOUT, message, code="timeout") from None
                yield texts

    async def _first(self, said: AsyncGenerator[Sequence[str], None]) -> Sequence[str]:
        """The first that the backend says: errors still have a status of their own then."""
        wait_s = self._settings.retry_after_s
        try:
            texts = await anext(said)
        except StopAsyncIteration:
            raise ApiError(HTTPStatus.BAD_GATEWAY, "the replica said nothing", code="no_answer") from None
        except Full:
            message = "as many requests wait as may; come again later"
            raise ApiError(HTTPStatus.TOO_MANY_REQUESTS, message, code="queue_full", retry_after_s=wait_s) from None
        except Unavailable as error:
            raise ApiError(HTTPStatus.SERVICE_UNAVAILABLE, str(error), code="not_ready", retry_after_s=wait_s) from None
        if texts[0].startswith('{"error"'):
            await said.aclose()
            raise of_engine(json.loads(texts[0])["error"])
        return texts

    def refused(self, request: Request, status: int) -> None:
        """Tell of a request that was not answered."""
        for observer in self._observers:
            observer.refused(getattr(request.state, "key", NOBODY), status)


async def _relayed(
    answering: Answering, first: Sequence[str], said: AsyncGenerator[Sequence[str], None]
) -> AsyncGenerator[str, None]:
    """The pieces of a stream as events. An error half-way is one of them: the status is gone out long ago."""
    try:
        for event in answering.events(first):
            yield event
        async for texts in said:
            for event in answering.events(texts):
                yield event
    except (ApiError, Unavailable) as error:
        answering.tally.error_kind = "engine_error"
        fault = error if isinstance(error, ApiError) else ApiError(HTTPStatus.SERVICE_UNAVAILABLE, str(error))
        yield f"data: {json.dumps(fault.body())}\n\n"


class _Events(StreamingResponse):
    """A stream that lets go of what it holds however it ends, also where its client left before it began."""

    def __init__(self, events: AsyncGenerator[str, None], said: AsyncGenerator[Sequence[str], None], running: ExitStack):
        super().__init__(events, media_type=_EVENTS)
        self._generators = (events, said)
        self._running = running

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it."""
        with self._running:
            try:
                await super().__call__(scope, receive, send)
            finally:
                for generator in self._generators:
                    await generator.aclose()


def build_app(gate: Gate, page: str) -> FastAPI:
    """The application of a gate, with the page at its root."""
    app = FastAPI(title="Fournée", description=f"{gate.config.model.name} behind OpenAI's API", docs_url=None, redoc_url=None)
    _add_ways_out(app, gate)
    model: dict[str, Any] = {
        "id": gate.config.model.name,
        "object": "model",
        "created": int(time.time()),
        "owned_by": "fournee",
        "max_model_len": gate.config.model.max_model_len,
    }

    @app.get("/", response_class=HTMLResponse)
    async def root() -> HTMLResponse:
        return HTMLResponse(page, headers={"Content-Security-Policy": POLICY, "X-Content-Type-Options": "nosniff"})

    @app.get("/health")
    @app.get("/ready")
    async def health() -> JSONResponse:
        num_ready = await gate.num_ready()
        status = HTTPStatus.OK if num_ready else HTTPStatus.SERVICE_UNAVAILABLE
        return JSONResponse({"status": "ok" if num_ready else "not ready", "replicas": num_ready}, status)

    @app.get("/v1/models")
    async def models(request: Request) -> dict[str, Any]:
        gate.client(request)
        return {"object": "list", "data": [model]}

    @app.get("/v1/models/{name:path}")
    async def one_model(request: Request, name: str) -> dict[str, Any]:
        gate.client(request)
        if name != model["id"]:
            raise ApiError(HTTPStatus.NOT_FOUND, f"the model {name!r} does not exist", code="model_not_found", param="model")
        return model

    for endpoint in (CHAT, TEXT, EMBEDDINGS):
        described = body_of_endpoint(endpoint, model["id"])
        app.add_api_route(endpoint, _answering(gate, endpoint), methods=["POST"], openapi_extra=described, name=endpoint)
    return app


def _answering(gate: Gate, endpoint: str) -> Callable[[Request], Awaitable[Response]]:
    async def answer(request: Request) -> Response:
        return await gate.generate(request, endpoint)

    return answer


def _add_ways_out(app: FastAPI, gate: Gate) -> None:
    """Every response has its request's id and a line in the access log; every error has OpenAI's shape."""

    def refuse(request: Request, error: ApiError) -> Response:
        gate.refused(request, error.status)
        return JSONResponse(error.body(), error.status, error.headers())

    @app.exception_handler(ApiError)
    async def known(request: Request, error: ApiError) -> Response:
        return refuse(request, error)

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> Response:
        return refuse(request, ApiError(error.status_code, f"{request.method} {request.url.path}: {error.detail}"))

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        return refuse(request, ApiError(HTTPStatus.BAD_REQUEST, str(error.errors()[0].get("msg"))))

    app.add_middleware(Marks, refused=gate.refused)
