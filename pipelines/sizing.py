"""How many rows go together: in a batch, in a shard, and on their way through a worker. Each choice with its reason."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pipelines.config import BatchConfig, Device, EchoEngineConfig, VllmEngineConfig

LEAST_ROWS = 16  # of a batch, and what every automatic number of rows is a multiple of
_MOST_ROWS = 1024  # what the largest GPUs run at once: a batch of more only holds more back until it is committed
_MOST_BATCHES = 100_000  # where it can be: their parts are listed, counted and read one by one at the end, by one process
_BATCH_BYTES = 16 * 2**20
_BATCHES_PER_WORKER = 64
_LAST_PER_WORKER = 2  # so many batches' worth of rows is cut finer at the end of the input
_FINER = 4
_LONGEST_TO_MEAN = 16  # a batch waits for its longest answer: so many times what runs at once must be on its way
_ROWS_PER_SHARD = 4096
_SHARDS_PER_WORKER = 16
_MOST_SHARDS = 20_000  # unless the workers need more: all are handed to Ray before the first worker starts
_GPU_SEQS, _CPU_SEQS = 1024, 256  # what vLLM 0.29 runs at once unless told otherwise, on a large GPU and on CPUs


@dataclass(frozen=True, slots=True)
class BatchSize:
    """How many rows are committed together, and why."""

    num_rows: int
    why: str
    num_last_rows: int
    """The same near the end of the input, so that the last batches are shared among all workers."""
    num_rows_near_end: int = 0
    """How many rows of the input that is."""

    def __str__(self) -> str:
        finer = f", {self.num_last_rows:,} for the last {self.num_rows_near_end:,} rows" if self.num_rows_near_end else ""
        return f"{self.num_rows:,}{finer} ({self.why})"

    def at(self, num_left: int) -> int:
        """How many rows the next batch has, when so many rows of the input are left."""
        return self.num_rows if num_left > self.num_rows_near_end else self.num_last_rows

    def cut(self, num_rows: int, num_left: int) -> Iterator[int]:
        """Cut the rows of one source, when so many rows of the input are left, these included."""
        end = num_left - num_rows
        while num_left > end:
            size = min(self.at(num_left), num_left - end)
            yield size
            num_left -= size


def batch_size(chosen: int | None, *, num_rows: int, num_bytes: int, num_workers: int) -> BatchSize:
    """What the user has chosen, else what suits the input: its rows, and their size where nothing compresses them."""
    if chosen is not None:
        return BatchSize(chosen, "engine.rows_per_batch", chosen)
    bytes_per_row, spread = num_bytes // max(1, num_rows), num_rows // _MOST_BATCHES
    sizes = {
        f"{_BATCHES_PER_WORKER} batches for each of {num_workers} worker(s)": num_rows // (_BATCHES_PER_WORKER * num_workers),
        f"rows of {bytes_per_row:,} bytes, {_BATCH_BYTES // 2**20} MiB a batch": _BATCH_BYTES // max(1, bytes_per_row),
        (f"{_MOST_BATCHES:,} batches" if spread > _MOST_ROWS else "as many as the largest GPUs run at once"): max(
            spread, _MOST_ROWS
        ),
    }
    why, most = min(sizes.items(), key=lambda item: item[1])
    if most < LEAST_ROWS:
        why = "the least"
    size = max(LEAST_ROWS, 2 ** (max(1, most).bit_length() - 1))
    finer = max(LEAST_ROWS, size // _FINER)
    return BatchSize(size, why, finer, _LAST_PER_WORKER * num_workers * size if finer < size else 0)


def rows_at_once(config: BatchConfig, device: Device) -> int:
    """How many rows a worker is handed at a time: enough to keep its engine full while batches wait for long answers."""
    return _LONGEST_TO_MEAN * _likely_max_num_seqs(config, device)


def rows_per_shard(num_rows: int, num_workers: int) -> int:
    """So few that each worker gets several shards, and so many that Ray Data has few tasks to move."""
    enough = max(_ROWS_PER_SHARD, num_rows // _MOST_SHARDS)
    return min(enough, num_rows // (num_workers * _SHARDS_PER_WORKER))


def sizes_of(
    config: BatchConfig, engine: Mapping[str, Any] | None, batch_size: str, mean_tokens: float | None
) -> dict[str, str]:
    """What a run's rows were cut into, and what its engine resolved its own sizes to, each with its reason; for the record."""
    chosen = config.engine_kwargs if isinstance(config.engine, VllmEngineConfig) else config.engine.model_dump()
    sizes, engine = {"rows_per_batch": batch_size}, engine or {}
    for name in ("max_num_seqs", "max_num_batched_tokens"):
        if name in engine:
            sizes[name] = f"{engine[name]:,} ({'the settings' if name in chosen else 'vLLM, for this hardware'})"
    if tokens := engine.get("kv_cache_tokens"):
        fits = (
            f": {tokens / mean_tokens:,.0f} requests of {mean_tokens:,.0f} tokens, the mean of this run" if mean_tokens else ""
        )
        sizes["kv_cache"] = f"{tokens:,} tokens{fits}"
    return sizes


def rows_ahead(max_num_seqs: int) -> int:
    """How many rows a worker has read and rendered while its engine, which takes twice what it runs, has no room for them."""
    return max_num_seqs


def rows_open(max_num_seqs: int) -> int:
    """How many rows it has read and not yet committed: they wait for the longest answer of their batch, in memory."""
    return 2 * _LONGEST_TO_MEAN * max_num_seqs


def _likely_max_num_seqs(config: BatchConfig, device: Device) -> int:
    """What the engine will run at once; only its worker knows, and shards are cut before there is one."""
    if isinstance(config.engine, EchoEngineConfig):
        return config.engine.max_num_seqs
    chosen = config.engine_kwargs.get("max_num_seqs")
    if isinstance(chosen, int) and chosen > 0:
        return chosen
    return _GPU_SEQS if device == "gpu" else _CPU_SEQS
