"""`fournee serve` on Ray Serve: one endpoint with the echo engine for all tests, and (slow) one with the real model."""

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest
import requests
from prometheus_client.parser import text_string_to_metric_families

from pipelines.engines import Engine
from pipelines.engines.vllm.requests import Requests
from pipelines.history import History
from pipelines.rows import Request
from tests.integration.test_metrics import fetch, metrics_url_of
from tests.integration.test_readme import COMMANDS

KEY = "sk-alice-0123456789abcdef"
WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}},
    "required": ["city"],
    "additionalProperties": False,
}
PAGE = (Path(__file__).parents[2] / "docs/serving.md").read_text(encoding="utf-8")
DOCUMENTED = re.findall(r"^\| `fournee_serve_\w+` \| `(ray_\w+)`", PAGE, re.MULTILINE)
(CURL,) = (line for line in COMMANDS if line.startswith("curl "))
QUESTION = {"model": "smollm2", "messages": [{"role": "user", "content": "What is the capital of France?"}]}


@dataclass(frozen=True)
class Server:
    """`fournee serve` in a process of its own."""

    process: "subprocess.Popen[str]"
    url: str
    folder: Path
    said: list[str]
    """What it wrote to its terminal."""

    @property
    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=KEY, max_retries=0)

    def post(self, body: dict[str, Any], **options: Any) -> requests.Response:
        path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
        return requests.post(self.url + path, json=body, headers={"Authorization": f"Bearer {KEY}"}, timeout=120, **options)

    def health(self) -> int:
        return requests.get(f"{self.url}/health", timeout=30).status_code


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


def started(port: int, folder: Path, *overrides: str, address: str = "", keys: str = f"alice:{KEY}") -> Server:
    """`fournee serve`, once it answers."""
    own = {"RAY_ADDRESS": address, "FOURNEE_API_KEYS": keys, **({"RAY_AUTH_MODE": "token"} if address else {})}
    process = subprocess.Popen(
        [sys.executable, "-m", "jobs.cli", "serve", f"serve.port={port}", f"serve.folder={folder}", *overrides],
        stderr=subprocess.PIPE, text=True, env={**os.environ, **own},
    )  # fmt: skip
    assert process.stderr is not None
    said: list[str] = []
    for line in process.stderr:
        said.append(line)
        if "answers at http" in line:
            break
    else:
        pytest.fail("".join(said))
    threading.Thread(target=lambda: said.extend(process.stderr or ()), daemon=True).start()
    return Server(process, f"http://127.0.0.1:{port}", folder, said)


@contextmanager
def serving(folder: Path, *overrides: str, port: int | None = None, **more: str) -> Iterator[Server]:
    """An endpoint for the block; it must end well when it is told to stop."""
    server = started(port or free_port(), folder, *overrides, **more)
    try:
        yield server
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(120) == 0, "".join(server.said)
        assert KEY not in "".join(server.said)
    finally:
        server.process.kill()
        server.process.wait(30)


def scraped(server: Server, wanted: set[str]) -> dict[str, Counter[str]]:
    """What the agent of the endpoint's own Ray shows to Prometheus, by the tag that counts."""
    (address,) = {
        word.partition("=")[2]
        for process in psutil.Process(server.process.pid).children(recursive=True)
        for word in process.cmdline()
        if word.startswith("--gcs-address=")
    }
    url = metrics_url_of(address)
    found: dict[str, Counter[str]] = {}
    deadline = time.monotonic() + 30  # Ray tells them every few seconds
    while not wanted <= ours(found) and time.monotonic() < deadline:
        time.sleep(1)
        found = {}
        for family in text_string_to_metric_families(fetch(url)):
            for sample in family.samples:
                tags = sample.labels
                found.setdefault(sample.name, Counter())[tags.get("status") or tags.get("kind") or ""] += sample.value
    return found


def ours(found: dict[str, Counter[str]]) -> set[str]:
    """The names of our metrics among those that were scraped."""
    return {re.sub("_(bucket|sum|count).*", "_bucket", name) for name in found if "fournee_serve" in name}


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
        words = shlex.split(CURL)
        answer = server.post(json.loads(words[words.index("-d") + 1]), stream=False)
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
        batch = batch_of(server.client, [QUESTION] * 4)
        done = wait_for(batch.id, server.client)
        assert (done.status, done.request_counts.completed) == ("completed", 4)
        assert (tmp_path / "batch_runs" / batch.id / "_SUCCESS").exists()
        wanted = set(DOCUMENTED) - {"ray_fournee_serve_queue_seconds_bucket"}  # only vLLM's engine has a queue
        found_metrics = scraped(server, wanted)
        assert ours(found_metrics) == wanted
        assert found_metrics["ray_fournee_serve_requests_total"]["ok"] >= 3
        assert found_metrics["ray_fournee_serve_requests_total"]["429"] >= 1
        assert (
            found_metrics["ray_fournee_serve_tokens_total"]["output"] > found_metrics["ray_fournee_serve_requests_total"]["ok"]
        )
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


def batch_of(client: openai.OpenAI, bodies: Iterable[dict[str, Any]]) -> Any:
    """Upload requests, and make a batch of them."""
    lines = [
        {"custom_id": str(number), "method": "POST", "url": "/v1/chat/completions", "body": body}
        for number, body in enumerate(bodies)
    ]
    file = client.files.create(file=("r.jsonl", "\n".join(map(json.dumps, lines)).encode()), purpose="batch")
    return client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")


