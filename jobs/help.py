"""What the shipped YAML says of each setting: the settings part of a job's --help, and of docs/configuration.md."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from pipelines.compose import conf_folder


@dataclass(frozen=True, slots=True)
class Root:
    """A job's own YAML."""

    base: str | None
    """The job whose settings it takes over."""
    defaults: dict[str, str]
    """The groups that it adds, and the default choice of each."""
    keys: list[str]
    """The lines of the other settings that it adds, each with its whole key."""


def settings_help(job: str) -> str:
    """List the groups with their choices, and every key: those of the default choices with their values and comments."""
    root = _with_base(read_root(job))
    folders = [path for path in sorted(conf_folder().iterdir()) if path.name in root.defaults]
    groups = {folder.name: choices_of(folder.name) for folder in folders}
    root_keys = [f"  {line}" for line in root.keys]
    names, keys, more = [], [], []
    for group, choices in groups.items():
        names.append(f"  {group:12} {', '.join(path.stem for path in choices) or 'none yet; put your own into --config-dir'}")
        shown = [line for path in choices if path.stem == root.defaults[group] for line in key_lines(path)]
        keys += [f"  {group}.{line}" for line in shown]
        for path in choices if shown else ():
            own = [name for name in map(_name, key_lines(path)) if name not in map(_name, shown)]
            more += [f"  {group + '=' + path.stem:18} {', '.join(own)}"] if own else []
    if not groups:
        return "\n".join(["keys (set with key=value):", *root_keys])
    return "\n".join([
        "groups (choose with group=choice):", *names,
        "\nkeys (set with key=value), here as the default choice of each group has them:", *keys, *root_keys,
        "\nkeys that only other choices have:", *more,
    ])  # fmt: skip


def read_root(job: str) -> Root:
    """Read what a job's own YAML adds to that of the job it builds on."""
    lines = (conf_folder() / f"{job}.yaml").read_text(encoding="utf-8").splitlines()
    entries = [line.removeprefix("  - ") for line in lines if line.startswith("  - ")]
    bases = [entry for entry in entries if ": " not in entry and entry != "_self_"]
    defaults = dict(entry.split(": ") for entry in entries if ": " in entry)
    return Root(bases[0] if bases else None, defaults, _root_keys(lines))


def choices_of(group: str) -> list[Path]:
    """The files of a group, by name."""
    return sorted((conf_folder() / group).glob("*.yaml"))


def key_lines(path: Path) -> list[str]:
    """The lines of a choice's settings: key, value and comment."""
    return [line for line in path.read_text(encoding="utf-8").splitlines() if line[:1].isalpha()]


def comments(lines: Iterable[str]) -> dict[str, str]:
    """What lines of settings say about each key; nothing where they are silent."""
    return {_name(line): line.partition(" # ")[2].strip() for line in lines}


def _with_base(root: Root) -> Root:
    if root.base is None:
        return root
    base = _with_base(read_root(root.base))
    return Root(None, {**base.defaults, **root.defaults}, [*base.keys, *root.keys])


def _name(line: str) -> str:
    return line.partition(":")[0]


def _root_keys(lines: list[str]) -> list[str]:
    """The keys below the defaults list of a job's own YAML."""
    keys, section = [], ""
    for line in lines[lines.index("") :]:
        if line.endswith(":"):
            section = line.replace(":", ".")
        elif line.strip():
            keys.append(f"{section if line.startswith(' ') else ''}{line.strip()}")
    return keys
