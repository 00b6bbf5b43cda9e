"""From the command line to one mapping of settings: the only importer of Hydra and omegaconf."""

import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from hydra import version
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.utils import create_config_search_path
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import GrammarParseError, InterpolationResolutionError, OmegaConfBaseException
from yaml import YAMLError

from pipelines.errors import ConfigError
from pipelines.suggest import did_you_mean, not_set, shown

_PACKAGE = Path(__file__).parent
_KEY = re.compile(r"(~|\+{0,2})[\w-]+([./][\w-]+)*", re.ASCII)
_REFERENCE = re.compile(r"(?<!\\)\$\{([\w.]+)\}", re.ASCII)
_YAML_REMEDY = r"in YAML, a text's own ${ is written \${"


def conf_folder() -> Path:
    """The folder of the shipped YAML: beside the package in a clone, inside it in a wheel."""
    return _PACKAGE / "conf" if (_PACKAGE / "conf").is_dir() else _PACKAGE.parent / "conf"


def compose_settings(job: str, overrides: Sequence[str], config_dir: str | None = None) -> dict[str, Any]:
    """Compose `conf/<job>.yaml` with the overrides of one command line; keys that do not exist are left to `parse_config`.

    `config_dir` is a folder of the user's own YAML in the same layout; its files come before the shipped ones.
    Raises ConfigError where an override is not one value, a choice does not exist, or a setting has no value yet.
    """
    folders = [conf_folder()] if config_dir is None else [_user_folder(config_dir), conf_folder()]
    parsed = [_parse(override) for override in overrides]
    arguments = [_argument(override, folders) for override in parsed]
    try:
        composed = _compose(job, arguments, folders)
        _refuse_null_in_text(composed, OmegaConf.to_container(composed, resolve=False))
        settings = OmegaConf.to_container(composed, resolve=True)
    except InterpolationResolutionError as error:
        raise ConfigError(_explain_interpolation(error, parsed)) from None
    except (HydraException, OmegaConfBaseException, YAMLError, ValueError) as error:
        raise ConfigError(_explain(error, folders)) from None
    if isinstance(composed.get("experiment"), DictConfig):  # the file's settings landed under its group's name
        raise ConfigError("the experiment's YAML must begin with the line '# @package _global_'")
    if missing := OmegaConf.missing_keys(composed):
        raise ConfigError("\n".join(not_set(key) for key in sorted(missing)))
    return cast("dict[str, Any]", settings)


def to_yaml(settings: dict[str, Any]) -> str:
    """Return the settings as YAML, in their own order."""
    return OmegaConf.to_yaml(DictConfig(settings))


def _user_folder(config_dir: str) -> Path:
    folder = Path(config_dir).expanduser().resolve()
    if not folder.is_dir():
        raise ConfigError(f"--config-dir={config_dir} is not a folder")
    return folder


def _parse(text: str) -> Override:
    key, equals, value = text.partition("=")
    if not _KEY.fullmatch(key) or not (equals or key.startswith("~")):
        raise ConfigError(f"{shown(text)} is not an override; write key=value, for example input.limit=100, and quote spaces")
    if not value.isascii() and any("\ud800" <= character <= "\udfff" for character in value):
        raise ConfigError(f"{key}={shown(value)} is not UTF-8 text")
    try:
        parsed: Override = OverridesParser.create().parse_override(text)
    except HydraException:
        raise ConfigError(f"{key}={shown(value)} cannot be read; {_how_to_quote(key, value)}") from None
    if parsed.is_sweep_override():
        raise ConfigError(f"{key}={shown(value)} reads as several values, and a run takes one; {_how_to_quote(key, value)}")
    try:
        DictConfig({"value": parsed.value()})  # omegaconf looks for "${" even in what Hydra saw as a quoted text
    except OmegaConfBaseException:
        inner = parsed.value()
        remedy = _how_to_quote(key, inner if isinstance(inner, str) else value)
        raise ConfigError(f"{key}={shown(value)} cannot be read; {remedy}") from None
    return parsed


def _argument(override: Override, folders: Sequence[Path]) -> str:
    """Return what Hydra is told: a group's choice as it is, any other key with `++`, since pydantic explains unknown ones."""
    group, value, text = override.key_or_group, override.value(), str(override.input_line).lstrip("+")
    if re.match(r"hydra\b", group):
        raise ConfigError(f"{text} is a setting of Hydra's own, which has no effect here")
    if override.is_delete():
        return text
    if isinstance(value, dict) or not any((folder / group).is_dir() for folder in folders):
        return f"++{text}"
    choices = value if isinstance(value, list) and value else [value]
    for choice in choices:
        if not isinstance(choice, str):
            raise ConfigError(_no_choice(group, shown(choice), folders))
    return text


