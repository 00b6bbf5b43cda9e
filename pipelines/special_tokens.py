"""Special tokens in a row's own texts: a model would take them for the end of a turn, or for the start of another's."""

import re
from collections.abc import Iterator, Sequence
from typing import Any

from pipelines.errors import ErrorKind, Flag, RowError
from pipelines.suggest import shown

Flags = tuple[Flag, ...]

_ZERO_WIDTH_SPACE = "\u200b"


class SpecialTokens:
    """What `prompt.special_tokens` makes of the tokenizer's special tokens in a row's own texts.

    These are the prompt's text, the columns that a template reads, and the content of messages with its parts (tool results
    are such messages); names, tool calls, tools and `prompt.system` are left alone, and a token that a template puts together
    from pieces is not seen. Escaping puts a zero-width space behind a token's first character, so one of one character stays.
    """

    def __init__(self, policy: str, tokens: Sequence[str]):
        self._policy = policy
        longest_first = sorted(filter(None, tokens), key=len, reverse=True)
        is_needed = policy != "allow" and bool(longest_first)
        self._pattern = re.compile("|".join(map(re.escape, longest_first))) if is_needed else None

    def screen(self, values: dict[str, Any]) -> tuple[dict[str, Any], Flags]:
        """Apply the policy to all texts in some named values, at any depth; raises RowError (`fail`)."""
        found = next(self._found(values), None)
        if found is None:
            return values, ()
        if self._policy == "fail":
            name, token = found
            raise RowError(
                ErrorKind.SPECIAL_TOKENS,
                f"{name} contains the special token {shown(token)}; prompt.special_tokens=escape, flag or allow answers it",
            )
        return self._escaped(values) if self._policy == "escape" else values, (Flag.SPECIAL_TOKENS,)

    def _found(self, values: dict[str, Any]) -> Iterator[tuple[str, str]]:
        if self._pattern is not None:
            for name, value in values.items():
                for place, text in _texts(value, name):
                    match = self._pattern.search(text)
                    if match is not None:
                        yield place, match[0]

    def _escaped(self, value: Any) -> Any:
        if isinstance(value, dict):
            return {key: self._escaped(inner) for key, inner in value.items()}
        if isinstance(value, list):
            return [self._escaped(inner) for inner in value]
        return self._escaped_text(value) if isinstance(value, str) else value

    def _escaped_text(self, text: str) -> str:
        assert self._pattern is not None
        pieces, start = [], 0
        while match := self._pattern.search(text, start):  # from the second character on: tokens may overlap
            pieces.append(text[start : match.start() + 1])
            start = match.start() + 1
        return _ZERO_WIDTH_SPACE.join([*pieces, text[start:]])


def _texts(value: Any, name: str) -> Iterator[tuple[str, str]]:
    """Yield all texts of a value, each with its place."""
    if isinstance(value, str):
        yield name, value
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from _texts(inner, f"{name}.{key}")
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _texts(inner, f"{name}[{index}]")
