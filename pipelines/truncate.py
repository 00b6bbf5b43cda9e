"""Cut a prompt that is too long: tokens leave its longest text until the whole fits, and no character changes."""

from collections.abc import Callable, Sequence
from typing import Any, Literal

from pipelines.errors import ErrorKind, RowError
from pipelines.prompts import SYSTEM_ROLES, Prompt

How = Literal["truncate_left", "truncate_middle", "truncate_right"]
Spans = Sequence[tuple[int, int]]

_DIRECT_TRIES = 3  # a tokenizer merges a token or two at the cut; where that is not all, halving gets there


def truncate(
    prompt: Prompt,
    how: How,
    *,
    limit: int,
    spans: Callable[[str], Spans],
    count: Callable[[Prompt], int],
) -> tuple[Prompt, int]:
    """Return a prompt of at most `limit` tokens, and how many tokens it lost.

    Cut is the longest text of the row (of a conversation, of all messages but the system's), at the bounds of its tokens
    (`spans`, in characters), by as few as the whole prompt's number of tokens (`count`) allows. Raises RowError where that
    text's last token would have to go.
    """
    before = count(prompt)
    if before <= limit:
        return prompt, 0
    place, text = max(_texts(prompt), key=lambda found: len(found[1]), default=((), ""))
    tokens = spans(text)
    most = len(tokens) - 1
    if most < 1:
        raise RowError(ErrorKind.PROMPT_TOO_LONG, f"the prompt has {before} tokens and no text to cut; {limit} are allowed")

    def cut(num_removed: int) -> Prompt:
        shorter: Prompt = _replaced(prompt, place, _kept(text, tokens, len(tokens) - num_removed, how))
        return shorter

    best = cut(most)
    least = count(best)
    if least > limit:
        message = (
            f"the prompt has {before} tokens, {least} even where its longest text is cut to one token; {limit} are allowed"
        )
        raise RowError(ErrorKind.PROMPT_TOO_LONG, message)
    too_few, enough, guess, tries = 0, most, before - limit, 0
    while enough - too_few > 1 and least < limit:
        guess = min(max(guess, too_few + 1), enough - 1)
        candidate = cut(guess)
        num_tokens = count(candidate)
        if num_tokens <= limit:
            enough, best, least = guess, candidate, num_tokens
        else:
            too_few = guess
        tries += 1
        guess = guess + num_tokens - limit if tries < _DIRECT_TRIES else (too_few + enough) // 2
    return best, before - least


def _kept(text: str, tokens: Spans, num_kept: int, how: How) -> str:
    """The text with only so many of its tokens, at least one."""
    match how:
        case "truncate_left":
            return text[tokens[-num_kept][0] :]
        case "truncate_right":
            return text[: tokens[num_kept - 1][1]]
        case "truncate_middle":
            num_tail = num_kept // 2
            tail = text[tokens[-num_tail][0] :] if num_tail else ""
            return text[: tokens[num_kept - num_tail][0]] + tail


def _texts(prompt: Prompt) -> list[tuple[tuple[Any, ...], str]]:
    """The texts of a prompt that may be cut, and the way to each."""
    if isinstance(prompt, str):
        return [((), prompt)]
    found: list[tuple[tuple[Any, ...], str]] = []
    for index, message in enumerate(prompt):
        content = message.get("content")
        if message["role"] in SYSTEM_ROLES:
            continue
        if isinstance(content, str):
            found.append(((index, "content"), content))
        for number, part in enumerate(content if isinstance(content, list) else ()):
            if isinstance(part.get("text"), str):
                found.append(((index, "content", number, "text"), part["text"]))
    return found


def _replaced(value: Any, way: tuple[Any, ...], text: str) -> Any:
    """A copy of a value with another text at the end of a way through it."""
    if not way:
        return text
    step, *rest = way
    copy = value.copy()
    copy[step] = _replaced(value[step], tuple(rest), text)
    return copy
