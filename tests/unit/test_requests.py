"""A row becomes a request or a row error, and the same one whatever file it came from."""

import json
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelines.compose import compose_settings
from pipelines.config import BatchConfig
from pipelines.errors import ConfigError, ErrorKind, Flag, RowError
from pipelines.parameters import row_seed
from pipelines.parse import parse_config
from pipelines.requests import RequestBuilder
from pipelines.rows import Request

COLUMNS = ("prompt_column", "messages_column", "request_column", "tools_column", "sampling_column", "schema_column")


def settings_of(name: str) -> BatchConfig:
    return parse_config(compose_settings("batch", ["engine=echo", f"input={name}", "input.path=rows", "pricing=cpu"]))


FORMATS = {name: settings_of(name) for name in ("parquet", "jsonl", "csv")}
RUN = FORMATS["parquet"].sampling


def builder(file: str = "parquet", *, tokens: tuple[str, ...] = (), **changes: Any) -> RequestBuilder:
    """The shipped settings but for what a test says; columns are those that it names, and `prompt`, if none has a prompt."""
    config = FORMATS[file]
    columns = {name: changes.pop(name, None) for name in COLUMNS}
    if not any((columns["prompt_column"], columns["messages_column"], columns["request_column"], changes.get("template"))):
        columns["prompt_column"] = "prompt"
    prompt = {name: value for name, value in changes.items() if name in type(config.prompt).model_fields}
    sampling = {name: value for name, value in changes.items() if name in type(config.sampling).model_fields}
    assert len(prompt) + len(sampling) == len(changes)
    return RequestBuilder(
        config.model_copy(
            update={
                "input": config.input.model_copy(update=columns),
                "prompt": config.prompt.model_copy(update=prompt),
                "sampling": config.sampling.model_copy(update=sampling),
            }
        ),
        tokens,
    )


def request_of(building: RequestBuilder, row: dict[str, Any], *, row_number: int = 3, attempt: int = 1) -> Request:
    return building.build(row, key="0-3", row_number=row_number, attempt=attempt)


def error_of(building: RequestBuilder, row: dict[str, Any]) -> RowError:
    with pytest.raises(RowError) as caught:
        request_of(building, row)
    return caught.value


