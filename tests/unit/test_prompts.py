"""A row becomes a request, or an error that names the field and what was found there."""

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelines.compose import compose_settings
from pipelines.errors import ConfigError, ErrorKind, Flag, RowError
from pipelines.parse import parse_config
from pipelines.prompts import Renderer, conversation, tools_of, without_nulls

MAX_MESSAGE = 260  # characters


BASE = parse_config(compose_settings("batch", ["engine=echo", "input=parquet", "input.path=rows.parquet", "pricing=cpu"]))


def renderer(*, tokens: Sequence[str] = (), messages_column: str | None = None, **prompt: Any) -> Renderer:
    """The shipped settings but for what a test says."""
    column = "prompt" if prompt.get("template") is None and messages_column is None else None
    source = BASE.input.model_copy(update={"prompt_column": column, "messages_column": messages_column})
    return Renderer(BASE.prompt.model_copy(update=prompt), source, tokens)


def row_error(renderer: Renderer, row: dict[str, Any]) -> RowError:
    with pytest.raises(RowError) as caught:
        renderer.render(row)
    error = caught.value
    assert len(error.message) <= MAX_MESSAGE
    assert "\n" not in error.message
    assert "None" not in error.message
    return error


def test_raw_hands_over_the_text_untouched() -> None:
    text = "  Say\n{name} {{ x }} \t\0 👩‍🚀 שלום "
    assert renderer(kind="raw").render({"prompt": text, "id": 7})[0] == text


def test_chat_makes_the_text_one_user_turn() -> None:
    assert renderer().render({"prompt": "Hi"})[0] == [{"role": "user", "content": "Hi"}]


def test_a_system_message_comes_before_a_conversation_that_has_none() -> None:
    brief = {"role": "system", "content": "Be brief."}
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    assert renderer(system="Be brief.").render({"prompt": "Hi"})[0] == [brief, {"role": "user", "content": "Hi"}]
    with_turns = renderer(system="Be brief.", messages_column="turns")
    assert with_turns.render({"turns": turns})[0] == [brief, *turns]


@pytest.mark.parametrize("role", ["system", "developer"])
def test_a_conversation_with_a_system_message_of_its_own_keeps_that(role: str) -> None:
    turns = [{"role": role, "content": "Be long."}, {"role": "user", "content": "Hi"}]
    assert renderer(system="Be brief.", messages_column="turns").render({"turns": turns})[0] == turns


@pytest.mark.parametrize(("value", "kind", "message"), [
    (None, ErrorKind.MISSING_VALUE, "prompt is null"),
    ("", ErrorKind.EMPTY_PROMPT, 'prompt is "": nothing but white space'),
    (" ", ErrorKind.EMPTY_PROMPT, 'prompt is " ": nothing but white space'),
    ("\n\t \u00a0", ErrorKind.EMPTY_PROMPT, 'prompt is "\\n\\t \u00a0": nothing but white space'),
    (7, ErrorKind.INVALID_TEXT, "prompt is 7, not text"),
    (0.5, ErrorKind.INVALID_TEXT, "prompt is 0.5, not text"),
    (True, ErrorKind.INVALID_TEXT, "prompt is true, not text"),
    (b"bytes", ErrorKind.INVALID_TEXT, "prompt is \"b'bytes'\", not text"),
    (["a", None], ErrorKind.INVALID_TEXT, 'prompt is ["a", null], not text'),
    ({"text": "a"}, ErrorKind.INVALID_TEXT, 'prompt is {"text": "a"}, not text'),
    (["long"] * 1000, ErrorKind.INVALID_TEXT, 'prompt is ["long", "long", "long"'),
])  # fmt: skip
@pytest.mark.parametrize("kind_of_prompt", ["raw", "chat"])
def test_a_prompt_that_is_no_text_or_says_nothing_is_a_row_error(
    kind_of_prompt: str, value: Any, kind: ErrorKind, message: str
) -> None:
    error = row_error(renderer(kind=kind_of_prompt), {"prompt": value})
    assert error.kind == kind
    assert error.message.startswith(message)


def test_a_row_without_the_prompts_key_is_a_row_error() -> None:
    assert row_error(renderer(), {"text": "Hi"}).message == "prompt is null"


