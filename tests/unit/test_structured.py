"""A form that makes no sense is refused before the engine sees it; an answer without its form is told from one that has it."""

import json
import time
from collections.abc import Callable
from typing import Any
from urllib import request

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelines.config import SamplingConfig
from pipelines.errors import ErrorKind, RowError
from pipelines.structured import check_form, parsed_of

PLAIN: dict[str, Any] = {
    "max_tokens": 8, "min_tokens": 0, "temperature": 0.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0,
    "presence_penalty": 0.0, "frequency_penalty": 0.0, "stop": (), "stop_token_ids": (), "logit_bias": None, "seed": None,
    "n": 1, "logprobs": None, "prompt_logprobs": None, "ignore_eos": False,
    "json_schema": None, "regex": None, "choice": None, "grammar": None,
}  # fmt: skip


def sampling(**changes: Any) -> SamplingConfig:
    return SamplingConfig(**{**PLAIN, **changes})


def refused(call: Callable[[], object]) -> RowError:
    with pytest.raises(RowError) as caught:
        call()
    pa.array([caught.value.message], pa.string())  # what cannot be written would take its neighbours along
    return caught.value


def nested(levels: int) -> str:
    return '{"items":' * levels + "{}" + "}" * levels


ANY = sampling(json_schema="true")
PERSON = sampling(json_schema='{"type":"object","properties":{"age":{"type":"integer"}},"required":["age"]}')

BAD_SCHEMAS = {
    "": "Expecting value",
    "{'type': 'string'}": "Expecting property name",
    '{"type":"string"} x': "Extra data",
    '{"minimum":NaN}': "NaN",
    '{"minimum":1e400}': "1e400",
    '{"type":"string","type":"integer"}': "twice",
    '{"const":"\\ud800"}': "surrogates",
    "[]": "it must be an object, true or false",
    '"string"': "it must be an object, true or false",
    "null": "it must be an object, true or false",
    '{"type":"text"}': "at $.type",
    '{"properties":{"a":{"type":"int"}}}': "at $.properties.a.type",
    '{"type":"object","required":"age"}': "at $.required",
    '{"pattern":"["}': "is not a 'regex'",
    '{"patternProperties":{"(":{}}}': "is not a 'regex'",
    '{"patternProperties":{"a":{}},"allOf":[{"unevaluatedProperties":false}]}': "write additionalProperties",
    '{"$ref":"https://example.com/schema.json"}': 'it refers to "https://example.com/schema.json", which is not in it',
    '{"$dynamicRef":"https://example.com/schema.json"}': "nothing is fetched",
    '{"$id":"https://example.com/a","items":{"$ref":"b"}}': "nothing is fetched",
    '{"$ref":"file:///etc/passwd"}': "nothing is fetched",
    '{"$ref":"https://json-schema.org/draft/2020-12/schema"}': "nothing is fetched",
    '{"$ref":"http://[x"}': "nothing is fetched",
    '{"$ref":"#/$defs/a"}': 'it refers to "/$defs/a", which is not in it',
    '{"$ref":"#a"}': 'it refers to "a", which is not in it',
    '{"items":{"$schema":"http://json-schema.org/draft-04/schema#","items":true}}': "$schema at its root only",
    '{"$ref":"#/components/a","components":{"a":{"$ref":"#/components/b"}}}': 'it refers to "/components/b"',
    '{"$ref":"#/components/a","components":{"a":{"type":"text"}}}': "'text' is not valid",
    '{"$ref":"#/required","required":["a"]}': "is not of type 'object', 'boolean'",
    '{"$ref":"#"}': "round in circles",
    '{"anyOf":[{"type":"string"},{"$ref":"#"}]}': "round in circles",
    '{"$defs":{"a":{"$ref":"#/$defs/b"},"b":{"$ref":"#/$defs/a"}},"allOf":[{"$ref":"#/$defs/a"}]}': "round in circles",
    nested(64): "deeper than 64 levels",
    nested(100_000): "nested too deeply",
}


