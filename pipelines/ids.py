"""Refuse ids that are null or repeated, where the settings ask for it (`input.ids=require_unique`).

Ids are compared as the text that they are carried as: the text "1" and the number 1 are the same id.
"""

from collections.abc import Iterator
from hashlib import blake2b

import numpy as np
import pyarrow as pa

from pipelines.config import InputConfig
from pipelines.errors import ConfigError, RowError
from pipelines.readers import read_batches
from pipelines.readers.jsonl import as_text
from pipelines.rows import Batch, Block
from pipelines.sources import read_each
from pipelines.suggest import shown

_DIGEST_BYTES = 16  # among a billion ids, two share a digest with a probability of 1e-21
_MAX_SHOWN = 3


def check_ids(config: InputConfig, batches: pa.Table) -> None:
    """Read the ids of all rows and raise ConfigError where some are null or repeated.

    A row that cannot be read has no id and is none of the two: it fails by itself.
    """
    if config.ids == "allow" or config.id_column is None:
        return
    num_rows = sum(batches["num_rows"].to_pylist())
    digests, rows = np.empty((num_rows, 2), np.uint64), np.empty(num_rows, np.int64)
    num_ids = num_nulls = 0
    examples: list[str] = []
    for batch, block in _blocks(config, batches, config.id_column):
        here: list[int] = []
        digest = bytearray()
        for place, text in _ids(block, config.id_column):
            if text is not None:
                here.append(batch.rows_before + place)
                digest += blake2b(text.encode(), digest_size=_DIGEST_BYTES).digest()
                continue
            num_nulls += 1
            if num_nulls <= _MAX_SHOWN:
                examples.append(f"null in {batch.source}, row {block.source_rows[place]}")
        end = num_ids + len(here)
        digests[num_ids:end] = np.frombuffer(digest, np.uint64).reshape(-1, 2)
        rows[num_ids:end] = here
        num_ids = end
    num_repeats, pairs = _repeats(digests[:num_ids])
    examples += [_pair(config, batches, config.id_column, rows[first], rows[repeat]) for first, repeat in pairs]
    if examples:
        raise ConfigError(
            f"input.ids=require_unique: in the column {config.id_column!r}, {num_nulls} ids are null and {num_repeats} are "
            f"repeated ({'; '.join(examples)}). Put the ids right, or set input.ids=allow"
        )


def _ids(block: Block, column: str) -> Iterator[tuple[int, str | None]]:
    for place, row in enumerate(block.rows):
        if not isinstance(row, RowError):
            yield place, as_text(row.get(column))


def _blocks(config: InputConfig, batches: pa.Table, column: str) -> Iterator[tuple[Batch, Block]]:
    """Read the ids batch by batch; batches in a damaged part of a file are left out, if the settings allow it."""
    lines = (Batch(**line) for line in batches.to_pylist())
    for batch, block in read_each(lines, config, lambda some: read_batches(config, some, [column], pa.schema([]))):
        if block is not None:
            yield batch, block


def _repeats(digests: np.ndarray) -> tuple[int, list[tuple[int, int]]]:
    """How many rows repeat an earlier one; of the first few, the earliest like them and they themselves."""
    order = np.lexsort((digests[:, 1], digests[:, 0]))
    ordered = digests[order]
    is_repeat = np.zeros(len(order), bool)
    is_repeat[1:] = (ordered[1:] == ordered[:-1]).all(axis=1)
    repeats, firsts = np.flatnonzero(is_repeat), np.flatnonzero(~is_repeat)
    few = repeats[np.argsort(order[repeats])[:_MAX_SHOWN]]
    earliest = firsts[np.searchsorted(firsts, few, side="right") - 1]
    return len(repeats), list(zip(order[earliest].tolist(), order[few].tolist(), strict=True))


def _pair(config: InputConfig, batches: pa.Table, column: str, first: int, repeat: int) -> str:
    """Two rows with the same id, given by their numbers in the whole input."""
    places = []
    for row in (first, repeat):
        index = int(np.searchsorted(batches["rows_before"].to_numpy(), row, side="right")) - 1
        batch = Batch(**batches.slice(index, 1).to_pylist()[0])
        block = next(read_batches(config, [batch], [column], pa.schema([])))
        place = row - batch.rows_before
        places.append(f"{batch.source}, row {block.source_rows[place]}")
    return f"{shown(dict(_ids(block, column))[place])} in {' and in '.join(places)}"
