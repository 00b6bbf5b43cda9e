"""An endpoint as a job's engine: what it says becomes answers, its refusals failed rows, and a busy one is asked again."""

import json
import socket
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from typing import Any

import pytest
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

from pipelines.compose import compose_settings
from pipelines.engines.served import ServedEngine
from pipelines.errors import EngineDead, ErrorKind, RowError
from pipelines.openai_requests import body_of
from pipelines.parse import parse_config
from pipelines.rows import Answer
from pipelines.rows import Request as Asked
from tests.unit.serving import Endpoint, listening

CONFIG = parse_config(compose_settings("batch", ["endpoint=http://127.0.0.1:1", "sampling.max_tokens=16"]))
OWN = CONFIG.sampling.model_copy(update={"max_tokens": 15})  # of a row that says so
USAGE = {"prompt_tokens": 7, "completion_tokens": 5, "prompt_tokens_details": {"cached_tokens": 4}}
SAID = {"choices": [{"index": 0, "finish_reason": "stop", "message": {"content": "x"}}], "usage": USAGE}
CHAT = [{"role": "user", "content": "Hi"}]


class Script:
    """An endpoint that says what it was told to, one after the other, and notes what it is asked."""

    def __init__(self) -> None:
        self.says: list[tuple[int, Any]] = []
        self.retry_after = "0"
        self.bodies: list[dict[str, Any]] = []
        self.app = FastAPI()

        @self.app.post("/v1/{path:path}")
        async def answer(request: Request, path: str) -> Response:
            self.bodies.append(await request.json())
            status, body = self.says.pop(0)
            headers = {"Retry-After": self.retry_after}
            return Response(body, status, headers) if isinstance(body, bytes) else JSONResponse(body, status, headers)


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[Script, ServedEngine]]:
    script = Script()
    with listening(script.app) as url:
        yield script, ServedEngine(CONFIG, url, pause_s=0.01)


def outcome_of(served: tuple[Script, ServedEngine], *says: tuple[int, Any], **asked: Any) -> Any:
    script, engine = served
    script.says, script.bodies = list(says), []
    request = Asked("k", asked.pop("prompt", CHAT), asked.pop("sampling", CONFIG.sampling), **asked)
    (outcome,) = engine.submit([engine.prepare(request)]).outcomes(10)
    assert not script.says
    return outcome


def choice(**values: Any) -> dict[str, Any]:
    return {"index": 0, "finish_reason": "stop", "stop_reason": None, "logprobs": None, **values}


def error(message: str, code: str | None) -> dict[str, Any]:
    return {"error": {"message": message, "type": "x", "param": None, "code": code}}


def test_an_answer_comes_with_its_counts_and_times(served: tuple[Script, ServedEngine]) -> None:
    times = {"queue_time_ms": 100, "time_to_first_token_ms": 200, "generation_time_ms": 300}
    said = {"choices": [choice(message={"content": "Hello"}, token_ids=[1, 2, 3])], "usage": USAGE, "metrics": times}
    answer = outcome_of(served, (200, said))
    assert isinstance(answer, Answer)
    assert (answer.completions[0].text, answer.completions[0].num_output_tokens) == ("Hello", 3)
    assert (answer.num_prompt_tokens, answer.num_cached_tokens) == (7, 4)
    assert (answer.queue_s, answer.ttft_s, answer.generation_s) == pytest.approx((0.1, 0.3, 0.3))