@pytest.mark.parametrize(("schema", "fault"), BAD_SCHEMAS.items(), ids=[text[:60] for text in BAD_SCHEMAS])
def test_a_schema_that_is_none_is_refused_with_its_fault(schema: str, fault: str) -> None:
    form = SamplingConfig.model_construct(**{**PLAIN, "json_schema": schema})
    for _ in range(2):  # what is remembered of it says the same
        error = refused(lambda: check_form(form))
        assert error.kind == ErrorKind.INVALID_SCHEMA
        assert "sampling.json_schema=" in error.message
        assert fault in error.message


@pytest.mark.parametrize("schema", [
    "true",
    "{}",
    nested(63),
    '{"$schema":"http://json-schema.org/draft-07/schema#","definitions":{"a":{"type":"string"}},"$ref":"#/definitions/a"}',
    '{"$defs":{"tree":{"properties":{"left":{"$ref":"#/$defs/tree"}}}},"$ref":"#/$defs/tree"}',
    '{"$id":"https://example.com/a","$defs":{"b":{"$id":"b","type":"string"}},"$ref":"b"}',
    '{"$defs":{"a":{"$anchor":"here"}},"$ref":"#here"}',
    '{"enum":[{"$ref":"https://example.com"}],"properties":{"$ref":{"type":"string"}}}',  # data, and a property's name
    '{"pattern":"^\\\\p{L}+$"}',  # the dialect of schemas, not Python's
])  # fmt: skip
def test_a_schema_that_is_one_passes(schema: str) -> None:
    check_form(sampling(json_schema=schema))


def test_nothing_is_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    fetched: list[object] = []
    monkeypatch.setattr(request, "urlopen", fetched.append)
    for key in ("$ref", "$dynamicRef"):
        form = sampling(json_schema=json.dumps({"properties": {"a": {key: "http://example.com/a.json"}}}))
        refused(lambda form=form: check_form(form))
        refused(lambda form=form: parsed_of(form, '{"a":1}', "stop"))
    assert not fetched


@pytest.mark.parametrize(("form", "name"), [
    ({"choice": ("a", "b", "a")}, "sampling.choice"),
    ({"choice": ("a", "")}, "sampling.choice"),
    ({"regex": ""}, "sampling.regex"),
    ({"grammar": " \n"}, "sampling.grammar"),
])  # fmt: skip
def test_an_empty_or_repeated_form_is_refused(form: dict[str, Any], name: str) -> None:
    error = refused(lambda: check_form(SamplingConfig.model_construct(**{**PLAIN, **form})))
    assert error.kind == ErrorKind.INVALID_SCHEMA
    assert name in error.message


@pytest.mark.parametrize("form", [{}, {"choice": ("a", " ")}, {"regex": "["}, {"regex": " "}, {"grammar": "root ::= x"}])
def test_regexes_and_grammars_are_left_to_the_engine(form: dict[str, Any]) -> None:
    check_form(sampling(**form))


def test_one_schema_for_many_rows_is_compiled_once() -> None:
    schema = json.dumps({"properties": {f"p{i}": {"type": "string", "pattern": "a"} for i in range(300)}})
    check_form(sampling(json_schema=schema))
    before = time.process_time()
    for _ in range(1000):
        check_form(sampling(json_schema=schema))
    assert time.process_time() - before < 1  # compiling it takes 0.1 s


@pytest.mark.parametrize(("text", "parsed"), [
    (' {"b" :1,\n"a":[ true,null ]} ', '{"b": 1, "a": [true, null]}'),
    ('"\\u00e9\\ud83c\\udf5e\\u0000\\/\\""', '"é🍞\\u0000/\\""'),
    ('{"a, b:  c":"d,e: f"}', '{"a, b:  c": "d,e: f"}'),
    ("0.1000000000000000055511151231257827", "0.1000000000000000055511151231257827"),
    ("[9007199254740993, 1e5, -0, 1.50, 1e-400]", "[9007199254740993, 1e5, -0, 1.50, 1e-400]"),
    ("1" * 4000, "1" * 4000),
])  # fmt: skip
def test_what_parses_keeps_its_order_its_text_and_every_digit(text: str, parsed: str) -> None:
    assert parsed_of(ANY, text, "stop") == parsed


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
)


