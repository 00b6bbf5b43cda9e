"""From a row to its answer: the prompt, the sampling parameters, and what is made of what the model says."""

import json
import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, JsonValue, PositiveFloat, PositiveInt, model_validator
from pydantic_core import PydanticCustomError

from pipelines.config.strict import Strict, Text
from pipelines.suggest import shown


class PromptConfig(Strict):
    """How a row becomes what the model reads."""

    kind: Literal["raw", "chat"]
    """`raw` hands the text to the model as it is; `chat` wraps it in the model's chat template."""
    system: str | None
    """A system message before each conversation that brings none of its own (chat only)."""
    template: Text | None
    """A Jinja template over the row's columns that gives the text; null takes `input.prompt_column` as it is."""
    template_file: Text | None
    """A file that holds the template, for texts that are awkward to quote."""
    chat_template: Text | None
    """A chat template to use instead of the model's own (Jinja)."""
    chat_template_file: Text | None
    """A file that holds the chat template."""
    chat_template_kwargs: dict[str, JsonValue]
    """Variables for the chat template, such as `enable_thinking`."""
    max_tokens: PositiveInt | None
    """The most tokens of a prompt. null takes what `model.max_model_len` leaves room for: an answer of one token where long
    prompts fail, one of `sampling.max_tokens` where they are truncated."""
    too_long: Literal["fail", "truncate_left", "truncate_middle", "truncate_right"]
    """What to do with a longer prompt: fail the row, or cut its longest text on that side."""
    special_tokens: Literal["allow", "flag", "escape", "fail"]
    """What to do with the tokenizer's special tokens in a row's text, which the model would take for the end of a turn."""

    @model_validator(mode="after")
    def _check(self) -> "PromptConfig":
        if self.kind == "chat":
            return self
        if self.system is not None:
            raise ValueError(f"prompt.system={shown(self.system)} needs prompt.kind=chat; set that, or prompt.system=null")
        if self.chat_template_kwargs:
            variables = shown(self.chat_template_kwargs)
            raise ValueError(
                f"prompt.chat_template_kwargs={variables} needs prompt.kind=chat; set that, or prompt.chat_template_kwargs={{}}"
            )
        if self.chat_template is not None:
            key = "prompt.chat_template" if self.chat_template_file is None else "prompt.chat_template_file"
            value = shown(self.chat_template) if self.chat_template_file is None else self.chat_template_file
            raise ValueError(f"{key}={value} needs prompt.kind=chat; set that, or {key}=null")
        return self


def _as_json_text(value: Any) -> Any:
    """A schema may be written as YAML, but is kept as JSON text: the order of its properties counts."""
    if isinstance(value, str):
        return value
    if not isinstance(value, dict):
        raise PydanticCustomError("json_schema", "must be a mapping, or JSON text in quotes")
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except ValueError:
        raise PydanticCustomError("json_schema", "holds a number that JSON has no name for") from None


def _compiles(pattern: str) -> str:
    try:
        re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise PydanticCustomError("pattern", "is not a regular expression: {fault}", {"fault": str(error)}) from None
    return pattern


Pattern = Annotated[Text, AfterValidator(_compiles)]
"""A regular expression, as Python spells it."""


def _has_token_ids(bias: dict[str, float]) -> dict[str, float]:
    if not all(token.isascii() and token.isdecimal() for token in bias):
        raise PydanticCustomError("token_ids", "must have token ids for its keys, such as 50256")
    return bias


