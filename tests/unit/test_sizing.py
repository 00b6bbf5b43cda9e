"""How many rows go together, and that what is chosen says why."""

import asyncio
from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelines.config import BatchConfig
from pipelines.room import Room
from pipelines.sizing import batch_size, rows_ahead, rows_at_once, rows_open, rows_per_shard, sizes_of


@given(num_rows=st.integers(0, 10**12), bytes_per_row=st.integers(0, 10**7), num_workers=st.integers(1, 5000))
def test_an_automatic_batch_has_16_to_1024_rows_and_more_only_of_huge_inputs(
    num_rows: int, bytes_per_row: int, num_workers: int
) -> None:
    size = batch_size(None, num_rows=num_rows, num_bytes=num_rows * bytes_per_row, num_workers=num_workers)
    assert 16 <= size.num_last_rows <= size.num_rows <= max(1024, num_rows // 100_000)
    assert size.num_rows % 16 == size.num_last_rows % 16 == 0
    assert size.num_rows == 16 or num_rows / size.num_rows >= 64 * num_workers
    assert size.num_rows == 16 or size.num_rows * bytes_per_row <= 16 * 2**20


@pytest.mark.parametrize(
    ("num_rows", "bytes_per_row", "num_workers", "said"),
    [
        (64, 100, 1, "16 (the least)"),
        (10_000, 100, 1, "128, 32 for the last 256 rows (64 batches for each of 1 worker(s))"),
        (10**6, 100, 8, "1,024, 256 for the last 16,384 rows (as many as the largest GPUs run at once)"),
        (10**9, 100, 1000, "8,192, 2,048 for the last 16,384,000 rows (100,000 batches)"),
        (10**6, 40_000, 8, "256, 64 for the last 4,096 rows (rows of 40,000 bytes, 16 MiB a batch)"),
        (10**6, 100, 500, "16 (64 batches for each of 500 worker(s))"),
    ],
)
def test_what_is_chosen_says_why(num_rows: int, bytes_per_row: int, num_workers: int, said: str) -> None:
    assert str(batch_size(None, num_rows=num_rows, num_bytes=num_rows * bytes_per_row, num_workers=num_workers)) == said


def test_the_users_choice_stands() -> None:
    size = batch_size(7, num_rows=10**6, num_bytes=10**9, num_workers=8)
    assert str(size) == "7 (engine.rows_per_batch)"
    assert set(size.cut(70, 70)) == {7}


@given(sources=st.lists(st.integers(0, 5000), max_size=8), num_workers=st.integers(1, 4), chosen=st.none() | st.integers(1, 99))
def test_every_row_of_every_source_is_in_one_batch_and_the_last_batches_are_smaller(
    sources: list[int], num_workers: int, chosen: int | None
) -> None:
    size = batch_size(chosen, num_rows=sum(sources), num_bytes=0, num_workers=num_workers)
    left, cuts = sum(sources), []
    for num_rows in sources:
        cuts.append(list(size.cut(num_rows, left)))
        left -= num_rows
    assert [sum(cut) for cut in cuts] == sources
    assert all(later <= earlier for cut in cuts for earlier, later in pairwise(cut))
    if size.num_rows_near_end and sources[-1] > size.num_rows_near_end:
        assert set(cuts[-1][-2 * num_workers : -1]) == {size.num_last_rows}


def test_a_worker_is_handed_what_keeps_its_engine_full(batch_config: Callable[..., BatchConfig]) -> None:
    assert rows_at_once(batch_config(), "gpu") == 16 * 1024
    assert rows_at_once(batch_config(), "cpu") == 16 * 256
    assert rows_at_once(batch_config("engine.kwargs.max_num_seqs=8"), "gpu") == 128
    assert rows_at_once(batch_config("engine=echo", "engine.max_num_seqs=4"), "cpu") == 64


@pytest.mark.parametrize("max_num_seqs", [1, 32, 1024])
def test_a_worker_takes_all_that_it_is_handed(max_num_seqs: int, batch_config: Callable[..., BatchConfig]) -> None:
    handed = rows_at_once(batch_config(f"engine.kwargs.max_num_seqs={max_num_seqs}"), "gpu")
    assert rows_ahead(max_num_seqs) < handed <= rows_open(max_num_seqs)


def test_shards_are_few_for_large_inputs_and_several_for_each_worker_of_small_ones() -> None:
    assert rows_per_shard(10**7, 100) == 4096
    assert rows_per_shard(10**9, 1000) == 50_000
    assert rows_per_shard(10**9, 10_000) == 6250
    assert rows_per_shard(16_000, 10) == 100


def test_room_is_for_so_many_rows_and_for_a_few_batches_of_any_size() -> None:
    async def entered(sizes: list[int]) -> int:
        room = Room(num_rows=100, num_batches=2)
        count = 0
        for size in sizes:
            try:
                await asyncio.wait_for(room.enter(size), timeout=0.01)
            except TimeoutError:
                break
            count += 1
        assert room.is_waited_for == (count < len(sizes))
        return count

    assert asyncio.run(entered([10] * 20)) == 10
    assert asyncio.run(entered([500, 500, 1])) == 2


def test_who_waits_for_room_gets_it_when_a_batch_leaves() -> None:
    async def story() -> list[str]:
        room, seen = Room(num_rows=100, num_batches=1), []

        async def bring(num_rows: int) -> None:
            await room.enter(num_rows)
            seen.append(f"in {num_rows}")

        await bring(80)
        waiting = asyncio.create_task(bring(30))
        await asyncio.sleep(0)
        seen.append("left 80")
        room.leave(80)
        await waiting
        return seen

    assert asyncio.run(story()) == ["in 80", "left 80", "in 30"]


def test_what_the_engine_resolved_is_recorded_with_its_reason(batch_config: Callable[..., BatchConfig]) -> None:
    engine = {"max_num_seqs": 8, "max_num_batched_tokens": 4096, "kv_cache_tokens": 81_920}
    assert sizes_of(batch_config("engine.kwargs.max_num_seqs=8"), engine, "16 (the least)", 200.0) == {
        "rows_per_batch": "16 (the least)",
        "max_num_seqs": "8 (the settings)",
        "max_num_batched_tokens": "4,096 (vLLM, for this hardware)",
        "kv_cache": "81,920 tokens: 410 requests of 200 tokens, the mean of this run",
    }
    assert sizes_of(batch_config(), None, "16 (the least)", None) == {"rows_per_batch": "16 (the least)"}
