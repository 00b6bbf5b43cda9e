"""Words for error messages: what the user meant, and what was found instead."""

import json
from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any

_MAX_SHOWN = 60  # characters


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return "; did you mean x?" for the known word closest to `word`, else "; there are: a, b"."""
    known = sorted(known)
    close = get_close_matches(word, known, n=1)
    if close:
        return f"; did you mean {close[0]}?"
    return f"; there are: {', '.join(known)}" if known else ""


def not_set(key: str) -> str:
    """Return what to say about a setting that has no value."""
    return f"{key} is not set; add {key}=... to the command, or set it in your own YAML"


def shown(value: Any) -> str:
    """Return a value as YAML and JSON spell it, in one short line."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    text = text.encode("utf-8", "backslashreplace").decode()  # half an emoji cannot be written anywhere
    return text if len(text) <= _MAX_SHOWN else f"{text[: _MAX_SHOWN - 3]}..."