def test_calls_reasoning_and_log_probabilities_come_along(served: tuple[Script, ServedEngine]) -> None:
    calls = [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
    token = {"token": "Hi", "logprob": -0.5, "bytes": None}
    logprobs = {"content": [{**token, "top_logprobs": [token, {"token": "Ho", "logprob": -1.5, "bytes": None}]}]}
    message = {"content": None, "reasoning": "because", "tool_calls": calls}
    said = {"choices": [choice(message=message, finish_reason="tool_calls", logprobs=logprobs)], "usage": USAGE}
    one = outcome_of(served, (200, said)).completions[0]
    assert (one.text, one.finish_reason, one.reasoning, json.loads(one.tool_calls)) == ("", "stop", "because", calls)
    assert [[(two["text"], two["logprob"]) for two in place] for place in one.logprobs] == [[("Hi", -0.5), ("Ho", -1.5)]]


def test_a_completion_and_an_embedding_are_asked_for_where_they_are(served: tuple[Script, ServedEngine]) -> None:
    logprobs = {"tokens": ["a"], "token_logprobs": [-1.0], "top_logprobs": [{"a": -1.0, "b": -2.0}], "text_offset": [0]}
    said = {"choices": [choice(text="a", logprobs=logprobs)], "usage": USAGE}
    one = outcome_of(served, (200, said), prompt="x").completions[0]
    assert (one.text, [two["text"] for two in one.logprobs[0]]) == ("a", ["a", "b"])
    vector = outcome_of(
        served, (200, {"data": [{"embedding": [0.5, 0.5]}], "usage": {"prompt_tokens": 2}}), prompt="x", embeds=True
    )
    assert (vector.completions[0].embedding, vector.num_prompt_tokens) == ([0.5, 0.5], 2)


def test_a_busy_endpoint_is_asked_again_until_it_answers(served: tuple[Script, ServedEngine]) -> None:
    busy = [(status, error("later", None)) for status in (429, 503, 502, 504, 429)]
    answer = outcome_of(served, *busy, (200, {"choices": [choice(message={"content": "x"})], "usage": USAGE}))
    assert answer.completions[0].text == "x"


@pytest.mark.parametrize("said", ["Tue, 01 Dec 2015 03:00:00 GMT", "Tue, 01 Dec 2015 03:00:00 -0000", "soon", "-1", "nan", ""])
def test_when_to_come_again_is_said_in_seconds_as_a_date_or_not_at_all(said: str, served: tuple[Script, ServedEngine]) -> None:
    served[0].retry_after = said
    try:
        answer = outcome_of(served, (503, error("later", None)), (200, SAID))
    finally:
        served[0].retry_after = "0"
    assert answer.completions[0].text == "x"


def test_a_date_that_is_to_come_is_waited_for(served: tuple[Script, ServedEngine]) -> None:
    date = format_datetime(datetime.now(UTC) + timedelta(seconds=1.9), usegmt=True)  # whole seconds: 0.9 to 1.9 from now
    served[0].retry_after = date
    began = time.monotonic()
    try:
        outcome_of(served, (503, error("later", None)), (200, SAID))
    finally:
        served[0].retry_after = "0"
    assert time.monotonic() - began > 0.5


@pytest.mark.parametrize("said", [
    b"<html>log in</html>", b"", [], {"choices": []}, {**SAID, "usage": None}, {"usage": USAGE}, {**SAID, "choices": [{}]},
])  # fmt: skip
def test_what_is_no_answer_names_the_endpoint(said: Any, served: tuple[Script, ServedEngine]) -> None:
    with pytest.raises(EngineDead, match=r"http://127\S+/v1/chat/completions answered 200, but not as fournee serve does"):
        outcome_of(served, (200, said))


def test_an_endpoint_that_is_not_there_is_said_once_and_asked_until_it_is(caplog: pytest.LogCaptureFixture) -> None:
    script = Script()
    script.says = [(200, SAID)]
    server = uvicorn.Server(uvicorn.Config(script.app, log_level="error"))
    with socket.socket() as taken:  # bound, and not listening yet
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        engine = ServedEngine(CONFIG, url, pause_s=0.01)
        ticket = engine.submit([engine.prepare(Asked("k", CHAT, CONFIG.sampling))])
        with pytest.raises(TimeoutError):
            ticket.outcomes(0.2)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [taken]}, daemon=True)
        thread.start()
        assert len(ticket.outcomes(10)) == engine.num_steps() == 1
        server.should_exit = True
        thread.join(10)
    (line,) = [record.getMessage() for record in caplog.records if record.name == "pipelines.engines.served"]
    assert line.startswith(f"{url}/v1/chat/completions does not answer") and "refused" in line


