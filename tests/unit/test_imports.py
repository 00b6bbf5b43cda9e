"""Imports point one way, and a heavy dependency has one door (docs/architecture.md, "Modules")."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOORS = {
    "vllm": {"pipelines.engines.vllm"},  # the package
    "ray.serve": {"pipelines.serving.replicas"},
    "omegaconf": {"pipelines.compose"},
    "hydra": {"pipelines.compose"},
    "ray": {"pipelines.cluster", "pipelines.board", "pipelines.metrics", "pipelines.submit", "pipelines.serving.replicas"},
    "fastapi": {"pipelines.serving"},
    "transformers": {"pipelines.model"},
    "datasets": {"pipelines.tables.huggingface"},
    "sqlalchemy": {"pipelines.tables.sql"},
    "deltalake": {"pipelines.tables.delta"},
    "pyiceberg": {"pipelines.tables.iceberg"},
    "lance": {"pipelines.tables.lance"},
    "altair": {"pipelines.charts"},
    "vl_convert": {"pipelines.charts"},
    "duckdb": {"pipelines.history"},
}
# Each module may import those of its own level and of the levels above it in this list.
LEVELS = [
    {"pipelines.errors", "pipelines.patience", "pipelines.suggest", "pipelines.telemetry"},
    {
        "pipelines.config",
        "pipelines.schema",
        "pipelines.rows",
        "pipelines.storage",
        "pipelines.compose",
        "pipelines.explain",
        "pipelines.file_systems",
        "pipelines.json_text",
        "pipelines.machine",
        "pipelines.parse",
        "pipelines.preflight",
        "pipelines.room",
        "pipelines.sizing",
        "pipelines.structured",
    },
    {
        "pipelines.budget",
        "pipelines.engines",
        "pipelines.histograms",
        "pipelines.intervals",
        "pipelines.model",
        "pipelines.openai_bodies",
        "pipelines.openai_requests",
        "pipelines.parameters",
        "pipelines.parts",
        "pipelines.poison",
        "pipelines.postprocess",
        "pipelines.prompts",
        "pipelines.readers",
        "pipelines.requests",
        "pipelines.result_rows",
        "pipelines.sources",
        "pipelines.special_tokens",
        "pipelines.statistics",
        "pipelines.tables",
        "pipelines.timeline",
        "pipelines.truncate",
    },
    {
        "pipelines.columns",
        "pipelines.compaction",
        "pipelines.ids",
        "pipelines.marking",
        "pipelines.openai_results",
        "pipelines.ordered_copy",
        "pipelines.plan",
        "pipelines.prefix_order",
        "pipelines.prefix_plan",
        "pipelines.prompt_counts",
        "pipelines.prompt_tokens",
        "pipelines.sample",
        "pipelines.spool",
    },
    {"pipelines.engine_use", "pipelines.ledger", "pipelines.run", "pipelines.doctor", "pipelines.placement"},
    {
        "pipelines.charts",
        "pipelines.costs",
        "pipelines.findings",
        "pipelines.handover",
        "pipelines.heartbeat",
        "pipelines.html_report",
        "pipelines.lease",
        "pipelines.lifeline",
        "pipelines.meter",
        "pipelines.metrics",
        "pipelines.row_profile",
        "pipelines.run_table",
        "pipelines.starvation",
        "pipelines.steps",
        "pipelines.summary",
        "pipelines.totals",
        "pipelines.watchdog",
        "pipelines.worker",
    },
    {
        "pipelines.board",
        "pipelines.progress",
        "pipelines.cluster",
        "pipelines.supervisor",
        "pipelines.comparison",
        "pipelines.history",
        "pipelines.inspection",
        "pipelines.outcome",
        "pipelines.pace",
        "pipelines.report",
        "pipelines.serving",
    },
    {"pipelines.batch", "pipelines.submit"},
    {"pipelines.estimate", "pipelines.pilot", "pipelines.serve"},
    {"jobs"},
]


def modules() -> dict[str, Path]:
    paths = [path for folder in ("pipelines", "jobs") for path in (ROOT / folder).rglob("*.py")]
    return {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in paths}


def imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield node.module or ""
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def level(module: str) -> int | None:
    return next(
        (i for i, names in enumerate(LEVELS) for name in names if module == name or module.startswith(f"{name}.")), None
    )


@pytest.mark.parametrize("package", DOORS)
def test_a_heavy_dependency_has_one_door(package: str) -> None:
    importers = {
        name
        for name, path in modules().items()
        if any(one == package or one.startswith(f"{package}.") for one in imports(path))
    }
    doors = DOORS[package]
    assert {next((door for door in doors if f"{name}.".startswith(f"{door}.")), name) for name in importers} == doors


@pytest.mark.parametrize("module", sorted(set(modules()) - {"pipelines"}))
def test_imports_point_one_way(module: str) -> None:
    mine = level(module)
    assert mine is not None, f"{module} has no level: put it into LEVELS and into docs/architecture.md"
    for imported in imports(modules()[module]):
        theirs = level(imported)
        if theirs is not None:
            assert theirs <= mine, f"{module} imports {imported}"
