"""Every YAML under conf/ goes through the real loader, holds every setting of its group, and says what each means."""

import re
import shlex
from itertools import groupby, zip_longest
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipelines.compose import compose_settings, conf_folder
from pipelines.config import (
    BatchConfig,
    CsvInput,
    DeltaInput,
    EchoEngineConfig,
    EstimateConfig,
    FilesInput,
    HistoryConfig,
    HuggingFaceInput,
    IcebergInput,
    JsonlInput,
    LanceInput,
    ParquetInput,
    ServeConfig,
    SqlInput,
    Strict,
    SubmitConfig,
    VllmEngineConfig,
)
from pipelines.parse import parse_config, parse_estimate, parse_history, parse_serve, parse_submit

# One YAML per job, and what its settings become.
ROOTS: dict[str, type[Strict]] = {
    "batch": BatchConfig,
    "estimate": EstimateConfig,
    "history": HistoryConfig,
    "serve": ServeConfig,
    "submit": SubmitConfig,
}
COMMENT_COLUMN, MAX_LINE = 32, 128
# Groups whose choices have settings of their own: the setting that says which, and what they become by its value.
UNIONS: dict[str, tuple[str, dict[str, type[Strict]]]] = {
    "engine": ("kind", {"vllm": VllmEngineConfig, "echo": EchoEngineConfig}),
    "input": ("format", {
        "parquet": ParquetInput, "jsonl": JsonlInput, "csv": CsvInput, "files": FilesInput,
        "huggingface": HuggingFaceInput, "sql": SqlInput,
        "delta": DeltaInput, "iceberg": IcebergInput, "lance": LanceInput,
    }),
}  # fmt: skip
# What a choice cannot know: the values behind its `???`, and what must go with it.
NEEDS = {
    "input.path": ["input.path=rows.jsonl"],
    "input.query": ["input.query='select * from t order by id'"],
    "input.connection": ["input.connection=env:DATABASE_URL"],
    "input.table": ["input.table=space.name"],
    "output.path": ["output.path=s3://bucket/run"],
    "prompt.template_file": ["prompt.template_file={template}", "input.prompt_column=null"],
}


def choices() -> list[tuple[str, str]]:
    paths = sorted(conf_folder().glob("*/*.yaml"))
    return [(path.parent.name, path.stem) for path in paths if path.parent.name != "experiment"]


def rounds() -> list[dict[str, str]]:
    """Every choice in as few commands as there are: the first of each group, the second of each, and so on."""
    groups = [list(pairs) for _, pairs in groupby(choices(), key=lambda pair: pair[0])]
    return [dict(pair for pair in pairs if pair is not None) for pairs in zip_longest(*groups)]


def settings_of(model: Any) -> set[str]:
    return set(model.model_fields)


def model_of(group: str, values: dict[str, Any]) -> Any:
    if group not in UNIONS:
        return BatchConfig.model_fields[group].annotation
    tag, models = UNIONS[group]
    return models[values[tag]]


def values_in(path: Path) -> dict[str, Any]:
    values: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    return values


@pytest.fixture
def template(tmp_path: Path) -> Path:
    path = tmp_path / "template.txt"
    path.write_text("Translate: {{ text }}", encoding="utf-8")
    return path


def test_every_file_is_the_root_of_a_job_or_a_choice_of_a_group() -> None:
    groups = set(BatchConfig.model_fields)
    for path in conf_folder().rglob("*"):
        *parents, name = path.relative_to(conf_folder()).parts
        if path.is_dir():
            assert not parents and name in groups, f"{name} is no group of settings"
        elif parents:
            assert path.suffix == ".yaml", f"{name} is not YAML"
        else:
            assert path.suffix == ".yaml" and path.stem in ROOTS, f"{name} is no job's root"


@pytest.mark.parametrize("chosen", rounds())
def test_every_choice_composes_and_parses(chosen: dict[str, str], template: Path) -> None:
    overrides = [f"{group}={choice}" for group, choice in chosen.items()]
    for group, choice in chosen.items():
        values = values_in(conf_folder() / group / f"{choice}.yaml")
        needs = [NEEDS[f"{group}.{key}"] for key, value in values.items() if value == "???"]
        overrides += [override.format(template=template) for need in needs for override in need]
    config = parse_config(compose_settings("batch", overrides))
    for group, choice in chosen.items():
        values = values_in(conf_folder() / group / f"{choice}.yaml")
        assert isinstance(getattr(config, group), model_of(group, values))