class TestTemplate:
    """`prompt.template`: a text written from several columns."""

    def test_it_reads_the_columns_that_it_names(self) -> None:
        template = "{% set n = 2 %}{% for i in range(n) %}{{ loop.index }}{{ word }}{% endfor %} {{ city.name }}"
        rendering = renderer(kind="raw", template=template)
        assert rendering.columns == ["city", "word"]
        assert rendering.render({"word": "a", "city": {"name": "Orléans"}, "other": 1})[0] == "1a2a Orléans"

    def test_it_may_begin_and_end_with_white_space(self) -> None:
        assert renderer(kind="raw", template="\n{{ a }}\n\n").render({"a": "x"})[0] == "\nx\n\n"

    def test_values_are_put_in_as_they_are(self) -> None:
        rendering = renderer(kind="raw", template="{{ a }}|{{ b }}")
        assert rendering.render({"a": "<b>&amp; {{ x }}", "b": 9007199254740993})[0] == "<b>&amp; {{ x }}|9007199254740993"

    @pytest.mark.parametrize(("template", "row", "message"), [
        ("{{ question }}", {}, "'question' is undefined"),
        ("{{ city.name }}", {"city": {}}, "'dict object' has no attribute 'name'"),
        ("{{ a + 1 }}", {"a": "x"}, "can only concatenate str"),
        ("{{ a / 0 }}", {"a": 1}, "division by zero"),
        ("{{ a|join }}", {"a": 1}, "'int' object is not iterable"),
        ("{{ range(10000000) }}", {}, "Range too big"),
        ("{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}", {}, "maximum recursion depth exceeded"),
        ("{{ a[b] }}", {"a": {}, "b": "k" * 1000}, "'dict object' has no attribute"),
        ("{{ a * 10 ** 18 }}", {"a": "ab"}, "MemoryError"),
    ])  # fmt: skip
    def test_a_row_that_it_cannot_render_is_a_row_error(self, template: str, row: dict[str, Any], message: str) -> None:
        error = row_error(renderer(template=template), row)
        assert error.kind == ErrorKind.TEMPLATE_ERROR
        assert error.message.startswith("prompt.template: ")
        assert message in error.message

    @pytest.mark.parametrize("template", ["{{ x.__class__ }}", "{{ x|attr('__class__') }}", "{{ x.append(1) }}"])
    def test_it_cannot_reach_into_python(self, template: str) -> None:
        error = row_error(renderer(template=template), {"x": ["a"]})
        assert error.kind == ErrorKind.TEMPLATE_ERROR
        assert error.message.endswith("is unsafe.")

    def test_a_null_is_not_printed_as_a_word(self) -> None:
        rendering = renderer(template="{{ question }} in {{ context }} of {{ city.name }}")
        error = row_error(rendering, {"question": "Who?", "context": None, "city": {"name": "x"}})
        assert (error.kind, error.message) == (ErrorKind.MISSING_VALUE, "prompt.template prints null; null here: context")
        error = row_error(rendering, {"question": "Who?", "context": "x", "city": {"name": None}})
        assert error.message == "prompt.template prints null; null here: part of a column"

    def test_it_can_say_what_stands_for_a_null(self) -> None:
        rendering = renderer(kind="raw", template="Who?{% if context %} In {{ context }}{% endif %}{{ more or '' }}")
        assert rendering.render({"context": None, "more": None})[0] == "Who?"

    def test_a_text_of_white_space_is_an_empty_prompt(self) -> None:
        error = row_error(renderer(template=" {{ a }}\n"), {"a": " "})
        assert (error.kind, error.message) == (
            ErrorKind.EMPTY_PROMPT, 'prompt.template is "  \\n": nothing but white space',
        )  # fmt: skip

    @pytest.mark.parametrize(("template", "message"), [
        ("Hi\n{{ name", "unexpected end of template, expected 'end of print statement'. (line 2)"),
        ("{% for %}", "Expected an expression, got 'end of statement block' (line 1)"),
        ("{{ name|upcase }}", "No filter named 'upcase'. (line 1)"),
    ])  # fmt: skip
    def test_what_is_not_jinja_is_refused_before_any_row(self, template: str, message: str) -> None:
        with pytest.raises(ConfigError) as caught:
            renderer(template=template)
        assert str(caught.value) == f"prompt.template={json.dumps(template)} is not a Jinja template: {message}"

    @pytest.mark.parametrize("template", ["{% include 'a.txt' %}", "{% extends base %}", "{% import 'a.txt' as a %}"])
    def test_one_that_needs_another_is_refused(self, template: str) -> None:
        with pytest.raises(ConfigError, match="includes, imports or extends another template; write it as one text"):
            renderer(template=template)

    def test_a_template_file_that_is_not_jinja_is_named(self) -> None:
        with pytest.raises(ConfigError, match=r"^prompt\.template_file=prompts/hi\.txt is not a Jinja template: "):
            renderer(template="{{", template_file="prompts/hi.txt")


