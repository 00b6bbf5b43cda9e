"""Run the console command as a user does, in a process of its own; most tests share one Ray cluster, to save its start.

Tests of the engine itself share one vLLM with the real model.
"""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.dataset as ds
import pytest

from pipelines.compose import compose_settings
from pipelines.config import BatchConfig
from pipelines.engines import Engine, build_engine
from pipelines.model import model_folder
from pipelines.parse import parse_config

MAX_MODEL_LEN = 256
MAX_TOKENS = 24


@dataclass(frozen=True)
class Done:
    """What a command returned and printed."""

    code: int
    out: str
    err: str


@dataclass(frozen=True)
class Fournee:
    """`fournee batch ...` with an output folder of the test's own."""

    folder: Path
    address: str
    """The Ray cluster to join; empty starts one for the run."""

    def start(self, *overrides: str) -> "subprocess.Popen[str]":
        """Start a run and leave it running."""
        environment = {**os.environ, "RAY_ADDRESS": self.address, "COLUMNS": "160"}
        if self.address:
            environment["RAY_AUTH_MODE"] = "token"
        return subprocess.Popen(
            [sys.executable, "-m", "jobs.cli", "batch", f"output.path={self.folder}", *overrides],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )

    def run(self, *overrides: str) -> Done:
        """Run to the end."""
        process = self.start(*overrides)
        out, err = process.communicate(timeout=600)
        return Done(process.returncode, out, err)

    def parts(self) -> dict[str, int]:
        """The committed parts and when each was written (ns)."""
        return {path.name: path.stat().st_mtime_ns for path in sorted(self.folder.glob("results/part-*.parquet"))}

    def table(self) -> pa.Table:
        """All rows of the run, read as a user would read them."""
        return ds.dataset(self.folder / "results").to_table()


@contextmanager
def ray_cluster(**environment: str) -> Iterator[str]:
    """A Ray cluster for the block, with more in the environment of its nodes; it ends with the process that started it."""
    script = (
        "import ray, sys; context = ray.init(address='local', include_dashboard=False, num_cpus=4, log_to_driver=False);"
        "print(context.address_info['address'], flush=True); sys.stdin.read(); ray.shutdown()"
    )
    head = subprocess.Popen(
        [sys.executable, "-c", script],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
    )
    assert head.stdin is not None and head.stdout is not None
    address = head.stdout.readline().strip()
    assert address, "the Ray cluster did not start"
    try:
        yield address
    finally:
        head.stdin.close()
        head.wait(60)


@pytest.fixture(scope="session")
def ray_address() -> Iterator[str]:
    """A Ray cluster that lives as long as the tests."""
    with ray_cluster() as address:
        yield address


@pytest.fixture
def fournee(tmp_path: Path, ray_address: str) -> Fournee:
    """Runs on the shared cluster."""
    return Fournee(tmp_path / "run", ray_address)


@pytest.fixture
def fournee_alone(tmp_path: Path) -> Fournee:
    """Runs on a cluster of its own, as on a laptop."""
    return Fournee(tmp_path / "run", "")


@pytest.fixture
def wait_until() -> Callable[[Callable[[], bool], "subprocess.Popen[str]"], None]:
    """Wait for a condition while a process lives; fails with its output where it ends before."""

    def wait(condition: Callable[[], bool], process: "subprocess.Popen[str]") -> None:
        for _ in range(4 * 300):
            if condition():
                return
            try:
                process.wait(0.25)
            except subprocess.TimeoutExpired:
                continue
            out, err = process.communicate()
            pytest.fail(f"the process ended with {process.returncode} before\n{out}\n{err}")
        process.kill()
        pytest.fail("it did not happen within five minutes")

    return wait


def engine_config(engine: str) -> BatchConfig:
    echo = [f"engine.max_model_len={MAX_MODEL_LEN}", "engine.seconds_per_token=0.001"]
    own = echo if engine == "echo" else ["engine.kwargs.max_num_seqs=8"]
    return parse_config(
        compose_settings(
            "batch", [f"engine={engine}", f"model.max_model_len={MAX_MODEL_LEN}", f"sampling.max_tokens={MAX_TOKENS}", *own]
        )
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What kills the shared engine comes last."""
    items.sort(key=lambda item: item.get_closest_marker("kills_the_engine") is not None)


@pytest.fixture(scope="session")
def vllm_engine() -> Iterator[Engine]:
    """The real engine in this process, as a worker on CPUs runs it; one for all tests, the last of which kills it."""
    environment = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
    }
    before = {key: os.environ.get(key) for key in environment}
    os.environ.update(environment)
    config = engine_config("vllm")
    yield build_engine(config, folder=model_folder(config.model), revision=None, device="cpu")
    for key, value in before.items():
        os.environ.pop(key) if value is None else os.environ.update({key: value})