@given(value=VALUES, ensure_ascii=st.booleans(), indent=st.sampled_from([None, 0, 2]))
def test_any_json_becomes_what_python_would_write(value: Any, ensure_ascii: bool, indent: int | None) -> None:
    text = json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)
    assert parsed_of(ANY, text, "stop") == json.dumps(value, ensure_ascii=False)


@pytest.mark.parametrize("text", [
    "", " ", '{"a":1', '{"a":1}}', "{'a':1}", "Sure: {}", "```json\n{}\n```", "[1,]", "01", "\ufeff{}", '"\n"',
    "NaN", "[-Infinity]", "1e400", "-1e400", "1" * 5000, '{"a":1,"a":1}', '[{"b":{"a":1,"a":2}}]',
    '"\\ud800"', '{"\\udc00":1}', '"\ud800"', '"\\ud83c \\udf5e"', "[" * 100_000, "[" * 2000 + "]" * 2000,
])  # fmt: skip
def test_what_is_not_json_or_would_change_silently_is_invalid_and_cut_it_is_truncated(text: str) -> None:
    assert refused(lambda: parsed_of(ANY, text, "stop")).kind == ErrorKind.INVALID_JSON
    assert refused(lambda: parsed_of(ANY, text, "length")).kind == ErrorKind.TRUNCATED


def test_an_answer_that_parses_is_held_to_every_keyword() -> None:
    for text in ('{"age":"7"}', "{}", "[]", '{"age":7.5}'):
        error = refused(lambda text=text: parsed_of(PERSON, text, "stop"))
        assert error.kind == ErrorKind.INVALID_OUTPUT
        assert "at $" in error.message
        assert refused(lambda text=text: parsed_of(PERSON, text, "length")).kind == ErrorKind.TRUNCATED
    form = sampling(json_schema='{"patternProperties":{"^l":{"uniqueItems":true}}}')  # the engine cannot enforce this
    assert refused(lambda: parsed_of(form, '{"list":[1,1.0]}', "stop")).kind == ErrorKind.INVALID_OUTPUT
    assert parsed_of(form, '{"list":[1,2]}', "stop") == '{"list": [1, 2]}'


@pytest.mark.parametrize("finish_reason", ["stop", "length", "repetition"])
def test_a_complete_answer_is_fine_however_it_ended(finish_reason: str) -> None:
    assert parsed_of(PERSON, '{"age":7}', finish_reason) == '{"age": 7}'
    assert parsed_of(sampling(choice=("yes", "no")), "yes", finish_reason) is None
    assert parsed_of(sampling(regex=r"\d+"), "42", finish_reason) is None
    assert parsed_of(sampling(), "anything", finish_reason) is None


@pytest.mark.parametrize("form", [{"choice": ("yes", "no")}, {"regex": "yes|no"}, {"regex": "(?:y)es+"}])
@pytest.mark.parametrize("text", ["", "ye", "yes ", "Yes", "yes\n"])
def test_an_answer_that_is_no_choice_or_no_match_is_invalid_output(form: dict[str, Any], text: str) -> None:
    assert refused(lambda: parsed_of(sampling(**form), text, "stop")).kind == ErrorKind.INVALID_OUTPUT
    assert refused(lambda: parsed_of(sampling(**form), text, "length")).kind == ErrorKind.TRUNCATED


