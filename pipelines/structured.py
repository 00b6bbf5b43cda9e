"""Structured output: whether a form of the answer makes sense, and whether the answer has it.

The engine's backends hold the model to a form while it answers, but not to every keyword of a schema, and not where
`max_tokens` cuts the answer short. So both ends are checked here.
"""

import json
import re
from functools import lru_cache
from typing import Any

from jsonschema import Draft202012Validator
from jsonschema.exceptions import SchemaError, ValidationError
from referencing.exceptions import Unresolvable

from pipelines.config import SamplingConfig
from pipelines.errors import ErrorKind, RowError
from pipelines.suggest import shown

_SCHEMAS_AT_ONCE = 256  # compiled and kept; a run has one schema, or one for each row


def check_form(sampling: SamplingConfig) -> None:
    """Refuse a form that nothing can have, before it reaches the engine; raises RowError.

    Regular expressions and grammars are for the engine to judge, whose dialects they are written in.
    """
    if sampling.json_schema is not None:
        _validator(sampling.json_schema)
    if sampling.choice is not None and len(set(sampling.choice)) < len(sampling.choice):
        raise RowError(ErrorKind.INVALID_SCHEMA, f"sampling.choice={shown(sampling.choice)} names a text twice")
    for name in ("regex", "grammar"):
        text = getattr(sampling, name)
        if text is not None and not text.strip():
            raise RowError(ErrorKind.INVALID_SCHEMA, f"sampling.{name} is {shown(text)}: nothing but white space")


def parsed_of(sampling: SamplingConfig, text: str, finish_reason: str) -> str | None:
    """Return the JSON text of an answer that must meet a schema, None for other answers.

    Raises RowError where the answer has not the form that was asked for: `truncated` where it was cut before it had.
    """
    try:
        return _parsed(sampling, text, is_cut=finish_reason == "length")
    except RowError as error:
        if finish_reason != "length":
            raise
        raise RowError(
            ErrorKind.TRUNCATED, f"the answer was cut by max_tokens={sampling.max_tokens}: {error.message}"
        ) from None


def json_of(text: str) -> Any:
    """Parse an answer as JSON, and only as such: no NaN, no repeated keys, nothing that JSON text could not hold again.

    Raises RowError.
    """
    try:
        value = json.loads(text, parse_constant=_no_constant, parse_float=_exact_float, object_pairs_hook=_no_repeats)
        if "\\ud" in text or "\\uD" in text:
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except (ValueError, RecursionError) as error:  # UnicodeError is a ValueError
        raise RowError(ErrorKind.INVALID_JSON, f"the answer is {shown(text)}, not JSON: {error}") from None
    return value


def _parsed(sampling: SamplingConfig, text: str, *, is_cut: bool) -> str | None:
    if sampling.json_schema is not None:
        value = json_of(text)
        _check_schema(sampling.json_schema, value)
        return json.dumps(value, ensure_ascii=False)
    if sampling.choice is not None and text not in sampling.choice:
        raise RowError(
            ErrorKind.INVALID_OUTPUT, f"the answer is {shown(text)}, none of sampling.choice={shown(sampling.choice)}"
        )
    if sampling.regex is not None and (pattern := _python_pattern(sampling.regex)) and not pattern.fullmatch(text):
        raise RowError(
            ErrorKind.INVALID_OUTPUT, f"the answer is {shown(text)} and does not match sampling.regex={sampling.regex}"
        )
    if sampling.grammar is not None and is_cut:
        raise RowError(ErrorKind.INVALID_OUTPUT, f"the answer is {shown(text)}, which the grammar would go on with")
    return None


def _check_schema(schema: str, value: Any) -> None:
    try:
        _validator(schema).validate(value)
    except ValidationError as error:
        raise RowError(
            ErrorKind.INVALID_OUTPUT, f"the answer does not meet its schema at {error.json_path}: {error.message}"
        ) from None
    except Unresolvable as error:  # nothing is fetched
        raise RowError(ErrorKind.INVALID_SCHEMA, f"the JSON schema refers to what is not in it: {error}") from None
    except (RecursionError, re.error) as error:
        raise RowError(
            ErrorKind.INVALID_SCHEMA, f"the JSON schema cannot be checked: {type(error).__name__}: {error}"
        ) from None


@lru_cache(_SCHEMAS_AT_ONCE)
def _validator(schema: str) -> Draft202012Validator:
    try:
        value = json.loads(schema)
        Draft202012Validator.check_schema(value)
    except (ValueError, SchemaError, RecursionError) as error:
        reason = error.message if isinstance(error, SchemaError) else str(error)
        raise RowError(ErrorKind.INVALID_SCHEMA, f"{shown(schema)} is not a JSON schema: {reason}") from None
    validator = Draft202012Validator(value)
    for reference in _references(value):
        if not reference.startswith("#"):
            raise RowError(
                ErrorKind.INVALID_SCHEMA, f"the JSON schema refers to {reference}, and nothing is fetched; write it out"
            )
    return validator


def _references(value: Any) -> list[str]:
    """Every `$ref` in a schema."""
    found: list[str] = []
    todo = [value]
    while todo:
        one = todo.pop()
        if isinstance(one, dict):
            found += [target for key, target in one.items() if key == "$ref" and isinstance(target, str)]
            todo += one.values()
        elif isinstance(one, list):
            todo += one
    return found


@lru_cache(_SCHEMAS_AT_ONCE)
def _python_pattern(regex: str) -> re.Pattern[str] | None:
    """The pattern where Python understands it as well; the engine's dialect is another one."""
    try:
        return re.compile(regex)
    except (re.error, RecursionError, OverflowError):
        return None


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


def _exact_float(digits: str) -> float:
    value = float(digits)
    if value in (float("inf"), float("-inf")):
        raise ValueError(f"{digits} is beyond every number that a reader of it could hold")
    return value


def _no_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        raise ValueError("a key stands twice in one object")
    return value