def through_parquet(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows as they come back from a Parquet file."""
    file = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_pylist(rows), file)
    read: list[dict[str, Any]] = pq.read_table(pa.BufferReader(file.getvalue())).to_pylist()
    return read


def test_a_plain_row_gets_the_runs_own_parameters_and_nothing_else() -> None:
    building = builder(system="Be brief.")
    request = request_of(building, {"prompt": "Hi", "other": 1})
    system = {"role": "system", "content": "Be brief."}
    assert request == Request(key="0-3", prompt=[system, {"role": "user", "content": "Hi"}], sampling=RUN)
    assert request.sampling is request_of(building, {"prompt": "Ho"}).sampling


def test_requests_are_told_apart_by_the_workers_keys_and_not_by_the_rows_ids() -> None:
    building = builder()
    requests = [
        building.build({"id": name, "prompt": "Hi"}, key=key, row_number=0, attempt=1) for name in ("x", None) for key in "ab"
    ]
    assert [request.key for request in requests] == ["a", "b", "a", "b"]


def test_the_columns_are_those_that_the_settings_name() -> None:
    assert builder().columns == ["prompt"]
    assert builder(template="{{ a }} {{ b }}", tools_column="a").columns == ["a", "b"]
    assert builder(messages_column="m", tools_column="t", sampling_column="s", schema_column="j").columns == [
        "m",
        "t",
        "s",
        "j",
    ]
    assert builder("jsonl", request_column="body").columns == ["body"]


def test_tools_need_a_chat_template() -> None:
    with pytest.raises(ConfigError, match=r'^input\.tools_column="t" needs prompt\.kind=chat; set that, or '):
        builder(kind="raw", tools_column="t")


@pytest.mark.parametrize("messages", [None, [], [{"role": "user", "content": None}], [{"content": "Hi"}], [{"role": None}]])
def test_a_bad_conversation_fails_its_row_and_the_next_one_is_fine(messages: Any) -> None:
    building = builder(messages_column="messages")
    assert "messages" in error_of(building, {"messages": messages}).message
    assert request_of(building, {"messages": [{"role": "user", "content": "Hi"}]}).prompt


class TestParquet:
    """Parquet gives each row's structs the keys of all other rows, with null; the requests are those of JSON lines."""

    def test_each_row_keeps_its_own_parameters(self) -> None:
        rows = [{"prompt": "a", "s": {"temperature": 0.5}}, {"prompt": "b", "s": {"max_tokens": 5}}, {"prompt": "c", "s": None}]
        read = through_parquet(rows)
        assert read[0]["s"] == {"temperature": 0.5, "max_tokens": None}
        first, second, third = (request_of(builder(sampling_column="s"), row) for row in read)
        assert first.sampling == RUN.model_copy(update={"temperature": 0.5})
        assert second.sampling == RUN.model_copy(update={"max_tokens": 5})
        assert third.sampling == RUN
        assert json.loads(second.own_sampling or "")["max_tokens"] == 5
        assert json.loads(second.own_sampling or "")["temperature"] == RUN.temperature
        assert third.own_sampling is None

    def test_lists_maps_of_tokens_and_schemas_in_structs_are_plain_python(self) -> None:
        schema = {"type": "object", "required": ["a"], "properties": {"a": {"enum": ["x", "y"]}}}
        rows = [
            {"prompt": "a", "s": {"stop": ["END"], "logit_bias": {"7": 1.0}, "json_schema": schema}},
            {"prompt": "b", "s": {"stop": [], "logit_bias": {"8": 1.0}, "json_schema": {"type": "string", "minLength": 1}}},
        ]
        sampling = request_of(builder(sampling_column="s"), through_parquet(rows)[0]).sampling
        assert (sampling.stop, sampling.logit_bias) == (("END",), {"7": 1.0})
        assert json.loads(sampling.json_schema or "") == schema

    def test_tools_lose_the_properties_of_other_rows(self) -> None:
        def tool(name: str, properties: dict[str, Any]) -> dict[str, Any]:
            parameters = {"type": "object", "properties": properties, "required": [*properties]}
            return {"type": "function", "function": {"name": name, "parameters": parameters}}

        weather = [tool("weather", {"city": {"type": "string"}})]
        convert = [tool("convert", {"amount": {"type": "number", "minimum": 0}, "to": {"type": "string", "enum": ["EUR"]}})]
        rows = [{"prompt": "a", "tools": weather}, {"prompt": "b", "tools": convert}, {"prompt": "c", "tools": []}]
        requests = [request_of(builder(tools_column="tools"), row) for row in through_parquet(rows)]
        assert [request.tools for request in requests] == [weather, convert, None]

    def test_a_turn_without_tool_calls_is_as_if_the_key_were_absent(self) -> None:
        call = {"id": "1", "type": "function", "function": {"name": "find", "arguments": {"cities": ["Paris", "Lyon"]}}}
        text_call = {"id": "2", "type": "function", "function": {"name": "find", "arguments": '{"limit": null}'}}
        for calls in ([call], [text_call]):
            turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "tool_calls": calls}]
            (row,) = through_parquet([{"messages": turns}])
            assert row["messages"] != turns
            assert request_of(builder(messages_column="messages"), row).prompt == turns

    def test_a_null_that_was_written_in_json_is_data(self) -> None:
        turns = [{"role": "assistant", "tool_calls": [{"function": {"name": "find", "arguments": {"city": None}}}]}]
        tools = [{"type": "function", "function": {"name": "find", "parameters": {"const": None}}}]
        row = {"messages": turns, "tools": tools, "s": {"json_schema": {"const": None}}}
        columns = {"messages_column": "messages", "tools_column": "tools", "sampling_column": "s"}
        text_row = {name: json.dumps(value) for name, value in row.items()}
        requests = [request_of(builder("jsonl", **columns), row), request_of(builder("parquet", **columns), text_row)]
        for request in requests:
            assert (request.prompt, request.tools, request.sampling.json_schema) == (turns, tools, '{"const": null}')


TEXT = st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\0"), min_size=1, max_size=5).filter(str.strip)
ARGUMENTS = st.fixed_dictionaries(
    {"city": TEXT},  # Parquet cannot hold a struct that never has a key
    optional={
        "days": st.integers(0, 9),
        "tags": st.lists(TEXT, max_size=2),
        "deep": st.fixed_dictionaries({"a": TEXT}, optional={"b": st.booleans()}),
    },
)
PART = st.one_of(
    st.fixed_dictionaries({"type": st.just("text"), "text": TEXT}),
    st.fixed_dictionaries({"type": st.just("image_url"), "image_url": st.fixed_dictionaries({"url": TEXT})}),
)


