"""A row becomes a request, or an error that names the field and what was found there."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipelines.config import InputConfig, PromptConfig
from pipelines.errors import ConfigError, ErrorKind, RowError
from pipelines.prompts import Renderer, conversation, without_nulls

MAX_MESSAGE = 260  # characters


def renderer(
    input_config: Callable[..., InputConfig],
    *,
    kind: str = "chat",
    system: str | None = None,
    template: str | None = None,
    messages_column: str | None = None,
) -> Renderer:
    prompt = PromptConfig.model_validate(
        {"kind": kind, "system": system, "template": template, "template_file": None, "chat_template_kwargs": {}}
    )
    column = "prompt" if template is None and messages_column is None else None
    return Renderer(prompt, input_config("rows.parquet", prompt_column=column, messages_column=messages_column))


def row_error(renderer: Renderer, row: dict[str, Any]) -> RowError:
    with pytest.raises(RowError) as caught:
        renderer.render(row)
    error = caught.value
    assert len(error.message) <= MAX_MESSAGE
    assert "\n" not in error.message
    assert "None" not in error.message
    return error


def test_raw_hands_over_the_text_untouched(input_config: Callable[..., InputConfig]) -> None:
    text = "  Say\n{name} {{ x }} \t\0 👩‍🚀 שלום "
    assert renderer(input_config, kind="raw").render({"prompt": text, "id": 7}) == text


def test_chat_makes_the_text_one_user_turn(input_config: Callable[..., InputConfig]) -> None:
    assert renderer(input_config).render({"prompt": "Hi"}) == [{"role": "user", "content": "Hi"}]


def test_a_system_message_comes_before_every_conversation(input_config: Callable[..., InputConfig]) -> None:
    brief = {"role": "system", "content": "Be brief."}
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    assert renderer(input_config, system="Be brief.").render({"prompt": "Hi"}) == [brief, {"role": "user", "content": "Hi"}]
    with_turns = renderer(input_config, system="Be brief.", messages_column="turns")
    assert with_turns.render({"turns": turns}) == [brief, *turns]


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
    input_config: Callable[..., InputConfig], kind_of_prompt: str, value: Any, kind: ErrorKind, message: str
) -> None:
    error = row_error(renderer(input_config, kind=kind_of_prompt), {"prompt": value})
    assert error.kind == kind
    assert error.message.startswith(message)


def test_a_row_without_the_prompts_key_is_a_row_error(input_config: Callable[..., InputConfig]) -> None:
    assert row_error(renderer(input_config), {"text": "Hi"}).message == "prompt is null"


class TestTemplate:
    """`prompt.template`: a text written from several columns."""

    def test_it_reads_the_columns_that_it_names(self, input_config: Callable[..., InputConfig]) -> None:
        template = "{% set n = 2 %}{% for i in range(n) %}{{ loop.index }}{{ word }}{% endfor %} {{ city.name }}"
        rendering = renderer(input_config, kind="raw", template=template)
        assert rendering.columns == ["city", "word"]
        assert rendering.render({"word": "a", "city": {"name": "Orléans"}, "other": 1}) == "1a2a Orléans"

    def test_it_may_begin_and_end_with_white_space(self, input_config: Callable[..., InputConfig]) -> None:
        assert renderer(input_config, kind="raw", template="\n{{ a }}\n\n").render({"a": "x"}) == "\nx\n\n"

    def test_values_are_put_in_as_they_are(self, input_config: Callable[..., InputConfig]) -> None:
        rendering = renderer(input_config, kind="raw", template="{{ a }}|{{ b }}")
        assert rendering.render({"a": "<b>&amp; {{ x }}", "b": 9007199254740993}) == "<b>&amp; {{ x }}|9007199254740993"

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
    def test_a_row_that_it_cannot_render_is_a_row_error(
        self, input_config: Callable[..., InputConfig], template: str, row: dict[str, Any], message: str
    ) -> None:
        error = row_error(renderer(input_config, template=template), row)
        assert error.kind == ErrorKind.TEMPLATE_ERROR
        assert error.message.startswith("prompt.template: ")
        assert message in error.message

    @pytest.mark.parametrize("template", ["{{ x.__class__ }}", "{{ x|attr('__class__') }}", "{{ x.append(1) }}"])
    def test_it_cannot_reach_into_python(self, input_config: Callable[..., InputConfig], template: str) -> None:
        error = row_error(renderer(input_config, template=template), {"x": ["a"]})
        assert error.kind == ErrorKind.TEMPLATE_ERROR
        assert error.message.endswith("is unsafe.")

    def test_a_null_is_not_printed_as_a_word(self, input_config: Callable[..., InputConfig]) -> None:
        rendering = renderer(input_config, template="{{ question }} in {{ context }} of {{ city.name }}")
        error = row_error(rendering, {"question": "Who?", "context": None, "city": {"name": "x"}})
        assert (error.kind, error.message) == (ErrorKind.MISSING_VALUE, "prompt.template prints null; null here: context")
        error = row_error(rendering, {"question": "Who?", "context": "x", "city": {"name": None}})
        assert error.message == "prompt.template prints null; null here: part of a column"

    def test_it_can_say_what_stands_for_a_null(self, input_config: Callable[..., InputConfig]) -> None:
        rendering = renderer(
            input_config, kind="raw", template="Who?{% if context %} In {{ context }}{% endif %}{{ more or '' }}"
        )
        assert rendering.render({"context": None, "more": None}) == "Who?"

    def test_a_text_of_white_space_is_an_empty_prompt(self, input_config: Callable[..., InputConfig]) -> None:
        error = row_error(renderer(input_config, template=" {{ a }}\n"), {"a": " "})
        assert (error.kind, error.message) == (
            ErrorKind.EMPTY_PROMPT, 'prompt.template is "  \\n": nothing but white space',
        )  # fmt: skip

    @pytest.mark.parametrize(("template", "message"), [
        ("Hi\n{{ name", "unexpected end of template, expected 'end of print statement'. (line 2)"),
        ("{% for %}", "Expected an expression, got 'end of statement block' (line 1)"),
        ("{{ name|upcase }}", "No filter named 'upcase'. (line 1)"),
    ])  # fmt: skip
    def test_what_is_not_jinja_is_refused_before_any_row(
        self, input_config: Callable[..., InputConfig], template: str, message: str
    ) -> None:
        with pytest.raises(ConfigError) as caught:
            renderer(input_config, template=template)
        assert str(caught.value) == f"prompt.template={json.dumps(template)} is not a Jinja template: {message}"

    @pytest.mark.parametrize("template", ["{% include 'a.txt' %}", "{% extends base %}", "{% import 'a.txt' as a %}"])
    def test_one_that_needs_another_is_refused(self, input_config: Callable[..., InputConfig], template: str) -> None:
        with pytest.raises(ConfigError, match="includes, imports or extends another template; write it as one text"):
            renderer(input_config, template=template)

    def test_a_template_file_that_is_not_jinja_is_named(self, input_config: Callable[..., InputConfig]) -> None:
        prompt = PromptConfig(
            kind="chat", system=None, template="{{", template_file="prompts/hi.txt", chat_template_kwargs={}
        )  # fmt: skip
        with pytest.raises(ConfigError, match=r"^prompt\.template_file=prompts/hi\.txt is not a Jinja template: "):
            Renderer(prompt, input_config("rows.parquet", prompt_column=None))


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

    def test_parquet_gives_the_same_as_json_without_the_null_keys(self, tmp_path: Path) -> None:
        turns = [turn for turn in CONVERSATION if not isinstance(turn.get("content"), list)]
        other = [
            {"role": "user", "content": "Hi", "name": "me", "tool_calls": [{"function": {"arguments": {"deep": {"a": 1}}}}]}
        ]
        pq.write_table(pa.table({"messages": [turns, other]}), tmp_path / "a.parquet")
        first, second = pq.read_table(tmp_path / "a.parquet")["messages"].to_pylist()
        assert first != turns  # every row has the keys of all others
        assert conversation(first, "messages") == turns
        assert conversation(second, "messages") == other

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
        self, input_config: Callable[..., InputConfig], value: Any, kind: ErrorKind, message: str
    ) -> None:
        error = row_error(renderer(input_config, messages_column="messages"), {"messages": value})
        assert error.kind == kind
        assert error.message.startswith(message)

    def test_an_empty_turn_among_others_is_none_of_our_business(self) -> None:
        turns = [{"role": "system", "content": ""}, {"role": "user", "content": "Hi"}]
        assert conversation(turns, "messages") == turns

    def test_an_emoji_as_two_escapes_is_one_character(self) -> None:
        (message,) = conversation('[{"role": "user", "content": "\\ud83c\\udf5e"}]', "messages")
        assert message["content"] == "🍞"

    def test_the_column_is_the_only_one_that_is_read(self, input_config: Callable[..., InputConfig]) -> None:
        assert renderer(input_config, messages_column="turns").columns == ["turns"]
        assert renderer(input_config).columns == ["prompt"]