@pytest.mark.parametrize("root", ROOTS)
def test_the_defaults_of_a_job_need_no_override(root: str) -> None:
    parsers = {
        "batch": parse_config, "estimate": parse_estimate, "history": parse_history, "serve": parse_serve,
        "submit": parse_submit,
    }  # fmt: skip
    assert isinstance(parsers[root](compose_settings(root, [])), ROOTS[root])


def test_every_experiment_begins_with_the_command_that_runs_it() -> None:
    for path in sorted((conf_folder() / "experiment").glob("*.yaml")):
        package, command, *_ = path.read_text(encoding="utf-8").splitlines()
        assert package == "# @package _global_"  # Hydra reads it on the first line only
        program, job, *overrides = shlex.split(command.removeprefix("#"))
        assert program == "fournee" and f"experiment={path.stem}" in overrides, f"{path.name} does not begin with its command"
        parse_config(compose_settings(job, overrides))


@pytest.mark.parametrize(("group", "choice"), choices())
def test_every_setting_stands_in_every_choice_of_its_group(group: str, choice: str) -> None:
    values = values_in(conf_folder() / group / f"{choice}.yaml")
    assert set(values) == settings_of(model_of(group, values))


@pytest.mark.parametrize("group", UNIONS)
def test_every_kind_of_a_group_is_the_choice_of_its_name(group: str) -> None:
    tag, models = UNIONS[group]
    assert {one[tag] for one in (values_in(path) for path in (conf_folder() / group).glob("*.yaml"))} == set(models)
    for name in models:
        assert values_in(conf_folder() / group / f"{name}.yaml")[tag] == name


@pytest.mark.parametrize("path", sorted(conf_folder().rglob("*.yaml")), ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_no_line_is_too_long_and_comments_stand_in_one_column_where_the_values_leave_room(path: Path) -> None:
    lines = path.read_text(encoding="utf-8").splitlines()
    assert max(map(len, lines)) <= MAX_LINE
    for line in lines:
        value, mark, _ = line.partition("# ")
        if mark and value.strip():
            is_in_its_column = len(value) == COMMENT_COLUMN or len(value.rstrip()) > COMMENT_COLUMN - 2
            assert is_in_its_column and value.endswith("  "), line


@pytest.mark.parametrize("root", ROOTS)
def test_the_root_chooses_every_group_and_holds_every_other_setting(root: str) -> None:
    values = values_in(conf_folder() / f"{root}.yaml")
    defaults = values.pop("defaults")
    for base in defaults:
        if base in list(ROOTS):
            values |= values_in(conf_folder() / f"{base}.yaml")
            defaults = values.pop("defaults")
    chosen = {key for default in defaults if isinstance(default, dict) for key in default}
    assert chosen | set(values) == settings_of(ROOTS[root])
    for key, inner in values.items():
        if isinstance(inner, dict) and inner:
            assert set(inner) == settings_of(ROOTS[root].model_fields[key].annotation)


@pytest.mark.parametrize("path", sorted(conf_folder().rglob("*.yaml")), ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_every_file_begins_with_its_purpose_and_every_key_says_what_it_means(path: Path) -> None:
    first, *lines = path.read_text(encoding="utf-8").splitlines()
    assert first.startswith("# ")
    is_silent = re.compile(r" *(accelerator|currency|source):" if path.parent.name == "pricing" else r"defaults:|\w+:$| +- ")
    keys = [line for line in lines if re.match(r" *[\w]+:", line) and not is_silent.match(line)]
    assert not [line for line in keys if " # " not in line]


def test_keys_need_no_plus_sign() -> None:
    settings = compose_settings("batch", ["input.limit=5", "engine.kwargs.max_num_seqs=8"])
    assert settings["input"]["limit"] == 5
    assert settings["engine"]["kwargs"] == {"max_num_seqs": 8}


def test_a_plus_sign_from_hydras_habit_changes_nothing() -> None:
    plain = compose_settings("batch", ["input.limit=5", "engine=echo", "sampling.seed=1"])
    assert compose_settings("batch", ["+input.limit=5", "+engine=echo", "++sampling.seed=1"]) == plain
