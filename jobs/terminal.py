"""Show texts from anywhere on a terminal: on one line, shortened, with nothing in them that a terminal would obey."""

import re
from collections.abc import Iterable, Mapping
from difflib import SequenceMatcher
from unicodedata import category

from rich.console import Console
from rich.table import Table
from rich.text import Text

_SHOWN = 200  # characters
_LOG_WIDTH = 160
_BEFORE = 40  # characters before the first difference


def one_line(text: str, most: int = _SHOWN) -> str:
    """Shorten a text, and spell out what is not printable: line ends, control characters, invisible marks."""
    cut = f"{text[:most]}..." if len(text) > most else text
    return "".join(_printable(character) for character in cut)


def inline_diff(before: str, after: str) -> Text:
    """Both texts in one, from a little before their first difference: [-only the first has this-] {+only the second+}."""
    same = next((i for i, (a, b) in enumerate(zip(before, after, strict=False)) if a != b), min(len(before), len(after)))
    start = max(0, same - _BEFORE)
    old, new = (re.split(r"(\s+)", text[start : start + _SHOWN]) for text in (before, after))
    shown = Text("..." if start else "")
    for operation, i, j, k, m in SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
        if operation == "equal":
            shown.append(_joined(old[i:j]))
        if operation in ("delete", "replace"):
            shown.append(f"[-{_joined(old[i:j])}-]", style="red")
        if operation in ("insert", "replace"):
            shown.append(f"{{+{_joined(new[k:m])}+}}", style="green")
    return shown.append("..." if max(len(before), len(after)) > start + _SHOWN else "")


def facts_table(title: str, lines: Mapping[str, str]) -> Table:
    """A name and a value a line; empty values are left out."""
    table = Table(title=Text(title), show_header=False, title_justify="left")
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, value in lines.items():
        if value:
            add_row(table, name, value)
    return table


def rows_table(title: str, *columns: str) -> Table:
    """An empty table for `add_row`."""
    table = Table(title=Text(title), title_justify="left")
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def add_row(table: Table, *cells: str | Text) -> None:
    """Add a line of plain texts: what rows hold is no markup."""
    table.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in cells))


def show_table(console: Console, table: Table) -> None:
    """Print a table; where no terminal limits it, as in a scheduler's log, so wide that no number is broken."""
    if not console.is_terminal:
        console.width = max(console.width, _LOG_WIDTH)
    console.print(table)


def _joined(words: Iterable[str]) -> str:
    return one_line("".join(words))


def _printable(character: str) -> str:
    if character.isprintable():
        return character
    return " " if category(character) == "Zs" else character.encode("unicode_escape").decode()  # Zs: all kinds of spaces
