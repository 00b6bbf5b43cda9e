"""A run's results in the format of OpenAI's batch API, as the official client's own types take it."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from openai.types import Completion, CreateEmbeddingResponse
from openai.types.chat import ChatCompletion
from pydantic import BaseModel

from pipelines.batch import run_batch
from pipelines.config import BatchConfig
from pipelines.errors import ErrorKind, RunFailed
from pipelines.openai_results import ERRORS_FILE, OUTPUT_FILE, write_openai
from pipelines.parts import part_name
from pipelines.plan import Plan
from pipelines.run import Run
from pipelines.schema import PLAN, RESULT
from pipelines.storage import Folder
from pipelines.summary import finish
from tests.unit.story import answer, echo

STARTED_AT_S = 1_700_000_000
ROW: dict[str, Any] = {
    **dict.fromkeys(RESULT.names),
    "id": "x",
    "source": "rows.jsonl",
    "source_row": 0,
    "status": "ok",
    "prompt_kind": "chat",
    "text": "Hello",
    "finish_reason": "stop",
    "num_prompt_tokens": 7,
    "num_cached_tokens": 4,
    "num_output_tokens": 2,
    "attempts": 1,
    "request_key": "00000000-0",
    "flags": [],
}
TYPES: dict[str, type[BaseModel]] = {
    "chat.completion": ChatCompletion,
    "text_completion": Completion,
    "list": CreateEmbeddingResponse,
}
CALLS = [{"id": "call_0", "type": "function", "function": {"name": "find", "arguments": '{"city": "Paris"}'}}]


@pytest.fixture
def run(tmp_path: Path) -> Folder:
    return Folder(str(tmp_path))


def written(run: Folder, *batches: Sequence[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The lines of both files, for parts that hold the given rows."""
    planned = []
    for batch_id, rows in enumerate(batches):
        keyed = [{**row, "request_key": f"{batch_id:08d}-{place}"} for place, row in enumerate(rows)]
        statistics = json.dumps({"batch_id": batch_id, "started_at": (STARTED_AT_S + batch_id) * 1_000_000})
        sink = pa.BufferOutputStream()
        table = pa.Table.from_pylist(keyed, schema=RESULT).replace_schema_metadata({"fournee.batch": statistics})
        pq.write_table(table, sink)
        run.write(part_name(batch_id), sink.getvalue().to_pybytes())
        numbers = {field.name: 0 for field in PLAN}
        planned.append({**numbers, "batch_id": batch_id, "source": "a", "spooled": None, "source_version": "1"})
    write_openai(run, Plan(pa.Table.from_pylist(planned, schema=PLAN), pa.schema([]), (), "2"), "my-model")
    output, errors = (run.read(name).decode("ascii") for name in (OUTPUT_FILE, ERRORS_FILE))
    return [json.loads(line) for line in output.splitlines()], [json.loads(line) for line in errors.splitlines()]


def body_of(run: Folder, **row: Any) -> dict[str, Any]:
    """The body that one row becomes, taken by the official client's type and given back unchanged."""
    ((line,), errors) = written(run, [{**ROW, **row}])
    assert not errors
    body: dict[str, Any] = line["response"]["body"]
    taken = TYPES[body["object"]].model_validate_json(json.dumps(body), strict=True)
    assert taken.model_dump(exclude_unset=True) == body
    assert unknown_fields(taken) <= {"reasoning"}
    return body


def unknown_fields(value: Any) -> set[str]:
    """What the client's types take without knowing it, at every depth."""
    if isinstance(value, list):
        return {name for one in value for name in unknown_fields(one)}
    if not isinstance(value, BaseModel):
        return set()
    return set(value.model_extra or ()) | {
        name for one in type(value).model_fields for name in unknown_fields(getattr(value, one))
    }


def choice_of(run: Folder, **row: Any) -> dict[str, Any]:
    choice: dict[str, Any] = body_of(run, **row)["choices"][0]
    return choice


def candidate(text: str | None, logprob: float | None, rank: int | None = 1) -> dict[str, Any]:
    return {"token_id": 5, "logprob": logprob, "rank": rank, "text": text}


def test_a_chat_is_the_line_that_openai_would_write(run: Folder) -> None:
    (line,), errors = written(run, [ROW])
    assert errors == []
    assert line == {
        "id": "batch_req_00000000-0",
        "custom_id": "x",
        "response": {
            "status_code": 200,
            "request_id": "req_00000000-0",
            "body": {
                "id": "chatcmpl-00000000-0",
                "object": "chat.completion",
                "created": STARTED_AT_S,
                "model": "my-model",
                "choices": [
                    {
                        "index": 0,
                        "message": {"role": "assistant", "content": "Hello", "refusal": None},
                        "logprobs": None,
                        "finish_reason": "stop",
                    }
                ],
                "usage": {
                    "prompt_tokens": 7,
                    "completion_tokens": 2,
                    "total_tokens": 9,
                    "prompt_tokens_details": {"cached_tokens": 4},
                },
            },
        },
        "error": None,
    }
    assert body_of(run) == line["response"]["body"]


