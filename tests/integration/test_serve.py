"""`fournee serve` on Ray Serve: one endpoint with the echo engine for all tests, and (slow) one with the real model."""

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest
import requests

from pipelines.engines import Engine
from pipelines.engines.vllm.requests import Requests
from pipelines.history import History
from pipelines.rows import Request
from tests.integration.test_readme import COMMANDS

KEY = "sk-alice-0123456789abcdef"
QUESTION = {"model": "smollm2", "messages": [{"role": "user", "content": "What is the capital of France?"}]}


@dataclass(frozen=True)
class Server:
    """`fournee serve` in a process of its own."""

    process: "subprocess.Popen[str]"
    url: str
    folder: Path

    @property
    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=KEY, max_retries=0)

    def post(self, body: dict[str, Any], **options: Any) -> requests.Response:
        path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
        return requests.post(self.url + path, json=body, headers={"Authorization": f"Bearer {KEY}"}, timeout=120, **options)

    def health(self) -> int:
        return requests.get(f"{self.url}/health", timeout=30).status_code


@contextmanager
def serving(folder: Path, *overrides: str) -> Iterator[Server]:
    """An endpoint for the block; it must end well when it is told to stop."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen(
        [sys.executable, "-m", "jobs.cli", "serve", f"serve.port={port}", f"serve.folder={folder}", *overrides],
        stderr=subprocess.PIPE, text=True, env={**os.environ, "RAY_ADDRESS": "", "FOURNEE_API_KEYS": f"alice:{KEY}"},
    )  # fmt: skip
    assert process.stderr is not None
    said: list[str] = []
    try:
        for line in process.stderr:
            said.append(line)
            if "answers at http" in line:
                break
        else:
            pytest.fail("".join(said))
        threading.Thread(target=lambda: said.extend(process.stderr or ()), daemon=True).start()
        yield Server(process, f"http://127.0.0.1:{port}", folder)
        process.send_signal(signal.SIGTERM)
        assert process.wait(120) == 0, "".join(said)
        assert KEY not in "".join(said)
    finally:
        process.kill()
        process.wait(30)


def wait_for(batch_id: str, client: openai.OpenAI, seconds: float = 180.0) -> Any:
    deadline = time.monotonic() + seconds
    while (batch := client.batches.retrieve(batch_id)).status not in ("completed", "failed", "cancelled"):
        assert time.monotonic() < deadline, batch
        time.sleep(0.5)
    return batch


def test_an_endpoint_on_ray_serve_keeps_its_promises(tmp_path: Path) -> None:
    """In one test, since starting Ray Serve takes half a minute."""
    own = ("serve.max_running=2", "serve.max_queued=2", "serve.usage_interval_s=1.0", "serve.idle_s=0.0")
    endless = {"model": "smollm2", "prompt": "word " * 2000, "max_tokens": 2000, "stream": True}  # 100 seconds
    with serving(tmp_path, "engine=echo", "engine.seconds_per_token=0.05", *own) as server:
        # The README's line.
        (curl,) = (shlex.split(one) for one in COMMANDS if one.startswith("curl "))
        answer = server.post(json.loads(curl[curl.index("-d") + 1]), stream=False)
        assert (answer.status_code, answer.json()["choices"][0]["message"]["content"]) == (
            200,
            QUESTION["messages"][0]["content"],
        )  # type: ignore[index]
        assert server.post({**QUESTION, "messages": []}).status_code == 400
        assert requests.get(f"{server.url}/v1/models", timeout=30).status_code == 401
        # A client that leaves frees its place, and a full queue refuses.
        leaving = [server.post(endless, stream=True) for _ in range(2)]
        for one in leaving:
            next(one.iter_lines())
            one.close()
        found: list[requests.Response] = []
        asking = [threading.Thread(target=lambda: found.append(server.post({**QUESTION, "max_tokens": 6}))) for _ in range(12)]
        began = time.monotonic()
        for thread in asking:
            thread.start()
        for thread in asking:
            thread.join()
        assert time.monotonic() - began < 50, "those that left still run"
        assert {one.status_code for one in found} == {200, 429}
        assert all("retry-after" in one.headers for one in found if one.status_code == 429)
        # A batch is a run of the cluster.
        lines = [{"custom_id": str(n), "method": "POST", "url": "/v1/chat/completions", "body": QUESTION} for n in range(4)]
        file = server.client.files.create(file=("r.jsonl", "\n".join(map(json.dumps, lines)).encode()), purpose="batch")
        batch = server.client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
        done = wait_for(batch.id, server.client)
        assert (done.status, done.request_counts.completed) == ("completed", 4)
        assert (tmp_path / "batch_runs" / batch.id / "_SUCCESS").exists()
        # What runs when it is told to stop comes to its end.
        last = server.post({"model": "smollm2", "prompt": "word " * 30, "stream": True}, stream=True)
        pieces = last.iter_lines()
        next(pieces)
        server.process.send_signal(signal.SIGTERM)
        assert list(pieces)[-2] == b"data: [DONE]"
    (line,) = History(str(tmp_path / "usage")).lines(["client"]).to_pylist()
    assert (line["client"], line["num_rows"] >= 8) == ("alice", True)


def test_a_serve_config_file_builds_the_endpoint_and_never_without_keys(ray_address: str) -> None:
    script = (
        "import ray, sys; ray.init(sys.argv[1], log_to_driver=False); from pipelines.serve import app;"
        "print(type(app({'overrides': ['engine=echo', 'cluster=job']})).__name__)"
    )
    command = [sys.executable, "-c", script, ray_address]
    without = {**os.environ, "RAY_AUTH_MODE": "token"}
    keys = {**without, "FOURNEE_API_KEYS": f"alice:{KEY}"}
    built = subprocess.run(command, env=keys, capture_output=True, text=True, timeout=120, check=False)
    assert built.stdout.strip() == "Application", built.stderr
    refused = subprocess.run(command, env=without, capture_output=True, text=True, timeout=120, check=False)
    assert refused.returncode != 0 and "there are no API keys" in refused.stderr


@pytest.mark.slow
def test_the_real_model_answers_as_in_a_batch_and_its_engine_may_die(tmp_path: Path, vllm_engine: Engine) -> None:
    """Takes five minutes on two cores: vLLM's server is three processes, each of which imports vLLM."""
    with serving(tmp_path, "engine.cpu_kv_cache_gib=1") as server:
        client = server.client
        _check_parity(server, vllm_engine)
        text = client.completions.create(model="smollm2", prompt="The capital of France is", max_tokens=3, logprobs=1)
        assert text.choices[0].logprobs is not None and " Paris" in text.choices[0].text
        schema = {"type": "object", "properties": {"word": {"type": "string", "maxLength": 8}}, "required": ["word"]}
        formed = client.chat.completions.create(
            **QUESTION, response_format={"type": "json_schema", "json_schema": {"name": "w", "schema": schema}}
        )
        assert set(json.loads(formed.choices[0].message.content)) == {"word"}
        several = client.chat.completions.create(**QUESTION, n=2, temperature=1, seed=1, stop=["."], max_tokens=8)
        assert len(several.choices) == 2
        for refused in ({"messages": [{"role": "user", "content": "word " * 3000}]}, {"logit_bias": {"9999999": 1}}):
            with pytest.raises(openai.BadRequestError):
                client.chat.completions.create(**{**QUESTION, **refused})
        with pytest.raises(openai.BadRequestError):
            client.embeddings.create(model="smollm2", input="x")
        for process in psutil.process_iter(["cmdline"]):
            if "EngineCore" in " ".join(process.info["cmdline"] or []) and _is_below(process, server.process.pid):
                process.kill()
        _wait_until(lambda: server.health() == 503, 30)
        assert server.post(QUESTION).status_code == 503
        _wait_until(lambda: server.health() == 200, 300)
        assert "Paris" in str(client.chat.completions.create(**QUESTION).choices[0].message.content)


def _check_parity(server: Server, engine: Engine) -> None:
    """The same question has the same prompt tokens, and greedily the same answer, as in a worker's engine."""
    said = server.post({**QUESTION, "max_tokens": 24, "return_token_ids": True}).json()
    assert isinstance(engine._requests, Requests)  # type: ignore[attr-defined]
    sampling = engine._requests._sampling.model_copy(update={"max_tokens": 24})  # type: ignore[attr-defined]
    prepared = engine.prepare(Request("parity", QUESTION["messages"], sampling))  # type: ignore[arg-type]
    (answer,) = engine.submit([prepared]).outcomes(120)
    assert said["prompt_token_ids"] == list(prepared.rendered["prompt_token_ids"])
    usage = (said["usage"]["prompt_tokens"], said["usage"]["completion_tokens"])
    assert usage == (answer.num_prompt_tokens, answer.completions[0].num_output_tokens)  # type: ignore[union-attr]
    assert said["choices"][0]["message"]["content"] == answer.completions[0].text  # type: ignore[union-attr]


def _is_below(process: psutil.Process, pid: int) -> bool:
    return any(parent.pid == pid for parent in process.parents())


def _wait_until(condition: Any, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.5)
