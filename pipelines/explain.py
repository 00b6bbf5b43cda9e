"""What is wrong with a setting, said with its key, its value, and what would be right."""

from collections.abc import Mapping, Sequence
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic_core import ErrorDetails

from pipelines.config import Strict
from pipelines.errors import ConfigError
from pipelines.suggest import did_you_mean, not_set, shown

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


def check_choices(values: Mapping[str, Any], root: type[Strict]) -> None:
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


def explain(detail: ErrorDetails, values: Mapping[str, Any], root: type[Strict]) -> str:
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
