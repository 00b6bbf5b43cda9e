"""A line of OpenAI's batch files says what to answer and how, or is refused by name; nothing in it is passed over."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.chat.completion_create_params import CompletionCreateParamsNonStreaming as ChatParams
from openai.types.completion_create_params import CompletionCreateParamsNonStreaming as TextParams
from openai.types.embedding_create_params import EmbeddingCreateParams

from pipelines.config import SamplingConfig
from pipelines.errors import ErrorKind, RowError
from pipelines.openai_requests import Body, body_of

HI = [{"role": "user", "content": "Hi"}]
CHAT, TEXT, EMBEDDING = {"messages": HI}, {"prompt": "Hi"}, {"input": "Hi"}
URLS = {"/v1/chat/completions": CHAT, "/v1/completions": TEXT, "/v1/embeddings": EMBEDDING}
TOOLS = [{"type": "function", "function": {"name": "find", "parameters": {"type": "object", "properties": {}}}}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "string", "default": None}}}


def line(body: Any, **others: Any) -> dict[str, Any]:
    return {"custom_id": "x", "method": "POST", "body": body, **others}


def error_of(row: dict[str, Any]) -> RowError:
    with pytest.raises(RowError) as caught:
        body_of(row, "body")
    return caught.value


@pytest.mark.parametrize(("url", "body"), URLS.items())
def test_each_endpoint_is_named_by_its_url_or_told_by_its_body(url: str, body: dict[str, Any]) -> None:
    expected = Body(HI if body is CHAT else "Hi", is_embedding=body is EMBEDDING)
    rows = [line(body, url=url), line(body, url=None, method=None), {"body": body}, line(json.dumps(body), url="", method="")]
    assert [body_of(row, "body") for row in rows] == [expected] * len(rows)


@pytest.mark.parametrize("key", ["prompt", "input"])
def test_a_list_of_one_text_is_that_text(key: str) -> None:
    assert body_of(line({key: ["Hi"]}), "body").prompt == "Hi"


@pytest.mark.parametrize(("given", "changes"), [
    ({"max_tokens": 5}, {"max_tokens": 5}),
    ({"max_completion_tokens": 5}, {"max_tokens": 5}),
    ({"max_completion_tokens": 5, "max_tokens": 5}, {"max_tokens": 5}),
    ({"temperature": 0.5, "top_p": 0.9, "n": 2, "seed": 7}, {"temperature": 0.5, "top_p": 0.9, "n": 2, "seed": 7}),
    ({"presence_penalty": 1, "frequency_penalty": -1}, {"presence_penalty": 1, "frequency_penalty": -1}),
    ({"logit_bias": {"50256": -100}}, {"logit_bias": {"50256": -100}}),
    ({"stop": "END"}, {"stop": ["END"]}),
    ({"stop": ["END", "\n"]}, {"stop": ["END", "\n"]}),
    ({"logprobs": True}, {"logprobs": 0}),
    ({"logprobs": True, "top_logprobs": 3}, {"logprobs": 3}),
    ({"logprobs": False, "top_logprobs": 0}, {}),
    ({"response_format": {"type": "text"}}, {}),
    ({"response_format": {"type": "json_object"}}, {"json_schema": {"type": "object"}}),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "a", "strict": True, "schema": SCHEMA}}},
     {"json_schema": SCHEMA}),
    ({"guided_json": SCHEMA}, {"json_schema": SCHEMA}),
    ({"guided_regex": "a+"}, {"regex": "a+"}),
    ({"guided_choice": ["a", "b"]}, {"choice": ["a", "b"]}),
    ({"guided_grammar": "root ::= x"}, {"grammar": "root ::= x"}),
    ({"structured_outputs": {"json": SCHEMA, "regex": None}}, {"json_schema": SCHEMA}),
    ({"structured_outputs": {"choice": ["a", "b"]}}, {"choice": ["a", "b"]}),
    ({"top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1}, {"top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1}),
    ({"min_tokens": 1, "stop_token_ids": [2]}, {"min_tokens": 1, "stop_token_ids": [2]}),
    ({"ignore_eos": True}, {"ignore_eos": True}),
    ({"prompt_logprobs": 1}, {"prompt_logprobs": 1}),
    ({"temperature": None, "stop": None, "response_format": None, "tools": None, "suffix": None, "other": None}, {}),
])  # fmt: skip
def test_parameters_come_out_under_our_names(given: dict[str, Any], changes: dict[str, Any]) -> None:
    found = body_of(line({**CHAT, **given}), "body")
    assert found == Body(HI, changes)
    assert set(found.changes) <= set(SamplingConfig.model_fields)
    assert body_of(line(json.dumps({**CHAT, **given})), "body") == found


def test_a_completion_says_the_number_of_its_logprobs() -> None:
    assert body_of(line({**TEXT, "logprobs": 3}), "body").changes == {"logprobs": 3}


@pytest.mark.parametrize("given", [
    {"model": "gpt-4o", "user": "u", "metadata": {"a": "b"}, "store": True, "service_tier": "flex"},
    {"safety_identifier": "s", "prompt_cache_key": "k", "prediction": {"type": "content", "content": "x"}},
    {"parallel_tool_calls": False, "stream": False, "stream_options": {"include_usage": True}, "modalities": ["text"]},
    {"functions": []},
])  # fmt: skip
def test_what_does_not_change_the_answer_is_ignored(given: dict[str, Any]) -> None:
    assert body_of(line({**CHAT, **given}), "body") == Body(HI)


def test_completions_that_ask_for_nothing_more_are_taken() -> None:
    given = {"echo": False, "suffix": "", "n": 3, "best_of": 3}
    assert body_of(line({**TEXT, **given}), "body") == Body("Hi", {"n": 3})
    assert body_of(line({**EMBEDDING, "encoding_format": "float", "model": "m"}), "body") == Body("Hi", is_embedding=True)


@pytest.mark.parametrize(("choice", "tools"), [(None, TOOLS), ("auto", TOOLS), ("none", None)])
def test_tools_are_offered_unless_the_body_says_none(choice: str | None, tools: list[dict[str, Any]] | None) -> None:
    assert body_of(line({**CHAT, "tools": TOOLS, "tool_choice": choice}), "body").tools == tools


def test_variables_for_the_chat_template_stay_as_they_are() -> None:
    variables = {"enable_thinking": False, "none": None}
    assert body_of(line({**CHAT, "chat_template_kwargs": variables}), "body").chat_template_kwargs == variables


@pytest.mark.parametrize(("row", "message"), [
    (line(CHAT, method="GET"), 'method is "GET"; it must be POST'),
    (line(CHAT, url="/v1/responses"), 'url is "/v1/responses"; it must be one of /v1/chat/completions, /v1/completions, '),
    (line(CHAT, url=["/v1/completions"]), 'url is ["/v1/completions"]; it must be one of '),
    (line(CHAT, url="/v1/completions"), "body.prompt is missing, which url=/v1/completions needs"),
    (line({"messages": None}, url="/v1/chat/completions"), "body.messages is missing, which url=/v1/chat/completions needs"),
    (line({**TEXT, **CHAT}, url="/v1/completions"), 'body.messages=[{"role": "user", "content": "Hi"}] is no parameter of '),
    (line({**TEXT, **CHAT}), "body must have one of messages, prompt and input; it has messages and prompt"),
    (line({}), "body must have one of messages, prompt and input; it has none of them"),
    (line([1]), "body is [1], not a mapping"),
    (line("{"), 'body is "{", not JSON: '),
    (line({"prompt": ["a", "b"]}), 'body.prompt is ["a", "b"], a list of 2 texts; write one text a line'),
    (line({"input": ["a", "b"]}), 'body.input is ["a", "b"], a list of 2 texts; write one text a line'),
    (line({"prompt": []}), "body.prompt is [], a list of 0 texts; write one text a line"),
    (line({"prompt": [1, 2]}), "body.prompt is [1, 2]: token ids are not taken; write the text"),
    (line({"input": [[1, 2], [3]]}), "body.input is [[1, 2], [3]]: token ids are not taken; write the text"),
    (line({"prompt": 7}), "body.prompt is 7, not text"),
    (line({**EMBEDDING, "temperature": 1}), "body.temperature=1 is no parameter of /v1/embeddings; there are: input"),
    (line({**EMBEDDING, "dimensions": 8}), "body.dimensions=8 is not offered: the model's own number of dimensions"),
    (line({**EMBEDDING, "encoding_format": "base64"}), 'body.encoding_format="base64" is not offered: leave it out, or write'),
    (line({**TEXT, "tools": TOOLS}), "body.tools=[{"),
    (line({**TEXT, "suffix": "x"}), 'body.suffix="x" is not offered: the model fills no gaps; leave it out, or '),
    (line({**TEXT, "echo": True}), "body.echo=true is not offered: the answer comes without the prompt; leave it out"),
    (line({**TEXT, "n": 2, "best_of": 4}), "body.best_of=4 is not offered; set n to the number of answers"),
    (line({**TEXT, "best_of": 2}), "body.best_of=2 is not offered; set n to the number of answers"),
])  # fmt: skip
def test_a_line_that_cannot_be_answered_is_refused_by_name(row: dict[str, Any], message: str) -> None:
    error = error_of(row)
    assert (error.kind, error.message[: len(message)]) == (ErrorKind.INVALID_REQUEST, message)


@pytest.mark.parametrize(("given", "message"), [
    ({"stream": True}, "body.stream=true is not offered: a batch is not streamed; leave it out"),
    ({"audio": {"voice": "alloy"}}, 'body.audio={"voice": "alloy"} is not offered: the answer is text; leave it out'),
    ({"modalities": ["text", "audio"]}, 'body.modalities=["text", "audio"] is not offered: the answer is text; leave it out'),
    ({"functions": [{"name": "f"}]}, 'body.functions=[{"name": "f"}] is not offered: use tools'),
    ({"function_call": "auto"}, 'body.function_call="auto" is not offered: use tools and tool_choice'),
    ({"reasoning_effort": "low"}, 'body.reasoning_effort="low" is not offered: use the model\'s own switch in chat_template_'),
    ({"temprature": 1}, "body.temprature=1 is no parameter of /v1/chat/completions; did you mean temperature?"),
    ({"xyz": 1}, "body.xyz=1 is no parameter of /v1/chat/completions; there are: chat_template_kwargs, "),
    ({"tool_choice": "required"}, 'body.tool_choice is "required"; write "auto" or "none"'),
    ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, 'body.tool_choice is {"type": "function", '),
    ({"tools": [{"type": "function"}]}, 'body.tools[0] is {"type": "function"}, not a tool'),
    ({"chat_template_kwargs": [1]}, "body.chat_template_kwargs is [1], not a mapping"),
    ({"logprobs": 3}, "body.logprobs is 3; in a chat it must be true or false"),
    ({"top_logprobs": 3}, "body.top_logprobs=3 needs body.logprobs=true"),
    ({"response_format": "json"}, 'body.response_format is "json"; it must be {type: text}, '),
    ({"response_format": {"type": "json_schema"}}, 'body.response_format is {"type": "json_schema"}; it must be '),
    ({"structured_outputs": {"json_object": True}}, "body.structured_outputs.json_object=true is not offered"),
    ({"structured_outputs": "a+"}, 'body.structured_outputs is "a+", not a mapping'),
    ({"max_tokens": 5, "max_completion_tokens": 6}, "body.max_tokens and body.max_completion_tokens both set max_tokens; "),
    ({"guided_regex": "a", "structured_outputs": {"regex": "b"}}, "body.guided_regex and body.structured_outputs both set re"),
])  # fmt: skip
def test_a_parameter_that_cannot_be_honoured_is_refused_with_what_to_do(given: dict[str, Any], message: str) -> None:
    error = error_of(line({**CHAT, **given}))
    assert (error.kind, error.message[: len(message)]) == (ErrorKind.INVALID_REQUEST, message)


@pytest.mark.parametrize(("row", "kind", "message"), [
    (line(None), ErrorKind.MISSING_VALUE, "body is null"),
    (line(""), ErrorKind.MISSING_VALUE, "body is null"),
    ({}, ErrorKind.MISSING_VALUE, "body is null"),
    (line({"messages": []}), ErrorKind.INVALID_MESSAGES, "body.messages is [], not a list of messages"),
    (line({"messages": [{"role": "user"}]}), ErrorKind.INVALID_MESSAGES, "body.messages[0].content is null"),
    (line('{"prompt": "\\ud800"}'), ErrorKind.INVALID_TEXT, "body is not Unicode text: "),
])  # fmt: skip
def test_missing_values_conversations_and_text_fail_as_they_do_in_columns(row: Any, kind: ErrorKind, message: str) -> None:
    error = error_of(row)
    assert (error.kind, error.message[: len(message)]) == (kind, message)


def test_the_custom_id_is_none_of_the_bodys_business() -> None:
    assert [body_of({**line(CHAT), "custom_id": one}, "body") for one in ("x", "x", None)] == [Body(HI)] * 3


@pytest.mark.parametrize(("body", "official"), [(CHAT, ChatParams), (TEXT, TextParams), (EMBEDDING, EmbeddingCreateParams)])
def test_every_parameter_of_the_official_client_is_known(body: dict[str, Any], official: Any) -> None:
    names = set(official.__annotations__)
    assert {"model", *body} <= names
    for name in names - set(body):
        try:
            body_of(line({**body, name: "a value of no use"}), "body")
        except RowError as error:
            assert "is no parameter" not in error.message


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-1, 3) | st.floats() | st.sampled_from(["", "POST", "auto", "text", "{}", *URLS]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["type", "json", "schema", "role"]), inner),
    max_leaves=5,
)
KEYS = st.sampled_from([
    "messages", "prompt", "input", "stop", "n", "best_of", "logprobs", "top_logprobs", "response_format", "structured_outputs",
    "tools", "tool_choice", "chat_template_kwargs", "model", "stream", "modalities", "max_tokens", "max_completion_tokens", "x",
])  # fmt: skip
BODIES = st.builds(
    lambda body, more: {**more, **body}, st.sampled_from([CHAT, TEXT, EMBEDDING, {}]), st.dictionaries(KEYS, VALUES)
)


@given(row=st.fixed_dictionaries({"body": BODIES | VALUES}, optional={"method": VALUES, "url": VALUES}))
def test_whatever_a_line_holds_it_becomes_a_body_or_a_row_error(row: dict[str, Any]) -> None:
    try:
        assert set(body_of(row, "body").changes) <= set(SamplingConfig.model_fields)
    except RowError as error:
        assert error.message
