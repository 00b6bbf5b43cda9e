"""From composed settings to a typed, frozen model of them, or to errors that say what is wrong and what would be right."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import unquote_plus

from pydantic import ValidationError
from pydantic_core import to_json

from pipelines.config import (
    BatchConfig,
    EstimateConfig,
    HistoryConfig,
    InputConfig,
    SamplingConfig,
    ServeConfig,
    SqlInput,
    Strict,
    SubmitConfig,
)
from pipelines.errors import ConfigError, RowError
from pipelines.explain import check_choices, explain
from pipelines.structured import check_form
from pipelines.suggest import shown

_Root = TypeVar("_Root", bound=Strict)
_Job = TypeVar("_Job", bound=BatchConfig)
# Before the host as SQLAlchemy finds it there (urllib does not, where it holds a /, ? or #), or among the options.
_PASSWORD = re.compile(r"://[^:/]*:[^@]*@|(?:passw|pwd|token|secret)[^=&;]*=", re.IGNORECASE)


def parse_config(values: Mapping[str, Any]) -> BatchConfig:
    """Turn composed settings into a `BatchConfig`.

    Raises ConfigError with one line for each wrong setting.
    """
    return _parsed(values, BatchConfig)


def parse_estimate(values: Mapping[str, Any]) -> EstimateConfig:
    """Turn composed settings into an `EstimateConfig`; raises like `parse_config`."""
    return _parsed(values, EstimateConfig)


def parse_serve(values: Mapping[str, Any]) -> ServeConfig:
    """Turn composed settings into a `ServeConfig`; raises like `parse_config`."""
    return _parsed(values, ServeConfig)


def _parsed(values: Mapping[str, Any], root: type[_Job]) -> _Job:
    check_choices(values, root)
    resolvers = {"prompt": _with_templates, "model": _with_absolute_path}
    values = {key: resolvers[key](value) if key in resolvers else value for key, value in values.items()}
    config = _validated(values, root)
    _check_form(config.sampling)
    _check_connection(config.input)
    return config


def parse_submit(values: Mapping[str, Any]) -> SubmitConfig:
    """Turn composed settings into a `SubmitConfig`; raises like `parse_config`."""
    return _validated(values, SubmitConfig)


def parse_history(values: Mapping[str, Any]) -> HistoryConfig:
    """Turn composed settings into a `HistoryConfig`; raises like `parse_config`."""
    return _validated(values, HistoryConfig)


def _validated(values: Mapping[str, Any], root: type[_Root]) -> _Root:
    try:
        return root.model_validate_json(to_json(values))
    except ValidationError as error:
        raise ConfigError("\n".join(explain(detail, values, root) for detail in error.errors())) from None


def _with_templates(prompt: Any) -> Any:
    """Read templates from files here, once: workers elsewhere may not see the files, and the texts belong to the run."""
    if not isinstance(prompt, Mapping):
        return prompt
    named = [name for name in ("template", "chat_template") if isinstance(prompt.get(f"{name}_file"), str)]
    return {**prompt, **{name: _text_of_file(prompt, name) for name in named}}


def _text_of_file(prompt: Mapping[str, Any], name: str) -> str:
    file = prompt[f"{name}_file"]
    if prompt.get(name) is not None:
        text = shown(prompt[name])
        raise ConfigError(f"prompt.{name}={text} and prompt.{name}_file={file} are both set; set one of them to null")
    try:
        return Path(file).expanduser().read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"prompt.{name}_file={file} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"prompt.{name}_file={file} is not UTF-8 text (byte {error.start}); save it as UTF-8") from None


def _with_absolute_path(model: Any) -> Any:
    """Make a model folder's path absolute here: workers have another working folder, and would ask the hub for it."""
    if not isinstance(model, Mapping) or not isinstance(model.get("path"), str):
        return model
    folder = Path(model["path"]).expanduser()
    return {**model, "path": str(folder.absolute())} if folder.is_dir() else model


def _check_form(sampling: SamplingConfig) -> None:
    """Not for `SamplingConfig` to do: where a row brings a form of its own, a fault in it is of another kind."""
    try:
        check_form(sampling)
    except RowError as error:
        raise ConfigError(error.message) from None


def _check_connection(source: InputConfig) -> None:
    """Refuse a password without showing it: the settings are printed, and kept in the run's record."""
    if isinstance(source, SqlInput) and _PASSWORD.search(unquote_plus(source.connection)):
        raise ConfigError(
            "input.connection holds a password, and would be kept in the run's record; "
            "put the URL into an environment variable and set input.connection=env:NAME"
        )