def test_a_grammar_and_a_regex_that_python_cannot_read_are_judged_only_where_the_answer_was_cut() -> None:
    for form in (sampling(grammar="root ::= x"), sampling(regex=r"\p{L}+"), sampling(regex="[")):
        assert parsed_of(form, "x", "stop") is None
        assert refused(lambda form=form: parsed_of(form, "x", "length")).kind == ErrorKind.TRUNCATED


def test_a_regex_means_what_the_engine_and_python_take_it_for() -> None:
    assert parsed_of(sampling(regex="a.b"), "a\nb", "stop") is None  # xgrammar's dot takes line ends too
    assert parsed_of(sampling(regex="x{e}"), "x{e}", "stop") is None  # and braces are braces
    assert parsed_of(sampling(regex=r"\N{DIGIT ONE}{2}\{"), "11{", "stop") is None
    assert refused(lambda: parsed_of(sampling(regex="x{e}"), "y", "stop")).kind == ErrorKind.INVALID_OUTPUT


@pytest.mark.parametrize("form", [
    {"regex": "(a+)+b|(a|aa)+c"},
    {"json_schema": '{"pattern":"(a+)+b|(a|aa)+c"}'},
    {"json_schema": '{"patternProperties":{"(a+)+b|(a|aa)+c":{}}}'},
    {"json_schema": '{"additionalProperties":{"type":"string"},"patternProperties":{"(a+)+b|(a|aa)+c":{}}}'},
])  # fmt: skip
def test_a_pattern_that_would_take_years_costs_its_row_and_seconds(form: dict[str, Any]) -> None:
    text = "a" * 60
    if "json_schema" in form:
        text = json.dumps({text: 1} if "Properties" in form["json_schema"] else text)
    before = time.perf_counter()
    assert refused(lambda: parsed_of(sampling(**form), text, "stop")).kind == ErrorKind.INVALID_OUTPUT
    assert time.perf_counter() - before < 60


def test_keys_are_judged_by_name_by_pattern_or_as_others() -> None:
    form = sampling(
        json_schema='{"properties":{"a":{}},"patternProperties":{"^b":{"type":"integer"}},"additionalProperties":{"type":"null"}}'
    )
    assert parsed_of(form, '{"a":"x","b1":2,"c":null}', "stop") == '{"a": "x", "b1": 2, "c": null}'
    assert "at $.b1: 'x' is not of type 'integer'" in refused(lambda: parsed_of(form, '{"b1":"x"}', "stop")).message
    assert "at $.c: 1 is not of type 'null'" in refused(lambda: parsed_of(form, '{"c":1}', "stop")).message
    closed = sampling(json_schema='{"patternProperties":{"^b":{}},"additionalProperties":false}')
    assert "('c' was unexpected)" in refused(lambda: parsed_of(closed, '{"b":1,"c":1}', "stop")).message


@pytest.mark.parametrize(("schema", "text"), [
    ('{"items":{"$ref":"#"}}', "[" * 900 + "]" * 900),
    ('{"multipleOf":0.5}', "1" * 400),
])  # fmt: skip
def test_an_answer_that_cannot_be_checked_is_invalid_output(schema: str, text: str) -> None:
    check_form(sampling(json_schema=schema))
    assert refused(lambda: parsed_of(sampling(json_schema=schema), text, "stop")).kind in (
        ErrorKind.INVALID_OUTPUT,
        ErrorKind.INVALID_JSON,
    )


def test_a_pattern_of_another_dialect_is_not_held_against_an_answer() -> None:
    for schema in ('{"properties":{"a":{"pattern":"^\\\\p{L}+$"}}}', '{"patternProperties":{"^\\\\p{L}+$":{}}}'):
        assert parsed_of(sampling(json_schema=schema), '{"a":"1"}', "stop") == '{"a": "1"}'


def test_messages_are_short_however_long_the_answer() -> None:
    long = json.dumps({"age": "x" * 100_000})
    assert len(refused(lambda: parsed_of(PERSON, long, "stop")).message) < 1000
    assert len(refused(lambda: parsed_of(ANY, long[:-1], "length")).message) < 1000
    assert len(refused(lambda: parsed_of(sampling(regex="a"), long, "stop")).message) < 1000