def _compose(job: str, arguments: Sequence[str], folders: Sequence[Path]) -> DictConfig:
    """Do what Hydra's `compose` does; that one can only append to the search path, and the user's files must win."""
    *own, shipped = folders
    version.setbase("1.3")
    path = create_config_search_path(str(shipped))
    for folder in own:
        path.prepend("--config-dir", f"file://{folder}", anchor="main")
    composed = ConfigLoaderImpl(path).load_configuration(job, list(arguments), RunMode.RUN)
    chosen = {group: choice for group, choice in composed.hydra.runtime.choices.items() if not group.startswith("hydra/")}
    with open_dict(composed):
        del composed["hydra"]
        if chosen and not isinstance(composed.get("experiment"), DictConfig):
            composed["experiment"] = chosen.get("experiment")  # its settings lie at the root, and its name nowhere
    return composed


def _refuse_null_in_text(composed: DictConfig, value: Any) -> None:
    """A null that becomes part of a text is the word None: every night would find the run in runs/None."""
    match value:
        case dict() | list():
            for one in value.values() if isinstance(value, dict) else value:
                _refuse_null_in_text(composed, one)
        case str():
            for reference in _REFERENCE.finditer(value):
                if reference[0] != value and OmegaConf.select(composed, reference[1], default="") is None:
                    raise ConfigError(not_set(reference[1]))


def _how_to_quote(key: str, value: str) -> str:
    lines = ["a text needs quotes, once for Hydra and once for the shell:", shlex.quote(f"{key}={_hydra_quoted(value)}")]
    if items := re.fullmatch(r"\[([^\"']+)\]", value):
        quoted = ",".join(_hydra_quoted(item.strip()) for item in items[1].split(","))
        lines.append(f"{shlex.quote(f'{key}=[{quoted}]')} as a list of texts")
    if key == "prompt.template":
        lines.append("prompt.template_file=my_prompt.txt, where a file holds it, needs none")
    return "\n  ".join(lines)


def _hydra_quoted(value: str) -> str:
    """Quote a text so that Hydra gives it back unchanged: backslashes count only before a quote or before `${`."""
    value = re.sub(r"(\\*)\$\{", r"\1\1\\${", value)
    return '"' + re.sub(r'(\\*)("|\Z)', lambda found: found[1] * 2 + ("\\" if found[2] else "") + found[2], value) + '"'


def _no_choice(group: str, choice: str, folders: Sequence[Path]) -> str:
    known = {path.stem for folder in folders for path in (folder / group).glob("*.yaml")}
    return f"{group}={choice}: there is no such file{did_you_mean(choice, known)}"


def _explain(error: Exception, folders: Sequence[Path]) -> str:
    """Keep what Hydra found and drop what only its authors need."""
    message, cause = str(error), str(error.__cause__ or "").partition("\n")[0]
    if choice := re.search(r"Could not find '(.+)/([^/']*)'", message):
        return _no_choice(choice[1], choice[2], folders)
    if deleted := re.search(r"Could not delete from config. '([^']+)' does not exist", message):
        return f"~{deleted[1]}: there is no such setting to delete, or it is null"
    if isinstance(error, UnicodeDecodeError):
        return f"a file in --config-dir is not UTF-8 text: {message}"
    if isinstance(error.__cause__, GrammarParseError):
        return f"a YAML file in --config-dir cannot be read: {cause}; {_YAML_REMEDY}"
    found = " ".join(message.removeprefix("Error merging override ++").split())
    return f"{found}: {cause}" if cause else found


def _explain_interpolation(error: InterpolationResolutionError, overrides: Sequence[Override]) -> str:
    if missing := re.search(r"Missing mandatory value: (\S+)", str(error)):
        return not_set(missing[1])
    key = str(error.full_key)
    found = re.sub(r'^\w+ raised while resolving interpolation: "?(.*?)"?$', r"\1", str(error).partition("\n")[0])
    texts = [str(override.value()) for override in overrides if override.key_or_group == key]
    remedy = _how_to_quote(key, texts[-1]) if texts else _YAML_REMEDY
    return f"{key}: {found}; {remedy}"
