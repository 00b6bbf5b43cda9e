"""What all arms share: the model, the engine's options, and on CPUs the core that the engine is bound to."""

import json
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from pipelines.compose import compose_settings
from pipelines.model import model_folder
from pipelines.parse import parse_config


@dataclass(frozen=True, slots=True)
class Settings:
    """The engine of every arm; `engine_core` is None on GPUs."""

    model: str
    max_model_len: int
    max_num_seqs: int
    engine_core: int | None

    @property
    def engine_options(self) -> dict[str, Any]:
        """For vLLM's EngineArgs. Nothing is compiled on CPUs, where it takes minutes."""
        options: dict[str, Any] = {"max_model_len": self.max_model_len, "max_num_seqs": self.max_num_seqs, "seed": 0}
        return options if self.engine_core is None else {**options, "dtype": "float32", "enforce_eager": True}

    @property
    def environment(self) -> dict[str, str]:
        """For every arm's processes: one core for the engine, the others for everything else."""
        common = {"VLLM_NO_USAGE_STATS": "1", "RAY_USAGE_STATS_ENABLED": "0", "VLLM_LOGGING_LEVEL": "WARNING"}
        if self.engine_core is None:
            return common
        cpu = {"VLLM_CPU_OMP_THREADS_BIND": str(self.engine_core), "OMP_NUM_THREADS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
        return {**common, **cpu, "KMP_BLOCKTIME": "1", "HF_HUB_OFFLINE": "1", "VLLM_CPU_NUM_OF_RESERVED_CPU": "0"}

    def folder(self) -> str:
        """The model as vLLM takes it; converts a packaged one."""
        return model_folder(parse_config(compose_settings("batch", [f"model={self.model}"])).model)


@dataclass(frozen=True, slots=True)
class Measured:
    """What an arm did, and when its engine worked: from the first request that it took to the last token (epoch seconds)."""

    num_rows: int
    num_prompt_tokens: int
    num_output_tokens: int
    first_s: float
    last_s: float

    def write(self, path: Path) -> None:
        """For the process that started the arm."""
        path.write_text(json.dumps(asdict(self)))


def settings_from_environment() -> Settings:
    """An arm gets its settings as one variable."""
    return Settings(**json.loads(os.environ["FOURNEE_BENCH"]))


def wall_time(monotonic_s: float) -> float:
    """vLLM notes its engine's times on the monotonic clock."""
    return monotonic_s + time.time() - time.monotonic()


def memory_bytes(root: psutil.Process) -> int:
    """What a process and its descendants hold for themselves alone."""
    total = 0
    for process in [root, *root.children(recursive=True)]:
        try:
            total += process.memory_full_info().uss
        except psutil.Error:
            continue
    return total