def calls_with(arguments: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    function = st.fixed_dictionaries({"name": TEXT, "arguments": arguments})
    call = st.fixed_dictionaries({"function": function}, optional={"id": TEXT, "type": st.just("function")})
    return st.lists(call, min_size=1, max_size=2)


def conversations(content: st.SearchStrategy[Any], arguments: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Conversations whose columns have one type each, as a Parquet file needs."""
    said = st.fixed_dictionaries({"role": st.sampled_from(["user", "tool"]), "content": content}, optional={"name": TEXT})
    called = st.fixed_dictionaries(
        {"role": st.just("assistant"), "tool_calls": calls_with(arguments)}, optional={"content": content}
    )
    return st.lists(st.one_of(said, called), min_size=1, max_size=4)


FILES = st.one_of(
    st.lists(conversations(content, arguments), min_size=1, max_size=4)
    for content in (TEXT, st.lists(PART, min_size=1, max_size=3))
    for arguments in (TEXT, ARGUMENTS)
)


@given(conversations=FILES)
def test_a_conversation_is_the_same_from_parquet_json_lines_and_json_text(conversations: list[Any]) -> None:
    rows = [{"messages": turns} for turns in conversations]
    for row, read in zip(rows, through_parquet(rows), strict=True):
        text = {"messages": json.dumps(row["messages"])}
        from_json = request_of(builder("jsonl", messages_column="messages"), row).prompt
        assert from_json == row["messages"]
        assert request_of(builder("parquet", messages_column="messages"), read).prompt == from_json
        assert request_of(builder("csv", messages_column="messages"), text).prompt == from_json


@pytest.mark.parametrize("value", [
    "NUL \0 stays", "👩\u200d🚀 👨\u200d👩\u200d👧", "שלום \u202eabc", "e" + "\u0301" * 10_000, "a\r\nb\u2028",
    "\ufeffBOM", "$ {x} {{ x }}",
])  # fmt: skip
def test_odd_text_passes_unchanged(value: str) -> None:
    assert request_of(builder(kind="raw", tokens=("<|end|>",)), {"prompt": value}).prompt == value
    turns = [{"role": "user", "content": value}]
    assert request_of(builder(messages_column="m"), {"m": json.dumps(turns)}).prompt == turns


@pytest.mark.parametrize("column", ["messages", "tools", "sampling", "schema"])
def test_half_an_emoji_in_json_text_fails_only_its_row(column: str) -> None:
    columns = {f"{name}_column": name for name in ("messages", "tools", "sampling", "schema")}
    row = {"messages": [{"role": "user", "content": "Hi"}]}
    error = error_of(builder(**columns), {**row, column: '[{"role": "user", "content": "\\ud83d", "title": "\\ud83d"}]'})
    assert error.kind == ErrorKind.INVALID_TEXT
    assert error.message.startswith(f"{column} is not Unicode text: ")
    assert request_of(builder(**columns), row)


class TestParameters:
    """`input.sampling_column` and `input.schema_column`."""

    @pytest.mark.parametrize(("own", "name"), [
        ({"temperature": -1}, "temperature"), ({"temperature": float("nan")}, "temperature"),
        ({"temperature": "0.5"}, "temperature"), ({"top_p": 0}, "top_p"), ({"max_tokens": 0}, "max_tokens"),
        ({"stop": [""]}, "stop"), ({"seed": -1}, "seed"), ({"min_tokens": 9, "max_tokens": 5}, "min_tokens"),
        ({"unheard_of": 1}, "unheard_of"), ({"n": 3, "temperature": 0}, "n"),
    ])  # fmt: skip
    def test_a_wrong_one_fails_only_its_row_and_is_named(self, own: dict[str, Any], name: str) -> None:
        building = builder(sampling_column="params")
        error = error_of(building, {"prompt": "Hi", "params": own})
        assert error.kind == ErrorKind.INVALID_PARAMETER
        assert f".{name}" in error.message
        assert "params" in error.message
        assert request_of(building, {"prompt": "Hi", "params": {"max_tokens": 16.0}}).sampling.max_tokens == 16

    @pytest.mark.parametrize("nothing", [None, "", " ", "null"])
    def test_a_row_may_have_none(self, nothing: Any) -> None:
        building = builder("csv", sampling_column="s", schema_column="j", tools_column="t")
        request = request_of(
            building, {"prompt": "Hi", "s": nothing, "t": nothing, "j": nothing if nothing != "null" else None}
        )
        assert (request.sampling, request.tools, request.own_sampling) == (RUN, None, None)

    def test_a_schema_takes_the_place_of_the_runs_form_beside_other_parameters(self) -> None:
        building = builder(sampling_column="s", schema_column="j", regex="a+")
        request = request_of(building, {"prompt": "Hi", "s": {"max_tokens": 5}, "j": '{"type":"object"}'})
        assert request.sampling == RUN.model_copy(update={"max_tokens": 5, "json_schema": '{"type":"object"}'})
        assert request.own_sampling == request.sampling.model_dump_json()
        assert request_of(building, {"prompt": "Hi"}).sampling.regex == "a+"

    def test_a_broken_schema_is_named_by_its_column(self) -> None:
        error = error_of(builder(schema_column="j"), {"prompt": "Hi", "j": "{"})
        assert error.kind == ErrorKind.INVALID_SCHEMA
        assert error.message.startswith('j is "{", not JSON: ')

    @pytest.mark.parametrize("form", ["regex", "json_schema"])
    def test_two_forms_in_two_columns_are_refused(self, form: str) -> None:
        error = error_of(builder(sampling_column="s", schema_column="j"), {"prompt": "Hi", "s": {form: "{}"}, "j": "{}"})
        assert error.kind == ErrorKind.INVALID_PARAMETER
        assert error.message == f"an answer has one form, but j and s.{form} are set; set one of them to null"


class TestSeed:
    """`sampling.seed`: each row draws from one of its own."""

    def test_it_follows_from_the_runs_seed_the_rows_number_and_the_attempt(self) -> None:
        building = builder(seed=7)
        request = request_of(building, {"prompt": "Hi"}, row_number=3, attempt=2)
        assert request.sampling == RUN.model_copy(update={"seed": row_seed(7, 3, 2)})
        assert request.own_sampling is None

    def test_one_that_the_row_names_is_used_as_it_is(self) -> None:
        building = builder(seed=7, sampling_column="s")
        for seed in (7, 8):
            assert request_of(building, {"prompt": "Hi", "s": {"seed": seed}}, attempt=2).sampling.seed == seed
        request = request_of(building, {"prompt": "Hi", "s": {"seed": None, "max_tokens": 5}})
        assert request.sampling.seed == row_seed(7, 3, 1)
        assert request.own_sampling == request.sampling.model_dump_json()

    def test_a_row_may_draw_from_a_seed_where_the_run_has_none(self) -> None:
        assert request_of(builder(sampling_column="s"), {"prompt": "Hi", "s": {"seed": 8}}).sampling.seed == 8
        assert request_of(builder(sampling_column="s"), {"prompt": "Hi", "s": {"top_k": 8}}).sampling.seed is None


class TestRequestColumn:
    """`input.request_column`: whole OpenAI request bodies."""

    HI = ({"role": "user", "content": "Hi<|end|>"},)

    def row(self, **body: Any) -> dict[str, Any]:
        return {"custom_id": "x", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": [*self.HI], **body}}

    def test_the_body_says_its_messages_parameters_and_tools(self) -> None:
        tools = [{"type": "function", "function": {"name": "find", "parameters": {"type": "object"}}}]
        request = request_of(builder("jsonl", request_column="body", seed=7), self.row(temperature=0.5, tools=tools))
        assert (request.prompt, request.tools) == ([*self.HI], tools)
        assert request.sampling == RUN.model_copy(update={"temperature": 0.5, "seed": row_seed(7, 3, 1)})
        assert request.own_sampling == request.sampling.model_dump_json()
        assert request_of(builder("jsonl", request_column="body", seed=7), self.row(seed=9)).sampling.seed == 9

    def test_the_runs_system_message_comes_first_unless_it_has_one(self) -> None:
        building = builder("jsonl", request_column="body", system="Be brief.")
        assert request_of(building, self.row()).prompt == [{"role": "system", "content": "Be brief."}, *self.HI]
        own = [{"role": "developer", "content": "Be long."}, *self.HI]
        assert request_of(building, self.row(messages=own)).prompt == own

    def test_its_texts_are_screened_for_special_tokens(self) -> None:
        request = request_of(builder("jsonl", request_column="body", tokens=("<|end|>",)), self.row())
        assert request.flags == (Flag.SPECIAL_TOKENS,)
        error = error_of(builder("jsonl", request_column="body", special_tokens="fail", tokens=("<|end|>",)), self.row())
        assert error.kind == ErrorKind.SPECIAL_TOKENS
        assert error.message.startswith('body.messages[0].content contains the special token "<|end|>"')

    def test_a_text_stays_a_text_and_an_input_asks_for_an_embedding(self) -> None:
        building = builder("jsonl", request_column="body", system="Be brief.", special_tokens="escape", tokens=("<|end|>",))
        completion, embedding = (request_of(building, {"body": {key: "Hi<|end|>"}}) for key in ("prompt", "input"))
        assert completion.prompt == embedding.prompt == "Hi<\u200b|end|>"
        assert (completion.embeds, embedding.embeds) == (False, True)
        assert error_of(building, {"body": {"prompt": " "}}).kind == ErrorKind.EMPTY_PROMPT

    def test_its_variables_for_the_chat_template_come_with_it(self) -> None:
        request = request_of(builder("jsonl", request_column="body"), self.row(chat_template_kwargs={"enable_thinking": False}))
        assert request.chat_template_kwargs == {"enable_thinking": False}

    def test_a_body_from_parquet_has_no_keys_of_other_rows(self) -> None:
        schema = {"type": "object", "properties": {"a": {"type": "string"}}}
        form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
        rows = [{"body": {"messages": [*self.HI], "response_format": form}}, {"body": {"messages": [*self.HI], "top_p": 0.5}}]
        first, second = (request_of(builder(request_column="body"), row).sampling for row in through_parquet(rows))
        assert first == RUN.model_copy(update={"json_schema": json.dumps(schema)})
        assert second == RUN.model_copy(update={"top_p": 0.5})

    def test_a_wrong_parameter_is_named(self) -> None:
        error = error_of(builder("jsonl", request_column="body"), self.row(temperature=-1))
        assert (error.kind, error.message) == (
            ErrorKind.INVALID_PARAMETER, "body.temperature=-1 must be greater than or equal to 0",
        )  # fmt: skip


LEAF = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8), st.binary(max_size=3), st.dates(),
    st.sampled_from(["user", "text", "<|end|>", "{}", "[]", '{"stop": ["a"]}', '[{"role": "user", "content": "a"}]']),
)  # fmt: skip
KEYS = st.sampled_from(["role", "content", "type", "text", "function", "name", "arguments", "messages", "stop"])
VALUE = st.recursive(LEAF, lambda inner: st.lists(inner, max_size=2) | st.dictionaries(KEYS, inner, max_size=2), max_leaves=6)
MESSAGE = st.fixed_dictionaries(
    {"role": st.just("user") | LEAF}, optional={"content": VALUE, "tool_calls": VALUE, "name": LEAF}
)
FUNCTION = st.fixed_dictionaries({"name": LEAF}, optional={"parameters": VALUE})
TOOL = st.fixed_dictionaries({"function": FUNCTION | VALUE})
PARAMETERS = st.dictionaries(st.sampled_from([*type(RUN).model_fields, "other"]), LEAF | st.lists(LEAF, max_size=2), max_size=4)
ROWS = st.fixed_dictionaries(
    {},
    optional={
        "p": st.lists(MESSAGE, max_size=3) | st.fixed_dictionaries({"messages": st.lists(MESSAGE, max_size=2)}) | VALUE,
        "t": st.lists(TOOL, max_size=2) | VALUE,
        "s": PARAMETERS | VALUE,
        "j": VALUE,
    },
)
HI = [{"role": "user", "content": "Hi"}]
BUILDERS = [
    (builder(file, **columns, **more, tokens=("<|end|>", "a")), good)
    for file in ("parquet", "jsonl")
    for columns, good in (
        ({"prompt_column": "p", "tools_column": "t", "sampling_column": "s", "schema_column": "j"}, "Hi"),
        ({"messages_column": "p", "tools_column": "t", "sampling_column": "s", "schema_column": "j"}, HI),
        ({"template": "{{ p }} {{ s.stop }}"}, "Hi"),
        ({"request_column": "p"}, {"messages": HI}),
    )
    for more in ({"special_tokens": "fail"}, {"special_tokens": "escape", "system": "Be brief.", "seed": 7})
]


@given(building_and_good=st.sampled_from(BUILDERS), row=ROWS, is_good=st.booleans())
def test_whatever_a_row_holds_it_becomes_a_request_or_a_row_error(
    building_and_good: tuple[RequestBuilder, Any], row: dict[str, Any], is_good: bool
) -> None:
    building, good = building_and_good
    row = {**row, "p": good} if is_good else row  # so that half of the rows come as far as their tools and parameters
    before = repr(row)
    try:
        request = request_of(building, row)
    except RowError as error:
        assert error.message
    else:
        assert request.prompt
    assert repr(row) == before


@pytest.mark.parametrize("depth", [300, 990, 100_000])
@pytest.mark.parametrize("column", ["messages", "tools", "sampling", "schema"])
def test_what_is_nested_too_deeply_is_a_row_error(column: str, depth: int) -> None:
    columns = {f"{name}_column": name for name in ("messages", "tools", "sampling", "schema")}
    row = {"messages": [{"role": "user", "content": "Hi"}], column: "[" * depth + "]" * depth}
    assert error_of(builder(**columns), row).kind.startswith("invalid_")
