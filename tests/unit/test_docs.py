"""The docs keep up with the code: columns, error kinds, modules, exit codes."""

from pathlib import Path

import pyarrow as pa
import pytest

from pipelines.errors import ErrorKind, ExitCode, Flag
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
