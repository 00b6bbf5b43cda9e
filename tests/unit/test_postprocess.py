"""What the steps make of an answer, and that a step which cannot take an answer costs the row its result, never its answer."""

import json
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pipelines.compose import compose_settings
from pipelines.config import FilterStep, FunctionStep, JsonStep, PostprocessConfig, RegexStep, StripReasoningStep
from pipelines.errors import ConfigError, ErrorKind, RowError, Stopped
from pipelines.parse import parse_config
from pipelines.postprocess import Postprocessor
from pipelines.rows import Completion
from tests.unit.test_structured import VALUES, sampling

FREE = sampling()
OBJECT = sampling(json_schema='{"type":"object"}')
JSON = JsonStep(kind="json")
THINK = StripReasoningStep(kind="strip_reasoning", start="<think>", end="</think>")
CUT_OFF = "```json\n" + '{"a":' * 3


def regex(pattern: str, take: str = "first") -> RegexStep:
    return RegexStep(kind="regex", pattern=pattern, take=take)


def words(*which: str, name: str = "bad words") -> FilterStep:
    return FilterStep(kind="filter", name=name, pattern=None, words=which)


def matching(pattern: str, name: str) -> FilterStep:
    return FilterStep(kind="filter", name=name, pattern=pattern, words=())


def function(name: str) -> FunctionStep:
    return FunctionStep(kind="function", function=f"{__name__}:{name}")


def said(text: str, finish_reason: str = "stop", **more: Any) -> Completion:
    return Completion(text=text, finish_reason=finish_reason, stop_reason=None, num_output_tokens=3, **more)


def made(text: str, *steps: Any, finish_reason: str = "stop", form: Any = FREE) -> Completion:
    """What the steps make of an answer that they can take."""
    completion = Postprocessor(PostprocessConfig(steps=steps)).apply(said(text, finish_reason), form)
    assert completion.error is None
    return completion


def value_of(text: str, *steps: Any, **more: Any) -> Any:
    parsed = made(text, *steps, **more).parsed
    assert parsed is not None
    return json.loads(parsed)


def failed(text: str, *steps: Any, finish_reason: str = "stop", form: Any = FREE) -> RowError:
    """The error of an answer that the steps cannot take; the answer itself stays."""
    completion = Postprocessor(PostprocessConfig(steps=steps)).apply(said(text, finish_reason, reasoning="hm"), form)
    assert completion.error is not None
    assert (completion.text, completion.reasoning, completion.num_output_tokens, completion.parsed) == (text, "hm", 3, None)
    pa.array([completion.error.message], pa.string())  # what cannot be written would take its neighbours along
    assert len(completion.error.message) < 1000
    return completion.error


def shipped(choice: str) -> Sequence[Any]:
    changes = ["model=smollm2", "engine=echo", "input=demo", f"postprocess={choice}"]
    return parse_config(compose_settings("batch", changes)).postprocess.steps


# The user's own functions, for the steps below.


def shout(value: str) -> str:
    return value.upper()


def length(value: Any) -> int:
    return len(value)


def same(value: Any) -> Any:
    return value


def spoil(value: dict[str, Any]) -> None:
    value.clear()


class BrokenError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("not even this works")


class BrokenDict(dict[str, int]):
    def items(self) -> Any:
        raise LookupError("nothing here")


def cycle() -> list[Any]:
    value: list[Any] = []
    value.append(value)
    return value


def deep() -> list[Any]:
    value: list[Any] = []
    for _ in range(5000):
        value = [value]
    return value


RETURNED: dict[str, Callable[[], Any]] = {
    "nan": lambda: float("nan"), "infinity": lambda: [float("-inf")], "set": lambda: {1}, "bytes": lambda: b"x",
    "surrogate": lambda: "\ud800", "surrogate key": lambda: {"\udfff": 1}, "cycle": cycle, "deep": deep, "object": object,
    "same keys": lambda: {1: "a", "1": "b"}, "tuple key": lambda: {(1, 2): 1}, "huge": lambda: 10**5000,
    "broken": lambda: BrokenDict(a=1),
}  # fmt: skip
RAISED: dict[str, BaseException] = {
    "value": ValueError("no\nsuch thing"), "key": KeyError("a"), "surrogate": ValueError("\ud800"), "broken": BrokenError(),
    "long": ValueError("x" * 100_000), "recursion": RecursionError(), "row": RowError(ErrorKind.EMPTY_PROMPT, "mine"),
    "stop": StopIteration(1), "group": ExceptionGroup("several", [ValueError("a")]),
}  # fmt: skip
FATAL: dict[str, BaseException] = {
    "memory": MemoryError(),
    "exit": SystemExit(1),
    "interrupt": KeyboardInterrupt(),
    "stop": Stopped(),
}


