"""JSON as strict as its readers are: no NaN, no key twice, no number that they cannot hold."""

import json
import re
from math import isfinite
from typing import Any, NamedTuple

from pipelines.suggest import shown

_TOKEN = re.compile(r'("[^"\\]*(?:\\.[^"\\]*)*")|([,:])|\s+')


class Json(NamedTuple):
    """A value, and its JSON text: the numbers in that are as they were written, Python's may have fewer digits."""

    value: Any
    text: str


def read_json(text: str) -> Json:
    """Parse a text; raises ValueError."""
    try:
        value = json.loads(text, parse_constant=_finite, parse_float=_finite, object_pairs_hook=_no_repeats)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    canonical = _TOKEN.sub(_compact, text)
    canonical.encode("utf-8")  # fails over half an emoji, which an escape may have brought in
    return Json(value, canonical)


def _compact(token: re.Match[str]) -> str:
    """A token as `json.dumps(ensure_ascii=False)` would write it; numbers stay as they are."""
    if (string := token[1]) is not None:
        return json.dumps(json.loads(string), ensure_ascii=False) if "\\" in string else string
    return f"{token[2]} " if token[2] else ""


def _finite(number: str) -> float:
    value = float(number)
    if not isfinite(value):
        raise ValueError(f"{shown(number)} is a number that readers of JSON do not hold")
    return value


def _no_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        raise ValueError("a key stands twice in one object")
    return value
