"""Render a row into a prompt: a text, or the messages of a conversation, and the tools that go with it."""

import json
from collections.abc import Collection, Mapping, Sequence
from textwrap import shorten
from typing import Any

from jinja2 import StrictUndefined, Template, TemplateError, TemplateRuntimeError, TemplateSyntaxError, meta
from jinja2.sandbox import ImmutableSandboxedEnvironment

from pipelines.config import InputConfig, PromptConfig
from pipelines.errors import ConfigError, ErrorKind, RowError
from pipelines.special_tokens import Flags, SpecialTokens
from pipelines.suggest import shown

Prompt = str | list[dict[str, Any]]

SYSTEM_ROLES = ("system", "developer")
_DATA = ("arguments", "parameters")  # of a tool call and of a tool: what is below them is the user's own
_MAX_MESSAGE = 200  # characters: what Jinja says may quote the row
_ROW_FAULTS = (TemplateError, TypeError, ValueError, LookupError, ArithmeticError, AttributeError, RecursionError, MemoryError)


class _NullPrinted(TemplateRuntimeError):
    """The template would write the word None into the prompt."""


def _not_null(value: Any) -> Any:
    if value is None:
        raise _NullPrinted
    return value


_JINJA = ImmutableSandboxedEnvironment(undefined=StrictUndefined, keep_trailing_newline=True, finalize=_not_null)