@pytest.mark.slow
def test_a_batch_goes_on_after_its_server_was_killed(tmp_path: Path) -> None:
    """Nothing is told to anybody: process, driver, workers and replicas are gone at once."""
    own = ("engine=echo", "engine.seconds_per_token=0.05", "engine.rows_per_batch=2", "serve.idle_s=0.0", "serve.max_running=2")
    server = started(free_port(), tmp_path, *own)
    batch = batch_of(server.client, [QUESTION] * 200)
    run = tmp_path / "batch_runs" / batch.id
    _wait_until(lambda: len(list(run.glob("results/part-*.parquet"))) >= 5, 180)
    below = psutil.Process(server.process.pid).children(recursive=True)
    for process in [psutil.Process(server.process.pid), *below]:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(below, 30)
    before = {path.name: path.stat().st_mtime_ns for path in run.glob("results/part-*.parquet")}
    assert 5 <= len(before) < 100
    with serving(tmp_path, *own) as again:
        done = wait_for(batch.id, again.client, 300)
        assert (done.status, done.request_counts.completed, done.request_counts.failed) == ("completed", 200, 0)
        lines = again.client.files.content(done.output_file_id).text.splitlines()
    assert sorted(int(json.loads(line)["custom_id"]) for line in lines) == list(range(200))
    after = {path.name: path.stat().st_mtime_ns for path in run.glob("results/part-*.parquet")}
    assert before.items() <= after.items(), "what was committed is not answered again"


@pytest.mark.slow
def test_replicas_come_with_the_load_and_are_brought_up_to_date_in_turn(tmp_path: Path, ray_address: str) -> None:
    port, stop = free_port(), threading.Event()
    own = ("engine=echo", "engine.seconds_per_token=0.1", "serve.target_running=1", "cluster.max_workers=2")
    first = started(port, tmp_path, *own, address=ray_address)
    answers: list[requests.Response] = []

    def ask() -> None:
        while not stop.is_set():
            answers.append(first.post({**QUESTION, "max_tokens": 6}))

    clients = [threading.Thread(target=ask) for _ in range(6)]
    try:
        for client in clients:
            client.start()
        _wait_until(lambda: requests.get(f"{first.url}/health", timeout=30).json()["replicas"] == 2, 180)
        first.process.kill()  # the terminal is closed; the cluster goes on
        with serving(tmp_path, *own, "cluster.workers=2", "sampling.max_tokens=3", port=port, address=ray_address) as second:
            said = second.post(QUESTION)
            assert said.status_code == 200, said.text
            assert said.json()["usage"]["completion_tokens"] == 3, "the new settings count"
            assert second.health() == 200
            stop.set()
            for client in clients:
                client.join()
    finally:
        stop.set()
        first.process.kill()
        first.process.wait(30)
    assert answers and not [one.text for one in answers if one.status_code != 200], "nobody notices"


@pytest.mark.slow
def test_a_model_that_embeds_does_so_live(tmp_path: Path) -> None:
    with serving(tmp_path, "engine.kwargs.runner=pooling", "engine.cpu_kv_cache_gib=1") as server:
        found = server.client.embeddings.create(model="smollm2", input=["bread", "the night"])
        assert [len(one.embedding) for one in found.data] == [576, 576]
        assert found.data[0].embedding != found.data[1].embedding
        with pytest.raises(openai.BadRequestError):
            server.client.chat.completions.create(**QUESTION)


@pytest.mark.slow
def test_the_real_model_answers_as_in_a_batch_and_its_engine_may_die(tmp_path: Path, vllm_engine: Engine) -> None:
    """Takes five minutes on two cores: vLLM's server is three processes, each of which imports vLLM."""
    own = ("engine.cpu_kv_cache_gib=1", "model.tool_call_parser=hermes")
    with serving(tmp_path, *own, port=8000, keys="") as server:  # as the README starts it
        client = server.client
        done = subprocess.run(CURL, shell=True, capture_output=True, text=True, timeout=120, check=True)
        assert "Paris" in json.loads(done.stdout)["choices"][0]["message"]["content"]
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
        tools = [{"type": "function", "function": {"name": "get_weather", "parameters": WEATHER}}]
        called = client.chat.completions.create(
            **QUESTION, tools=tools, tool_choice={"type": "function", "function": {"name": "get_weather"}}, max_tokens=100
        )
        (call,) = called.choices[0].message.tool_calls
        assert call.function.name == "get_weather" and set(json.loads(call.function.arguments)) == {"city"}
        _check_batch(client)
        assert ours(scraped(server, set(DOCUMENTED))) == set(DOCUMENTED)
        for process in psutil.process_iter(["cmdline"]):
            if "EngineCore" in " ".join(process.info["cmdline"] or []) and _is_below(process, server.process.pid):
                process.kill()
        _wait_until(lambda: server.health() == 503, 30)
        assert server.post(QUESTION).status_code == 503
        _wait_until(lambda: server.health() == 200, 300)
        assert "Paris" in str(client.chat.completions.create(**QUESTION).choices[0].message.content)


def _check_batch(client: openai.OpenAI) -> None:
    """Two rows are answered as they are live; the third is too long, and stands among the errors."""
    live = client.chat.completions.create(**QUESTION, max_tokens=8).choices[0].message.content
    long = {**QUESTION, "messages": [{"role": "user", "content": "word " * 3000}]}
    done = wait_for(batch_of(client, [{**QUESTION, "max_tokens": 8}] * 2 + [long]).id, client, 300)
    assert (done.status, done.request_counts.completed, done.request_counts.failed) == ("completed", 2, 1)
    answers = [json.loads(line) for line in client.files.content(done.output_file_id).text.splitlines()]
    assert {one["custom_id"]: one["response"]["body"]["choices"][0]["message"]["content"] for one in answers} == {
        "0": live,
        "1": live,
    }
    (error,) = map(json.loads, client.files.content(done.error_file_id).text.splitlines())
    assert error["custom_id"] == "2" and error["response"]["status_code"] == 400
    client.files.delete(done.input_file_id)
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve(done.input_file_id)


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
