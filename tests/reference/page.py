"""docs/configuration.md, from the settings' models and the YAML under conf/; what stands around the marks stays."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

import yaml

from jobs.help import choices_of, key_lines, read_root
from pipelines.compose import conf_folder
from pipelines.config import BatchConfig, EstimateConfig, HistoryConfig, ServeConfig, Strict, SubmitConfig
from tests.reference.rows import Choice, link, prose, rows, sentence, spelled
from tests.reference.types import Schema, in_words, inlined, members

PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"
JOBS: dict[str, type[Strict]] = {
    "batch": BatchConfig,
    "estimate": EstimateConfig,
    "serve": ServeConfig,
    "submit": SubmitConfig,
    "history": HistoryConfig,
}
BEGIN, END = "<!-- from here on made by `make docs` -->", "<!-- up to here -->"


def renewed(page: str) -> str:
    """Return the page with what lies between its marks made anew."""
    head, _, rest = page.partition(BEGIN)
    parts = [_contents(), *(part for job in JOBS for part in _job(job))]
    return "\n\n".join([f"{head}{BEGIN}", *parts, f"{END}{rest.partition(END)[2]}"])


def _contents() -> str:
    lines = []
    for job in JOBS:
        groups = [f"[{name}](#{name})" for name, schema in _fields(job).items() if members(schema) or choices_of(name)]
        lines.append(": ".join(filter(None, [f"- [fournee {job}](#fournee-{job})", ", ".join(groups)])))
    return "\n".join(lines)


def _fields(job: str) -> dict[str, Schema]:
    """The settings that a job adds to those of the job it builds on."""
    schema, base = JOBS[job].model_json_schema(), read_root(job).base
    known = JOBS[base].model_fields if base else {}
    return {name: inlined(one, schema.get("$defs", {})) for name, one in schema["properties"].items() if name not in known}


def _job(job: str) -> Iterator[str]:
    root, fields = read_root(job), _fields(job)
    chosen = {group: yaml.safe_load(choice) for group, choice in root.defaults.items()}
    file = conf_folder() / f"{job}.yaml"
    own = Choice.of(file, chosen | _values(file), root.keys)
    yield f"## fournee {job}"
    yield f"{prose(JOBS[job].__doc__ or '')} The defaults stand in {link(file, f'conf/{job}.yaml')}."
    if plain := {name: schema for name, schema in fields.items() if not members(schema)}:
        yield _table({"properties": plain}, "", [own])
    for name, schema in fields.items():
        if members(schema):
            default = root.defaults.get(name)
            yield from _group(name, schema, [own] if default is None else _choices(name, default))
        elif choices_of(name):
            yield f"### {name}"
            yield "\n".join(_experiment(path) for path in choices_of(name))


def _group(name: str, schema: Schema, choices: Sequence[Choice]) -> Iterator[str]:
    yield f"### {name}"
    if "description" in schema:
        yield prose(schema["description"])
    if len(choices) > 1:
        yield "\n".join(_choice(name, choice, choices) for choice in choices)
    yield _table(schema, f"{name}.", choices)


def _choices(group: str, default: str) -> list[Choice]:
    """The choices of a group, the default one first."""
    paths = sorted(choices_of(group), key=lambda path: path.stem != default)
    return [Choice.of(path, {group: _values(path)}, [f"{group}.{line}" for line in key_lines(path)]) for path in paths]


def _values(path: Path) -> dict[str, Any]:
    values: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    return values


def _choice(group: str, choice: Choice, choices: Sequence[Choice]) -> str:
    """What a choice is for, and what it sets otherwise than the default one (or the first that has the setting)."""
    firsts = {key: next(one.values[key] for one in choices if key in one.values) for key in choice.values}
    own = {key: value for key, value in choice.settings.items() if value != firsts[key]}
    name = link(choice.path, f"`{group}={choice.path.stem}`") + (", the default" if choice is choices[0] else "")
    parts = [sentence(" ".join(_head(choice.path))), _sets({key.partition(".")[2]: value for key, value in own.items()})]
    return " ".join([f"- {name}:", *filter(None, parts)])


def _experiment(path: Path) -> str:
    command, *purpose = _head(path)
    values = _values(path)
    entries = [entry.items() for entry in values.pop("defaults", []) if isinstance(entry, dict)]
    chosen = [f"{key.removeprefix('override /')}={choice}" for entry in entries for key, choice in entry]
    parts = [sentence(" ".join(purpose)), _sets(Choice.of(path, values, []).settings, chosen)]
    return " ".join([f"- {link(path, f'`experiment={path.stem}`')}: `{command}`.", *filter(None, parts)])


def _sets(values: Mapping[str, Any], chosen: Sequence[str] = ()) -> str:
    told = [*chosen, *(": ".join(filter(None, [key, spelled(value)])) for key, value in values.items())]
    return f"Sets {', '.join(f'`{one}`' for one in told)}." if told else ""


def _head(path: Path) -> list[str]:
    """The comment that a file begins with, without what Hydra reads in it."""
    lines = takewhile(lambda line: line.startswith("#"), path.read_text(encoding="utf-8").splitlines())
    return [line.removeprefix("#").strip() for line in lines if not line.startswith("# @package")]


def _table(schema: Schema, prefix: str, choices: Sequence[Choice]) -> str:
    lines = ["| setting | type | default | meaning |", "|---|---|---|---|"]
    for row in rows(schema, prefix, choices):
        of = f" of {', '.join(f'`{kind}`' for kind in row.kinds)}" if row.kinds else ""
        cells = (f"`{row.key}`{of}", in_words(row.types), row.default, row.meaning)
        lines.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    return "\n".join(lines)
