"""Render a row into a request: its text, or the messages of a conversation."""

import json
from collections.abc import Mapping
from textwrap import shorten
from typing import Any

from jinja2 import StrictUndefined, Template, TemplateError, TemplateRuntimeError, TemplateSyntaxError, meta
from jinja2.sandbox import ImmutableSandboxedEnvironment

from pipelines.config import InputConfig, PromptConfig
from pipelines.errors import ConfigError, ErrorKind, RowError
from pipelines.suggest import shown

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

    def __init__(self, prompt: PromptConfig, source: InputConfig):
        self._prompt = prompt
        self._text_column = source.prompt_column
        self._messages_column = source.messages_column
        self._template: Template | None = None
        self.columns: list[str] = [name for name in (source.prompt_column, source.messages_column) if name is not None]
        if prompt.template is not None:
            self._template, self.columns = _compile(prompt.template, prompt.template_file)

    def render(self, row: Mapping[str, Any]) -> str | list[dict[str, Any]]:
        """Return the text (`prompt.kind=raw`) or the messages (`chat`) of a row; raises RowError."""
        if self._messages_column is not None:
            messages = conversation(row.get(self._messages_column), self._messages_column)
        else:
            text = self._text(row)
            if self._prompt.kind == "raw":
                return text
            messages = [{"role": "user", "content": text}]
        if self._prompt.system is not None:
            messages = [{"role": "system", "content": self._prompt.system}, *messages]
        return messages

    def _text(self, row: Mapping[str, Any]) -> str:
        if self._template is not None:
            try:
                text: Any = self._template.render(row)
            except _NullPrinted:
                nulls = ", ".join(column for column in self.columns if row.get(column) is None) or "part of a column"
                raise RowError(ErrorKind.MISSING_VALUE, f"prompt.template prints null; null here: {nulls}") from None
            except _ROW_FAULTS as error:
                reason = shorten(str(error) or type(error).__name__, _MAX_MESSAGE, placeholder="...")
                raise RowError(ErrorKind.TEMPLATE_ERROR, f"prompt.template: {reason}") from None
            name = "prompt.template"
        else:
            name = str(self._text_column)
            text = row.get(name)
        if text is None:
            raise RowError(ErrorKind.MISSING_VALUE, f"{name} is null")
        if not isinstance(text, str):
            raise RowError(ErrorKind.INVALID_TEXT, f"{name} is {shown(text)}, not text")
        if not text.strip():
            raise RowError(ErrorKind.EMPTY_PROMPT, f"{name} is {shown(text)}: nothing but white space")
        return text


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


def conversation(value: Any, name: str) -> list[dict[str, Any]]:
    """Return messages as the chat template expects them, from a list or JSON text; raises RowError.

    Keys that are null are dropped at every depth: a Parquet struct gives each row the keys of all others.
    """
    if value is None:
        raise RowError(ErrorKind.MISSING_VALUE, f"{name} is null")
    if isinstance(value, str):
        value = _from_json(value, name)
    if not isinstance(value, list) or not value:
        raise RowError(ErrorKind.INVALID_MESSAGES, f"{name} is {shown(value)}, not a list of messages")
    messages = [_message(message, f"{name}[{index}]") for index, message in enumerate(value)]
    if not any(_says_something(message) for message in messages):
        raise RowError(ErrorKind.EMPTY_PROMPT, f"{name} is {shown(value)}: nothing but white space")
    return messages


def _from_json(text: str, name: str) -> Any:
    try:
        value = json.loads(text)
        if "\\ud" in text or "\\uD" in text:
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeError as error:
        raise RowError(ErrorKind.INVALID_TEXT, f"{name} is not Unicode text: {error}") from None
    except (ValueError, RecursionError) as error:
        raise RowError(ErrorKind.INVALID_MESSAGES, f"{name} is {shown(text)}, not JSON: {error}") from None
    return value


def _message(value: Any, name: str) -> dict[str, Any]:
    message = without_nulls(value)
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
    return message


def _says_something(message: Mapping[str, Any]) -> bool:
    content = message.get("content")
    return bool(content.strip() if isinstance(content, str) else content) or "tool_calls" in message


def without_nulls(value: Any) -> Any:
    """Drop null entries of mappings at every depth."""
    if isinstance(value, dict):
        return {key: without_nulls(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, list):
        return [without_nulls(inner) for inner in value]
    return value