def give_back(name: str) -> Any:
    return RETURNED[name]()


def fail_with(name: str) -> Any:
    raise RAISED[name]


def die_of(name: str) -> Any:
    raise FATAL[name]


NOT_CALLABLE = 7


# The steps that come with the project.


@pytest.mark.parametrize(("text", "number"), [
    ("So 3 x 4 = 12, and the total is 1,234.50.", "1,234.50"),
    ("#### -7", "-7"),
    ("It is 5.", "5"),
    ("They need 18, which is more than 7,000, or 6, 7.", "7"),
    ("She has 1,500, and no more", "1,500"),
])  # fmt: skip
def test_the_last_number_is_found(text: str, number: str) -> None:
    assert value_of(text, *shipped("last_number")) == number


def test_the_shipped_steps_do_what_their_names_say() -> None:
    assert made("as it is", *shipped("none")) == said("as it is")
    assert value_of("```json\n[1]\n```", *shipped("json")) == [1]


# Structured output.


def test_an_answer_with_a_schema_stands_in_parsed_and_the_next_steps_get_its_value() -> None:
    assert made('{"a": 1.50}', form=OBJECT).parsed == '{"a": 1.50}'
    assert made('{"a": 1.50}', words("x"), form=OBJECT).parsed == '{"a": 1.50}'
    assert value_of('{"a": 1, "b": 2}', function("length"), form=OBJECT) == 2
    assert made('{"a": 1}', function("spoil"), form=OBJECT).parsed == "null"


def test_an_answer_without_its_form_fails_before_any_step() -> None:
    assert failed("[]", function("die_of"), form=OBJECT).kind == ErrorKind.INVALID_OUTPUT
    assert failed("{", function("die_of"), form=OBJECT).kind == ErrorKind.INVALID_JSON
    assert failed("{", function("die_of"), form=OBJECT, finish_reason="length").kind == ErrorKind.TRUNCATED
    assert failed("b", function("die_of"), form=sampling(choice=("a",))).kind == ErrorKind.INVALID_OUTPUT


def test_an_answer_that_has_failed_or_is_an_embedding_is_left_alone() -> None:
    postprocessor = Postprocessor(PostprocessConfig(steps=(JSON,)))
    for completion in (said("x", error=RowError(ErrorKind.INVALID_OUTPUT, "m")), said("", embedding=[0.5])):
        assert postprocessor.apply(completion, OBJECT) is completion


# regex


@pytest.mark.parametrize(("pattern", "take", "text", "value"), [
    (r"\d+", "first", "a 1 b 22", "1"),
    (r"\d+", "last", "a 1 b 22", "22"),
    (r"(a)(\d)", "first", "a1 a2", "1"),
    (r"answer: (.*)", "last", "answer: x\nanswer: y z", "y z"),
    (r"boxed\{(\d+)\}|is (\d+)", "first", "boxed{3}", "3"),
    (r"boxed\{(\d+)\}|is (\d+)", "last", "boxed{3} is 4", "4"),
    (r"x{e}", "first", "abc x{e}", "x{e}"),
    (r"x*", "first", "abc", ""),
    ("🍞.", "last", "🍞a🍞é", "🍞é"),
])  # fmt: skip
def test_a_regex_takes_its_last_group_or_all_of_the_first_or_last_match(pattern: str, take: str, text: str, value: str) -> None:
    assert value_of(text, regex(pattern, take)) == value


@pytest.mark.parametrize(("pattern", "text"), [(r"\d+", "none"), (r"(\d)?x", "x"), (r"\d", "")])
def test_an_answer_without_a_match_fails_naming_step_and_pattern(pattern: str, text: str) -> None:
    error = failed(text, THINK, regex(pattern))
    assert error.kind == ErrorKind.POSTPROCESS_ERROR
    assert "postprocess.steps.1" in error.message
    assert pattern in error.message


