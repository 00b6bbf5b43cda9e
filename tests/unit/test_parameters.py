"""A row's own parameters are merged over the run's, or refused by name; its seed is the same in every run."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelines.compose import compose_settings
from pipelines.config import FORMS, SamplingConfig
from pipelines.errors import ErrorKind, RowError
from pipelines.parameters import changes_in, merge, row_seed, schema_of
from pipelines.parse import parse_config

RUN = parse_config(
    compose_settings("batch", ["engine=echo", "input=parquet", "input.path=rows.parquet", "pricing=cpu"])
).sampling


def changed(run: SamplingConfig, merged: SamplingConfig) -> dict[str, Any]:
    return {name: value for name, value in merged if value != getattr(run, name)}


@pytest.mark.parametrize("changes", [None, {}, "{}", "null", {"max_tokens": None, "stop": None}, {"max_tokens": 128}])
def test_a_row_that_changes_nothing_gets_the_runs_own_object(changes: Any) -> None:
    assert merge(RUN, changes, "sampling") is RUN


@pytest.mark.parametrize(("changes", "merged"), [
    ({"temperature": 0.5, "max_tokens": None}, {"temperature": 0.5}),
    ({"temperature": 1}, {"temperature": 1.0}),
    ({"max_tokens": 16.0}, {"max_tokens": 16}),
    ({"top_k": 5.0, "temperature": 1.0}, {"top_k": 5, "temperature": 1.0}),
    ({"stop": ["END", "\n"]}, {"stop": ("END", "\n")}),
    ({"stop_token_ids": [1, 2]}, {"stop_token_ids": (1, 2)}),
    ({"logit_bias": {"50256": -100, "7": 0.5, "8": None}}, {"logit_bias": {"50256": -100.0, "7": 0.5}}),
    ({"n": 3, "temperature": 1.0, "seed": 7}, {"n": 3, "temperature": 1.0, "seed": 7}),
    ({"logprobs": 0, "ignore_eos": True}, {"logprobs": 0, "ignore_eos": True}),
    ({"choice": ["yes", "no"]}, {"choice": ("yes", "no")}),
])  # fmt: skip
def test_what_a_row_sets_takes_the_place_of_the_runs(changes: dict[str, Any], merged: dict[str, Any]) -> None:
    assert changed(RUN, merge(RUN, changes, "sampling")) == merged
    assert changed(RUN, merge(RUN, json.dumps(changes), "sampling")) == merged


@pytest.mark.parametrize(("changes", "message"), [
    ({"temperature": "0.5"}, 'params.temperature="0.5" must be a number'),
    ({"temperature": True}, "params.temperature=true must be a number"),
    ({"temperature": -1}, "params.temperature=-1 must be greater than or equal to 0"),
    ({"temperature": float("nan")}, "params.temperature=NaN must be a finite number"),
    ({"temperature": float("inf")}, "params.temperature=Infinity must be a finite number"),
    ({"top_p": 0}, "params.top_p=0 must be greater than 0"),
    ({"max_tokens": 0}, "params.max_tokens=0 must be greater than 0"),
    ({"max_tokens": 16.5}, "params.max_tokens=16.5 must be a whole number"),
    ({"max_tokens": "16"}, 'params.max_tokens="16" must be a whole number'),
    ({"max_tokens": True}, "params.max_tokens=true must be a whole number"),
    ({"max_tokens": [16]}, "params.max_tokens=[16] must be a whole number"),
    ({"ignore_eos": 1}, "params.ignore_eos=1 must be true or false"),
    ({"seed": 2**63}, "params.seed=9223372036854775808 must be less than 9223372036854775808"),
    ({"stop": "END"}, 'params.stop="END" must be a list'),
    ({"stop": [""]}, 'params.stop.0="" must not be empty'),
    ({"stop": ["a", 7]}, "params.stop.1=7 must be text"),
    ({"choice": []}, "params.choice=[] must not be empty"),
    ({"logit_bias": [1]}, "params.logit_bias=[1] must be a mapping: {name: value}"),
    ({"logit_bias": {"1": "x"}}, 'params.logit_bias.1="x" must be a number'),
    ({"temprature": 1}, "params.temprature=1 is no parameter; did you mean temperature?"),
    ({"guided_decoding": {}}, "params.guided_decoding={} is no parameter; there are: choice, "),
    ({"n": 3}, "with params merged in, sampling.n=3 would give the same answer 3 times; set sampling.temperature above 0"),
    ({"min_tokens": 129}, "with params merged in, sampling.min_tokens=129 is above sampling.max_tokens=128"),
    ({"regex": "a+", "choice": ["a"]}, "with params merged in, an answer has one form, but sampling.regex and sampling.choice"),
    (7, "params is 7, not a mapping of sampling parameters"),
    ([], "params is [], not a mapping of sampling parameters"),
    ("[1]", "params is [1], not a mapping of sampling parameters"),
    ("{", 'params is "{", not JSON: '),
])  # fmt: skip
def test_a_wrong_parameter_is_named_with_its_value_and_what_is_right(changes: Any, message: str) -> None:
    with pytest.raises(RowError) as caught:
        merge(RUN, changes, "params")
    assert caught.value.kind == ErrorKind.INVALID_PARAMETER
    assert caught.value.message.startswith(message)


@pytest.mark.parametrize("form", [{"regex": "a+"}, {"choice": ["a"]}, {"grammar": 'root ::= "a"'}, {"json_schema": {}}])
@pytest.mark.parametrize("run_form", [{"regex": "b+"}, {"choice": ["b"]}, {"json_schema": '{"type": "object"}'}])
def test_the_answers_form_takes_the_place_of_the_runs(form: dict[str, Any], run_form: dict[str, Any]) -> None:
    merged = merge(merge(RUN, run_form, "run"), form, "sampling")
    assert {name for name in FORMS if getattr(merged, name) is not None} == set(form)


def test_a_row_without_a_form_keeps_the_runs() -> None:
    run = merge(RUN, {"regex": "a+"}, "run")
    assert merge(run, {"max_tokens": 5, "regex": None, "choice": None}, "sampling").regex == "a+"


class TestSchema:
    """A JSON schema, as text or written out."""

    def test_text_stays_as_it_is_and_a_mapping_keeps_its_order_and_its_nulls(self) -> None:
        text = '{ "type":"object", "properties": {"b": {"default": null}, "a": {"const": null}} }'
        assert merge(RUN, {"json_schema": text}, "sampling").json_schema == text
        merged = merge(RUN, {"json_schema": json.loads(text)}, "sampling").json_schema
        assert merged == json.dumps(json.loads(text))
        assert merge(RUN, json.dumps({"json_schema": json.loads(text)}), "sampling").json_schema == merged

    @pytest.mark.parametrize(("value", "message"), [
        (7, "schema is 7, not a JSON schema"),
        (["a"], 'schema is ["a"], not a JSON schema'),
        ("[1]", 'schema is "[1]", not a JSON schema'),
        ("null", 'schema is "null", not a JSON schema'),
        ("{type: object}", 'schema is "{type: object}", not JSON: '),
        ({"const": float("nan")}, 'schema is {"const": NaN}, which JSON cannot hold: '),
        ({"const": b"a"}, 'schema is {"const": "b\'a\'"}, which JSON cannot hold: '),
    ])  # fmt: skip
    def test_what_is_none_is_an_invalid_schema(self, value: Any, message: str) -> None:
        with pytest.raises(RowError) as caught:
            schema_of(value, "schema")
        assert caught.value.kind == ErrorKind.INVALID_SCHEMA
        assert caught.value.message.startswith(message)
        with pytest.raises(RowError) as caught:
            merge(RUN, {"json_schema": value}, "params")
        assert caught.value.kind == ErrorKind.INVALID_SCHEMA
        assert caught.value.message.startswith("params.json_schema is ")

    def test_half_an_emoji_is_not_unicode_text(self) -> None:
        with pytest.raises(RowError) as caught:
            merge(RUN, '{"stop": ["\\ud83d"]}', "params")
        assert caught.value.kind == ErrorKind.INVALID_TEXT


def test_the_row_is_left_as_it_was() -> None:
    row = {"stop": ["a"], "json_schema": {"a": None}, "max_tokens": None}
    merge(RUN, row, "sampling")
    assert row == {"stop": ["a"], "json_schema": {"a": None}, "max_tokens": None}
    assert changes_in(row, "sampling") == {"stop": ["a"], "json_schema": {"a": None}}


class TestSeed:
    """`row_seed`: what each row draws from."""

    def test_it_is_the_same_in_every_run(self) -> None:
        assert row_seed(7, 0, 1) == row_seed(7, 0, 1) == 3553333896621419397

    @given(seed=st.integers(0, 2**63 - 1), row=st.integers(0, 10**10), attempt=st.integers(1, 100))
    def test_it_is_one_that_the_engine_takes(self, seed: int, row: int, attempt: int) -> None:
        assert 0 <= row_seed(seed, row, attempt) < 2**63

    def test_each_row_seed_and_attempt_has_its_own(self) -> None:
        seeds = {row_seed(seed, row, attempt) for seed in range(3) for row in range(1000) for attempt in (1, 2, 3)}
        assert len(seeds) == 3 * 1000 * 3
