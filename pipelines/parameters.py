"""A row's own sampling parameters, merged over the run's, and the seed that it draws from."""

import json
from hashlib import blake2b
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from pipelines.config import FORMS, SamplingConfig
from pipelines.errors import ErrorKind, RowError
from pipelines.prompts import from_json, without_nulls
from pipelines.suggest import did_you_mean, shown

_MUST = {
    "tuple_type": "must be a list",
    "dict_type": "must be a mapping: {name: value}",
    "bool_type": "must be true or false",
    "int_type": "must be a whole number",
    "float_type": "must be a number",
    "string_type": "must be text",
    "string_too_short": "must not be empty",
    "too_short": "must not be empty",
}


def changes_in(value: Any, name: str) -> dict[str, Any]:
    """Return the parameters that a row sets, from a mapping or JSON text; null ones are the run's; raises RowError."""
    if isinstance(value, str):
        value = from_json(value, name, ErrorKind.INVALID_PARAMETER)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise RowError(ErrorKind.INVALID_PARAMETER, f"{name} is {shown(value)}, not a mapping of sampling parameters")
    changes: dict[str, Any] = without_nulls(value, data=("json_schema",))  # a schema may say `default: null`
    return changes


def merge(run: SamplingConfig, changes: Any, name: str) -> SamplingConfig:
    """Put what a row sets in the place of the run's parameters; the run's own object where that changes nothing.

    A form of the answer (`FORMS`) replaces the run's. Raises RowError.
    """
    changes = changes_in(changes, name)
    if not changes:
        return run
    values = dict(run)
    if any(form in changes for form in FORMS):
        values.update(dict.fromkeys(FORMS))
    if "json_schema" in changes:
        changes["json_schema"] = schema_of(changes["json_schema"], f"{name}.json_schema")
    values.update({key: _as_setting(value) for key, value in changes.items()})
    try:
        merged = SamplingConfig.model_validate(values)
    except ValidationError as error:
        raise RowError(ErrorKind.INVALID_PARAMETER, _explain(error.errors()[0], name)) from None
    return run if merged == run else merged


def schema_of(value: Any, name: str) -> str:
    """Return a JSON schema as text, from a mapping or JSON text; raises RowError."""
    try:
        text = json.dumps(value, allow_nan=False) if isinstance(value, dict) else value
    except (TypeError, ValueError) as error:
        raise RowError(ErrorKind.INVALID_SCHEMA, f"{name} is {shown(value)}, which JSON cannot hold: {error}") from None
    if not isinstance(text, str) or not isinstance(from_json(text, name, ErrorKind.INVALID_SCHEMA), dict):
        raise RowError(ErrorKind.INVALID_SCHEMA, f"{name} is {shown(value)}, not a JSON schema")
    return text


def row_seed(seed: int, row_number: int, attempt: int) -> int:
    """Return the seed of a row: the same in every run, but another one when a failed row is answered again."""
    digest = blake2b(f"{seed}:{row_number}:{attempt}".encode(), digest_size=8).digest()
    return int.from_bytes(digest) >> 1  # vLLM's seeds are below 2**63


def _as_setting(value: Any) -> Any:
    """A value as strict settings take it."""
    if isinstance(value, list):
        return tuple(value)
    if isinstance(value, float) and value.is_integer():
        return int(value)  # pandas makes a column of whole numbers one of floats where any of them is missing
    return value


def _explain(detail: ErrorDetails, name: str) -> str:
    """Say which parameter is wrong, what it was set to, and what would be right."""
    key = ".".join([name, *map(str, detail["loc"])])
    if detail["type"] == "extra_forbidden":
        return (
            f"{key}={shown(detail['input'])} is no parameter{did_you_mean(str(detail['loc'][-1]), SamplingConfig.model_fields)}"
        )
    if detail["type"] == "value_error":  # of several parameters together, and some of them may be the run's
        return f"with {name} merged in, {detail['ctx']['error']}"
    return f"{key}={shown(detail['input'])} {_MUST.get(detail['type'], detail['msg'].replace('Input should be', 'must be'))}"
