"""How many shards a worker is handed at a time."""

import pytest

from pipelines.cluster import shards_at_once


@pytest.mark.parametrize(
    ("sizes", "num_workers", "at_once"),
    [
        ([64] * 1000, 8, 4),  # large shards fill a worker by few
        ([1] * 1000, 8, 16),  # single batches need more
        ([4] * 1000, 8, 4),
        ([1] * 40, 8, 5),  # nobody takes more than a fair share before the others have loaded
        ([1] * 3, 8, 1),
        ([1], 1, 1),
    ],
)
def test_a_worker_gets_enough_and_no_more_than_its_share(sizes: list[int], num_workers: int, at_once: int) -> None:
    assert shards_at_once(sizes, num_workers) == at_once