class SamplingConfig(Strict):
    """vLLM's sampling parameters, under vLLM's names, and what the answer's form must be."""

    max_tokens: PositiveInt
    min_tokens: Annotated[int, Field(ge=0)]
    temperature: Annotated[float, Field(ge=0, le=2)]
    top_p: Annotated[float, Field(gt=0, le=1)]
    top_k: Annotated[int, Field(ge=0)]
    """The most tokens to choose among; 0 considers every token."""
    min_p: Annotated[float, Field(ge=0, le=1)]
    repetition_penalty: PositiveFloat
    presence_penalty: Annotated[float, Field(ge=-2, le=2)]
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)]
    stop: tuple[Text, ...]
    stop_token_ids: tuple[Annotated[int, Field(ge=0)], ...]
    logit_bias: Annotated[dict[str, Annotated[float, Field(ge=-100, le=100)]], AfterValidator(_has_token_ids)] | None
    """What to add to the scores of tokens, by token id."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None
    """Each row draws from a seed of its own that follows from this one and the row's number; null draws anew in each run."""
    n: PositiveInt
    """Answers per row; the first is `text`, the others stand in `completions`."""
    logprobs: Annotated[int, Field(ge=0, le=20)] | None
    """Log probabilities of so many likeliest tokens at each place of the answer."""
    prompt_logprobs: Annotated[int, Field(ge=0, le=20)] | None
    """The same for the prompt."""
    ignore_eos: bool
    json_schema: Annotated[Text, BeforeValidator(_as_json_text, json_schema_input_type=dict[str, JsonValue] | Text)] | None
    """The JSON schema that the answer must meet; the answer stands in the column `parsed` too."""
    regex: Text | None
    """The regular expression that the whole answer must match."""
    choice: Annotated[tuple[Text, ...], Field(min_length=1)] | None
    """The texts of which the answer must be one."""
    grammar: Text | None
    """The grammar (EBNF, as vLLM takes it) that the answer must follow."""

    @model_validator(mode="after")
    def _check(self) -> "SamplingConfig":
        if self.min_tokens > self.max_tokens:
            raise ValueError(f"sampling.min_tokens={self.min_tokens} is above sampling.max_tokens={self.max_tokens}")
        if self.n > 1 and self.temperature == 0:
            raise ValueError(f"sampling.n={self.n} would give the same answer {self.n} times; set sampling.temperature above 0")
        forms = [f"sampling.{name}" for name in FORMS if getattr(self, name) is not None]
        if len(forms) > 1:
            raise ValueError(f"an answer has one form, but {' and '.join(forms)} are set; set all but one to null")
        return self


FORMS = ("json_schema", "regex", "choice", "grammar")
"""The sampling parameters that fix the answer's form (structured output); at most one is set."""


class RegexStep(Strict):
    """Take a part of the text."""

    kind: Literal["regex"]
    pattern: Pattern
    """A regular expression, as Python spells it; the value becomes its last group, or the whole match where it has none."""
    take: Literal["first", "last"]
    """Which match to take."""


class JsonStep(Strict):
    """Parse the text as JSON; where it holds a fenced code block, that."""

    kind: Literal["json"]


class StripReasoningStep(Strict):
    """Drop what stands before the end of the model's reasoning."""

    kind: Literal["strip_reasoning"]
    start: Text
    """What the reasoning begins with; an answer that holds it without an end fails."""
    end: Text
    """What it ends with: all up to its last place in the answer is dropped."""


class FilterStep(Strict):
    """Mark an answer that matches; the row does not fail for it."""

    kind: Literal["filter"]
    name: Text
    """What the column `filtered_by` then says."""
    pattern: Pattern | None
    """A regular expression, as Python spells it."""
    words: tuple[Text, ...]
    """Words to look for, whatever their case."""

    @model_validator(mode="after")
    def _check(self) -> "FilterStep":
        if (self.pattern is None) == (not self.words):
            raise ValueError(
                f"postprocess.steps: the filter {self.name} takes either pattern or words; give one, and null or []"
            )
        return self


class FunctionStep(Strict):
    """Call a function of your own."""

    kind: Literal["function"]
    function: Text
    """`package.module:name`; it takes the value so far and returns the next, which JSON must be able to hold."""


Step = Annotated[RegexStep | JsonStep | StripReasoningStep | FilterStep | FunctionStep, Field(discriminator="kind")]


class PostprocessConfig(Strict):
    """What is made of an answer before it is written; the result stands in the column `parsed`, as JSON text."""

    steps: tuple[Step, ...]
    """What is done with the answer, one step after the other."""
