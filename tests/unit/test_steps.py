"""The rows of a shard come out of an input whose storage refuses for a while; what is damaged is not waited for."""

import errno
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fsspec.implementations.memory import MemoryFile, MemoryFileSystem

from pipelines.batch import plan_input
from pipelines.config import BatchConfig
from pipelines.engines import build_engine
from pipelines.errors import RunFailed
from pipelines.rows import Batch
from pipelines.sources import list_sources
from pipelines.statistics import Origin
from pipelines.steps import Steps
from pipelines.storage import Folder

Config = Callable[..., BatchConfig]
NUM_ROWS = 95


@pytest.fixture(params=["parquet", "jsonl"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """An input of 95 rows on object storage (here: fsspec's own, in memory)."""
    path = f"/in{tmp_path}/rows.{request.param}"
    fs = fsspec.filesystem("memory")
    with fs.open(path, "wb") as file:
        if request.param == "parquet":
            pq.write_table(pa.table({"prompt": [f"row {i}" for i in range(NUM_ROWS)]}), file, row_group_size=20)
        else:
            file.write("".join(f'{{"prompt": "row {i}"}}\n' for i in range(NUM_ROWS)).encode())
    yield f"memory:/{path}"
    if fs.exists(path):
        fs.rm(path)


def steps_for(batch_config: Config, url: str, patience_s: float) -> tuple[Steps, list[Batch]]:
    config = batch_config(
        "engine=echo", "engine.rows_per_batch=10", f"input={url.rpartition('.')[2]}", f"input.path={url}",
        f"output.patience_s={patience_s}",
    )  # fmt: skip
    folder = Folder("memory://no-run")
    plan = plan_input(config, list_sources(config.input), folder)
    origin = Origin("f", "w", "node", "cpu", 1, 1, config.pricing)
    steps = Steps(config, folder, plan.carried, origin, build_engine(config, folder="", revision=None, device="cpu"))
    return steps, [Batch(**line) for line in plan.batches.to_pylist()]


def prompts(steps: Steps, batches: list[Batch]) -> list[Any]:
    return [[row["prompt"] for row in block.rows if isinstance(row, dict)] for block in steps.blocks(batches)]


def refusing(method: Callable[..., Any], error: Exception, *calls: int) -> Callable[..., Any]:
    """The same method, some of whose calls raise."""
    count = 0

    def call(*arguments: Any, **options: Any) -> Any:
        nonlocal count
        count += 1
        if count in calls:
            raise error
        return method(*arguments, **options)

    return call


@pytest.mark.parametrize(
    "error", [ConnectionResetError("reset"), TimeoutError("slow"), OSError(errno.EBUSY, "SlowDown")], ids=repr
)
@pytest.mark.parametrize(
    ("owner", "method", "calls"),
    [(MemoryFileSystem, "info", (1, 2)), (MemoryFileSystem, "open", (1,)), (MemoryFile, "read", (1, 5, 9))],
)
def test_rows_come_once_and_in_order_from_storage_that_refuses_now_and_then(
    batch_config: Config,
    url: str,
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
    owner: type[Any],
    method: str,
    calls: tuple[int, ...],
) -> None:
    steps, batches = steps_for(batch_config, url, patience_s=60)
    monkeypatch.setattr(owner, method, refusing(getattr(owner, method), error, *calls))
    found = prompts(steps, batches)
    assert [len(one) for one in found] == [batch.num_rows for batch in batches]
    assert [prompt for one in found for prompt in one] == [f"row {i}" for i in range(NUM_ROWS)]


def test_storage_that_refuses_for_too_long_is_not_a_damaged_file(
    batch_config: Config, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps, batches = steps_for(batch_config, url, patience_s=0.2)
    monkeypatch.setattr(MemoryFileSystem, "open", refusing(MemoryFileSystem.open, ConnectionResetError("reset"), *range(99)))
    with pytest.raises(TimeoutError, match=r"rows\..*: ConnectionResetError: reset; given up after 0.2 s"):
        prompts(steps, batches)


def test_a_file_that_is_gone_is_said_at_once(batch_config: Config, url: str) -> None:
    steps, batches = steps_for(batch_config, url, patience_s=600)
    fsspec.filesystem("memory").rm(batches[0].source.removeprefix("memory:/"))
    with pytest.raises(RunFailed, match=r"is gone since the run was planned"):
        prompts(steps, batches)
