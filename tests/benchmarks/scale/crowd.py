"""What sees all workers of a run, driven without them: the board in Ray, the files of their heartbeats, Ray Data's tasks."""

import json
import socket
import time
from pathlib import Path
from shutil import rmtree
from threading import Thread
from typing import Any

import psutil
import pyarrow as pa
import ray
from ray.data import ActorPoolStrategy, DataContext

from pipelines.board import Board, Life
from pipelines.heartbeat import heartbeats
from pipelines.plan import batches_of, make_shards
from pipelines.run import ATTEMPTS
from pipelines.schema import PLAN
from pipelines.storage import Folder
from tests.benchmarks.scale.apart import Numbers, peak_mib, timed
from tests.benchmarks.scale.slow import SlowFileSystem, register

_MESSAGES = 5000
_LOOKS = 20


def board(num_workers: int) -> Numbers:
    """How many messages a board takes, and how long its driver waits for an answer while all workers wait for orders."""
    ray.init("local", include_dashboard=False, logging_level="WARNING")
    try:
        return _board(num_workers)
    finally:
        ray.shutdown()


def _board(num_workers: int) -> Numbers:
    found: Numbers = {"workers": num_workers}
    one = Board()
    actor: Any = one._actor
    one.totals()
    lives = [Life(f"w{number}", "node", number, 0.0) for number in range(num_workers)]
    numbers = {"num_rows": 256, "num_failed": 0, "num_output_tokens": 51200}
    with timed(found, "commits_s"):
        for _ in range(_MESSAGES):
            actor.committed.remote(numbers)
        one.totals()
    with timed(found, "signs_of_life_s"):
        for number in range(_MESSAGES):
            actor.alive.remote(lives[number % num_workers], True)
        one.totals()
    process = _process_of_board()
    is_over = [False]
    waiting = [Thread(target=_wait_for_orders, args=(actor, num_workers, is_over))]
    for thread in waiting:
        thread.start()
    time.sleep(3.0)
    before, started = sum(process.cpu_times()[:2]), time.perf_counter()
    looks = []
    for _ in range(_LOOKS):
        for life in lives[: num_workers // 5]:  # a sign of life every five seconds
            actor.alive.remote(life, True)
        looked = time.perf_counter()
        one.num_alive(15.0)
        looks.append(time.perf_counter() - looked)
        time.sleep(max(0.0, 1.0 - looks[-1]))
    found["board_cores"] = (sum(process.cpu_times()[:2]) - before) / (time.perf_counter() - started)
    found["answer_median_s"], found["answer_worst_s"] = sorted(looks)[_LOOKS // 2], max(looks)
    with timed(found, "stop_heard_by_all_s"):
        one.stop()
        is_over[0] = True
        for thread in waiting:
            thread.join()
    return found


def _wait_for_orders(actor: Any, num_workers: int, is_over: list[bool]) -> None:
    """As each worker does: ask, and when there is no order for a while, ask again."""
    asking = [actor.order.remote("node") for _ in range(num_workers)]
    while asking:
        answered, asking = ray.wait(asking, num_returns=len(asking), timeout=0.2)
        orders = ray.get(answered)
        if not is_over[0]:
            asking += [actor.order.remote("node") for order in orders if order is None]


def _process_of_board() -> psutil.Process:
    names = ((one, one.info["cmdline"]) for one in psutil.process_iter(["cmdline"]))
    mine = [one for one, command in names if command and "ray::_Board" in command[0]]
    return max(mine, key=lambda one: one.create_time())


def beats(folder: Path, num_workers: int, request_ms: float) -> Numbers:
    """How long it takes to read the heartbeats of so many workers, here and where each request takes its time."""
    place = folder / "beats"
    rmtree(place, ignore_errors=True)
    (place / ATTEMPTS).mkdir(parents=True)
    for number in range(num_workers):
        name = f"worker-0001-{number:08x}"
        beat = {"worker": f"{number:08x}", "attempt": 1, "node": socket.gethostname(), "engine": "x" * 2000, "death": None}
        (place / ATTEMPTS / f"{name}.json").write_text(json.dumps(beat))
    register()
    SlowFileSystem.request_s = request_ms / 1000
    found: Numbers = {"workers": num_workers, "request_ms": request_ms}
    with timed(found, "here_s"):
        heartbeats(Folder(str(place)))
    with timed(found, "far_away_s"):
        heartbeats(Folder(f"slow://{place}"))
    return found


def tasks(num_shards: int, num_batches: int) -> Numbers:
    """What Ray Data itself takes for so many shards, whose batches cost nothing."""
    ray.init("local", include_dashboard=False, logging_level="WARNING")
    try:
        return _tasks(num_shards, num_batches)
    finally:
        ray.shutdown()


class Nothing:
    """A worker that has nothing to do."""

    async def __call__(self, shard: pa.Table) -> pa.Table:
        return pa.table({"num_batches": [len(batches_of(shard))]})


def _tasks(num_shards: int, num_batches: int) -> Numbers:
    lines = [
        {"batch_id": place, "source": "bucket/folder/part-00000.parquet", "source_bytes": 1, "source_version": "1" * 19,
         "first_row": place * 256, "num_rows": 256, "rows_before": place * 256}
        for place in range(num_shards * num_batches)
    ]  # fmt: skip
    shards = make_shards(pa.Table.from_pylist(lines, schema=PLAN), max(1, num_shards // 16))
    found: Numbers = {"shards": len(shards), "batches": len(lines)}
    with timed(found, "hand_over_s"):
        dataset = ray.data.from_blocks(shards)
    DataContext.get_current().enable_progress_bars = False
    pool = ActorPoolStrategy(size=2, max_tasks_in_flight_per_actor=16, max_concurrent_calls_per_actor=16)
    work = dataset.map_batches(Nothing, batch_size=1, batch_format="pyarrow", compute=pool, num_cpus=0.5)
    started = time.perf_counter()
    coming = iter(work.iter_batches(batch_size=None, batch_format="pyarrow"))
    done = len(next(coming))
    found["first_result_s"] = time.perf_counter() - started
    started = time.perf_counter()
    done += sum(map(len, coming))
    found["tasks_per_s"] = (done - 1) / (time.perf_counter() - started)
    return {**found, "driver_peak_mib": peak_mib()}
