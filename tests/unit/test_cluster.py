"""How many shards a worker is handed at a time, and what is said where there is no cluster."""

import socket
import time
from collections.abc import Callable

import pytest

from pipelines.cluster import connect, shards_at_once
from pipelines.config import BatchConfig
from pipelines.errors import ConfigError


@pytest.mark.parametrize(
    ("sizes", "num_workers", "at_once"),
    [
        ([4096] * 1000, 8, 4),  # large shards fill a worker by few
        ([16] * 10_000, 8, 256),  # single batches need more
        ([1024] * 1000, 8, 4),
        ([16] * 40, 8, 5),  # nobody takes more than a fair share before the others have loaded
        ([16] * 3, 8, 1),
        ([16], 1, 1),
    ],
)
def test_a_worker_gets_enough_and_no_more_than_its_share(sizes: list[int], num_workers: int, at_once: int) -> None:
    assert shards_at_once(sizes, num_workers, num_rows=4096) == at_once


@pytest.mark.parametrize(
    "address", ["127.0.0.1:{port}", "ray://127.0.0.1:{port}", "[::1]:{port}", "no-such-host.invalid:{port}"]
)
def test_a_cluster_that_is_not_there_is_said_within_seconds(batch_config: Callable[..., BatchConfig], address: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        closed = address.format(port=server.getsockname()[1])
    started = time.monotonic()
    with pytest.raises(ConfigError, match="no Ray cluster answers there"), connect(batch_config(f"cluster.address='{closed}'")):
        pytest.fail("it is there")
    assert time.monotonic() - started < 10
