"""Connect to Ray, and let Ray Data stream the shards over the workers."""

import logging
import os
import queue
import re
import signal
import socket
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import pyarrow as pa
import ray
from ray.data import ActorPoolStrategy, DataContext
from ray.data._internal.execution.execution_callback import ExecutionCallback

from pipelines.board import Board, BoardLost
from pipelines.config import BatchConfig
from pipelines.errors import ConfigError, RunFailed, Stopped, TooManyFailures
from pipelines.handover import Job, raise_failure
from pipelines.heartbeat import deaths
from pipelines.metrics import WorkerMetrics
from pipelines.placement import Placement, check_room, place
from pipelines.plan import num_rows_of
from pipelines.sizing import rows_at_once
from pipelines.worker import Worker

logger = logging.getLogger(__name__)

_SHARDS_AT_ONCE = 4  # at least: a shard is done when its longest answer is, and the engine must not wait for that
_GROW_WHEN_BUSY = 0.75  # of the shards that all workers together are handed at a time
_CHECK_S = 0.5
_HEAD_TIMEOUT_S = 5.0
_SHUTDOWN_S = 5.0  # what it takes to leave the cluster after a drain
_RAY_JOB = "RAY_JOB_CONFIG_JSON_ENV_VAR"  # the job server sets this variable for the processes that it starts
_INIT_DEATHS = 3  # actors that may die while loading, one after the other, before the job gives up


@contextmanager
def connect(config: BatchConfig) -> Iterator[Placement]:
    """Join or start a Ray cluster for the block; raises ConfigError where it cannot hold the workers."""
    if not config.verbose:
        _quieten()
    # What the settings say, else the cluster that this process belongs to, else one of our own.
    address = config.cluster.address or os.environ.get("RAY_ADDRESS") or "local"
    handlers = {one: signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)}
    try:
        _knock(address)
        ray.init(
            address=address,
            include_dashboard=None if config.verbose else False,
            logging_level=logging.INFO if config.verbose else logging.WARNING,
            log_to_driver=True,
        )
    except (OSError, ValueError, RuntimeError, ray.exceptions.RayError) as error:
        raise ConfigError(
            f"cluster.address={address}: no Ray cluster answers there: {error}; "
            "if it runs and wants a token (the default since Ray 2.60), set RAY_AUTH_MODE=token"
        ) from None
    for one, handler in handlers.items():
        signal.signal(one, handler)  # Ray has installed handlers of its own
    try:
        placement = place(config, ray.cluster_resources())
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        # Any cluster but our own may grow: Ray 2.60 does not publish whether one has an autoscaler, nor how far it goes.
        if waiting := check_room(config, placement, nodes, can_grow=address != "local"):
            logger.warning("%s", waiting)
        yield placement
    finally:
        ray.shutdown()


