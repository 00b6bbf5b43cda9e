"""What tests of every kind share: the settings of a job, composed and parsed as a user's command would be."""

import json
import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from pipelines.compose import compose_settings
from pipelines.config import BatchConfig
from pipelines.parse import parse_config


@pytest.fixture(autouse=True)
def own_signals() -> Iterator[None]:
    """A job that has ended ignores signals; the tests that come after it must not."""
    before = {one: signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)}
    yield
    for one, handler in before.items():
        signal.signal(one, handler)


@pytest.fixture
def batch_config() -> Callable[..., BatchConfig]:
    """Parse the settings of `fournee batch <overrides>`."""

    def parse(*overrides: str) -> BatchConfig:
        return parse_config(compose_settings("batch", overrides))

    return parse


@pytest.fixture
def jsonl(tmp_path: Path) -> Callable[..., Path]:
    """Write rows as JSON lines; a row given as text is written as it is."""

    def write(rows: Sequence[Any], name: str = "rows.jsonl") -> Path:
        path = tmp_path / name
        lines = [row if isinstance(row, str) else json.dumps(row, ensure_ascii=False) for row in rows]
        path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        return path

    return write