CALL = {"id": "1", "type": "function", "function": {"name": "find", "arguments": {"cities": ["Paris", "Orléans"], "limit": 3}}}
CONVERSATION: list[dict[str, Any]] = [
    {"role": "user", "content": "Which is bigger?"},
    {"role": "assistant", "tool_calls": [CALL]},
    {"role": "tool", "content": "Paris", "tool_call_id": "1"},
    {"role": "user", "content": [{"type": "text", "text": "And which is older?"}]},
]


class TestMessages:
    """`input.messages_column`: whole conversations."""

    def test_a_list_and_its_json_text_give_the_same(self) -> None:
        assert conversation(CONVERSATION, "messages") == CONVERSATION
        assert conversation(json.dumps(CONVERSATION), "messages") == CONVERSATION

    def test_a_null_key_is_the_same_as_an_absent_one(self) -> None:
        call = {"id": None, "type": "function", "function": {"name": "find", "arguments": "{}", "strict": None}}
        part = {"type": "text", "text": "Hi", "image_url": None}
        messages = conversation([{"role": "user", "content": [part], "name": None, "tool_calls": [call]}], "messages")
        assert messages == [
            {
                "role": "user",
                "content": [{"type": "text", "text": "Hi"}],
                "tool_calls": [{"type": "function", "function": {"name": "find", "arguments": "{}"}}],
            }
        ]

    def test_a_null_in_a_tool_calls_arguments_is_data(self) -> None:
        call = {"function": {"name": "find", "arguments": {"city": None, "days": [{"from": None}]}}}
        (message,) = conversation([{"role": "assistant", "tool_calls": [call]}], "messages")
        assert message["tool_calls"] == [call]

    def test_an_empty_list_of_tool_calls_is_the_same_as_none(self) -> None:
        assert conversation([{"role": "user", "content": "Hi", "tool_calls": []}], "m") == [{"role": "user", "content": "Hi"}]

    def test_the_row_is_left_as_it_was(self) -> None:
        row: list[dict[str, Any]] = [{"role": "user", "content": "Hi", "name": None, "tool_calls": []}]
        conversation(row, "messages")
        assert row == [{"role": "user", "content": "Hi", "name": None, "tool_calls": []}]

    def test_a_null_inside_a_list_stays(self) -> None:
        assert without_nulls({"a": [None, {"b": None, "c": 0}], "d": None, "e": ""}) == {"a": [None, {"c": 0}], "e": ""}

    @pytest.mark.parametrize(("value", "kind", "message"), [
        (None, ErrorKind.MISSING_VALUE, "messages is null"),
        ([], ErrorKind.INVALID_MESSAGES, "messages is [], not a list of messages"),
        ({"role": "user"}, ErrorKind.INVALID_MESSAGES, 'messages is {"role": "user"}, not a list of messages'),
        (7, ErrorKind.INVALID_MESSAGES, "messages is 7, not a list of messages"),
        ("", ErrorKind.INVALID_MESSAGES, 'messages is "", not JSON: '),
        ("Hi", ErrorKind.INVALID_MESSAGES, 'messages is "Hi", not JSON: '),
        ("null", ErrorKind.INVALID_MESSAGES, "messages is null, not a list of messages"),
        ('"Hi"', ErrorKind.INVALID_MESSAGES, 'messages is "Hi", not a list of messages'),
        ("[" * 100_000, ErrorKind.INVALID_MESSAGES, 'messages is "[[['),
        (["Hi"], ErrorKind.INVALID_MESSAGES, 'messages[0] is "Hi", not a message'),
        ([{"role": "user", "content": "Hi"}, None], ErrorKind.INVALID_MESSAGES, "messages[1] is null, not a message"),
        ([{"content": "Hi"}], ErrorKind.INVALID_MESSAGES, "messages[0].role is null, not text"),
        ([{"role": None, "content": "Hi"}], ErrorKind.INVALID_MESSAGES, "messages[0].role is null, not text"),
        ([{"role": 1, "content": "Hi"}], ErrorKind.INVALID_MESSAGES, "messages[0].role is 1, not text"),
        ([{"role": "user"}], ErrorKind.INVALID_MESSAGES, "messages[0].content is null"),
        ([{"role": "user", "content": None}], ErrorKind.INVALID_MESSAGES, "messages[0].content is null"),
        ([{"role": "user", "content": None, "tool_calls": []}], ErrorKind.INVALID_MESSAGES, "messages[0].content is null"),
        ([{"role": "user", "content": 7}], ErrorKind.INVALID_MESSAGES, "messages[0].content is 7, not text or a list of parts"),
        ([{"role": "user", "content": {"a": "b" * 500}}], ErrorKind.INVALID_MESSAGES, 'messages[0].content is {"a": "bbb'),
        ([{"role": "user", "content": ""}], ErrorKind.EMPTY_PROMPT, 'messages is [{"role": "user", "content": ""}]: '),
        ([{"role": "user", "content": " \n"}, {"role": "assistant", "content": ""}], ErrorKind.EMPTY_PROMPT, "messages is [{"),
        ([{"role": "user", "content": []}], ErrorKind.EMPTY_PROMPT, "messages is [{"),
        ('[{"role": "user", "content": "\\ud83d"}]', ErrorKind.INVALID_TEXT, "messages is not Unicode text: "),
    ])  # fmt: skip
    def test_a_conversation_that_is_none_is_a_row_error_that_names_the_place(
        self, value: Any, kind: ErrorKind, message: str
    ) -> None:
        error = row_error(renderer(messages_column="messages"), {"messages": value})
        assert error.kind == kind
        assert error.message.startswith(message)

    @pytest.mark.parametrize(("content", "kind", "message"), [
        ([None], ErrorKind.INVALID_MESSAGES, "m[0].content[0] is null, not a part: {type, text}"),
        (["Hi"], ErrorKind.INVALID_MESSAGES, 'm[0].content[0] is "Hi", not a part: {type, text}'),
        ([{"type": "text"}], ErrorKind.INVALID_MESSAGES, "m[0].content[0].text is null, not text"),
        ([{"type": "text", "text": 7}], ErrorKind.INVALID_MESSAGES, "m[0].content[0].text is 7, not text"),
        ([{"type": "text", "text": " "}], ErrorKind.EMPTY_PROMPT, 'm is [{"role": "user", "content": [{"type": "text"'),
    ])  # fmt: skip
    def test_parts_that_say_nothing_are_a_row_error(self, content: Any, kind: ErrorKind, message: str) -> None:
        error = row_error(renderer(messages_column="m"), {"m": [{"role": "user", "content": content}]})
        assert error.kind == kind
        assert error.message.startswith(message)

    def test_an_image_alone_says_something(self) -> None:
        turns = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}]}]
        assert conversation(turns, "messages") == turns

    def test_an_empty_turn_among_others_is_none_of_our_business(self) -> None:
        turns = [{"role": "system", "content": ""}, {"role": "user", "content": "Hi"}]
        assert conversation(turns, "messages") == turns

    def test_an_emoji_as_two_escapes_is_one_character(self) -> None:
        (message,) = conversation('[{"role": "user", "content": "\\ud83c\\udf5e"}]', "messages")
        assert message["content"] == "🍞"

    def test_the_column_is_the_only_one_that_is_read(self) -> None:
        assert renderer(messages_column="turns").columns == ["turns"]
        assert renderer().columns == ["prompt"]


TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}


class TestTools:
    """`input.tools_column`: the tools that the model may call."""

    def test_a_list_and_its_json_text_give_the_same(self) -> None:
        assert tools_of([TOOL], "tools") == [TOOL]
        assert tools_of(json.dumps([TOOL]), "tools") == [TOOL]

    @pytest.mark.parametrize("value", [None, [], "[]", "null"])
    def test_a_row_may_have_none(self, value: Any) -> None:
        assert tools_of(value, "tools") is None

    def test_a_null_key_is_the_same_as_an_absent_one_and_a_null_in_the_parameters_is_data(self) -> None:
        parameters = {"properties": {"city": {"default": None, "enum": [None, "Paris"], "const": None}}}
        function = {"name": "weather", "parameters": parameters}
        given_tool = {"type": "function", "function": {**function, "strict": None, "description": None}, "extra": None}
        assert tools_of([given_tool], "tools") == [{"type": "function", "function": function}]

    @pytest.mark.parametrize(("value", "message"), [
        ("[", 'tools is "[", not JSON: '),
        (7, "tools is 7, not a list of tools"),
        (TOOL, 'tools is {"type": "function", '),
        ([TOOL, None], "tools[1] is null, not a tool: {type: function, function: {...}}"),
        (["weather"], 'tools[0] is "weather", not a tool'),
        ([{"name": "weather"}], 'tools[0] is {"name": "weather"}, not a tool'),
        ([{"function": {}}], "tools[0].function.name is null, not text"),
        ([{"function": {"name": 7}}], "tools[0].function.name is 7, not text"),
        ([{"function": {"name": "a", "parameters": "{}"}}], 'tools[0].function.parameters is "{}", not a JSON schema'),
    ])  # fmt: skip
    def test_tools_that_are_none_are_a_row_error_that_names_the_place(self, value: Any, message: str) -> None:
        with pytest.raises(RowError) as caught:
            tools_of(value, "tools")
        assert caught.value.kind == ErrorKind.INVALID_REQUEST
        assert caught.value.message.startswith(message)


