"""What is made of an answer before it is written: its structured output, then the steps of `postprocess.steps`."""

import json
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from traceback import format_exception_only
from typing import Any
from unicodedata import normalize

import regex  # type: ignore[import-untyped]  # it ships no types

from pipelines.config import (
    FilterStep,
    FunctionStep,
    JsonStep,
    PostprocessConfig,
    RegexStep,
    SamplingConfig,
    Step,
    StripReasoningStep,
)
from pipelines.errors import ConfigError, ErrorKind, RowError
from pipelines.json_text import Json
from pipelines.rows import Completion
from pipelines.structured import MATCH_TIMEOUT_S, cut_short, json_of, parsed_of, pattern_of
from pipelines.suggest import shown

_MAX_MESSAGE = 500  # characters of what a user's function raised
# A block ends with a fence at the start of a line, where no JSON text can hold one, or with the answer.
_FENCED = re.compile(r"(?<!`)(`{3,}+)[ \t]*+([^\s`]*+)[^\n`]*+\n(.*?)(?:^[ \t]*\1|\1\s*\Z|\Z)", re.DOTALL | re.MULTILINE)

# Words end where a letter of a script with spaces meets anything else: "bomb" stands in "用bomb做", and "炸弹" in "做炸弹的".
_LETTER = r"[[\w\p{M}]--[\p{Han}\p{Hiragana}\p{Katakana}\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}]]"
_WORD_END = f"(?:(?<!{_LETTER})|(?!{_LETTER}))"

Apply = Callable[[Any, str], Json]
"""One step: from the value so far, and why the answer ended, to the next value; raises RowError."""


@dataclass(frozen=True, slots=True)
class Filter:
    """A step that changes nothing."""

    name: str
    matches: Callable[[str], bool]


class Postprocessor:
    """Applies the steps, from any thread. Raises ConfigError over a pattern or a function of the user's that is none."""

    def __init__(self, config: PostprocessConfig):
        self._steps = [_step(step, f"postprocess.steps.{number}") for number, step in enumerate(config.steps)]

    def apply(self, completion: Completion, sampling: SamplingConfig) -> Completion:
        """Return the completion with what was made of it, or with the error that it ran into; what the model said stays."""
        if completion.error is not None or completion.embedding is not None:
            return completion
        filtered_by: str | None = None
        try:
            parsed = parsed_of(sampling, completion.text, completion.finish_reason)
            value = completion.text if parsed is None else json_of(parsed).value
            for step in self._steps:
                if not isinstance(step, Filter):
                    value, parsed = step(value, completion.finish_reason)
                elif filtered_by is None and step.matches(value if isinstance(value, str) else str(parsed)):
                    filtered_by = step.name
        except RowError as error:
            return replace(completion, filtered_by=filtered_by, error=error)
        if parsed is None and filtered_by is None:
            return completion
        return replace(completion, parsed=parsed, filtered_by=filtered_by)


def _step(step: Step, name: str) -> Apply | Filter:
    match step:
        case RegexStep():
            pattern = _pattern(step.pattern, name)
            return lambda value, _: _match(pattern, step, _text(value, name), name)
        case JsonStep():
            return lambda value, finish_reason: _json(_text(value, name), finish_reason)
        case StripReasoningStep():
            return lambda value, finish_reason: _without_reasoning(_text(value, name), step, finish_reason, name)
        case FilterStep():
            return Filter(step.name, _matcher(step, name))
        case FunctionStep():
            function = _function(step.function, name)
            return lambda value, _: _call(function, value, f"{name} ({step.function})")


def _match(pattern: Any, step: RegexStep, text: str, name: str) -> Json:
    found = None
    try:
        for match in pattern.finditer(text, timeout=MATCH_TIMEOUT_S):
            found = match
            if step.take == "first":
                break
    except TimeoutError:
        raise _too_slow(step.pattern, name) from None
    groups = () if found is None else found.groups() or (found[0],)
    taken = [group for group in groups if group is not None]  # of alternatives, each with a group, only one matches
    if not taken:
        raise RowError(ErrorKind.POSTPROCESS_ERROR, f"{name}: {shown(text)} has no match of {step.pattern}")
    return _held(json.dumps(taken[-1], ensure_ascii=False), name)


