"""docs/configuration.md is current, and whole: every setting, every choice, every variable that is read."""

import re
from collections.abc import Iterator
from typing import Any

import pytest

from pipelines.compose import compose_settings, conf_folder
from tests.reference.page import BEGIN, END, JOBS, PAGE, renewed

TEXT = PAGE.read_text(encoding="utf-8")
HEAD, FOOT = TEXT.partition(BEGIN)[0], TEXT.partition(END)[2]


def table(text: str) -> list[list[str]]:
    lines = [line for line in text.splitlines() if line.startswith("| `")]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]


def settings_of(job: str) -> list[list[str]]:
    """The rows of a job's tables, those of the job it builds on first."""
    titles = [f"\n## fournee {name}\n" for name, model in JOBS.items() if issubclass(JOBS[job], model)]
    return [row for title in titles for row in table(TEXT.partition(title)[2].partition("\n## ")[0])]


def keys_in(settings: dict[str, Any]) -> Iterator[str]:
    for key, value in settings.items():
        yield from (f"{key}.{name}" for name in value) if isinstance(value, dict) and value else [key]


def test_it_is_what_the_models_and_the_yaml_say() -> None:
    assert renewed(TEXT) == TEXT, "docs/configuration.md is out of date: renew it with `make docs`, and commit it"


def test_a_renewal_mends_what_lies_between_the_marks_and_keeps_what_is_around() -> None:
    assert renewed(f"{HEAD}{BEGIN}\n\n| `model.nmae` | text | | |\n\n{END}{FOOT}") == TEXT
    page = renewed(f"Before.\n\n{BEGIN}\n{END}\n\nAfter.\n")
    assert page.startswith(f"Before.\n\n{BEGIN}\n\n- [fournee batch]") and page.endswith(f"\n\n{END}\n\nAfter.\n")


@pytest.mark.parametrize("job", JOBS)
def test_every_setting_of_a_job_has_a_row_that_says_what_it_takes_and_means(job: str) -> None:
    rows = settings_of(job)
    assert not [row for row in rows if len(row) != 4 or not row[1] or not row[3]]
    explained = {row[0].split("`")[1] for row in rows}
    assert not [key for key in keys_in(compose_settings(job, [])) if key not in explained]


@pytest.mark.parametrize(("setting", "kind", "default"), [
    ("`input.limit`", "whole number above 0 or null", "`null`"),
    ("`sampling.top_p`", "number above 0 up to 1", "`1.0`"),
    ("`engine.device` of `vllm`", r"`auto \| cpu \| gpu`", "`auto`"),
    ("`verbose`", r"`true \| false`", "`false`"),
    ("`run_date`", "date as YYYY-MM-DD or null", "`null`"),
    ("`input.path` of `parquet`", "text or list of texts", "`???`"),
    ("`input.delimiter` of `csv`", "one character", "`','`"),
    ("`input.path` of `delta`, `lance`", "text", "`???`"),
    ("`engine.max_model_len` of `echo`", "whole number above 0", "`4096`"),
    ("`sampling.json_schema`", "mapping, text or null", "`null`"),
    ("`sampling.stop_token_ids`", "list of whole numbers from 0", "`[]`"),
    ("`postprocess.steps[].take` of `regex`", r"`first \| last`", ""),
])  # fmt: skip
def test_a_setting_says_what_it_takes_and_its_default(setting: str, kind: str, default: str) -> None:
    assert [row[1:3] for row in settings_of("batch") if row[0] == setting] == [[kind, default]]


def test_every_choice_is_listed_with_its_file() -> None:
    for path in conf_folder().glob("*/*.yaml"):
        assert f"\n- [`{path.parent.name}={path.stem}`](../conf/{path.parent.name}/{path.name})" in TEXT


def test_a_choice_says_what_it_sets_otherwise_than_the_default_one() -> None:
    assert re.search(r"`sampling=creative`.*: Varied answers\. Sets `temperature: 0\.8`, `top_p: 0\.95`\.\n", TEXT)
    assert re.search(r"`sampling=greedy`.*, the default: The likeliest answer\.\n", TEXT)


def test_links_within_the_page_lead_to_its_headings() -> None:
    headings = {title.replace(" ", "-").lower() for title in re.findall(r"^#+ (.+)$", TEXT, re.MULTILINE)}
    assert set(re.findall(r"\]\(#([\w-]+)\)", TEXT)) <= headings


def test_every_variable_that_is_read_from_the_environment_is_explained() -> None:
    sources = [path for folder in ("pipelines", "jobs") for path in (PAGE.parents[1] / folder).rglob("*.py")]
    code = "\n".join(path.read_text(encoding="utf-8") for path in sources)
    read = set(re.findall(r"environ(?:ment)?(?:\.get\(|\.setdefault\(|\[)[\"']([A-Z_]+)[\"']", code))
    read |= set(re.findall(r"[\"']([A-Z_]+)[\"'] in (?:os\.)?environ", code))
    ours = set(re.findall(r"\bFOURNEE_[A-Z_]+", code))
    explained = set(re.findall(r"`([A-Z_]+)`", FOOT))
    assert not (read | ours) - explained
    assert {name for name in explained if name.startswith("FOURNEE_")} == ours
