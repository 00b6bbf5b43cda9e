"""A real S3 server in a process of its own on loopback, and a gate before it that can refuse.

The server is moto's, from PyPI with the two web packages that it needs (`moto[s3] flask flask-cors`; `moto[server]` brings
fifteen more, for other services): three seconds to install, two to start. It checks signatures and keys, knows which buckets
exist, keeps unfinished uploads and honours conditional writes, which is all that s3fs asks of S3. The gate does the rest.
"""

import json
import socket
import socketserver
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BUCKET = "bucket"
_ALLOWED = {"Version": "2012-10-17", "Statement": [{"Effect": "Allow", "Action": "s3:*", "Resource": "*"}]}


class _Pump(socketserver.BaseRequestHandler):
    """Carries one connection's bytes to the server and back."""

    server: "_Listener"

    def handle(self) -> None:
        with socket.create_connection(("127.0.0.1", self.server.target)) as other:
            self.server.ends += [self.request, other]
            there = threading.Thread(target=_copy, args=(self.request, other), daemon=True)
            there.start()
            _copy(other, self.request)
            there.join()


def _copy(source: socket.socket, target: socket.socket) -> None:
    try:
        while content := source.recv(2**16):
            target.sendall(content)
        target.shutdown(socket.SHUT_WR)
    except OSError:  # the gate was closed, or either side is gone
        for end in (source, target):
            end.close()


class _Listener(socketserver.ThreadingTCPServer):
    allow_reuse_address = True
    daemon_threads = True

    def __init__(self, port: int, target: int):
        self.target = target
        self.ends: list[socket.socket] = []
        super().__init__(("127.0.0.1", port), _Pump)


class Gate:
    """A port before the server's: while it is shut, connections break and new ones are refused."""

    def __init__(self, target: int):
        self._target = target
        self._listener: _Listener | None = None
        self.port = 0
        self.open()

    def open(self) -> None:
        """Let connections through."""
        self._listener = _Listener(self.port, self._target)
        self.port = self._listener.server_address[1]
        threading.Thread(target=self._listener.serve_forever, args=(0.05,), daemon=True).start()

    def shut(self) -> None:
        """Refuse all."""
        assert self._listener is not None
        self._listener.shutdown()
        self._listener.server_close()
        for end in self._listener.ends:
            with suppress(OSError):  # it has ended by itself
                end.shutdown(socket.SHUT_RDWR)


@dataclass(frozen=True)
class Server:
    """The server, its gate, and what a user needs to get in."""

    process: "subprocess.Popen[bytes]"
    gate: Gate
    environment: dict[str, str]

    @property
    def secret(self) -> str:
        """What must never be printed or written."""
        return self.environment["AWS_SECRET_ACCESS_KEY"]


@contextmanager
def running(log: Path) -> Iterator[Server]:
    """A server with one bucket and one user, who alone is let in."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    with log.open("wb") as said:
        process = subprocess.Popen(command, stdout=said, stderr=subprocess.STDOUT)
    try:
        key = _prepare(f"http://127.0.0.1:{port}", process)
        gate = Gate(port)
        environment = {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{gate.port}",
            "AWS_ACCESS_KEY_ID": key["AccessKeyId"],
            "AWS_SECRET_ACCESS_KEY": key["SecretAccessKey"],
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",  # nothing outside loopback is asked for credentials
            "AWS_CONFIG_FILE": "/dev/null",
            "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
        }
        yield Server(process, gate, environment)
        gate.shut()
    finally:
        process.kill()
        process.wait()


def _prepare(url: str, process: "subprocess.Popen[bytes]") -> dict[str, str]:
    """Wait for the server, make a bucket and a user, and lock the door; returns the user's key."""
    import botocore.session

    def client(service: str) -> Any:
        return botocore.session.get_session().create_client(
            service, endpoint_url=url, region_name="us-east-1", aws_access_key_id="a", aws_secret_access_key="b"
        )

    for _ in range(300):
        try:
            urllib.request.urlopen(f"{url}/moto-api/")
            break
        except OSError:
            assert process.poll() is None, "the server did not start"
            time.sleep(0.1)
    client("s3").create_bucket(Bucket=BUCKET)
    iam = client("iam")
    iam.create_user(UserName="user")
    iam.put_user_policy(UserName="user", PolicyName="all", PolicyDocument=json.dumps(_ALLOWED))
    key: dict[str, str] = iam.create_access_key(UserName="user")["AccessKey"]
    lock = urllib.request.Request(
        f"{url}/moto-api/reset-auth", data=b"0", headers={"Content-Type": "text/plain"}, method="POST"
    )
    urllib.request.urlopen(lock)
    return key
