"""What the settings' models take, in words, from their JSON schema: it is what pydantic says of itself."""

import re
from collections.abc import Iterable
from typing import Any

Schema = dict[str, Any]
_NULL = "null"
_LIMITS = {"exclusiveMinimum": "above", "minimum": "from", "maximum": "up to", "exclusiveMaximum": "below"}


def inlined(node: Any, definitions: Schema) -> Any:
    """Put each definition where it is referred to."""
    if isinstance(node, list):
        return [inlined(one, definitions) for one in node]
    if not isinstance(node, dict):
        return node
    own = {key: inlined(value, definitions) for key, value in node.items() if key not in ("$ref", "$defs")}
    if "$ref" not in node:
        return own
    return inlined(definitions[node["$ref"].rpartition("/")[2]], definitions) | own


def members(node: Schema) -> dict[str, Schema]:
    """The groups of settings that may stand here, each by its kind; a single one has none, and a plain value no members."""
    if "properties" in node:
        return {"": node}
    tag = tag_of(node)
    return {one["properties"][tag]["const"]: one for one in node["oneOf"]} if tag else {}


def tag_of(node: Schema) -> str | None:
    """The setting that tells the members of a union apart."""
    tag: str | None = node.get("discriminator", {}).get("propertyName")
    return tag


def alternatives(node: Schema) -> list[str]:
    """What a value may be: words that stand for themselves in backticks, kinds of values as they are."""
    if several := node.get("anyOf", node.get("oneOf")):
        return [one for each in several for one in alternatives(each)]
    if node.get("type") == "boolean":
        return ["`true`", "`false`"]
    if "const" in node or "enum" in node:
        return [f"`{value}`" for value in node.get("enum", [node.get("const")])]
    return [_kind(node)]


def _kind(node: Schema) -> str:
    match node.get("type"):
        case "string":
            text = "one character" if node.get("maxLength") == 1 else "text"
            return "date as YYYY-MM-DD" if node.get("format") == "date" else text
        case "integer" | "number" as kind:
            limits = [f" {word} {node[limit]}" for limit, word in _LIMITS.items() if limit in node]
            return f"{'whole ' if kind == 'integer' else ''}number{''.join(limits)}"
        case "array":
            return f"list of {_plural(node['items'])}"
        case "object":
            inner = node.get("additionalProperties")
            return f"mapping to {_plural(inner)}" if isinstance(inner, dict) and inner else "mapping"
        case kind:
            return _NULL if kind == "null" else "any value"


def in_words(types: Iterable[str]) -> str:
    """Join alternatives: "`a | b`, text or null"."""
    words = [one.strip("`") for one in types if one.startswith("`")]
    kinds = [one for one in types if not one.startswith("`") and one != _NULL]
    *first, last = [*([f"`{' | '.join(words)}`"] if words else []), *kinds, *([_NULL] if _NULL in types else [])]
    return f"{', '.join(first)} or {last}" if first else last


def _plural(node: Schema) -> str:
    if members(node):
        return "mappings"
    return re.sub(r"\b(text|number)\b", r"\1s", in_words(alternatives(node)))
