"""The endpoint without Ray: its application in this process, with the echo engine behind it."""

import asyncio
import json
import threading
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import uvicorn
from fastapi import FastAPI
from starlette.testclient import TestClient

from pipelines.compose import compose_settings
from pipelines.config import ServeConfig
from pipelines.parse import parse_serve
from pipelines.serving.answering import Tally
from pipelines.serving.app import Gate, build_app
from pipelines.serving.asking import Ask
from pipelines.serving.echo import EchoServer
from pipelines.serving.faults import Full, Unavailable
from pipelines.serving.keys import VARIABLE, Keys
from pipelines.serving.page import page_of

KEY = "sk-alice-0123456789abcdef"
ASKED = {"model": "smollm2", "messages": [{"role": "user", "content": "Say these five words back"}]}


class Backend:
    """The echo engine's server, which can be told to be full, gone or slow."""

    def __init__(self, config: ServeConfig):
        self.server = EchoServer(config)
        self.state = "ready"
        self.asked: list[Ask] = []

    async def answer(self, ask: Ask, *, request_id: str, key: str) -> AsyncGenerator[Sequence[str], None]:
        self.asked.append(ask)
        match self.state:
            case "full":
                raise Full
            case "gone":
                raise Unavailable("no replica is ready yet; come again later")
            case "slow":
                await asyncio.sleep(60)
        async for texts in self.server.answer(ask, request_id=request_id, key=key):
            yield texts

    async def num_ready(self) -> int:
        return 0 if self.state == "gone" else 1


class Heard:
    """Notes what the endpoint tells of its requests."""

    def __init__(self) -> None:
        self.refusals: list[tuple[str, int]] = []
        self.running = 0
        self.tallies: list[Tally] = []

    def refused(self, key: str, status: int) -> None:
        self.refusals.append((key, int(status)))

    def began(self, tally: Tally) -> None:
        self.running += 1

    def answered(self, tally: Tally) -> None:
        self.running -= 1
        self.tallies.append(tally)


def config_of(*overrides: str) -> ServeConfig:
    return parse_serve(compose_settings("serve", ["engine=echo", *overrides]))


class Endpoint:
    """The application, and a client of it."""

    def __init__(self, *overrides: str, environment: dict[str, str] | None = None):
        self.config = config_of(*overrides)
        self.backend = Backend(self.config)
        self.heard = Heard()
        keys = Keys(self.config.serve, {VARIABLE: f"alice:{KEY}"} if environment is None else environment)
        self.gate = Gate(self.config, self.backend, keys, [self.heard])
        self.app = build_app(self.gate, page_of(self.config, keys))
        self.client = TestClient(self.app, headers={"Authorization": f"Bearer {KEY}"}, raise_server_exceptions=False)

    def chat(self, **changes: Any) -> Any:
        return self.client.post("/v1/chat/completions", json={**ASKED, **changes})


@contextmanager
def listening(app: FastAPI) -> Iterator[str]:
    """The application behind a port of this machine for the block; yields its URL."""
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(10)


def events(text: str) -> list[Any]:
    """What the events of a stream say; the last is the text [DONE]."""
    said = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    return [one if one == "[DONE]" else json.loads(one) for one in said]