def test_a_text_prompt_becomes_a_text_completion(run: Folder) -> None:
    body = body_of(run, prompt_kind="text")
    assert (body["id"], body["object"]) == ("cmpl-00000000-0", "text_completion")
    assert body["choices"] == [{"index": 0, "text": "Hello", "logprobs": None, "finish_reason": "stop"}]


def test_an_embedding_becomes_a_list_of_one(run: Folder) -> None:
    body = body_of(run, prompt_kind="text", text="", embedding=[0.5, -1.0])
    assert body["data"] == [{"object": "embedding", "index": 0, "embedding": [0.5, -1.0]}]
    assert body["usage"] == {"prompt_tokens": 7, "total_tokens": 7}


def test_an_embedding_that_overflowed_has_null_in_that_place(run: Folder) -> None:
    ((line,), _) = written(run, [{**ROW, "embedding": [0.5, float("inf"), float("nan")]}])
    assert line["response"]["body"]["data"][0]["embedding"] == [0.5, None, None]


def test_rows_come_in_the_order_of_the_plan_each_in_one_file(run: Folder) -> None:
    failed = {"status": "failed", "error_kind": "empty_prompt", "error_message": "no"}
    batches = [[ROW, {**ROW, **failed, "id": "bad"}, {**ROW, "id": None}], [{**ROW, "id": "y"}, ROW]]
    output, errors = written(run, *batches)
    assert [(line["custom_id"], line["id"]) for line in output] == [
        ("x", "batch_req_00000000-0"),
        (None, "batch_req_00000000-2"),
        ("y", "batch_req_00000001-0"),
        ("x", "batch_req_00000001-1"),
    ]
    assert [(line["custom_id"], line["id"]) for line in errors] == [("bad", "batch_req_00000000-1")]
    assert output[-1]["response"]["body"]["created"] == STARTED_AT_S + 1
    assert written(run, *batches) == (output, errors)


def test_a_run_without_rows_has_two_empty_files(run: Folder) -> None:
    assert written(run) == ([], [])
    assert run.names("openai") == ["errors.jsonl", "output.jsonl"]


def test_files_of_an_earlier_time_are_replaced(run: Folder) -> None:
    written(run, [{**ROW, "status": "failed", "error_kind": "engine_error", "error_message": "no"}])
    output, errors = written(run, [ROW])
    assert (len(output), errors) == (1, [])


def test_a_part_that_is_missing_leaves_the_files_as_they_were(run: Folder) -> None:
    written(run, [ROW])
    before = run.read(OUTPUT_FILE)
    missing = Plan(pa.table({"batch_id": [0, 1]}), pa.schema([]), (), "2")
    with pytest.raises(RunFailed, match="batch 1 has no part"):
        write_openai(run, missing, "my-model")
    assert run.read(OUTPUT_FILE) == before


@pytest.mark.parametrize("kind", ErrorKind)
def test_each_kind_of_error_is_the_requests_fault_or_the_servers_or_no_response_at_all(run: Folder, kind: ErrorKind) -> None:
    row = {**ROW, "status": "failed", "error_kind": kind.value, "error_message": "what and why"}
    output, (line,) = written(run, [row])
    assert output == []
    assert (line["id"], line["custom_id"]) == ("batch_req_00000000-0", "x")
    if kind in ("engine_killed", "unreadable_file"):
        assert (line["response"], line["error"]) == (None, {"code": kind.value, "message": "what and why"})
        return
    is_servers = kind in ("engine_error", "truncated", "invalid_json", "invalid_output", "postprocess_error")
    status, fault = (500, "server_error") if is_servers else (400, "invalid_request_error")
    assert line["error"] is None
    assert line["response"] == {
        "status_code": status,
        "request_id": "req_00000000-0",
        "body": {"error": {"message": "what and why", "type": fault, "param": None, "code": kind.value}},
    }


def test_a_row_that_never_came_to_a_request_is_an_error_too(run: Folder) -> None:
    names = ("prompt_kind", "text", "finish_reason", "num_prompt_tokens", "num_cached_tokens", "num_output_tokens", "id")
    row = {**ROW, **dict.fromkeys(names), "status": "failed", "error_kind": "malformed_row", "error_message": "line 3"}
    _, (line,) = written(run, [row])
    assert (line["custom_id"], line["response"]["status_code"]) == (None, 400)


@pytest.mark.parametrize(
    ("found", "shown"), [("stop", "stop"), ("length", "length"), ("repetition", "length"), ("abort", "length")]
)
@pytest.mark.parametrize("prompt_kind", ["chat", "text"])
def test_an_answer_that_was_cut_never_looks_whole(run: Folder, prompt_kind: str, found: str, shown: str) -> None:
    assert choice_of(run, prompt_kind=prompt_kind, finish_reason=found)["finish_reason"] == shown


def test_tool_calls_stand_in_the_message(run: Folder) -> None:
    choice = choice_of(run, text="", tool_calls=json.dumps(CALLS))
    assert choice["message"] == {"role": "assistant", "content": None, "refusal": None, "tool_calls": CALLS}
    assert choice["finish_reason"] == "tool_calls"
    assert choice_of(run, text="I ask.", tool_calls=json.dumps(CALLS))["message"]["content"] == "I ask."