NAMES = st.sampled_from("ab")
PATTERNS = st.sampled_from(["a", "^b$", "", r"\p{L}", "x{e}"])


def keywords(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Schemas with each keyword of the right type, whatever their sense."""
    some, named = st.lists(inner, min_size=1, max_size=2), st.dictionaries(NAMES, inner, max_size=2)
    by_type: list[tuple[str, st.SearchStrategy[Any]]] = [
        ("items not if then else additionalProperties unevaluatedItems unevaluatedProperties propertyNames contains", inner),
        ("anyOf allOf oneOf prefixItems", some),
        ("properties $defs dependentSchemas definitions", named),
        ("patternProperties", st.dictionaries(PATTERNS, inner, max_size=2)),
        ("pattern", PATTERNS),
        ("type", st.sampled_from(["object", "array", "string", "integer", ["null", "number"]])),
        ("const default", VALUES),
        ("enum", st.lists(VALUES, max_size=2)),
        ("required", st.lists(NAMES, unique=True)),
        ("minimum exclusiveMaximum", st.integers() | st.floats(allow_nan=False, allow_infinity=False)),
        ("multipleOf", st.sampled_from([1, 3, 0.01, 1e-300, 1e300, 10**400])),
        ("maxLength minItems maxProperties minContains", st.integers(0, 3)),
        ("uniqueItems", st.booleans()),
        ("$ref $dynamicRef", st.sampled_from(["#", "#/$defs/a", "#/items", "#/enum", "#a", "b", "urn:x", "http://[", "%"])),
        ("$id", st.sampled_from(["b", "http://x/y", "http://[", "urn:x", ""])),
        ("$anchor $dynamicAnchor", NAMES),
        ("$schema", st.sampled_from(["http://json-schema.org/draft-04/schema#", "http://x/y"])),
    ]
    return st.fixed_dictionaries({}, optional={name: values for names, values in by_type for name in names.split()}).flatmap(
        lambda full: st.lists(st.sampled_from(sorted(full) or [""]), max_size=4).map(
            lambda kept: {name: full[name] for name in kept if name in full}
        )
    )


SCHEMAS = st.recursive(st.booleans() | st.just({}), keywords, max_leaves=6)


@given(
    schema=SCHEMAS,
    value=VALUES | st.dictionaries(st.sampled_from("ab"), VALUES),
    finish_reason=st.sampled_from(["stop", "length"]),
)
def test_nothing_but_a_row_error_comes_of_any_schema_and_any_answer(schema: Any, value: Any, finish_reason: str) -> None:
    form = sampling(json_schema=json.dumps(schema))
    try:
        check_form(form)
        assert parsed_of(form, json.dumps(value), finish_reason) == json.dumps(value, ensure_ascii=False)
    except RowError as error:
        assert error.message


@given(
    form=st.one_of(
        st.builds(lambda text: {"regex": text}, st.text(r"ab()[]{}|*+?\^$.,0e", min_size=1, max_size=8)),
        st.builds(lambda texts: {"choice": tuple(texts)}, st.lists(st.text("ab", min_size=1), min_size=1, unique=True)),
        st.just({"grammar": "root ::= x"}),
    ),
    text=st.text() | st.text("ab{}e"),
    finish_reason=st.sampled_from(["stop", "length"]),
)
def test_nothing_but_a_row_error_comes_of_any_other_form(form: dict[str, Any], text: str, finish_reason: str) -> None:
    check_form(sampling(**form))
    try:
        assert parsed_of(sampling(**form), text, finish_reason) is None
    except RowError as error:
        assert error.kind in ((ErrorKind.TRUNCATED,) if finish_reason == "length" else (ErrorKind.INVALID_OUTPUT,))