@pytest.mark.parametrize("step", [regex("(a+)+b|(a|aa)+c", "last"), matching("(a+)+b|(a|aa)+c", "slow")])
def test_a_pattern_that_would_take_years_costs_its_row_and_seconds(step: Any) -> None:
    before = time.perf_counter()
    assert failed("a" * 60, step).kind == ErrorKind.POSTPROCESS_ERROR
    assert time.perf_counter() - before < 60


# json


@pytest.mark.parametrize(("text", "parsed"), [
    (' {"a": 1.50}\n', '{"a": 1.50}'),
    ('```json\n{"a": 1.50}\n```', '{"a": 1.50}'),
    ("```JSON\r\n[1]\r\n```\r\n", "[1]"),
    ("```\n[1]\n```", "[1]"),
    ("Here you are:\n\n```json\n[1,\n 2]\n```\nAnything else?", "[1, 2]"),
    ("Here: ```json\n[1]\n```", "[1]"),
    ("  ```json\n  [1]\n  ```", "[1]"),
    ("````json\n[1]\n````", "[1]"),
    ("```python\nx = {}\n```\nprints\n```json\n[1]\n```", "[1]"),
    ("```\nx = {}\n```\nprints\n```json\n[1]\n```", "[1]"),
    ("```python\nx = {}\n```\nprints\n```\n[1]\n```", "[1]"),
    ('```json\n{"code": "```py\\nx\\n```"}\n```', '{"code": "```py\\nx\\n```"}'),
    ('{"code": "```json\\n[1]\\n```"}', '{"code": "```json\\n[1]\\n```"}'),
    ('```json\n{"a": 1}```', '{"a": 1}'),
    ("```json\n[1]", "[1]"),  # the stop text was the end of the block
])  # fmt: skip
def test_json_is_found_by_itself_or_in_a_code_block(text: str, parsed: str) -> None:
    assert made(text, JSON).parsed == parsed
    assert made(text, JSON, finish_reason="length").parsed == parsed


@pytest.mark.parametrize("text", [
    "", "no", "Here you are: [1]", "[1] is it", CUT_OFF, "```json\n```", "```python\nx = 1\n```", "```json\nNaN\n```",
    '```json\n{"a":1,"a":2}\n```', "`[1]`", '"\\ud800"', "`" * 100_000, "```" + "a" * 100_000, "```json\n" + " " * 100_000,
    "```\n" * 10_000,
])  # fmt: skip
def test_what_is_no_json_fails_and_where_it_was_cut_says_so(text: str) -> None:
    before = time.process_time()
    assert failed(text, JSON).kind == ErrorKind.INVALID_JSON
    assert failed(text, JSON, finish_reason="length").kind == ErrorKind.TRUNCATED
    assert time.process_time() - before < 5


# strip_reasoning


@pytest.mark.parametrize(("text", "answer"), [
    ("<think>hm\n</think>\n\nyes", "yes"),
    ("hm</think>yes", "yes"),  # the template had opened it
    ("<think>a</think>b<think>c</think>d ", "d "),
    ("yes", "yes"),
    ("  yes", "  yes"),
    ("<think></think>", ""),
    ("", ""),
])  # fmt: skip
def test_reasoning_is_dropped_up_to_its_end(text: str, answer: str) -> None:
    assert value_of(text, THINK) == answer
    assert value_of(text, THINK, finish_reason="length") == answer


@pytest.mark.parametrize("text", ["<think>", "<think>hm", "<think>a</think>b<think>c"])
def test_reasoning_without_an_end_fails_and_where_it_was_cut_says_so(text: str) -> None:
    assert failed(text, THINK).kind == ErrorKind.POSTPROCESS_ERROR
    assert failed(text, THINK, finish_reason="length").kind == ErrorKind.TRUNCATED


# filter