def test_tool_calls_do_not_hide_that_they_were_cut(run: Folder) -> None:
    assert choice_of(run, tool_calls=json.dumps(CALLS), finish_reason="length")["finish_reason"] == "length"


def test_the_reasoning_stands_beside_the_content(run: Folder) -> None:
    assert choice_of(run, reasoning="Well.")["message"] == {
        "role": "assistant", "content": "Hello", "refusal": None, "reasoning": "Well.",
    }  # fmt: skip


@pytest.mark.parametrize("prompt_kind", ["chat", "text"])
def test_further_answers_are_further_choices(run: Folder, prompt_kind: str) -> None:
    further = {"text": "Bye", "finish_reason": "length", "num_output_tokens": 1}
    logprobs = [[candidate("Hello", -0.5)]]
    first, second = body_of(run, prompt_kind=prompt_kind, completions=[further], logprobs=logprobs)["choices"]
    assert (first["index"], second["index"]) == (0, 1)
    assert (second["message"]["content"] if prompt_kind == "chat" else second["text"]) == "Bye"
    assert (second["finish_reason"], second["logprobs"]) == ("length", None)
    assert first["logprobs"] is not None


def test_a_chats_log_probabilities_name_the_token_and_the_likeliest(run: Folder) -> None:
    places = [
        [candidate("b", -2.0, 3), candidate("a", -0.25), candidate("é", -1.0, 2)],
        [candidate("\ufffd", -0.5), candidate("c", float("-inf"), 2)],
    ]
    logprobs = choice_of(run, logprobs=places, sampling=json.dumps({"logprobs": 2}))["logprobs"]
    assert logprobs["refusal"] is None
    first, second = logprobs["content"]
    a, e = {"token": "a", "logprob": -0.25, "bytes": [97]}, {"token": "é", "logprob": -1.0, "bytes": [195, 169]}
    assert first == {"token": "b", "logprob": -2.0, "bytes": [98], "top_logprobs": [a, e]}
    half, c = {"token": "\ufffd", "logprob": -0.5, "bytes": None}, {"token": "c", "logprob": -9999.0, "bytes": [99]}
    assert second == {**half, "top_logprobs": [half, c]}


@pytest.mark.parametrize(("sampling", "number"), [({"logprobs": 0}, 0), ({"logprobs": 1}, 1), (None, 2)])
def test_there_are_as_many_candidates_as_the_row_asked_for_or_all(run: Folder, sampling: Any, number: int) -> None:
    places = [[candidate("a", -0.25), candidate("b", -2.0, 2)]]
    choice = choice_of(run, logprobs=places, sampling=sampling and json.dumps(sampling))
    assert len(choice["logprobs"]["content"][0]["top_logprobs"]) == number


def test_a_completions_log_probabilities_stand_side_by_side(run: Folder) -> None:
    places = [
        [candidate("He", -0.5), candidate("\ufffd", -1.0, 2), candidate("\ufffd", -3.0, 3)],
        [candidate("llo", float("-inf"), 9), candidate("!", -0.125)],
    ]
    assert choice_of(run, prompt_kind="text", logprobs=places)["logprobs"] == {
        "tokens": ["He", "llo"],
        "token_logprobs": [-0.5, -9999.0],
        "top_logprobs": [{"He": -0.5, "\ufffd": -1.0}, {"!": -0.125, "llo": -9999.0}],
        "text_offset": [0, 2],
    }


def test_log_probabilities_without_a_value_do_not_stop_the_file(run: Folder) -> None:
    for kind in ("chat", "text"):
        choice_of(run, prompt_kind=kind, logprobs=[[candidate(None, None, None), candidate("a", float("nan"))]])
        choice_of(run, prompt_kind=kind, logprobs=[])


def test_odd_text_comes_out_unchanged_and_one_line_a_row(run: Folder) -> None:
    text = 'NUL \0 "quoted" \u2028 \x85 \r\n 👩\u200d🚀 שלום'
    assert choice_of(run, text=text)["message"]["content"] == text
    assert written(run, [{**ROW, "id": text}])[0][0]["custom_id"] == text


def test_a_finished_run_gets_its_files_when_they_are_asked_for_and_nothing_else(
    batch_config: Callable[..., BatchConfig], jsonl: Callable[..., Path], tmp_path: Path
) -> None:
    settings = echo(jsonl([{"id": f"r{i}", "prompt": f"row {i}"} for i in range(25)]), str(tmp_path / "run"))
    config = batch_config(*settings)
    finished, plan, _ = answer(config)
    finish(finished, plan, config)
    began: list[Run] = []
    for asked, there in ((config, False), (batch_config(*settings, "output.openai=true"), True)):
        run_batch(asked, began.append)
        assert (finished.folder.exists(OUTPUT_FILE), began) == (there, [])
    lines = [json.loads(line) for line in finished.folder.read(OUTPUT_FILE).splitlines()]
    assert [line["custom_id"] for line in lines] == [f"r{i}" for i in range(25)]
