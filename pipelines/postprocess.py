"""What is made of an answer before it is written: its structured output, then the steps of `postprocess.steps`."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from typing import Any

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
from pipelines.rows import Completion
from pipelines.structured import json_of, parsed_of
from pipelines.suggest import shown

_FENCED = re.compile(r"```(?:json)?\s*\n(.*?)\n?\s*```", re.DOTALL | re.IGNORECASE)

Apply = Callable[[Any, Completion], Any]
"""One step: from the value so far to the next, or for a filter to whether it matches; raises RowError."""


class Postprocessor:
    """Applies the steps, from any thread. Raises ConfigError where a user's own function cannot be found."""

    def __init__(self, config: PostprocessConfig):
        self._steps = [(step, _step(step, f"postprocess.steps.{number}")) for number, step in enumerate(config.steps)]
        self._makes_value = any(not isinstance(step, FilterStep) for step in config.steps)

    def apply(self, completion: Completion, sampling: SamplingConfig) -> Completion:
        """Return the completion with what was made of it, or with the error that it ran into; what the model said stays."""
        if completion.error is not None or completion.embedding is not None:
            return completion
        filtered_by: str | None = None
        try:
            parsed = parsed_of(sampling, completion.text, completion.finish_reason)
            value: Any = completion.text if parsed is None else json.loads(parsed)
            for step, apply in self._steps:
                made = apply(value, completion)
                if not isinstance(step, FilterStep):
                    value = made
                elif made and filtered_by is None:
                    filtered_by = step.name
            if self._makes_value:
                parsed = _as_json(value)
        except RowError as error:
            return replace(completion, filtered_by=filtered_by, error=error)
        if parsed is None and filtered_by is None:
            return completion
        return replace(completion, parsed=parsed, filtered_by=filtered_by)


def _step(step: Step, name: str) -> Apply:
    match step:
        case RegexStep():
            pattern = re.compile(step.pattern)
            return lambda value, completion: _match(pattern, step.take, _text(value, name), name)
        case JsonStep():
            return lambda value, completion: _json(_text(value, name), completion)
        case StripReasoningStep():
            return lambda value, completion: _without_reasoning(_text(value, name), step, completion, name)
        case FunctionStep():
            function = _function(step.function, name)
            return lambda value, completion: _call(function, value, f"{name} ({step.function})")
        case FilterStep():
            search = _filter(step)
            return lambda value, completion: search(_as_text(value)) is not None


def _match(pattern: re.Pattern[str], take: str, text: str, name: str) -> str | None:
    matches = list(pattern.finditer(text))
    if not matches:
        raise RowError(ErrorKind.POSTPROCESS_ERROR, f"{name}: {shown(text)} has no match of {pattern.pattern}")
    found = matches[0 if take == "first" else -1]
    return found[pattern.groups]


def _json(text: str, completion: Completion) -> Any:
    fenced = _FENCED.search(text)
    try:
        return json_of(fenced[1] if fenced else text)
    except RowError as error:
        if completion.finish_reason == "length":
            raise RowError(ErrorKind.TRUNCATED, f"the answer was cut by max_tokens: {error.message}") from None
        raise


def _without_reasoning(text: str, step: StripReasoningStep, completion: Completion, name: str) -> str:
    _, end, answer = text.rpartition(step.end)
    if end:
        return answer.lstrip()
    if step.start in text:
        kind = ErrorKind.TRUNCATED if completion.finish_reason == "length" else ErrorKind.POSTPROCESS_ERROR
        raise RowError(kind, f"{name}: the reasoning has no end ({step.end})")
    return text


def _call(function: Callable[[Any], Any], value: Any, name: str) -> Any:
    try:
        return json.loads(_as_json(function(value)))  # the next step gets what the results could hold
    except RowError as error:
        raise RowError(ErrorKind.POSTPROCESS_ERROR, f"{name}: {error.message}") from None
    except MemoryError:
        raise
    except Exception as error:  # noqa: BLE001 - the user's function may raise anything, over this row alone
        raise RowError(ErrorKind.POSTPROCESS_ERROR, f"{name}: {type(error).__name__}: {error}") from None


def _filter(step: FilterStep) -> Callable[[str], object]:
    if step.pattern is not None:
        return re.compile(step.pattern).search
    words = "|".join(re.escape(word) for word in step.words)
    return re.compile(rf"(?<!\w)(?:{words})(?!\w)", re.IGNORECASE).search


def _function(path: str, name: str) -> Callable[[Any], Any]:
    module, _, attribute = path.partition(":")
    try:
        function: Any = import_module(module)
        for part in attribute.split("."):
            function = getattr(function, part)
    except Exception as error:  # noqa: BLE001 - importing the user's module runs the user's code
        raise ConfigError(
            f"{name}.function={path}: {type(error).__name__}: {error}; write package.module:name, "
            "and put the module into the working directory or on PYTHONPATH"
        ) from None
    if not callable(function):
        raise ConfigError(f"{name}.function={path} is no function; write package.module:name")
    return function  # type: ignore[no-any-return]


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise RowError(ErrorKind.POSTPROCESS_ERROR, f"{name} needs text, and the value so far is {shown(value)}")
    return value


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _as_json(value: Any) -> str:
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        text.encode("utf-8")
    except (TypeError, ValueError, RecursionError) as error:
        raise RowError(ErrorKind.POSTPROCESS_ERROR, f"JSON cannot hold {shown(repr(value))}: {error}") from None
    return text
