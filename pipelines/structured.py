"""Structured output: whether a form of the answer makes sense, and whether the answer has it.

The engine's backends hold the model to a form while it answers, but not to every keyword of a schema, and not where the
answer is cut short. So both ends are checked here.
"""

import re
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import regex  # type: ignore[import-untyped]  # it ships no types
from jsonschema import Draft202012Validator, FormatChecker, SchemaError, ValidationError
from jsonschema.validators import extend
from referencing import Registry
from referencing.exceptions import Unresolvable
from referencing.jsonschema import DRAFT202012

from pipelines.config import SamplingConfig
from pipelines.errors import ErrorKind, RowError
from pipelines.json_text import Json, read_json
from pipelines.suggest import shown

MATCH_TIMEOUT_S = 2.0  # an honest match takes microseconds, one that tries every way to divide the text takes years
_FORMS_AT_ONCE = 64  # compiled and kept; a run has one form, or one for each row
_MAX_DEPTH = 64  # the engine's backends take seconds for 300 levels, and forever for 1000
_MAX_MESSAGE = 300  # characters; jsonschema quotes the whole value
# They hold nothing to descend into: a check that does not end on them refers to itself for ever.
_PROBES: tuple[Any, ...] = (None, True, 0, "", [], {})

_LITERAL_BRACE = re.compile(r"(\\N\{[^}]*\}|\\.)|\{(?![0-9]*,?[0-9]*\})", re.DOTALL)


def check_form(sampling: SamplingConfig) -> None:
    """Refuse a form that nothing can have, before it reaches the engine; raises RowError.

    Regular expressions and grammars are for the engine to judge, whose dialects they are written in.
    """
    if sampling.json_schema is not None:
        _validator(sampling.json_schema)
    if sampling.choice is not None and ("" in sampling.choice or len(set(sampling.choice)) < len(sampling.choice)):
        raise RowError(
            ErrorKind.INVALID_SCHEMA, f"sampling.choice={shown(sampling.choice)}: no text may be empty or named twice"
        )
    for name, form in (("regex", sampling.regex), ("grammar", sampling.grammar and sampling.grammar.strip())):
        if form == "":
            raise RowError(ErrorKind.INVALID_SCHEMA, f"sampling.{name} is empty; set it to null where the answer has no form")


def parsed_of(sampling: SamplingConfig, text: str, finish_reason: str) -> str | None:
    """Return the JSON text of an answer that must meet a schema, None for other answers.

    Raises RowError where the answer has not the form that was asked for: `truncated` where it was cut before it had.
    """
    is_cut = finish_reason == "length"
    try:
        if sampling.json_schema is not None:
            value, canonical = json_of(text)
            _check_schema(sampling.json_schema, value)
            return canonical
        _check_text(sampling, text, is_cut=is_cut)
    except RowError as error:
        raise cut_short(error) if is_cut else error from None
    return None


def cut_short(error: RowError) -> RowError:
    """What to say instead where the answer was cut."""
    return RowError(ErrorKind.TRUNCATED, f"the answer was cut by sampling.max_tokens or the model's limit: {error.message}")


def json_of(text: str) -> Json:
    """Parse an answer as JSON, and only as such: no NaN, no repeated keys, nothing that changes silently; raises RowError."""
    try:
        return read_json(text)
    except ValueError as error:
        raise RowError(ErrorKind.INVALID_JSON, f"{shown(text)} is not JSON: {error}") from None


@lru_cache(_FORMS_AT_ONCE)
def pattern_of(text: str, flags: int = 0) -> Any:
    """Compile a regular expression as Python spells it; raises ValueError. Its matches take a `timeout`, unlike those of `re`.

    `regex` understands more than `re`, hence both; and only to `regex` does `{e}` mean that the text may have errors.
    """
    try:
        re.compile(text)
        return regex.compile(_LITERAL_BRACE.sub(lambda match: match[1] or r"\{", text), flags, cache_pattern=False)
    except (re.error, regex.error, RecursionError, OverflowError) as error:
        raise ValueError(str(error)) from None


def _check_text(sampling: SamplingConfig, text: str, *, is_cut: bool) -> None:
    fault = None
    if sampling.choice is not None and text not in sampling.choice:
        fault = f"is none of sampling.choice={shown(sampling.choice)}"
    elif sampling.regex is not None:
        fault = _mismatch(sampling.regex, text, is_cut=is_cut)
    elif sampling.grammar is not None and is_cut:
        fault = "may not be all that sampling.grammar asks for"
    if fault is not None:
        raise RowError(ErrorKind.INVALID_OUTPUT, f"the answer, {shown(text)}, {fault}")


def _mismatch(pattern: str, text: str, *, is_cut: bool) -> str | None:
    """What is wrong with a text; nothing where the pattern is not in Python's dialect, and the engine saw the text's end."""
    try:
        compiled = pattern_of(pattern, regex.DOTALL)  # the dot of xgrammar takes line ends too
    except ValueError:
        return f"may not be all that sampling.regex={shown(pattern)} asks for" if is_cut else None
    try:
        if compiled.fullmatch(text, timeout=MATCH_TIMEOUT_S):
            return None
    except TimeoutError:
        return f"cannot be matched with sampling.regex={shown(pattern)} within {MATCH_TIMEOUT_S:g} seconds"
    return f"does not match sampling.regex={shown(pattern)}"


