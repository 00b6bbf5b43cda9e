"""Connect to Ray, and let Ray Data stream the shards over the workers."""

import logging
import os
import queue
import re
import signal
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pyarrow as pa
import ray
from ray.data import ActorPoolStrategy, DataContext

from pipelines.config import BatchConfig
from pipelines.errors import ConfigError, RunFailed
from pipelines.heartbeat import deaths
from pipelines.placement import Placement, check_fits, place
from pipelines.plan import batches_of
from pipelines.worker import Job, Worker, raise_failure

_BATCHES_AT_ONCE = 16  # handed to a worker, which itself bounds those that it works on
_SHARDS_AT_ONCE = 4  # at least: a shard is done when its longest answer is, and the engine must not wait for that
_GROW_WHEN_BUSY = 0.75  # of the shards that all workers together are handed at a time
_CHECK_S = 0.5
_INIT_DEATHS = 3  # actors that may die while loading, one after the other, before the job gives up


@contextmanager
def connect(config: BatchConfig) -> Iterator[Placement]:
    """Join or start a Ray cluster for the block; raises ConfigError where it cannot hold the workers."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if not config.verbose:
        _quieten()
    # What the settings say, else the cluster that this process belongs to, else one of our own.
    address = config.cluster.address or os.environ.get("RAY_ADDRESS") or "local"
    handlers = {one: signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)}
    try:
        ray.init(
            address=address,
            include_dashboard=None if config.verbose else False,
            logging_level=logging.INFO if config.verbose else logging.WARNING,
            log_to_driver=True,
        )
    except (ConnectionError, ValueError, RuntimeError, ray.exceptions.RayError) as error:
        raise ConfigError(
            f"cluster.address={address}: no Ray cluster answers there: {error}; "
            "if it runs and wants a token (the default since Ray 2.60), set RAY_AUTH_MODE=token"
        ) from None
    for one, handler in handlers.items():
        signal.signal(one, handler)  # Ray has installed handlers of its own
    try:
        resources = ray.cluster_resources()
        placement = place(config, resources)
        if address == "local":
            check_fits(config, placement, resources)
        yield placement
    finally:
        ray.shutdown()


def answer(job: Job, placement: Placement, shards: Sequence[pa.Table], tally: Any, check: Callable[[], None]) -> None:
    """Run the workers over the shards until every batch of them is committed, or until `check` raises.

    Raises ConfigError where the engine refuses its options, RunFailed where a batch cannot be read or committed, or where
    workers die more often than allowed.
    """
    context = DataContext.get_current()
    context.execution_options.preserve_order = False
    context.enable_progress_bars = job.config.verbose
    if not job.config.verbose:
        context.issue_detectors_config.detectors = []  # they take a worker with a model in its memory for a fault
    context.execution_no_progress_timeout_s = -1  # loading and queueing for GPUs may take longer than Ray's 30 minutes
    context.max_consecutive_actor_init_deaths = _INIT_DEATHS
    # A worker is handed no more shards than it works on, so the pool is never more than 100 % busy, where Ray would grow it.
    context.autoscaling_config.actor_pool_util_upscaling_threshold = _GROW_WHEN_BUSY
    settings = job.config.cluster
    most = settings.max_workers or settings.workers
    at_once = shards_at_once([len(batches_of(shard)) for shard in shards], most)
    # Not from_arrow: it asks remote tasks for the schema of each table, and the first of them wait for processes to start.
    items = [line for shard in shards for line in shard.to_pylist()]
    dataset = ray.data.from_items(items, override_num_blocks=len(items)).map_batches(
        Worker,
        fn_constructor_args=(job, tally),
        batch_size=1,
        batch_format="pyarrow",
        compute=ActorPoolStrategy(
            min_size=min(settings.workers, len(shards)),
            max_size=min(most, len(shards)),
            max_tasks_in_flight_per_actor=at_once,
            max_concurrent_calls_per_actor=at_once,
        ),
        num_cpus=job.config.cluster.cpus_per_worker,
        num_gpus=placement.num_accelerators if placement.device == "gpu" else 0,
        accelerator_type=settings.accelerator_type,
        runtime_env={"env_vars": placement.environment} if placement.environment else None,
        max_restarts=settings.worker_restarts,
        max_task_retries=settings.worker_restarts,
    )
    try:
        for summary in _watched(dataset.iter_batches(batch_size=None, batch_format="pyarrow"), check):
            raise_failure(summary)
    except ray.exceptions.RayError as error:
        raise _explained(error, deaths(job.run, job.attempt)) from error


def shards_at_once(sizes: Sequence[int], num_workers: int) -> int:
    """How many shards a worker is handed at a time: enough to fill it, and no more than its fair share of all."""
    enough = max(_SHARDS_AT_ONCE, _BATCHES_AT_ONCE // max(sizes))
    return max(1, min(enough, -(-len(sizes) // num_workers)))


def _watched(items: Iterable[Any], check: Callable[[], None]) -> Iterator[Any]:
    """Yield items as they come, and call `check` now and then however long the next one takes."""
    arrived: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def fetch() -> None:
        try:
            for item in items:
                arrived.put((item, None))
            arrived.put((None, StopIteration()))
        except BaseException as error:  # noqa: BLE001 - raised again below
            arrived.put((None, error))

    threading.Thread(target=fetch, name="fetch", daemon=True).start()
    while True:
        check()
        try:
            item, error = arrived.get(timeout=_CHECK_S)
        except queue.Empty:
            continue
        if isinstance(error, StopIteration):
            return
        if error is not None:
            raise error
        yield item


def _explained(error: ray.exceptions.RayError, reasons: Sequence[str]) -> RunFailed:
    """Say in one line why engines died, or what Ray or a fault of our own says at the end of its stack trace."""
    raised = re.findall(r"^(?!ray\.exceptions)[A-Za-z_][\w.]*: .+", str(error), re.MULTILINE)
    said = raised[-1] if raised else str(error).strip().partition("\n")[0] or type(error).__name__
    if isinstance(error, ray.exceptions.RayActorError):
        return RunFailed(
            f"workers died more often than cluster.worker_restarts allows, last: {reasons[-1] if reasons else said}"
        )
    return RunFailed(f"a worker could not go on: {said}")


def _quieten() -> None:
    """Keep Ray's chatter off the terminal; what it says about this job's health still comes through."""
    warnings.filterwarnings("ignore", message="`ray_remote_args` is deprecated")  # no other way in 2.60 to bound restarts
    logging.getLogger("ray.data").setLevel(logging.WARNING)
    for name in ("ray._private.authentication", "ray.data._internal.progress"):
        logging.getLogger(name).setLevel(logging.ERROR)
    for name in ("ray.data._internal.execution.streaming_executor_state", "ray.data.exceptions"):
        logging.getLogger(name).setLevel(logging.CRITICAL)  # stack traces of what `answer` raises anyway, in one line