def _json(text: str, finish_reason: str) -> Json:
    try:
        return _fenced_or_plain(text)
    except RowError as error:
        raise cut_short(error) if finish_reason == "length" else error from None


def _fenced_or_plain(text: str) -> Json:
    """JSON by itself, or in the first code block that is marked as such, else in the first that is not marked."""
    try:
        return json_of(text)
    except RowError:
        blocks = [(block[2].lower(), block[3]) for block in _FENCED.finditer(text)]
        for mark in ("json", ""):
            for marked, content in blocks:
                if marked == mark:
                    return json_of(content)
        raise


def _without_reasoning(text: str, step: StripReasoningStep, finish_reason: str, name: str) -> Json:
    answer = text.rpartition(step.end)[2]
    if step.start in answer:
        error = RowError(ErrorKind.POSTPROCESS_ERROR, f"{name}: the reasoning has no end ({step.end})")
        raise cut_short(error) if finish_reason == "length" else error
    return _held(json.dumps(answer if answer == text else answer.lstrip(), ensure_ascii=False), name)


def _matcher(step: FilterStep, name: str) -> Callable[[str], bool]:
    if step.pattern is not None:
        pattern = _pattern(step.pattern, name)
    else:
        words = "|".join(regex.escape(_folded(word)) for word in step.words)
        pattern = regex.compile(f"{_WORD_END}(?:{words}){_WORD_END}", regex.V1)

    def matches(text: str) -> bool:
        try:
            return pattern.search(text if step.pattern is not None else _folded(text), timeout=MATCH_TIMEOUT_S) is not None
        except TimeoutError:  # not to be told from an answer that passed, were it not an error
            raise _too_slow(step.pattern or step.name, name) from None

    return matches


def _folded(text: str) -> str:
    """A text without its differences of case and of composition: STRASSE is straße, and é is e with an accent."""
    return normalize("NFC", normalize("NFC", text).casefold())


def _call(function: Callable[[Any], Any], value: Any, name: str) -> Json:
    try:
        result = json.dumps(function(value), ensure_ascii=False, allow_nan=False)
    except MemoryError:
        raise
    except Exception as error:  # noqa: BLE001 - the user's function, and what it returns, may raise anything over this row
        reason = "".join(format_exception_only(error)).strip()[:_MAX_MESSAGE]
        raise RowError(ErrorKind.POSTPROCESS_ERROR, f"{name}: {_writable(reason)}") from None
    return _held(result, name)


def _function(path: str, name: str) -> Callable[[Any], Any]:
    module, _, attribute = path.partition(":")
    try:
        folder = str(Path.cwd())
        if folder not in sys.path:
            sys.path.append(folder)  # an installed command has the folder of its script there instead
        function: Any = import_module(module)
        for part in attribute.split("."):
            function = getattr(function, part)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - importing the user's module runs the user's code
        raise ConfigError(
            f"{name}.function={path}: {type(error).__name__}: {error}; write package.module:name; "
            "is the module in the working directory or on PYTHONPATH?"
        ) from None
    if not callable(function):
        raise ConfigError(f"{name}.function={path} is {shown(function)}, not a function; write package.module:name")
    return function  # type: ignore[no-any-return]


def _pattern(text: str, name: str) -> Any:
    try:
        return pattern_of(text)
    except ValueError as error:
        raise ConfigError(f"{name}.pattern={text} is no regular expression as Python spells it: {error}") from None


def _too_slow(pattern: str, name: str) -> RowError:
    reason = f"{pattern} took more than {MATCH_TIMEOUT_S:g} seconds over this answer; write it with fewer ways to match"
    return RowError(ErrorKind.POSTPROCESS_ERROR, f"{name}: {reason}")


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise RowError(ErrorKind.POSTPROCESS_ERROR, f"{name} needs text, and the value so far is {type(value).__name__}")
    return value


def _held(text: str, name: str) -> Json:
    """A value as the results hold it; raises RowError over half an emoji, and over keys that JSON takes for the same."""
    try:
        return json_of(text)
    except RowError as error:
        raise RowError(ErrorKind.POSTPROCESS_ERROR, f"{name}: the result cannot be written: {error.message}") from None


def _writable(message: str) -> str:
    return message.encode("utf-8", "backslashreplace").decode()