@pytest.mark.parametrize(("word", "text"), [
    ("bomb", "a BOMB."),
    ("STRASSE", "die straße"),
    ("straße", "STRASSE 7"),
    ("café", "CAFE\u0301!"),
    ("İzmir", "i̇zmir"),
    ("ΣΑΣ", "σας;"),
    ("можно", "МОЖНО?"),
    ("नमस्ते", "नमस्ते।"),
    ("c++", "in C++, of course"),
    ("bad word", "a bad word"),
    ("炸弹", "这是一个炸弹的"),
    ("bomb", "用bomb做"),
    ("爆弾", "爆弾です"),
    ("ระเบิด", "ทำระเบิดเอง"),
    ("한국", "한국, 한국어"),
    ("a.b", "a.b"),
])  # fmt: skip
def test_words_are_found_whatever_their_case_and_script(word: str, text: str) -> None:
    assert made(text, words("zzz", word)).filtered_by == "bad words"


@pytest.mark.parametrize(("word", "text"), [
    ("bomb", "bombastic"), ("bomb", "abomb"), ("bomb", "bomb_1"), ("क", "कि"), ("한", "한국"), ("ass", "class"),
    ("можно", "возможно"), ("a.b", "axb"), ("e", "e\u0301t"),
])  # fmt: skip
def test_words_are_not_found_inside_others(word: str, text: str) -> None:
    assert made(text, words(word)).filtered_by is None


def test_the_first_filter_that_matches_is_named_and_the_value_stays() -> None:
    steps = (matching("z", "z"), matching("^a", "start"), words("a"))
    assert made("a b", *steps) == said("a b", filtered_by="start")
    assert value_of("a b", *steps, function("shout")) == "A B"
    assert made("a b", *steps, function("shout"), matching("A", "later")).filtered_by == "start"


def test_a_filter_looks_at_the_value_so_far_and_at_json_as_text() -> None:
    assert made("<think>bomb</think>no", words("bomb")).filtered_by == "bad words"
    assert made("<think>bomb</think>no", THINK, words("bomb")).filtered_by is None
    assert made('{"a": ["b\\u00e9"]}', JSON, matching(r'\["bé"\]', "bé")).filtered_by == "bé"
    assert made('{"a": 1.50}', words("1.50"), form=OBJECT).filtered_by == "bad words"


def test_what_was_filtered_says_so_also_where_a_later_step_fails() -> None:
    completion = Postprocessor(PostprocessConfig(steps=(words("a"), JSON))).apply(said("a"), FREE)
    assert completion.filtered_by == "bad words"
    assert completion.error is not None


# function


def test_a_function_gets_the_value_so_far_and_gives_the_next() -> None:
    assert value_of("it is abc", regex("is (.*)"), function("shout"), function("length")) == 3
    assert value_of("[1, 2]", JSON, function("same")) == [1, 2]


@pytest.mark.parametrize("name", RETURNED)
def test_what_json_cannot_hold_is_no_result(name: str) -> None:
    error = failed(name, function("give_back"))
    assert error.kind == ErrorKind.POSTPROCESS_ERROR
    assert "postprocess.steps.0" in error.message


@pytest.mark.parametrize("name", RAISED)
def test_whatever_a_function_raises_fails_its_row_with_type_and_message(name: str) -> None:
    error = failed(name, function("fail_with"))
    assert error.kind == ErrorKind.POSTPROCESS_ERROR
    assert "fail_with" in error.message
    assert type(RAISED[name]).__name__ in error.message
    if name in ("value", "row"):
        assert RAISED[name].args[-1] in error.message


@pytest.mark.parametrize("name", FATAL)
def test_what_is_not_about_the_row_goes_on(name: str) -> None:
    with pytest.raises(type(FATAL[name])):
        made(name, function("die_of"))


@pytest.mark.parametrize("step", [regex("a"), JSON, THINK])
def test_a_step_that_needs_text_fails_over_anything_else(step: Any) -> None:
    error = failed("[1]", JSON, step)
    assert error.kind == ErrorKind.POSTPROCESS_ERROR
    assert "postprocess.steps.1 needs text" in error.message


# What is refused before anything starts.


