"""Check the columns that a run asks for against those that its sources have."""

from collections.abc import Sequence
from dataclasses import dataclass

import pyarrow as pa

from pipelines.config import InputConfig
from pipelines.errors import ConfigError
from pipelines.readers import Outline, for_file, jsonl
from pipelines.readers.parquet import plain_type
from pipelines.schema import result_schema
from pipelines.sources import Source
from pipelines.suggest import did_you_mean

# Not every file has rows with something of their own.
_SPARSE = ("tools_column", "sampling_column", "schema_column", "expected_column")
_COLUMNS = ("id_column", "prompt_column", "messages_column", "request_column", *_SPARSE)
_REQUEST_COLUMNS = ("url", "method")  # what OpenAI's batch files have beside a request's body; other files need not


@dataclass(frozen=True, slots=True)
class Look:
    """A source, the copy that is read instead, and what is in it."""

    source: Source
    spooled: str | None
    outline: Outline


def check_columns(config: InputConfig, looks: Sequence[Look], needed: Sequence[str]) -> pa.Schema:
    """Refuse columns that are missing, doubled or change their type between files; return the carried ones.

    Files without rows have a say in nothing.
    """
    looks = [look for look in looks if look.outline.num_rows]
    sparse = {name for key in _SPARSE if (name := getattr(config, key)) is not None}
    optional = {*sparse, *(_REQUEST_COLUMNS if config.request_column is not None else ())} - {config.id_column}
    required = [name for name in needed if name not in optional]
    for look in looks:
        if for_file(config, look.source.path).format != "jsonl":  # there, each row says for itself which keys it has
            names = look.outline.columns.names
            _require(config, names, required, look.source.path)
            _refuse_doubled(config, names, [*needed, *config.carry_columns], look.source.path)
    types = _types(config, looks)
    if looks:
        wanted = [*required, *config.carry_columns, *sorted(sparse)]
        unseen = [name for name in wanted if not _is_somewhere(config, looks, name)]
        _require(config, list(types), unseen, looks[0].source.path)
    carried = pa.schema([(name, types.get(name, pa.string())) for name in dict.fromkeys(config.carry_columns) if looks])
    result_schema(carried)  # raises where a name is taken; the workers would find out after their answers
    return carried


def _types(config: InputConfig, looks: Sequence[Look]) -> dict[str, pa.DataType]:
    """The type of every column of any file. A column of nulls takes that of other files."""
    fixed = {*config.carry_columns, config.prompt_column}
    found: dict[str, tuple[pa.DataType, str]] = {}
    for look in looks:
        for field in look.outline.columns:
            here, path = plain_type(field.type), look.source.path
            known, where = found.setdefault(field.name, (here, path))
            if pa.types.is_null(known):
                found[field.name] = (here, path)
            elif field.name in fixed and here != known and not pa.types.is_null(here):
                raise ConfigError(
                    f"{_key_of(config, field.name)}: {field.name!r} is {known} in {where} and {field.type} in {path}; "
                    "write the files with one type, or leave some of them out"
                )
    return {name: known for name, (known, _) in found.items()}


def _is_somewhere(config: InputConfig, looks: Sequence[Look], name: str) -> bool:
    """Whether any file has a column; the first rows of JSON lines do not show what keys later ones have."""
    if any(name in look.outline.columns.names for look in looks):
        return True
    lines = [look.source.path for look in looks if for_file(config, look.source.path).format == "jsonl"]
    return any(jsonl.mentions(path, name) for path in lines)


def _require(config: InputConfig, names: Sequence[str], needed: Sequence[str], path: str) -> None:
    for name in needed:
        if name not in names:
            raise ConfigError(f"{_key_of(config, name)}: the column {name!r} is not in {path}{did_you_mean(name, names)}")


def _refuse_doubled(config: InputConfig, names: Sequence[str], wanted: Sequence[str], path: str) -> None:
    for name in wanted:
        if names.count(name) > 1:
            raise ConfigError(f"{_key_of(config, name)}: {path} has {names.count(name)} columns {name!r}; rename all but one")


def _key_of(config: InputConfig, column: str) -> str:
    """The setting that asks for a column."""
    for key in _COLUMNS:
        if getattr(config, key) == column:
            return f"input.{key}"
    return "input.carry_columns" if column in config.carry_columns else "prompt.template"
