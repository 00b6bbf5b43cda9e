"""From composed settings to a typed, frozen `BatchConfig`, or to errors that say what is wrong and what would be right."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails, to_json

from pipelines.config import BatchConfig, EchoEngineConfig, Strict, VllmEngineConfig
from pipelines.errors import ConfigError
from pipelines.suggest import did_you_mean, not_set, shown

_ENGINES: dict[str, type[Strict]] = {"vllm": VllmEngineConfig, "echo": EchoEngineConfig}

_UNIONS = (["engine"], ["input", "path"])
_MUST = {
    "bool_type": "must be true or false",
    "int_type": "must be a whole number",
    "float_type": "must be a number",
    "dict_type": "must be a mapping: {name: value}",
    "model_type": "must be a group of settings; set its keys one by one",
    "string_too_short": "must not be empty",
    "too_short": "must not be empty",
}


def parse_config(values: Mapping[str, Any]) -> BatchConfig:
    """Turn composed settings into a `BatchConfig`.

    Raises ConfigError with one line for each wrong setting.
    """
    _check_engine(values.get("engine"))
    resolvers = {"prompt": _with_template_text, "model": _with_absolute_path}
    values = {key: resolvers[key](value) if key in resolvers else value for key, value in values.items()}
    try:
        return BatchConfig.model_validate_json(to_json(values))
    except ValidationError as error:
        raise ConfigError("\n".join(_explain(detail, values) for detail in error.errors())) from None


def _check_engine(engine: Any) -> None:
    """Refuse an engine under another's name here: every one of its settings would seem wrong."""
    for name, model in _ENGINES.items():
        if isinstance(engine, Mapping) and engine.get("kind", name) != name and set(engine) == set(model.model_fields):
            kind, choices = shown(engine["kind"]), " or ".join(f"engine={choice}" for choice in _ENGINES)
            raise ConfigError(f"engine.kind={kind} has the settings of engine={name}; choose by file: {choices}")


def _with_template_text(prompt: Any) -> Any:
    """Read `template_file` here, once: workers elsewhere may not see the file, and its text belongs to the run."""
    if not isinstance(prompt, Mapping) or not isinstance(prompt.get("template_file"), str):
        return prompt
    name = prompt["template_file"]
    if prompt.get("template") is not None:
        template = shown(prompt["template"])
        raise ConfigError(f"prompt.template={template} and prompt.template_file={name} are both set; set one of them to null")
    try:
        return {**prompt, "template": Path(name).expanduser().read_text(encoding="utf-8")}
    except OSError as error:
        raise ConfigError(f"prompt.template_file={name} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"prompt.template_file={name} is not UTF-8 text (byte {error.start}); save it as UTF-8") from None


def _with_absolute_path(model: Any) -> Any:
    """Make a model folder's path absolute here: workers have another working folder, and would ask the hub for it."""
    if not isinstance(model, Mapping) or not isinstance(model.get("path"), str):
        return model
    folder = Path(model["path"]).expanduser()
    return {**model, "path": str(folder.absolute())} if folder.is_dir() else model


def _explain(detail: ErrorDetails, values: Mapping[str, Any]) -> str:
    """Say which key is wrong, what it was set to, and what would be right."""
    path = _path(detail)
    key = ".".join(path)
    if detail["type"] == "extra_forbidden":
        return f"{key} is not a setting{_guess(path, values)}"
    if detail["type"] == "missing":
        return not_set(key)
    if detail["type"] == "value_error":
        return str(detail["ctx"]["error"])
    if detail["type"].startswith("union_tag"):
        return f"engine.kind={shown(values['engine'].get('kind'))} must be {' or '.join(_ENGINES)}; choose with engine=vllm"
    return f"{key}={shown(detail['input'])} {_must(detail, path)}"


def _must(detail: ErrorDetails, path: Sequence[str]) -> str:
    *groups, name = path
    if detail["type"] == "tuple_type":
        return f"must be a list: {'.'.join(path)}=[...]"
    if detail["type"] == "string_type" and isinstance(detail["input"], bool | int | float):
        example = f'{".".join(groups)}=["..."]' if name.isdigit() else f'{".".join(path)}="..."'
        return f"must be text; quote it, once for Hydra and once for the shell: '{example}'"
    return _MUST.get(detail["type"], detail["msg"].replace("Input should be", "must be").replace("a valid string", "text"))


def _path(detail: ErrorDetails) -> list[str]:
    """The keys that lead to the fault, without the names that pydantic gives to the members of a union."""
    path: list[str] = []
    is_named = False
    for part in detail["loc"]:
        if path in _UNIONS and not is_named:
            is_named = True
        else:
            path.append(str(part))
    return path


def _guess(path: list[str], values: Mapping[str, Any]) -> str:
    """What an unknown key was meant to be: one of the other engine, of another group, or the nearest of its own."""
    *groups, word = path
    engine = values.get("engine")
    chosen = _ENGINES.get(str(engine.get("kind"))) if isinstance(engine, Mapping) else None
    for name, model in _ENGINES.items():
        if groups == ["engine"] and model is not chosen and word in model.model_fields:
            return f" of this engine; it belongs to engine={name}"
    models = {group: field.annotation for group, field in BatchConfig.model_fields.items()} | {"engine": chosen}
    settings = {group: set(m.model_fields) for group, m in models.items() if isinstance(m, type) and issubclass(m, Strict)}
    elsewhere = [f"{group}.{word}" for group, names in settings.items() if word in names]
    if elsewhere:
        return f"; did you mean {' or '.join(elsewhere)}?"
    return did_you_mean(word, settings.get(groups[0], ()) if groups else BatchConfig.model_fields)