@pytest.mark.parametrize(("status", "code", "kind"), [
    (400, "context_length_exceeded", ErrorKind.PROMPT_TOO_LONG),
    (400, "invalid_schema", ErrorKind.INVALID_SCHEMA),
    (400, "invalid_parameter", ErrorKind.INVALID_PARAMETER),
    (400, None, ErrorKind.ENGINE_REFUSED),
    (413, None, ErrorKind.ENGINE_REFUSED),
])  # fmt: skip
def test_a_refusal_is_the_rows_own_failure(
    status: int, code: str | None, kind: ErrorKind, served: tuple[Script, ServedEngine]
) -> None:
    refusal = outcome_of(served, (status, error("no", code)), sampling=OWN)
    assert isinstance(refusal, RowError) and (refusal.kind, refusal.message) == (kind, "no")


def test_a_fault_of_the_endpoint_is_tried_again_a_few_times(served: tuple[Script, ServedEngine]) -> None:
    fault = (500, "not JSON of ours")
    refusal = outcome_of(served, fault, fault, fault)
    assert isinstance(refusal, RowError) and refusal.kind == ErrorKind.ENGINE_ERROR


@pytest.mark.parametrize("status", [401, 404])
def test_a_wrong_key_or_model_is_no_rows_fault(status: int, served: tuple[Script, ServedEngine]) -> None:
    with pytest.raises(EngineDead, match=f"answered {status}: no"):
        outcome_of(served, (status, error("no", None)))


def test_what_is_asked_is_read_as_it_was_meant(served: tuple[Script, ServedEngine]) -> None:
    """Both ways of writing and reading bodies agree, for every parameter."""
    sampling = CONFIG.sampling.model_copy(
        update={
            "max_tokens": 3,
            "temperature": 0.5,
            "stop": ("a",),
            "seed": 4,
            "regex": "a+",
            "logprobs": 2,
            "logit_bias": {"5": 1.0},
        }
    )
    tools = [{"type": "function", "function": {"name": "f"}}]
    said = {"choices": [choice(message={"content": "x"})], "usage": USAGE}
    outcome_of(served, (200, said), sampling=sampling, tools=tools, chat_template_kwargs={"a": 1})
    (body,) = served[0].bodies
    del body["return_token_ids"]
    read = body_of({"body": body}, "body")
    given = {name: value for name, value in sampling.model_dump(mode="json").items() if value is not None}
    assert read.changes == given
    assert (read.prompt, read.tools, read.chat_template_kwargs) == (CHAT, tools, {"a": 1})


def test_the_endpoint_is_told_all_of_the_jobs_parameters(served: tuple[Script, ServedEngine]) -> None:
    outcome_of(served, (200, SAID))
    (body,) = served[0].bodies
    given = {name: value for name, value in CONFIG.sampling.model_dump(mode="json").items() if value is not None}
    assert given["max_tokens"] == 16 and {name: body[name] for name in given} == given


def test_a_job_and_its_endpoint_may_differ_in_length() -> None:
    endpoint = Endpoint("sampling.max_tokens=2", environment={})
    with listening(endpoint.app) as url:
        engine = ServedEngine(CONFIG, url, pause_s=0.01)
        (answer,) = engine.submit([engine.prepare(Asked("k", "one two three four", CONFIG.sampling))]).outcomes(10)
    assert answer.completions[0].text == "one two three four"
    endpoint.chat(max_tokens=None)
    assert [ask.body.get("max_tokens") for ask in endpoint.backend.asked] == [16, None]


def test_the_jobs_length_is_cut_to_what_a_long_prompt_leaves(served: tuple[Script, ServedEngine]) -> None:
    """The endpoint's own is: it is asked again without the job's. A row's own has to fit."""
    too_long = (400, error("no", "context_length_exceeded"))
    answer = outcome_of(served, too_long, (200, SAID))
    assert isinstance(answer, Answer) and [body["max_tokens"] for body in served[0].bodies] == [16, None]
    assert outcome_of(served, too_long, too_long).kind == ErrorKind.PROMPT_TOO_LONG
    assert outcome_of(served, too_long, sampling=OWN).kind == ErrorKind.PROMPT_TOO_LONG
    assert served[0].bodies[0]["max_tokens"] == 15