def _knock(address: str) -> None:
    """Raises OSError where nobody listens: Ray 2.60 would try again for a quarter of an hour."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if host and port.isdigit():
        socket.create_connection((host.strip("[]"), int(port)), timeout=_HEAD_TIMEOUT_S).close()


class RoundLost(RunFailed):
    """Ray has given up on a round of workers; another one may go on."""


class HeadSilent(RuntimeError):
    """The head of the cluster does not answer."""


def answer(job: Job, placement: Placement, shards: Sequence[pa.Table], board: Board, check: Callable[[], None]) -> None:
    """Run the workers over the shards until every batch of them is committed, or until `check` or a signal stops them.

    Then they hand back what has not entered their engines, and commit the rest, for at most `cluster.drain_s`.
    Raises ConfigError where the engine refuses its options, RunFailed where a batch cannot be read or committed, RoundLost
    where workers die more often than allowed.
    """
    context = DataContext.get_current()
    context.execution_options.preserve_order = False
    context.enable_progress_bars = job.config.verbose
    if not job.config.verbose:
        context.issue_detectors_config.detectors = []  # they take a worker with a model in its memory for a fault
    context.execution_no_progress_timeout_s = -1  # loading and queueing for GPUs may take longer than Ray's 30 minutes
    # Else the pool grows only within a share of the cluster that other jobs, also those that died minutes ago, leave to it.
    context.op_resource_reservation_enabled = False
    context.custom_execution_callback_classes = [_Halt]
    _Halt.is_due = False
    context.max_consecutive_actor_init_deaths = _INIT_DEATHS
    # A worker is handed no more shards than it works on, so the pool is never more than 100 % busy, where Ray would grow it.
    context.autoscaling_config.actor_pool_util_upscaling_threshold = _GROW_WHEN_BUSY
    # Let no worker go before all shards are handed out: at Ray's 50 %, one that has just loaded goes before it is given any.
    context.autoscaling_config.actor_pool_util_downscaling_threshold = 0.0
    settings = job.config.cluster
    most = settings.max_workers or settings.workers
    at_once = shards_at_once([num_rows_of(shard) for shard in shards], most, rows_at_once(job.config, placement.device))
    # Not from_arrow: it asks remote tasks for the schema of each table, and the first of them wait for processes to start.
    dataset = ray.data.from_blocks(list(shards)).map_batches(
        Worker,
        fn_constructor_args=(job, board, WorkerMetrics),
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
        max_task_retries=-1,  # while a dead node is not yet known to be dead, each second costs a task one of them
    )
    coming = _Coming(dataset.iter_batches(batch_size=None, batch_format="pyarrow"))
    try:
        for summary in coming.watched(check):
            raise_failure(summary)
    except (Stopped, TooManyFailures) as stop:
        _drain(board, job.config, str(stop))
        raise
    except ray.exceptions.RayError as error:
        raise _explained(error, deaths(job.run, job.attempt)) from error
    finally:
        _Halt.is_due = True
        coming.join(_SHUTDOWN_S)  # a thread that asks Ray for something after we have left it ends the process


def draining_nodes() -> list[str]:
    """The nodes that are about to go: a spot notice, or the autoscaler. Raises HeadSilent."""
    try:
        # Ray 2.60 tells it nowhere in public.
        return sorted(ray._private.worker.global_worker.gcs_client.get_draining_nodes(timeout=_HEAD_TIMEOUT_S))
    except ray.exceptions.RayError as error:
        raise HeadSilent(str(error)) from None


def drain_limit_s(drain_s: float, environment: Mapping[str, str]) -> float:
    """How long a drain may take: a Ray job is killed soon after it is told to stop (3 s by default)."""
    if _RAY_JOB not in environment:
        return drain_s
    return max(0.0, min(drain_s, float(environment.get("RAY_JOB_STOP_WAIT_TIME_S", 3)) - _SHUTDOWN_S))


def _drain(board: Board, config: BatchConfig, reason: str) -> None:
    """Let the workers commit what is in their engines; another signal ends it at once."""
    limit_s = drain_limit_s(config.cluster.drain_s, os.environ)
    deadline = time.monotonic() + limit_s
    within_s = 3 * config.cluster.heartbeat_s
    with suppress(TimeoutError, BoardLost):
        board.stop()
        if num_alive := board.num_alive(within_s):
            logger.warning("%s: %d worker(s) finish what is in their engines, for at most %.0f s", reason, num_alive, limit_s)
        while board.num_alive(within_s) and time.monotonic() < deadline:
            time.sleep(_CHECK_S)


def shards_at_once(sizes: Sequence[int], num_workers: int, num_rows: int) -> int:
    """How many shards a worker is handed at a time: with so many rows, and no more than its fair share of all."""
    enough = max(_SHARDS_AT_ONCE, -(-num_rows // max(sizes)))
    return max(1, min(enough, -(-len(sizes) // num_workers)))


class _Coming:
    """What Ray Data yields, fetched in a thread, so that the driver is free to look after other things meanwhile."""

    def __init__(self, items: Iterable[Any]):
        self._items = items
        self._arrived: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._fetch, name="fetch", daemon=True)
        self._thread.start()
        self.join = self._thread.join

    def watched(self, check: Callable[[], None]) -> Iterator[Any]:
        """Yield items as they come, and call `check` now and then however long the next one takes."""
        while True:
            check()
            try:
                item, error = self._arrived.get(timeout=_CHECK_S)
            except queue.Empty:
                continue
            if isinstance(error, StopIteration):
                return
            if error is not None:
                raise error
            yield item

    def _fetch(self) -> None:
        try:
            for item in self._items:
                self._arrived.put((item, None))
            self._arrived.put((None, StopIteration()))
        except BaseException as error:  # noqa: BLE001 - raised again where the items are used
            self._arrived.put((None, error))


class _Halt(ExecutionCallback):  # type: ignore[misc]
    """Ends the execution of this process, when it is due: Ray Data 2.60 has no other way than a step of it that fails."""

    is_due = False

    def on_execution_step(self, executor: Any) -> None:
        if self.is_due:
            raise RuntimeError("halted")


def _explained(error: ray.exceptions.RayError, reasons: Sequence[str]) -> RunFailed:
    """Say in one line why engines died, or what Ray or a fault of our own says at the end of its stack trace."""
    raised = re.findall(r"^(?!ray\.exceptions)[A-Za-z_][\w.]*: .+", str(error), re.MULTILINE)
    said = raised[-1] if raised else str(error).strip().partition("\n")[0] or type(error).__name__
    if isinstance(error, ray.exceptions.RayActorError):
        return RoundLost(
            f"workers died more often than cluster.worker_restarts allows, last: {reasons[-1] if reasons else said}"
        )
    if isinstance(error, ray.exceptions.RayTaskError):  # it would come again
        return RunFailed(f"a worker could not go on: {said}")
    return RoundLost(f"Ray has lost a worker: {said}")


def _quieten() -> None:
    """Keep Ray's chatter off the terminal; what it says about this job's health still comes through."""
    warnings.filterwarnings("ignore", message="`ray_remote_args` is deprecated")  # no other way in 2.60 to bound restarts
    logging.getLogger("ray.data").setLevel(logging.WARNING)
    for name in ("ray._private.authentication", "ray.data._internal.progress"):
        logging.getLogger(name).setLevel(logging.ERROR)
    for name in ("ray.data._internal.execution.streaming_executor_state", "ray.data.exceptions"):
        logging.getLogger(name).setLevel(logging.CRITICAL)  # stack traces of what `answer` raises anyway, in one line
