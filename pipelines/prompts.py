"""Render a row into a request: its text, or the messages of a conversation."""

import json
from collections.abc import Mapping
from typing import Any

from jinja2 import StrictUndefined, TemplateError, meta
from jinja2.sandbox import ImmutableSandboxedEnvironment

from pipelines.config import InputConfig, PromptConfig
from pipelines.errors import ConfigError, ErrorKind, RowError

_JINJA = ImmutableSandboxedEnvironment(undefined=StrictUndefined, keep_trailing_newline=True)


class Renderer:
    """Turns rows into prompts. Raises ConfigError where the template is not Jinja."""

    def __init__(self, prompt: PromptConfig, source: InputConfig):
        self._prompt = prompt
        self._text_column = source.prompt_column
        self._messages_column = source.messages_column
        self._template = None
        self.columns: list[str] = [name for name in (source.prompt_column, source.messages_column) if name is not None]
        if prompt.template is not None:
            try:
                self._template = _JINJA.from_string(prompt.template)
                self.columns = sorted(meta.find_undeclared_variables(_JINJA.parse(prompt.template)))
            except TemplateError as error:
                raise ConfigError(f"prompt.template is not a Jinja template: {error}") from None

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
            except (TemplateError, TypeError, ValueError, LookupError, ArithmeticError, AttributeError) as error:
                raise RowError(ErrorKind.TEMPLATE_ERROR, f"prompt.template: {error}") from None
            name = "prompt.template"
        else:
            name = str(self._text_column)
            text = row.get(name)
        if text is None:
            raise RowError(ErrorKind.MISSING_VALUE, f"{name} is null")
        if not isinstance(text, str):
            raise RowError(ErrorKind.INVALID_TEXT, f"{name} is {_shown(text)}, not text")
        if not text.strip():
            raise RowError(ErrorKind.EMPTY_PROMPT, f"{name} is {_shown(text)}: nothing but white space")
        return text


def conversation(value: Any, name: str) -> list[dict[str, Any]]:
    """Return messages as the chat template expects them, from a list or JSON text; raises RowError.

    Keys that are null are dropped at every depth: a Parquet struct gives each row the keys of all others.
    """
    if value is None:
        raise RowError(ErrorKind.MISSING_VALUE, f"{name} is null")
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise RowError(ErrorKind.INVALID_MESSAGES, f"{name} is not JSON: {error}") from None
    if not isinstance(value, list) or not value:
        raise RowError(ErrorKind.INVALID_MESSAGES, f"{name} is {_shown(value)}, not a list of messages")
    return [_message(message, f"{name}[{index}]") for index, message in enumerate(value)]


def _message(value: Any, name: str) -> dict[str, Any]:
    message = without_nulls(value)
    if not isinstance(message, dict):
        raise RowError(ErrorKind.INVALID_MESSAGES, f"{name} is {_shown(value)}, not a message")
    if not isinstance(message.get("role"), str):
        raise RowError(ErrorKind.INVALID_MESSAGES, f"{name}.role is {_shown(message.get('role'))}, not text")
    content = message.get("content")
    if content is None and not message.get("tool_calls"):
        raise RowError(ErrorKind.INVALID_MESSAGES, f"{name}.content is null")
    if content is not None and not isinstance(content, str | list):
        raise RowError(ErrorKind.INVALID_MESSAGES, f"{name}.content is {_shown(content)}, not text or a list of parts")
    return message


def without_nulls(value: Any) -> Any:
    """Drop null entries of mappings at every depth."""
    if isinstance(value, dict):
        return {key: without_nulls(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, list):
        return [without_nulls(inner) for inner in value]
    return value


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
