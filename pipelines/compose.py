"""From the command line to one mapping of settings: the only importer of Hydra and omegaconf."""

import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from pipelines.errors import ConfigError
from pipelines.suggest import did_you_mean

_PACKAGE = Path(__file__).parent


def conf_folder() -> Path:
    """The folder of the shipped YAML: beside the package in a clone, inside it in a wheel."""
    return _PACKAGE / "conf" if (_PACKAGE / "conf").is_dir() else _PACKAGE.parent / "conf"


def compose_settings(job: str, overrides: Sequence[str], config_dir: str | None = None) -> dict[str, Any]:
    """Compose `conf/<job>.yaml` with the overrides of one command line.

    `config_dir` is a folder of the user's own YAML in the same layout; its files come before the shipped ones.
    Raises ConfigError where an override cannot be read, names no setting, or would start a sweep.
    """
    for override in overrides:
        _check_override(override)
    search = []
    if config_dir is not None:
        folder = Path(config_dir).expanduser().resolve()
        if not folder.is_dir():
            raise ConfigError(f"--config-dir={config_dir} is not a folder")
        search = [f"hydra.searchpath=[{_hydra_quoted('file://' + str(folder))}]"]
    try:
        with initialize_config_dir(version_base="1.3", config_dir=str(conf_folder())):
            composed = compose(config_name=job, overrides=[*search, *overrides])
            OmegaConf.resolve(composed)
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(_explain(error)) from None
    missing = OmegaConf.missing_keys(composed)
    if missing:
        key = min(missing)
        raise ConfigError(f"{key} is not set; add {key}=... to the command, or set it in your own YAML")
    return cast("dict[str, Any]", OmegaConf.to_container(composed))


def to_yaml(settings: dict[str, Any]) -> str:
    """Return the settings as YAML, in their own order."""
    return OmegaConf.to_yaml(DictConfig(settings))


def _check_override(text: str) -> None:
    try:
        parsed: Override = OverridesParser.create().parse_override(text)
    except HydraException:
        raise ConfigError(_unreadable(text)) from None
    if parsed.is_sweep_override():
        raise ConfigError(_unreadable(text))


def _unreadable(text: str) -> str:
    key, equals, value = text.partition("=")
    if not equals or not re.fullmatch(r"[+~]{0,2}[\w./@-]+", key):
        return f"{text!r} is not an override; write key=value, for example input.limit=100"
    quoted = shlex.quote(f"{key}={_hydra_quoted(value)}")
    hint = "; a long text is easier in a file: prompt.template_file=my_prompt.txt" if key.startswith("prompt.") else ""
    return f"{key}={value!r} must be quoted, once for Hydra and once for the shell: {quoted}{hint}"


def _hydra_quoted(value: str) -> str:
    """Quote a text so that Hydra gives it back unchanged (Hydra's grammar: backslashes count only before a quote)."""
    escaped = re.sub(r"(\\*)(\"|$)", lambda m: m[1] * 2 + ("\\" if m[2] else "") + m[2], value)
    return '"' + escaped.replace("${", "\\${") + '"'


def _explain(error: Exception) -> str:
    """Keep what Hydra found and drop what only its authors need."""
    message = str(error.__cause__ or error) if "Could not override" in str(error) else str(error)
    unknown = re.search(r"Could not override '([^']+)'", str(error))
    if unknown:
        return f"{unknown[1]} is not a setting; `fournee batch --help` lists them all"
    choice = re.search(r"Could not find '([^'/]+)/([^']+)'", message)
    if choice:
        folder = conf_folder() / choice[1]
        known = sorted(path.stem for path in folder.glob("*.yaml"))
        return f"{choice[1]}={choice[2]}: there is no such file{did_you_mean(choice[2], known)}"
    return message.strip()
