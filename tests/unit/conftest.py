"""Shared by the unit tests: an input's settings, its plan, its rows, and a hypothesis profile for a busy machine."""

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import settings

from pipelines.config import CsvInput, FileInput, InputConfig, JsonlInput, ParquetInput, PricingConfig
from pipelines.engines import fair_clock
from pipelines.plan import Plan, make_plan
from pipelines.readers import read_batches
from pipelines.rows import Batch, Block
from pipelines.sources import list_sources
from pipelines.storage import Folder

settings.register_profile("unit", deadline=None, max_examples=40)
settings.load_profile("unit")


PRICING = PricingConfig(
    accelerator="H100",
    market="on_demand",
    price_per_accelerator_hour=3600.0,
    spot_price_per_accelerator_hour=None,
    overhead_per_hour=0.0,
    overhead_per_run=0.0,
    currency="USD",
    source="a test",
    peak_tflops=None,
    peak_memory_gb_per_s=None,
    hosted=(),
)

_CSV = {"delimiter": ",", "quote": '"', "encoding": "utf-8", "columns": None}


@pytest.fixture(scope="session")
def input_config() -> Callable[..., FileInput]:
    """The settings of an input: Parquet with the column `prompt`, unless the test says otherwise."""

    def build(path: str | Path | Sequence[str | Path], **changes: Any) -> FileInput:
        values: dict[str, Any] = {
            "format": "parquet",
            "path": str(path) if isinstance(path, str | Path) else tuple(str(one) for one in path),
            "id_column": None,
            "ids": "allow",
            "prompt_column": "prompt",
            "messages_column": None,
            "request_column": None,
            "tools_column": None,
            "sampling_column": None,
            "schema_column": None,
            "expected_column": None,
            "carry_columns": (),
            "limit": None,
            "order": "as_is",
            "on_bad_file": "fail",
        }
        kind = {"parquet": ParquetInput, "jsonl": JsonlInput, "csv": CsvInput}[changes.get("format", "parquet")]
        return kind(**{**values, **(_CSV if kind is CsvInput else {}), **changes})

    return build


@pytest.fixture(scope="session")
def plan_of() -> Callable[..., Plan]:
    """The plan of an input; compressed files are spooled to `run`."""

    def plan(
        config: InputConfig,
        *,
        needed: Sequence[str] = ("prompt",),
        rows_per_batch: int | None = None,
        run: Folder | None = None,
    ) -> Plan:
        folder = run or Folder("memory://no-run")
        return make_plan(config, list_sources(config), needed, folder, rows_per_batch=rows_per_batch, num_workers=1)

    return plan


@pytest.fixture(scope="session")
def blocks_of() -> Callable[..., list[Block]]:
    """The rows of an input, batch by batch, each source read in one go; of all batches unless some are named."""

    def read(
        config: InputConfig, plan: Plan, *, needed: Sequence[str] = ("prompt",), batches: pa.Table | None = None
    ) -> list[Block]:
        def each() -> Iterator[Block]:
            lines = (plan.batches if batches is None else batches).to_pylist()
            for _, group in groupby(lines, key=lambda line: line["source"]):
                yield from read_batches(config, [Batch(**line) for line in group], needed, plan.carried)

        return list(each())

    return read


class HandClock:
    """A clock that tests set by hand."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def engine_time(monkeypatch: pytest.MonkeyPatch) -> HandClock:
    """The time that requests share in an engine, moved by hand."""
    clock = HandClock()
    monkeypatch.setattr(fair_clock, "perf_counter", clock)
    return clock
