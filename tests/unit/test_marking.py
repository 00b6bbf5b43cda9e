"""An answer is the expected one if the same steps make the same of both; the results, the tables and the summary say so."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelines.compose import compose_settings
from pipelines.config import BatchConfig
from pipelines.errors import ConfigError
from pipelines.intervals import share_interval
from pipelines.marking import is_correct
from pipelines.parse import parse_config
from pipelines.postprocess import Postprocessor
from pipelines.rows import Completion
from pipelines.summary import finish
from tests.unit.story import answer, echo, results


def config_of(*overrides: str) -> BatchConfig:
    return parse_config(compose_settings("batch", list(overrides)))


def mark(text: str, expected: str, *overrides: str) -> bool | None:
    config = config_of(*overrides)
    steps = Postprocessor(config.postprocess)
    said = Completion(text=text, finish_reason="stop", stop_reason=None, num_output_tokens=1)
    return is_correct(steps.apply(said, config.sampling), expected, config.sampling, steps)


@pytest.mark.parametrize(("text", "expected", "correct"), [
    ("So she makes 9 * 2 = $18 every day.\n#### 18", "9 * 2 = <<9*2=18>>18\n#### 18", True),
    ("It is 1,000.", "#### 1000", True),
    ("18.00 dollars", "#### 18", True),
    ("#### 17", "#### 18", False),
    ("I do not know.", "#### 18", False),
    ("#### 18", "eighteen", None),
])  # fmt: skip
def test_numbers_count_by_what_they_are_worth(text: str, expected: str, correct: bool | None) -> None:
    assert mark(text, expected, "postprocess=last_number") is correct


@pytest.mark.parametrize(("text", "expected", "correct"), [
    (" yes\n", "yes", True),
    ("Yes", "yes", False),
    ("1e3", "1000", True),
    ("nan", "nan", True),
    ("", "yes", False),
])  # fmt: skip
def test_text_counts_without_the_space_around_it(text: str, expected: str, correct: bool) -> None:
    assert mark(text, expected) is correct


SCHEMA = "sampling.json_schema={type: object, properties: {topic: {}, n: {}}}"


@pytest.mark.parametrize(("text", "expected", "correct"), [
    ('{"n": 1, "topic": "a"}', '{"topic":"a","n":1.0}', True),
    ('{"topic": ["a", "b"]}', '{"topic": ["b", "a"]}', False),
    ('{"n": 1}', '{"n": true}', False),
    ('{"n": null}', "{}", False),
    ("no JSON", '{"n": 1}', False),
    ('{"n": 1}', "no JSON", None),
])  # fmt: skip
def test_structured_answers_are_compared_as_json(text: str, expected: str, correct: bool | None) -> None:
    assert mark(text, expected, SCHEMA) is correct


@pytest.mark.parametrize("levels", [100, 300, 450, 600, 900])
def test_json_of_any_depth_costs_its_row_at_most_its_mark(levels: int) -> None:
    text = "[" * levels + "]" * levels
    assert mark(text, text, "postprocess=json") in (True, None)


@pytest.mark.parametrize("number", ["1e999999999999999999999", "-1e-999999999", "9" * 5000, "1_0", "sNaN"])
def test_numbers_of_any_size_are_the_same_as_themselves(number: str) -> None:
    assert mark(number, number) is True
    assert mark(number, "5") is False


AS_JSON = config_of("postprocess=json")
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-10, 10) | st.text("ab1 ", max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("ab", max_size=2), inner, max_size=3),
    max_leaves=6,
)


@given(value=JSON)
def test_every_value_is_the_same_as_itself_however_it_is_spaced(value: Any) -> None:
    steps, sampling = Postprocessor(AS_JSON.postprocess), AS_JSON.sampling
    said = Completion(text=json.dumps(value, indent=3), finish_reason="stop", stop_reason=None, num_output_tokens=1)
    assert is_correct(steps.apply(said, sampling), json.dumps(value), sampling, steps) is True


ROWS = [
    {"id": "right", "prompt": "Is it 4?", "answer": "4"},
    {"id": "a number", "prompt": "Is it 5?", "answer": 5},
    {"id": "wrong", "prompt": "Is it 6?", "answer": "7"},
    {"id": "no answer", "prompt": "Is it?", "answer": "8"},
    {"id": "no prompt", "prompt": None, "answer": "8"},
    {"id": "not expected", "prompt": "Is it 9?"},
    {"id": "null", "prompt": "Is it 9?", "answer": None},
    {"id": "not to be had", "prompt": "Is it 9?", "answer": "nine"},
]


def run_of(tmp_path: Path, *more: str) -> BatchConfig:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in ROWS), encoding="utf-8")
    wanted = ["postprocess=last_number", "errors.max_failed_fraction=1", "sampling.max_tokens=50"]
    return config_of(*echo(path, str(tmp_path / "run"), *wanted, *more))


def test_a_run_says_of_each_row_and_in_all_what_is_correct(tmp_path: Path) -> None:
    config = run_of(tmp_path, "input.expected_column=answer")
    run, plan, _ = answer(config)
    assert {row["id"]: row["correct"] for row in results(run)} == {
        "right": True, "a number": True, "wrong": False, "no answer": False, "no prompt": False,
        "not expected": None, "null": None, "not to be had": None,
    }  # fmt: skip
    summary = finish(run, plan, config)
    assert (summary.num_marked, summary.num_correct) == (5, 2)
    assert summary.accuracy is not None and summary.accuracy.value == 0.4
    assert "2 of 5" in (tmp_path / "run/report.html").read_text(encoding="utf-8")


def test_without_an_expected_column_nothing_is_marked(tmp_path: Path) -> None:
    config = run_of(tmp_path)
    run, plan, _ = answer(config)
    assert {row["correct"] for row in results(run)} == {None}
    summary = finish(run, plan, config)
    assert (summary.num_marked, summary.accuracy) == (0, None)


def test_a_column_that_no_file_has_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"input\.expected_column: the column 'answers' is not in"):
        answer(run_of(tmp_path, "input.expected_column=answers"))


@given(num=st.integers(0, 300), more=st.integers(0, 300))
def test_the_range_of_a_share_ends_where_the_share_would_be_just_so_unlikely(num: int, more: int) -> None:
    """Wilson's definition: a true share at an end of the range lies 1.645 of its own standard deviations from what was seen."""
    total = num + more
    found = share_interval(num, total)
    if not total:
        assert found is None
        return
    assert found is not None and 0 <= found.low <= found.value <= found.high <= 1
    for end in (found.low, found.high):
        distance = abs(found.value - end)
        assert distance == pytest.approx(1.6449 * math.sqrt(end * (1 - end) / total), rel=1e-3, abs=1e-6)
