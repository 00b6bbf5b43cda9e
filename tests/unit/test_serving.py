"""The endpoint's promises: OpenAI's shapes and statuses, closed by default, bounded, and the job's own settings."""

import asyncio
import contextlib
import json
import logging
from typing import Any

import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from starlette.requests import ClientDisconnect

from pipelines.errors import ConfigError
from pipelines.serving.answering import Answering
from pipelines.serving.asking import Ask
from pipelines.serving.endpoint import endpoint_of
from tests.unit.serving import ASKED, KEY, Endpoint, config_of, events


def test_an_answer_has_openais_shape_and_is_tallied() -> None:
    endpoint = Endpoint()
    response = endpoint.chat()
    assert response.status_code == 200
    answer = ChatCompletion.model_validate(response.json())
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("Say these five words back", "stop")
    assert answer.usage is not None and answer.usage.total_tokens == 10
    (tally,) = endpoint.heard.tallies
    assert (tally.key, tally.num_prompt_tokens, tally.num_output_tokens, tally.finish_reason) == ("alice", 5, 5, "stop")
    assert endpoint.heard.running == 0


def test_a_stream_of_several_answers_that_is_left_has_used_the_tokens_of_all() -> None:
    answering = Answering(Ask("/v1/completions", {}, is_stream=True), "alice")
    for number, index in ((1, 0), (1, 1), (2, 0), (2, 1), (3, 1)):  # as vLLM says it: in each piece the tokens of its answer
        piece = {"choices": [{"index": index, "text": "x"}], "usage": {"prompt_tokens": 4, "completion_tokens": number}}
        assert list(answering.events([json.dumps(piece)]))
    assert (answering.tally.num_prompt_tokens, answering.tally.num_output_tokens) == (4, 5)
    list(answering.events([json.dumps({"choices": [], "usage": {"prompt_tokens": 4, "completion_tokens": 7}})]))
    assert answering.end().num_tokens == 11


def test_a_completion_has_openais_shape() -> None:
    response = Endpoint().client.post("/v1/completions", json={"model": "smollm2", "prompt": "one two three", "max_tokens": 2})
    answer = Completion.model_validate(response.json())
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("one two", "length")


@pytest.mark.parametrize("options", [None, {"include_usage": False}, {"include_usage": True}])
def test_a_stream_says_the_same_in_pieces_and_its_counts_only_to_whom_asks(options: dict[str, bool] | None) -> None:
    endpoint = Endpoint()
    response = endpoint.chat(stream=True, **({"stream_options": options} if options else {}))
    assert response.headers["content-type"].startswith("text/event-stream")
    *pieces, done = events(response.text)
    assert done == "[DONE]"
    chunks = [ChatCompletionChunk.model_validate(piece) for piece in pieces]
    assert "".join(one.choices[0].delta.content or "" for one in chunks if one.choices) == "Say these five words back"
    counts = [chunk.usage.total_tokens for chunk in chunks if chunk.usage is not None]
    assert counts == ([10] if options == {"include_usage": True} else [])
    (tally,) = endpoint.heard.tallies
    assert (tally.num_prompt_tokens, tally.num_output_tokens, tally.finish_reason) == (5, 5, "stop")
    assert tally.ttft_s is not None


BAD: dict[str, tuple[dict[str, Any], int, str | None]] = {
    "unknown model": ({"model": "gpt"}, 404, "model_not_found"),
    "no model": ({"model": None}, 400, None),
    "too long": ({"messages": [{"role": "user", "content": "word " * 5000}]}, 400, "context_length_exceeded"),
    "no messages": ({"messages": []}, 400, "invalid_messages"),
    "bad schema": ({"structured_outputs": {"json": {"type": "no"}}}, 400, "invalid_schema"),
    "bad parameter": ({"temperature": 9}, 400, "invalid_parameter"),
    "unknown parameter": ({"temprature": 1}, 400, "invalid_request"),
    "stream is no switch": ({"stream": "yes"}, 400, None),
    "usage without a stream": ({"stream_options": {"include_usage": True}}, 400, None),
    "a call of no tool": ({"tool_choice": "required"}, 400, None),
    "above the limit": ({"max_tokens": 65}, 400, None),
    "n times above the limit": ({"max_tokens": 40, "n": 2, "temperature": 1}, 400, None),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_a_bad_request_is_refused_in_openais_shape(name: str) -> None:
    changes, status, code = BAD[name]
    endpoint = Endpoint("serve.max_answer_tokens=64", "sampling.max_tokens=16")
    response = endpoint.chat(**changes)
    assert response.status_code == status
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["type"], error["code"]) == ("invalid_request_error", code)
    assert endpoint.heard.refusals == [("alice", status)]
    assert endpoint.heard.running == 0


