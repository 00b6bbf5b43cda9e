"""What vLLM says about each of its steps, taken through its interface for statistics loggers."""

from typing import Any

from pipelines.rows import EngineWork


class StepCounts:
    """Counts of the last step, and their sums. vLLM takes it for a `StatLoggerBase`, whose methods it has."""

    def __init__(self) -> None:
        self.num_running = 0
        self.num_first_tokens = 0
        self.work = EngineWork()

    def begin(self) -> None:
        """A step begins: vLLM records nothing for one that gave nothing."""
        self.num_running = self.num_first_tokens = 0

    def record(self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0) -> None:
        """Called by vLLM in every step."""
        num_generated_tokens, num_flops, num_moved_bytes = self.work
        if scheduler_stats is not None:
            self.num_running = scheduler_stats.num_running_reqs
            if (perf := scheduler_stats.perf_stats) is not None:
                num_flops += perf.num_flops_per_gpu
                num_moved_bytes += perf.num_read_bytes_per_gpu + perf.num_write_bytes_per_gpu
        if iteration_stats is not None:
            self.num_first_tokens = len(iteration_stats.time_to_first_tokens_iter)
            num_generated_tokens += iteration_stats.num_generation_tokens
        self.work = EngineWork(num_generated_tokens, num_flops, num_moved_bytes)

    def log_engine_initialized(self) -> None:
        """Called by vLLM once."""

    def log(self) -> None:
        """Called by vLLM now and then."""

    def record_sleep_state(self, is_awake: int, level: int) -> None:
        """Called by vLLM when an engine is put to sleep; ours never is."""