def _check_schema(schema: str, value: Any) -> None:
    try:
        error = next(_validator(schema).iter_errors(value), None)
    except re.error:
        return  # a key of patternProperties in another dialect than Python's: for the engine to judge
    except (RecursionError, ArithmeticError, TimeoutError) as problem:
        raise RowError(ErrorKind.INVALID_OUTPUT, f"the answer cannot be checked against its schema: {problem}") from None
    if error is not None:
        fault = f"at {error.json_path}: {error.message}"[:_MAX_MESSAGE]
        raise RowError(ErrorKind.INVALID_OUTPUT, f"the answer does not meet its schema {fault}")


def _validator(schema: str) -> Any:
    compiled = _compiled(schema)
    if isinstance(compiled, str):
        raise RowError(ErrorKind.INVALID_SCHEMA, f"sampling.json_schema={shown(schema)} is no JSON schema: {compiled}")
    return compiled


@lru_cache(_FORMS_AT_ONCE)
def _compiled(schema: str) -> Any:
    """The validator of a schema, or as text what is wrong with it."""
    try:
        return _compile(schema)
    except SchemaError as error:
        return f"at {error.json_path}, {error.message}"[:_MAX_MESSAGE]
    except Unresolvable as error:
        target = shown(getattr(error, "anchor", error.ref))
        return f"it refers to {target}, which is not in it, and nothing is fetched; write it out"
    except RecursionError:
        return "its references go round in circles, or over too many steps"
    except TypeError:  # referencing 0.37 over true and false beneath the $schema of an old draft
        return "it mixes dialects; write $schema at its root only"
    except ValueError as error:
        return str(error)


def _compile(schema: str) -> Any:
    value = read_json(schema).value
    if not isinstance(value, dict | bool):
        raise ValueError("it must be an object, true or false")
    if _depth(value) > _MAX_DEPTH:
        raise ValueError(f"it is nested deeper than {_MAX_DEPTH} levels")
    Draft202012Validator.check_schema(value, format_checker=_FORMATS)
    _check_within(value)
    validator = _Validator(value, registry=Registry())  # jsonschema's own registry would fetch what is not in it
    for probe in _PROBES:
        validator.is_valid(probe)
    return validator


def _check_within(schema: Any) -> None:
    """Refuse references that do not lead to a schema within this one, and keywords whose check may not end.

    `check_schema` looks at neither.
    """
    root = DRAFT202012.create_resource(schema)
    todo = [(Registry().resolver_with_root(root), root)]
    seen: set[int] = set()
    keywords: set[str] = set()
    while todo:
        resolver, one = todo.pop()
        if id(one.contents) in seen or not isinstance(one.contents, dict):
            continue
        seen.add(id(one.contents))
        keywords |= one.contents.keys()
        for key in ("$ref", "$dynamicRef"):
            if key in one.contents:
                target = resolver.lookup(one.contents[key])
                if id(target.contents) not in seen:
                    Draft202012Validator.check_schema(target.contents, format_checker=_FORMATS)
                    todo.append((target.resolver, DRAFT202012.create_resource(target.contents)))
        todo += [(resolver.in_subresource(child), child) for child in one.subresources()]
    if {"patternProperties", "unevaluatedProperties"} <= keywords:  # jsonschema matches those keys itself, without a time limit
        raise ValueError("unevaluatedProperties beside patternProperties is not checked here; write additionalProperties")


def _depth(value: Any) -> int:
    depth, level = 0, [value]
    while level := [one for one in level if isinstance(one, dict | list)]:
        depth += 1
        level = [child for one in level for child in (one.values() if isinstance(one, dict) else one)]
    return depth


def _matches_pattern(validator: Any, pattern: str, instance: Any, schema: Any) -> Iterator[ValidationError]:
    """The keyword `pattern`: jsonschema's own would raise over another dialect, and never end over some patterns."""
    if not validator.is_type(instance, "string"):
        return
    try:
        compiled = pattern_of(pattern)
    except ValueError:
        return
    if not compiled.search(instance, timeout=MATCH_TIMEOUT_S):
        yield ValidationError(f"{instance!r} does not match {pattern!r}")


def _matches_properties(validator: Any, patterns: Any, instance: Any, schema: Any) -> Iterator[ValidationError]:
    """The keyword `patternProperties`, likewise."""
    if validator.is_type(instance, "object"):
        for pattern, subschema in patterns.items():
            for key in (key for key in instance if _is_match(pattern, key)):
                yield from validator.descend(instance[key], subschema, path=key, schema_path=pattern)


def _matches_additional(validator: Any, subschema: Any, instance: Any, schema: Any) -> Iterator[ValidationError]:
    """The keyword `additionalProperties`, over the keys that neither `properties` nor `patternProperties` speaks of."""
    if validator.is_type(instance, "object"):
        named, patterns = schema.get("properties", {}), schema.get("patternProperties", {})
        others = [key for key in instance if key not in named and not any(_is_match(pattern, key) for pattern in patterns)]
        rest = {key: instance[key] for key in others}
        yield from Draft202012Validator.VALIDATORS["additionalProperties"](validator, subschema, rest, {})


def _is_match(pattern: str, key: str) -> bool:
    try:
        return pattern_of(pattern).search(key, timeout=MATCH_TIMEOUT_S) is not None
    except ValueError as error:
        raise re.error(str(error)) from None


_Validator = extend(
    Draft202012Validator,
    {"pattern": _matches_pattern, "patternProperties": _matches_properties, "additionalProperties": _matches_additional},
)
_FORMATS = FormatChecker(())
# The dialect of schemas is a third one; `regex` understands what there is in it and not in Python's.
_FORMATS.checks("regex", raises=(regex.error, RecursionError, OverflowError))(
    lambda text: not isinstance(text, str) or regex.compile(text) is not None
)