@pytest.mark.parametrize(
    ("content", "status"), [(b"{", 400), (b"[1]", 400), (b"[" * 100_000, 400), (b" " * 5000, 413), (b"\xff", 400)]
)
def test_a_body_that_is_no_object_or_too_large_is_refused(content: bytes, status: int) -> None:
    response = Endpoint("serve.max_body_bytes=4096" if status == 413 else "serve.port=1").client.post(
        "/v1/chat/completions", content=content
    )
    assert response.status_code == status
    assert response.json()["error"]["type"] == "invalid_request_error"


def test_a_body_without_its_length_is_not_read_past_the_limit() -> None:
    response = Endpoint("serve.max_body_bytes=4096").client.post("/v1/completions", content=iter([b" " * 3000] * 3))
    assert response.status_code == 413


@pytest.mark.parametrize("header", [None, "", "Bearer", "Bearer sk-wrong", "Basic alice"])
@pytest.mark.parametrize(
    "path", ["/v1/models", "/v1/models/smollm2", "/v1/chat/completions", "/v1/completions", "/v1/embeddings"]
)
def test_without_a_known_key_nothing_is_told(path: str, header: str | None) -> None:
    endpoint = Endpoint()
    method = "GET" if "models" in path else "POST"
    response = endpoint.client.request(method, path, headers={"Authorization": header or ""})
    assert (response.status_code, response.json()["error"]["code"]) == (401, "invalid_api_key")
    assert response.headers["www-authenticate"] == "Bearer"
    assert endpoint.heard.refusals == [("anonymous", 401)]


def test_where_no_keys_are_set_anybody_on_this_machine_may_ask() -> None:
    assert Endpoint(environment={}).client.get("/v1/models", headers={"Authorization": ""}).status_code == 200


def test_the_model_is_listed_with_its_limit() -> None:
    client = Endpoint().client
    (model,) = client.get("/v1/models").json()["data"]
    assert (model["id"], model["max_model_len"]) == ("smollm2", 2048)
    assert client.get("/v1/models/smollm2").json() == model
    assert client.get("/v1/models/other").status_code == 404


def test_a_full_queue_tells_when_to_come_again() -> None:
    endpoint = Endpoint("serve.retry_after_s=7")
    endpoint.backend.state = "full"
    response = endpoint.chat()
    assert (response.status_code, response.json()["error"]["code"]) == (429, "queue_full")
    assert int(response.headers["retry-after"]) >= 7
    assert (endpoint.heard.tallies[0].error_kind, endpoint.heard.tallies[0].is_refused) == ("queue_full", True)


def test_health_turns_red_and_requests_are_put_off_while_no_replica_is_there() -> None:
    endpoint = Endpoint()
    assert endpoint.client.get("/health").status_code == endpoint.client.get("/ready").status_code == 200
    endpoint.backend.state = "gone"
    assert endpoint.client.get("/health").status_code == endpoint.client.get("/ready").status_code == 503
    response = endpoint.chat()
    assert (response.status_code, response.json()["error"]["type"]) == (503, "server_error")
    assert "retry-after" in response.headers
    endpoint.backend.state = "ready"
    assert endpoint.chat().status_code == 200


def test_a_request_that_takes_too_long_is_given_up() -> None:
    endpoint = Endpoint("serve.timeout_s=0.05")
    endpoint.backend.state = "slow"
    response = endpoint.chat()
    assert (response.status_code, response.json()["error"]["code"]) == (504, "timeout")


def test_a_stream_that_takes_too_long_ends_with_an_error() -> None:
    endpoint = Endpoint("serve.timeout_s=0.2", "engine.hang_text=forever", "engine.seconds_per_token=0.02")
    *_, last = events(endpoint.chat(stream=True, messages=[{"role": "user", "content": "forever"}]).text)
    assert last["error"]["code"] == "timeout"
    assert endpoint.backend.server.num_running == 0
    assert endpoint.heard.tallies[0].num_output_tokens > 1


def test_what_nobody_asked_for_is_not_found() -> None:
    client = Endpoint().client
    assert client.get("/nowhere").json()["error"]["type"] == "invalid_request_error"
    assert client.get("/v1/chat/completions").status_code == 405


def test_the_job_s_settings_are_what_the_engine_is_asked() -> None:
    endpoint = Endpoint(
        "prompt.system=Be brief.", "prompt.chat_template_kwargs={enable_thinking: false}", "sampling=creative",
        "sampling.max_tokens=9", "sampling.stop=[END]", "sampling.regex='a+'", "sampling.seed=5",
    )  # fmt: skip
    endpoint.chat(
        max_tokens=4, response_format={"type": "json_object"}, tools=[{"type": "function", "function": {"name": "f"}}]
    )
    body = endpoint.backend.asked[0].body
    sampling = endpoint.config.sampling
    assert body["messages"] == [{"role": "system", "content": "Be brief."}, *ASKED["messages"]]
    assert (body["max_tokens"], body["temperature"], body["top_p"]) == (4, sampling.temperature, sampling.top_p)
    assert (body["stop"], body["chat_template_kwargs"]) == (["END"], {"enable_thinking": False})
    assert body["structured_outputs"] == {"json": '{"type": "object"}'}
    assert (body["tools"][0]["function"]["name"], body["tool_choice"]) == ("f", "none")  # no parser finds calls
    endpoint.chat(seed=1)
    assert endpoint.backend.asked[1].body["seed"] == 1
    assert body["seed"] not in (1, 5)  # a row's own, which follows from the job's


