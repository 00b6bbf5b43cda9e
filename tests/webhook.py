"""A webhook on loopback that keeps what it is sent, and answers as the test says."""

import json
import threading
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

SECRET = "hooks-T0K3N"


class Webhook:
    """Listens for the block; answers with the given HTTP statuses one after the other, the last of them again and again."""

    def __init__(self, answers: Sequence[int] = (200,), *, silent: bool = False):
        self.messages: list[dict[str, Any]] = []
        self.num_requests = 0
        self._release = threading.Event()
        hook = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                code = answers[min(hook.num_requests, len(answers) - 1)]
                hook.num_requests += 1
                if silent:
                    hook._release.wait()
                if code == 200:
                    hook.messages.append(json.loads(body))
                self.send_response(code)
                self.send_header("Content-Length", "0")
                if code == 302:
                    self.send_header("Location", hook.url)
                self.end_headers()

            def do_GET(self) -> None:
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the name is the standard library's
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}/services/{SECRET}"

    def __enter__(self) -> "Webhook":
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self._release.set()
        self._server.shutdown()
        self._server.server_close()