@pytest.mark.parametrize(("path", "reason"), [
    ("no_such_module_of_mine:f", "No module named"),
    (f"{__name__}:no_such_function", "no_such_function"),
    (f"{__name__}:NOT_CALLABLE", "not a function"),
    (__name__, "write package.module:name"),
    (":f", "write package.module:name"),
    ("./mine.py:f", "write package.module:name"),
    ("raises_at_import:f", "ZeroDivisionError"),
    ("exits_at_import:f", "SystemExit"),
])  # fmt: skip
def test_a_function_that_is_none_is_refused_with_the_way_out(
    path: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "raises_at_import.py").write_text("1 / 0")
    (tmp_path / "exits_at_import.py").write_text("raise SystemExit")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError) as caught:
        Postprocessor(PostprocessConfig(steps=(JSON, FunctionStep(kind="function", function=path))))
    assert f"postprocess.steps.1.function={path}" in str(caught.value)
    assert reason in str(caught.value)
    assert "write package.module:name" in str(caught.value)


def test_a_function_may_stand_in_the_working_directory_and_in_a_class(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "in_this_folder.py").write_text("class Mine:\n    @staticmethod\n    def f(value):\n        return [value]\n")
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    assert value_of("x", FunctionStep(kind="function", function="in_this_folder:Mine.f")) == ["x"]


@pytest.mark.parametrize("pattern", ["(", "(" * 1000 + ")" * 1000, "a{99999999999}"])
def test_a_pattern_that_is_none_is_refused(pattern: str) -> None:
    step = RegexStep.model_construct(kind="regex", pattern=pattern, take="first")  # the settings refuse most of them before
    with pytest.raises(ConfigError, match=r"postprocess\.steps\.0\.pattern="):
        Postprocessor(PostprocessConfig.model_construct(steps=(step,)))


# All of it.

STEPS = st.lists(
    st.sampled_from([
        JSON, THINK, regex(r"\w+", "last"), regex("(a)|b"), words("a", "é"), matching("[{1]", "brace"),
        function("shout"), function("length"), function("same"), function("give_back"), function("fail_with"),
    ]),
    max_size=5,
)  # fmt: skip
FORMS = st.sampled_from([FREE, OBJECT, sampling(json_schema="true"), sampling(choice=("a",)), sampling(regex="a*"),
                         sampling(grammar="root ::= a")])  # fmt: skip
TEXTS = (
    st.text()
    | st.text(st.characters(codec=None))
    | VALUES.map(json.dumps)
    | st.sampled_from([*RETURNED, *RAISED, CUT_OFF])
    | st.lists(st.sampled_from(["<think>", "</think>", "```", "json", "\n", '{"a": 1}', "a", " "])).map("".join)
)


@given(text=TEXTS, steps=STEPS, form=FORMS, finish_reason=st.sampled_from(["stop", "length", "repetition"]))
@example(text="\ud800", steps=[], form=FREE, finish_reason="stop")
def test_whatever_the_answer_and_the_steps_the_answer_stays_and_the_result_can_be_written(
    text: str, steps: list[Any], form: Any, finish_reason: str
) -> None:
    completion = said(text, finish_reason, reasoning="hm", tool_calls="[]")
    after = Postprocessor(PostprocessConfig(steps=tuple(steps))).apply(completion, form)
    assert (after.text, after.finish_reason, after.reasoning, after.tool_calls) == (text, finish_reason, "hm", "[]")
    pa.array([after.parsed, after.filtered_by, after.error and after.error.message], pa.string())
    makes_value = form.json_schema is not None or any(not isinstance(step, FilterStep) for step in steps)
    assert (after.parsed is not None) == (makes_value and after.error is None)
    if after.parsed is not None:
        json.loads(after.parsed)


def test_threads_do_not_get_into_each_others_way() -> None:
    postprocessor = Postprocessor(PostprocessConfig(steps=(THINK, JSON, function("length"), matching("7", "seven"))))
    start = threading.Barrier(8)

    def work(thread: int) -> list[Completion]:
        start.wait()
        texts = [json.dumps(["x"] * (thread + i % 5)) for i in range(200)]
        return [postprocessor.apply(said(f"<think>{thread}</think>{text}"), FREE) for text in texts]

    with ThreadPoolExecutor(8) as pool:
        for thread, completions in enumerate(pool.map(work, range(8))):
            assert [one.parsed for one in completions] == [str(thread + i % 5) for i in range(200)]
            assert [one.filtered_by for one in completions] == ["seven" if thread + i % 5 == 7 else None for i in range(200)]
