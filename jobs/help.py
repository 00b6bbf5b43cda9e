"""The settings part of a job's --help, read from the shipped YAML itself."""

from pipelines.compose import conf_folder


def settings_help(job: str) -> str:
    """List the groups with their choices, and every key with its default and its comment."""
    groups = [path for path in sorted(conf_folder().iterdir()) if path.is_dir()]
    lines = ["groups (choose with group=choice):"]
    for group in groups:
        choices = ", ".join(sorted(path.stem for path in group.glob("*.yaml")))
        lines.append(f"  {group.name:12} {choices or 'none yet; put your own into --config-dir'}")
    lines.append("\nkeys (set with key=value), here as the default choice of each group has them:")
    root = (conf_folder() / f"{job}.yaml").read_text(encoding="utf-8").splitlines()
    defaults = dict(line.removeprefix("  - ").split(": ") for line in root if line.startswith("  - ") and ": " in line)
    for group in groups:
        chosen = conf_folder() / group.name / f"{defaults.get(group.name, '')}.yaml"
        if chosen.is_file():
            lines += [
                f"  {group.name}.{line}" for line in chosen.read_text(encoding="utf-8").splitlines() if line[:1].isalpha()
            ]
    section = ""
    for line in root[root.index("") :]:
        if line.endswith(":"):
            section = line.replace(":", ".")
        elif line.strip():
            lines.append(f"  {section if line.startswith(' ') else ''}{line.strip()}")
    return "\n".join(lines)