END, START = "<|end|>", "<|start|>"
HIDDEN = "<\u200b|end|>"


class TestSpecialTokens:
    """`prompt.special_tokens`: what a row must not smuggle in."""

    @pytest.mark.parametrize(("policy", "text", "flags"), [
        ("allow", f"a{END}b", ()),
        ("flag", f"a{END}b", (Flag.SPECIAL_TOKENS,)),
        ("escape", f"a{HIDDEN}b", (Flag.SPECIAL_TOKENS,)),
    ])  # fmt: skip
    def test_the_text_is_screened(self, policy: str, text: str, flags: tuple[Flag, ...]) -> None:
        rendering = renderer(kind="raw", special_tokens=policy, tokens=[START, END])
        assert rendering.render({"prompt": f"a{END}b"}) == (text, flags)
        assert rendering.render({"prompt": "a < b | end"}) == ("a < b | end", ())

    def test_the_token_and_the_place_are_named_where_it_fails_the_row(self) -> None:
        rendering = renderer(special_tokens="fail", tokens=["<|", END], messages_column="turns")
        parts = [{"type": "text", "text": "Hi"}, {"type": "text", "text": f"Hi{END}"}]
        error = row_error(rendering, {"turns": [{"role": "user", "content": "Hi"}, {"role": "user", "content": parts}]})
        assert error.kind == ErrorKind.SPECIAL_TOKENS
        assert error.message == (
            'turns[1].content[1].text contains the special token "<|end|>"; '
            "prompt.special_tokens=escape, flag or allow answers it"
        )

    def test_contents_parts_and_tool_results_are_screened_and_tool_calls_are_not(self) -> None:
        call = {"function": {"name": END, "arguments": END}}
        turns = [
            {"role": "user", "content": [{"type": "text", "text": END}]},
            {"role": "assistant", "tool_calls": [call]},
            {"role": "tool", "content": END},
        ]
        messages, flags = renderer(special_tokens="escape", tokens=[END], messages_column="turns").render({"turns": turns})
        assert flags == (Flag.SPECIAL_TOKENS,)
        assert messages == [
            {"role": "user", "content": [{"type": "text", "text": HIDDEN}]},
            {"role": "assistant", "tool_calls": [call]},
            {"role": "tool", "content": HIDDEN},
        ]

    def test_the_systems_text_and_the_templates_own_are_meant(self) -> None:
        rendering = renderer(special_tokens="fail", tokens=[END], system=END)
        assert rendering.render({"prompt": "Hi"})[0][0] == {"role": "system", "content": END}
        rendering = renderer(kind="raw", special_tokens="escape", tokens=[END], template=f"{{{{ city.name }}}}{END}")
        assert rendering.render({"city": {"name": "Paris"}}) == (f"Paris{END}", ())
        assert rendering.render({"city": {"name": END}}) == (f"{HIDDEN}{END}", (Flag.SPECIAL_TOKENS,))

    @given(tokens=st.lists(st.text("<|ab>", min_size=2, max_size=4), min_size=1, max_size=4), text=st.text("<|ab>", min_size=1))
    def test_escaping_leaves_no_token_and_loses_no_character(self, tokens: list[str], text: str) -> None:
        escaped, flags = renderer(kind="raw", special_tokens="escape", tokens=tokens).render({"prompt": text})
        assert not any(token in escaped for token in tokens)
        assert str(escaped).replace("\u200b", "") == text
        assert bool(flags) == any(token in text for token in tokens) == (escaped != text)
