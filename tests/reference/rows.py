"""The rows of a table of settings: from the models what each takes and means, from the YAML what it is set to."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from jobs.help import comments
from pipelines.compose import conf_folder
from tests.reference.types import Schema, alternatives, members, tag_of

_MAX_VALUE = 120  # characters; a longer value is left to its file


@dataclass(frozen=True, slots=True)
class Choice:
    """What one YAML sets, and says of it, by whole keys; what is a mapping stands there as a whole and key by key."""

    path: Path
    values: Mapping[str, Any]
    comments: Mapping[str, str]

    @staticmethod
    def of(path: Path, values: Mapping[str, Any], lines: Iterable[str]) -> "Choice":
        """From the file's values and the lines of its settings, both by whole keys."""
        return Choice(path, dict(_by_key(values)), comments(lines))

    @property
    def settings(self) -> dict[str, Any]:
        """What it sets as it is typed: the settings of groups, and those at the root that are no groups."""
        at_root = [key for key, value in self.values.items() if "." not in key and not isinstance(value, dict)]
        return {key: value for key, value in self.values.items() if key.count(".") == 1 or key in at_root}


@dataclass(slots=True)
class Row:
    """One line of a table."""

    key: str
    meaning: str
    types: list[str] = field(default_factory=list)
    kinds: list[str] = field(default_factory=list)
    """The members of the union around it that have it, where not all have."""
    default: str = ""


def rows(schema: Schema, prefix: str, choices: Sequence[Choice]) -> list[Row]:
    """A row for each setting; members of a union share one where it means the same in them and takes the same."""
    kinds, tag = members(schema), tag_of(schema)
    found: dict[tuple[str, ...], list[Row]] = {}
    for kind, member in kinds.items():
        for name, setting in member["properties"].items():
            key, types = f"{prefix}{name}", alternatives(setting)
            meaning = _each(kinds) if name == tag else _meaning(key, setting, choices)
            identity = (key, meaning, *(one for one in types if not one.startswith("`")))
            if identity not in found:
                found[identity] = [Row(key, meaning), *_inner(setting, key, choices)]
            row = found[identity][0]
            row.types += [one for one in types if one not in row.types]
            row.kinds.append(kind)
    for row, *inner in found.values():
        row.kinds = [] if len(row.kinds) == len(kinds) else row.kinds
        row.default = "" if inner and row.types == ["mapping"] else _default(row, f"{prefix}{tag}", choices)
    tag_first = sorted(found.values(), key=lambda several: several[0].key != f"{prefix}{tag}")
    return [row for several in tag_first for row in several]


def _inner(setting: Schema, key: str, choices: Sequence[Choice]) -> list[Row]:
    """The settings within a setting that is a group, or a list of groups."""
    if members(setting):
        return rows(setting, f"{key}.", choices)
    return rows(setting["items"], f"{key}[].", choices) if members(setting.get("items", {})) else []


def _each(kinds: Mapping[str, Schema]) -> str:
    """What each kind of a union is."""
    return " ".join(f"`{kind}`: {sentence(member['description'])}" for kind, member in kinds.items())


def _meaning(key: str, setting: Schema, choices: Sequence[Choice]) -> str:
    """The docstring of the field, else the first comment in the YAML."""
    said = [setting.get("description", ""), *(choice.comments.get(key, "") for choice in choices)]
    return sentence(next((one for one in said if one), ""))


def _default(row: Row, tag: str, choices: Sequence[Choice]) -> str:
    """What the default choice sets it to, or the first choice that has it."""
    for choice in choices:
        if row.key in choice.values and (not row.kinds or choice.values[tag] in row.kinds):
            value = spelled(choice.values[row.key])
            return f"`{value}`" if value else link(choice.path, "see its file")
    return ""


def _by_key(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        yield f"{prefix}{name}", value
        if isinstance(value, dict):
            yield from _by_key(value, f"{prefix}{name}.")


def spelled(value: Any) -> str:
    """A value as YAML spells it on one line; nothing where that is too long to read here."""
    text = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, allow_unicode=True, width=2**20)
    text = text.removesuffix("...\n").strip()
    return text if len(text) <= _MAX_VALUE else ""


def sentence(text: str) -> str:
    """A docstring or a comment as a sentence."""
    text = " ".join(text.split())
    text = text[:1].upper() + text[1:] if re.match(r"[a-z]+[ ,;:']", text) else text
    return prose(text if not text or text.endswith(".") else f"{text}.")


def prose(text: str) -> str:
    """Keep Markdown from reading marks into a text, but for its code."""
    parts = re.split(r"(`[^`]*`)", text)
    return "".join(part if part.startswith("`") else re.sub(r"([<*])", r"\\\1", part) for part in parts)


def link(path: Path, text: str) -> str:
    """A link from the page to a file under conf/."""
    return f"[{text}](../{path.relative_to(conf_folder().parent)})"
