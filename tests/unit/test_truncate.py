"""A prompt that is too long loses tokens of its longest text, as few as it can, and no character changes."""

import re
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelines.errors import ErrorKind, RowError
from pipelines.prompts import Prompt
from pipelines.truncate import How, truncate

HOWS: tuple[How, ...] = ("truncate_left", "truncate_middle", "truncate_right")
TOKENIZERS = {
    "words": r"\w+|\S",
    "words and what follows them": r"\w+\s*|\s+|[^\w\s]\s*",
    "pairs": r"(?s:..?)",  # merges anew across every cut at an odd place
    "runs": r"(?s:(.)\1*)",  # equal characters at both sides of a cut become one token
}


def spans_by(pattern: str) -> Callable[[str], list[tuple[int, int]]]:
    return lambda text: [match.span() for match in re.finditer(pattern, text)]


def in_bytes(text: str) -> list[tuple[int, int]]:
    """A token for each byte, as byte-level tokenizers make of rare characters: several have the span of one character."""
    return [(index, index + 1) for index, one in enumerate(text) for _ in one.encode()]


def counted(spans: Callable[[str], Any], *, trim: bool = False) -> Callable[[Prompt], int]:
    """Count tokens as a chat template makes them: three for each message, and those of its texts."""

    def count(prompt: Prompt) -> int:
        if isinstance(prompt, str):
            return len(spans(prompt))
        contents = [message.get("content", "") for message in prompt]
        texts = [text for one in contents for text in ([one] if isinstance(one, str) else [part["text"] for part in one])]
        return 3 * len(prompt) + sum(len(spans(text.strip() if trim else text)) for text in texts)

    return count


WORDS = spans_by(TOKENIZERS["words"])


def cut(prompt: Prompt, how: How, limit: int) -> tuple[Prompt, int]:
    return truncate(prompt, how, limit=limit, spans=WORDS, count=counted(WORDS))


@pytest.mark.parametrize(("how", "text"), [
    ("truncate_left", "three four, five"),
    ("truncate_right", "one two three four"),
    ("truncate_middle", "one two , five"),
])  # fmt: skip
def test_a_text_is_cut_on_the_side_that_is_asked_for(how: How, text: str) -> None:
    assert cut("one two three four, five", how, 4) == (text, 2)


@pytest.mark.parametrize("how", HOWS)
def test_a_prompt_of_exactly_the_limit_is_not_touched_and_one_more_loses_one(how: How) -> None:
    prompt = [{"role": "user", "content": "a b c d"}]
    assert cut(prompt, how, 7)[0] is prompt
    assert cut(prompt, how, 7)[1] == 0
    assert cut(prompt, how, 6)[1] == 1


def test_the_longest_text_that_is_not_the_systems_is_cut_and_the_row_is_left_as_it_was() -> None:
    parts = [{"type": "text", "text": "a b"}, {"type": "text", "text": "c d e f"}]
    prompt: list[dict[str, Any]] = [
        {"role": "system", "content": "s " * 50},
        {"role": "developer", "content": "s " * 50},
        {"role": "user", "content": "a b"},
        {"role": "user", "content": parts},
        {"role": "assistant", "tool_calls": []},
    ]
    before = repr(prompt)
    shorter, num_removed = cut(prompt, "truncate_right", counted(WORDS)(prompt) - 2)
    assert num_removed == 2
    assert shorter == [*prompt[:3], {"role": "user", "content": [parts[0], {"type": "text", "text": "c d"}]}, prompt[4]]
    assert repr(prompt) == before


@pytest.mark.parametrize(("prompt", "limit", "message"), [
    ([{"role": "system", "content": "s s s s"}, {"role": "user", "content": "a b c"}], 10,
     "the prompt has 13 tokens, 11 even where its longest text is cut to one token; 10 are allowed"),
    ([{"role": "system", "content": "s s s s"}, {"role": "assistant", "tool_calls": [{}]}], 9,
     "the prompt has 10 tokens and no text to cut; 9 are allowed"),
    ([{"role": "user", "content": "a"}], 3, "the prompt has 4 tokens and no text to cut; 3 are allowed"),
])  # fmt: skip
def test_a_prompt_whose_fixed_part_is_too_long_is_a_row_error(prompt: Prompt, limit: int, message: str) -> None:
    with pytest.raises(RowError) as caught:
        cut(prompt, "truncate_left", limit)
    assert (caught.value.kind, caught.value.message) == (ErrorKind.PROMPT_TOO_LONG, message)


def test_white_space_that_the_template_drops_is_not_taken_for_tokens_that_were_cut() -> None:
    spans = spans_by(r"\w+|\s")
    prompt = [{"role": "user", "content": "a b c" + "\n" * 1000}]
    shorter, num_removed = truncate(
        prompt, "truncate_right", limit=3 + 3, spans=spans, count=counted(spans, trim=True)
    )  # fmt: skip
    assert isinstance(shorter, list)
    assert shorter[0]["content"].startswith("a b")
    assert num_removed == 2


def is_cut_of(text: str, kept: str, how: How) -> bool:
    """Whether nothing but one piece is missing, on the side that was asked for."""
    if how == "truncate_left":
        return text.endswith(kept)
    if how == "truncate_right":
        return text.startswith(kept)
    return any(text.startswith(kept[:at]) and text.endswith(kept[at:]) for at in range(len(kept) + 1))


TEXTS = st.text("ab .é🍞\n", min_size=1, max_size=40)


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("spans", [*map(spans_by, TOKENIZERS.values()), in_bytes], ids=[*TOKENIZERS, "bytes"])
@given(text=TEXTS, limit=st.integers(1, 30), as_message=st.booleans())
def test_the_prompt_fits_and_no_character_changes(
    spans: Callable[[str], list[tuple[int, int]]], how: How, text: str, limit: int, as_message: bool
) -> None:
    count = counted(spans)
    prompt: Prompt = [{"role": "user", "content": text}] if as_message else text
    try:
        shorter, num_removed = truncate(prompt, how, limit=limit, spans=spans, count=count)
    except RowError as error:
        assert error.kind == ErrorKind.PROMPT_TOO_LONG
        assert count(prompt) > limit
        return
    kept = shorter if isinstance(shorter, str) else shorter[0]["content"]
    assert count(shorter) <= limit
    assert num_removed == count(prompt) - count(shorter)
    assert is_cut_of(text, kept, how)
    assert (kept == text) == (count(prompt) <= limit)


@pytest.mark.parametrize("how", HOWS)
@given(words=st.lists(st.sampled_from(["a", "bc", "def"]), min_size=2, max_size=60), data=st.data())
def test_no_more_is_cut_than_must_be(how: How, words: list[str], data: st.DataObject) -> None:
    limit = data.draw(st.integers(1, len(words) - 1))
    shorter, num_removed = cut(" ".join(words), how, limit)
    assert len(str(shorter).split()) == limit
    assert num_removed == len(words) - limit


def test_a_long_prompt_is_rendered_a_few_times_only() -> None:
    rendered = 0

    def count(prompt: Prompt) -> int:
        nonlocal rendered
        rendered += 1
        return counted(WORDS)(prompt)

    truncate("word " * 20_000, "truncate_middle", limit=9_000, spans=WORDS, count=count)
    assert rendered == 3