class Renderer:
    """Turns rows into prompts. Raises ConfigError where the template is not Jinja."""

    def __init__(self, prompt: PromptConfig, source: InputConfig, special_tokens: Sequence[str] = ()):
        self._prompt = prompt
        self._special_tokens = SpecialTokens(prompt.special_tokens, special_tokens)
        self._text_column = source.prompt_column
        self._messages_column = source.messages_column
        self._template: Template | None = None
        self.columns: list[str] = [name for name in (source.prompt_column, source.messages_column) if name is not None]
        if prompt.template is not None:
            self._template, self.columns = _compile(prompt.template, prompt.template_file)

    def render(self, row: Mapping[str, Any]) -> tuple[Prompt, Flags]:
        """Return the text (`prompt.kind=raw`) or the messages (`chat`) of a row; raises RowError."""
        if self._messages_column is not None:
            return self.complete(conversation(row.get(self._messages_column), self._messages_column), self._messages_column)
        text, flags = self._text(row)
        return (text if self._prompt.kind == "raw" else self._with_system([{"role": "user", "content": text}])), flags

    def complete(self, prompt: Prompt, name: str) -> tuple[Prompt, Flags]:
        """Screen what a row says for special tokens, and put `prompt.system` before it; raises RowError."""
        if isinstance(prompt, str):
            _check_text(prompt, name)
            texts, flags = self._special_tokens.screen({name: prompt})
            return texts[name], flags
        contents = {f"{name}[{index}].content": one["content"] for index, one in enumerate(prompt) if "content" in one}
        contents, flags = self._special_tokens.screen(contents)
        screened = iter(contents.values())
        messages = [{**one, "content": next(screened)} if "content" in one else one for one in prompt]
        return self._with_system(messages), flags

    def _with_system(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        if self._prompt.system is None or messages[0]["role"] in SYSTEM_ROLES:
            return messages
        return [{"role": "system", "content": self._prompt.system}, *messages]

    def _text(self, row: Mapping[str, Any]) -> tuple[str, Flags]:
        # A template's own special tokens are meant, so the columns are screened and not what it makes of them.
        values, flags = self._special_tokens.screen({name: row[name] for name in self.columns if name in row})
        name = "prompt.template" if self._template is not None else str(self._text_column)
        text: Any = values.get(name) if self._template is None else _fill(self._template, values, self.columns)
        _check_text(text, name)
        return text, flags


def _check_text(text: Any, name: str) -> None:
    if text is None:
        raise RowError(ErrorKind.MISSING_VALUE, f"{name} is null")
    if not isinstance(text, str):
        raise RowError(ErrorKind.INVALID_TEXT, f"{name} is {shown(text)}, not text")
    if not text.strip():
        raise RowError(ErrorKind.EMPTY_PROMPT, f"{name} is {shown(text)}: nothing but white space")


def _compile(text: str, file: str | None) -> tuple[Template, list[str]]:
    """Return a template and the columns that it reads."""
    origin = f"prompt.template_file={file}" if file is not None else f"prompt.template={shown(text)}"
    try:
        template, parsed = _JINJA.from_string(text), _JINJA.parse(text)
    except TemplateSyntaxError as error:
        raise ConfigError(f"{origin} is not a Jinja template: {error.message} (line {error.lineno})") from None
    if list(meta.find_referenced_templates(parsed)):
        raise ConfigError(f"{origin} includes, imports or extends another template; write it as one text")
    return template, sorted(meta.find_undeclared_variables(parsed))


def _fill(template: Template, values: Mapping[str, Any], columns: Sequence[str]) -> str:
    try:
        return template.render(values)
    except _NullPrinted:
        nulls = ", ".join(column for column in columns if values.get(column) is None) or "part of a column"
        raise RowError(ErrorKind.MISSING_VALUE, f"prompt.template prints null; null here: {nulls}") from None
    except _ROW_FAULTS as error:
        reason = shorten(str(error) or type(error).__name__, _MAX_MESSAGE, placeholder="...")
        raise RowError(ErrorKind.TEMPLATE_ERROR, f"prompt.template: {reason}") from None


def conversation(value: Any, name: str) -> list[dict[str, Any]]:
    """Return messages as the chat template expects them, from a list or JSON text; raises RowError.

    Keys that are null are the same as keys that are absent, but for what is inside a tool call's `arguments`: that is data.
    """
    if value is None:
        raise RowError(ErrorKind.MISSING_VALUE, f"{name} is null")
    if isinstance(value, str):
        value = from_json(value, name, ErrorKind.INVALID_MESSAGES)
    if not isinstance(value, list) or not value:
        raise RowError(ErrorKind.INVALID_MESSAGES, f"{name} is {shown(value)}, not a list of messages")
    messages = [_message(message, f"{name}[{index}]") for index, message in enumerate(value)]
    if not any(_says_something(message) for message in messages):
        raise RowError(ErrorKind.EMPTY_PROMPT, f"{name} is {shown(value)}: nothing but white space")
    return messages


def _message(value: Any, name: str) -> dict[str, Any]:
    message = without_nulls(value, data=_DATA)
    if not isinstance(message, dict):
        raise RowError(ErrorKind.INVALID_MESSAGES, f"{name} is {shown(value)}, not a message")
    if not isinstance(message.get("role"), str):
        raise RowError(ErrorKind.INVALID_MESSAGES, f"{name}.role is {shown(message.get('role'))}, not text")
    if not message.get("tool_calls"):
        message.pop("tool_calls", None)  # some templates write a tool block wherever the key is
    content = message.get("content")
    if content is None and "tool_calls" not in message:
        raise RowError(ErrorKind.INVALID_MESSAGES, f"{name}.content is null")
    if content is not None and not isinstance(content, str | list):
        raise RowError(ErrorKind.INVALID_MESSAGES, f"{name}.content is {shown(content)}, not text or a list of parts")
    for index, part in enumerate(content if isinstance(content, list) else ()):
        _check_part(part, f"{name}.content[{index}]")
    return message


def _check_part(part: Any, name: str) -> None:
    if not isinstance(part, dict):
        raise RowError(ErrorKind.INVALID_MESSAGES, f"{name} is {shown(part)}, not a part: {{type, text}}")
    if part.get("type") == "text" and not isinstance(part.get("text"), str):
        raise RowError(ErrorKind.INVALID_MESSAGES, f"{name}.text is {shown(part.get('text'))}, not text")


def _says_something(message: Mapping[str, Any]) -> bool:
    content = message.get("content", "")
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    return "tool_calls" in message or any(part.get("type") != "text" or part["text"].strip() for part in parts)


def tools_of(value: Any, name: str) -> list[dict[str, Any]] | None:
    """Return the tools that a row offers to the model, from a list or JSON text; None for none; raises RowError.

    Keys that are null are the same as keys that are absent, but for what is inside a tool's `parameters`: that is data.
    """
    if isinstance(value, str):
        value = from_json(value, name, ErrorKind.INVALID_REQUEST)
    if value is None:
        return None
    if not isinstance(value, list):
        raise RowError(ErrorKind.INVALID_REQUEST, f"{name} is {shown(value)}, not a list of tools")
    for index, tool in enumerate(value):
        _check_tool(tool, f"{name}[{index}]")
    return [without_nulls(tool, data=_DATA) for tool in value] or None


def _check_tool(tool: Any, name: str) -> None:
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(function, dict):
        raise RowError(ErrorKind.INVALID_REQUEST, f"{name} is {shown(tool)}, not a tool: {{type: function, function: {{...}}}}")
    if not isinstance(function.get("name"), str):
        raise RowError(ErrorKind.INVALID_REQUEST, f"{name}.function.name is {shown(function.get('name'))}, not text")
    if not isinstance(function.get("parameters"), dict | None):
        shown_parameters = shown(function["parameters"])
        raise RowError(ErrorKind.INVALID_REQUEST, f"{name}.function.parameters is {shown_parameters}, not a JSON schema")


def from_json(text: str, name: str, kind: ErrorKind) -> Any:
    """Decode a row's JSON text; raises RowError of a kind."""
    try:
        value = json.loads(text)
        if "\\ud" in text or "\\uD" in text:
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeError as error:
        raise RowError(ErrorKind.INVALID_TEXT, f"{name} is not Unicode text: {error}") from None
    except (ValueError, RecursionError) as error:
        raise RowError(kind, f"{name} is {shown(text)}, not JSON: {error}") from None
    return value


def without_nulls(value: Any, *, data: Collection[str] = ()) -> Any:
    """Drop null entries of mappings at every depth, but not inside the values of the keys in `data`."""
    if isinstance(value, dict):
        return {
            key: inner if key in data else without_nulls(inner, data=data) for key, inner in value.items() if inner is not None
        }
    if isinstance(value, list):
        return [without_nulls(inner, data=data) for inner in value]
    return value
