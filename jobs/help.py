"""The settings part of a job's --help, read from the shipped YAML itself."""

from pathlib import Path

from pipelines.compose import conf_folder


def settings_help(job: str) -> str:
    """List the groups with their choices, and every key: those of the default choices with their values and comments."""
    root = _root(job)
    defaults = dict(line.removeprefix("  - ").split(": ") for line in root if line.startswith("  - ") and ": " in line)
    folders = [path for path in sorted(conf_folder().iterdir()) if path.name in defaults]
    groups = {folder.name: sorted(folder.glob("*.yaml")) for folder in folders}
    names, keys, more = [], [], []
    for group, choices in groups.items():
        names.append(f"  {group:12} {', '.join(path.stem for path in choices) or 'none yet; put your own into --config-dir'}")
        shown = [line for path in choices if path.stem == defaults.get(group) for line in _key_lines(path)]
        keys += [f"  {group}.{line}" for line in shown]
        for path in choices if shown else ():
            own = [name for name in map(_name, _key_lines(path)) if name not in map(_name, shown)]
            more += [f"  {group + '=' + path.stem:18} {', '.join(own)}"] if own else []
    if not groups:
        return "\n".join(["keys (set with key=value):", *_root_keys(root)])
    return "\n".join([
        "groups (choose with group=choice):", *names,
        "\nkeys (set with key=value), here as the default choice of each group has them:", *keys, *_root_keys(root),
        "\nkeys that only other choices have:", *more,
    ])  # fmt: skip


def _root(job: str) -> list[str]:
    """The lines of a job's own YAML, those of the one that it builds on first."""
    own = (conf_folder() / f"{job}.yaml").read_text(encoding="utf-8").splitlines()
    bases = [line.removeprefix("  - ") for line in own if line.startswith("  - ") and ": " not in line]
    inherited = [line for base in bases if base != "_self_" for line in _root(base)]
    return [*inherited, *own[own.index("") :]] if inherited else own


def _key_lines(path: Path) -> list[str]:
    return [line for line in path.read_text(encoding="utf-8").splitlines() if line[:1].isalpha()]


def _name(line: str) -> str:
    return line.partition(":")[0]


def _root_keys(root: list[str]) -> list[str]:
    """The keys below the defaults list of a job's own YAML."""
    keys, section = [], ""
    for line in root[root.index("") :]:
        if line.endswith(":"):
            section = line.replace(":", ".")
        elif line.strip():
            keys.append(f"  {section if line.startswith(' ') else ''}{line.strip()}")
    return keys
