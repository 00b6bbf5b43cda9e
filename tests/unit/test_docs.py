"""The docs keep up with the code: columns, error kinds, modules, exit codes."""

import re
import shlex
from pathlib import Path

import pyarrow as pa
import pytest

from pipelines.compose import compose_settings
from pipelines.errors import ErrorKind, ExitCode, Flag
from pipelines.parse import parse_config, parse_estimate, parse_serve
from pipelines.schema import BATCH, RESULT, RUN, WORKER
from tests.benchmarks.scale.__main__ import MEASUREMENTS

ROOT = Path(__file__).parents[2]


def text_of(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


@pytest.mark.parametrize("schema", [RESULT, BATCH, WORKER, RUN], ids=["results", "batches", "workers", "run"])
def test_every_column_is_explained(schema: pa.Schema) -> None:
    page = text_of("docs/results.md")
    assert not [name for name in schema.names if f"`{name}`" not in page]


def test_every_error_kind_has_a_cause_and_a_remedy() -> None:
    lines = [line.split("|") for line in text_of("docs/results.md").splitlines() if line.startswith("| `")]
    explained = {cells[1].strip(" `"): (cells[2].strip(), cells[3].strip()) for cells in lines if len(cells) == 5}
    assert set(explained) == set(ErrorKind)
    assert all(cause and remedy for cause, remedy in explained.values())


def test_every_flag_is_explained() -> None:
    page = text_of("docs/results.md").partition("### Flags")[2]
    assert not [flag for flag in Flag if f"| `{flag}` | " not in page]


def test_every_module_has_its_line_in_the_architecture() -> None:
    page = text_of("docs/architecture.md").partition("## Modules")[2].partition("## Measured")[0]
    names = {path.stem for path in (ROOT / "pipelines").glob("*.py")} - {"__init__"}
    names |= {f"{path.parent.name}/" for path in (ROOT / "pipelines").glob("*/__init__.py")}
    assert not [name for name in names if f"`{name}`" not in page]


def test_every_exit_code_is_in_the_readme() -> None:
    page = text_of("README.md")
    assert not [code for code in ExitCode if f"| {code.value} | " not in page]


def test_every_measurement_of_scale_is_in_the_page_on_performance() -> None:
    page = text_of("docs/performance.md")
    assert not [name for name in MEASUREMENTS if f"`{name}`" not in page]


PAGES = ["README.md", *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md")))]
PARSERS = {"batch": parse_config, "estimate": parse_estimate, "serve": parse_serve}


def jobs_in(page: str) -> list[str]:
    """The commands of a page that run a job here, each on one line; settings of one's own are played in test_readme.py."""
    blocks = re.findall(r"^```bash\n(.*?)^```", text_of(page), re.MULTILINE | re.DOTALL)
    lines = [line.removeprefix(".venv/bin/") for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    names = tuple(f"fournee {job}" for job in PARSERS)
    return [line for line in lines if line.startswith(names) and "--config-dir" not in line and "--new-key" not in line]


@pytest.mark.parametrize(("page", "line"), [(page, line) for page in PAGES for line in jobs_in(page)])
def test_every_command_of_a_page_composes(page: str, line: str) -> None:
    _, job, *overrides = shlex.split(line)
    PARSERS[job](compose_settings(job, [one for one in overrides if one != "--dry-run"]))
