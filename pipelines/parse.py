"""From composed settings to a typed, frozen model of them, or to errors that say what is wrong and what would be right."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin
from urllib.parse import unquote_plus

from pydantic import ValidationError
from pydantic_core import ErrorDetails, to_json

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
from pipelines.structured import check_form
from pipelines.suggest import did_you_mean, not_set, shown

_Root = TypeVar("_Root", bound=Strict)
_Job = TypeVar("_Job", bound=BatchConfig)
_MUST = {
    "bool_type": "must be true or false",
    "int_type": "must be a whole number",
    "float_type": "must be a number",
    "dict_type": "must be a mapping: {name: value}",
    "model_type": "must be a group of settings; set its keys one by one",
    "string_too_short": "must not be empty",
    "string_too_long": "must be one character",
    "too_short": "must not be empty",
}
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
    _check_choices(values, root)
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
        raise ConfigError("\n".join(_explain(detail, values, root) for detail in error.errors())) from None


def _check_choices(values: Mapping[str, Any], root: type[Strict]) -> None:
    """Refuse a choice under another's name here: every one of its settings would seem wrong."""
    for group, model in _groups(values, root).items():
        tag, choices = _choices(root.model_fields[group].annotation)
        if not choices or set(model.model_fields) <= set(values[group]):
            continue
        chosen = values[group][tag]
        owners = [f"{group}={name}" for name, other in choices.items() if set(other.model_fields) == set(values[group])]
        if owners:
            raise ConfigError(
                f"{group}.{tag}={shown(chosen)} has the settings of {' or '.join(owners)}; choose by file: {group}={chosen}"
            )


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


def _explain(detail: ErrorDetails, values: Mapping[str, Any], root: type[Strict]) -> str:
    """Say which key is wrong, what it was set to, and what would be right."""
    path, kind = _follow(detail["loc"], root)
    key = ".".join(path)
    if detail["type"] == "extra_forbidden":
        return f"{key} is not a setting{_guess(detail['loc'], values, root)}"
    if detail["type"] == "missing":
        return not_set(key)
    if detail["type"] == "value_error":
        return str(detail["ctx"]["error"])
    if detail["type"].startswith("union_tag"):
        tag, choices = _choices(kind)
        must = f"{key}.{tag}={shown(detail['input'].get(tag))} must be {' or '.join(choices)}"
        return f"{must}; choose with {key}={next(iter(choices))}" if _is_group(path) else must
    return f"{key}={shown(detail['input'])} {_must(detail, path)}"


def _must(detail: ErrorDetails, path: Sequence[str]) -> str:
    *groups, name = path
    if detail["type"] == "tuple_type":
        return f"must be a list: {'.'.join(path)}=[...]"
    if detail["type"] == "string_type" and isinstance(detail["input"], bool | int | float):
        example = f'{".".join(groups)}=["..."]' if name.isdigit() else f'{".".join(path)}="..."'
        return f"must be text; quote it, once for Hydra and once for the shell: '{example}'"
    return _MUST.get(detail["type"], detail["msg"].replace("Input should be", "must be").replace("a valid string", "text"))


def _guess(place: Sequence[str | int], values: Mapping[str, Any], root: type[Strict]) -> str:
    """What an unknown key was meant to be: one of another choice, of another group, or the nearest of its own."""
    path, model = _follow(place[:-1], root)
    word = str(place[-1])
    tag, choices = _choices(_follow(place[:-2], root)[1])
    owners = [choice for choice, other in choices.items() if word in other.model_fields]
    if owners:
        name = path[0] if _is_group(path) else tag
        return f" of this {name}; it belongs to {' or '.join(f'{name}={owner}' for owner in owners)}"
    elsewhere = [f"{group}.{word}" for group, other in _groups(values, root).items() if word in other.model_fields]
    if elsewhere:
        return f"; did you mean {' or '.join(elsewhere)}?"
    return did_you_mean(word, model.model_fields)


def _groups(values: Mapping[str, Any], root: type[Strict]) -> dict[str, type[Strict]]:
    """The groups of settings, as they were chosen."""
    groups: dict[str, type[Strict]] = {}
    for name, field in root.model_fields.items():
        given, (tag, choices) = values.get(name), _choices(field.annotation)
        model: Any = choices.get(str(given.get(tag))) if choices and isinstance(given, Mapping) else field.annotation
        if _is_model(model):
            groups[name] = model
    return groups


def _follow(place: Sequence[str | int], root: type[Strict]) -> tuple[list[str], Any]:
    """The keys on the way to a place in the settings, and the type there.

    pydantic names the member of a union that it chose as if that were a key, and users know no such key.
    """
    path: list[str] = []
    kind: Any = root
    for part in place:
        members = _members(kind)
        if len(members) > 1:
            kind = _choices(kind)[1].get(str(part))
        else:
            path.append(str(part))
            kind = _below(members[0], str(part))
    return path, kind


def _members(kind: Any) -> list[Any]:
    """The types that a value may have, without null."""
    if get_origin(kind) is Annotated:
        return _members(get_args(kind)[0])
    if get_origin(kind) in (Union, UnionType):
        return [one for member in get_args(kind) if member is not NoneType for one in _members(member)]
    return [kind]


def _choices(kind: Any) -> tuple[str, dict[str, type[Strict]]]:
    """The setting that tells the members of a union apart, which has one possible value in each, and the members by it."""
    models = [member for member in _members(kind) if _is_model(member)]
    if len(models) < 2:
        return "", {}
    literals = {
        name: get_args(field.annotation)
        for name, field in models[0].model_fields.items()
        if get_origin(field.annotation) is Literal
    }
    tag = next(name for name, values in literals.items() if len(values) == 1)
    return tag, {get_args(model.model_fields[tag].annotation)[0]: model for model in models}


def _below(kind: Any, key: str) -> Any:
    if _is_model(kind):
        return kind.model_fields[key].annotation if key in kind.model_fields else None
    return get_args(kind)[0] if get_origin(kind) is tuple else None


def _is_model(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Strict)


def _is_group(path: Sequence[str]) -> bool:
    return len(path) == 1