def test_the_log_has_no_prompt_unless_it_is_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "fournee.access")
    Endpoint().client.post("/v1/chat/completions", json=ASKED, headers={"x-request-id": "mine-1"})
    assert "POST /v1/chat/completions 200 key=alice id=mine-1" in caplog.text
    assert "five words" not in caplog.text
    Endpoint("serve.log_prompts=true").chat()
    assert "five words" in caplog.text


def test_a_request_s_id_in_the_log_is_one_line_whatever_a_client_says(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "fournee.access")
    Endpoint().client.get("/a%0Ab", headers={"x-request-id": "a b"})
    (record,) = caplog.records
    assert "\n" not in record.getMessage() and "a b" not in record.getMessage()


def test_a_fault_of_the_server_is_an_error_of_the_usual_shape() -> None:
    endpoint = Endpoint()
    endpoint.backend.server = None  # type: ignore[assignment]
    response = endpoint.chat()
    assert (response.status_code, response.json()["error"]["type"]) == (500, "server_error")
    assert "NoneType" not in response.text


def test_the_served_description_can_be_read() -> None:
    paths = Endpoint().client.get("/openapi.json").json()["paths"]
    assert {"/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/models", "/health"} <= set(paths)
    json.dumps(paths)


@pytest.mark.parametrize(("override", "message"), [
    ("serve.prot=1", "serve.prot is not a setting; did you mean port?"),
    ("serve.port=70000", "serve.port=70000 must be less than or equal to 65535"),
    ("serve.port=http", 'serve.port="http" must be a whole number'),
    ("serve.host=''", 'serve.host="" must not be empty'),
    ("serve.max_queued=0", "serve.max_queued=0 must be greater than 0"),
    ("serve.timeout_s=0", "serve.timeout_s=0 must be greater than 0"),
    ("serve.quota.requests_per_minute=0", "serve.quota.requests_per_minute=0 must be greater than 0"),
    ("serve.log_prompts=1", "serve.log_prompts=1 must be true or false"),
    ("sampling.top_p=2", "sampling.top_p=2 must be less than or equal to 1"),
])  # fmt: skip
def test_a_wrong_setting_is_named_before_anything_starts(override: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config_of(override)
    assert message in str(caught.value)


def test_a_policy_that_only_a_batch_can_follow_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"prompt\.too_long=truncate_left cuts rows of a batch"):
        endpoint_of(config_of("prompt.too_long=truncate_left"), {})


def test_the_page_shows_the_model_and_its_limits_and_nothing_that_a_name_brings_in() -> None:
    name = "</script><script>alert(1)</script>"
    endpoint = Endpoint(f"model.name='{name}'", "serve.quota.requests_per_minute=60", "serve.max_answer_tokens=64")
    response = endpoint.client.get("/", headers={"Authorization": ""})
    assert response.status_code == 200
    assert name not in response.text and "&lt;/script&gt;" in response.text
    for limit in ("2,048 tokens", "64 tokens", "60 requests per minute"):
        assert limit in response.text
    assert "connect-src 'self'" in response.headers["content-security-policy"]


@pytest.mark.parametrize("sent_before", [0, 1, 3])
def test_a_client_that_leaves_at_any_moment_frees_its_place(sent_before: int) -> None:
    endpoint = Endpoint("engine.seconds_per_token=0.01")
    body = json.dumps({**ASKED, "stream": True}).encode()
    said = iter([{"type": "http.request", "body": body, "more_body": False}])
    left = 0

    async def receive() -> Any:
        try:
            return next(said)
        except StopIteration:
            await asyncio.Event().wait()

    async def send(message: Any) -> None:
        nonlocal left
        if left == sent_before:
            raise OSError("gone")
        left += 1

    headers = [(b"authorization", f"Bearer {KEY}".encode())]
    scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions", "headers": headers, "query_string": b""}
    with contextlib.suppress(OSError, ClientDisconnect, BaseExceptionGroup):
        asyncio.run(endpoint.app(scope, receive, send))
    assert (endpoint.heard.running, endpoint.backend.server.num_running) == (0, 0)
    (tally,) = endpoint.heard.tallies
    assert (tally.finish_reason, tally.error_kind) == ("left", None)
