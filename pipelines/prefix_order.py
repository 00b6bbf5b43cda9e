"""Which rows share the beginning of their prompt, and the order that makes the most of it.

A prefix cache keeps the tokens of a prompt in whole blocks, each known by all that stands before it. So the prompts form a
tree of blocks, and going through it depth-first, every block is computed once as long as the cache holds one longest
request: no order has more hits (Zheng et al., "SGLang: efficient execution of structured language model programs", 2024,
theorem 3.1). Blocks that only one row has do not count, and rows without a shared block keep their order.

What is kept does not grow with the prompts' lengths: 64 bits of hash for each block in a file, a filter of at most 256 MiB
that tells most of the blocks that came once, some 40 bytes for each shared block, and 8 bytes a row.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import IO

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict

MOST_BLOCKS = 1024  # of one prompt; what is shared behind them is not seen
_MOST_NODES = 2**23  # shared blocks that are told apart, 40 bytes each; beyond, those that the fewest rows share are not
_MOST_SLOTS = 2**28  # bytes of the filter
_SLOTS_PER_ROW = 64
_HASHES_AT_ONCE = 2**20
_ONCE, _AGAIN = 1, 2

Ints = npt.NDArray[np.int64]
Hashes = npt.NDArray[np.uint64]
_NODE = np.dtype([("hash", np.uint64), ("parent", np.uint64), ("depth", np.int64), ("first_row", np.int64), ("rows", np.int64)])


class PrefixHits(BaseModel):
    """The prompt tokens that should come from the prefix cache: of a row those that it shares with the row before it."""

    model_config = ConfigDict(frozen=True)
    block_size: int
    num_prompt_tokens: int
    as_is: int
    """In the order of the input."""
    by_prefix: int
    """In the order by prefix."""
    least_gain: float
    """The part of all prompt tokens that has to be won for the rows to be put into that order."""

    @property
    def is_ordered(self) -> bool:
        """Whether the rows are answered in the order by prefix."""
        return self.by_prefix - self.as_is >= max(1, self.least_gain * self.num_prompt_tokens)

    @property
    def predicted(self) -> int:
        """In the order that was taken."""
        return self.by_prefix if self.is_ordered else self.as_is

    def describe(self) -> str:
        """What is won, in a sentence."""
        best, as_is = (f"{part:,} ({part / max(1, self.num_prompt_tokens):.1%})" for part in (self.by_prefix, self.as_is))
        return (
            f"of {self.num_prompt_tokens:,} prompt tokens {best} can come from the prefix cache, {as_is} in the order of the "
            f"input, which is {'changed' if self.is_ordered else 'kept'}"
        )


@dataclass(frozen=True, slots=True)
class PrefixTree:
    """The blocks that several rows share; the first is the root, above all of them."""

    parent: Ints
    depth: Ints
    rank: Ints
    """The place of each in the tree, read depth-first; children in the order of their first rows."""
    node: Ints
    """Of each row, the deepest block that it shares."""

    def order(self) -> Ints:
        """The rows as the tree is read; those of one place keep their order."""
        return np.argsort(self.rank[self.node], kind="stable")

    def num_shared(self, order: Ints) -> Ints:
        """How many leading blocks each row but the first shares with the one before it."""
        one, other = self.node[order[:-1]].copy(), self.node[order[1:]].copy()
        apart = np.flatnonzero(one != other)
        while len(apart):
            depths = self.depth[one[apart]], self.depth[other[apart]]
            up_one, up_other = apart[depths[0] >= depths[1]], apart[depths[1] >= depths[0]]
            one[up_one], other[up_other] = self.parent[one[up_one]], self.parent[other[up_other]]
            apart = apart[one[apart] != other[apart]]
        return self.depth[one]


def num_hit_tokens(tree: PrefixTree, order: Ints, num_tokens: Ints, block_size: int) -> int:
    """The prompt tokens that come out of a cache which holds the row before and nothing else.

    vLLM computes at least the last token of a prompt (`KVCacheManager.get_computed_blocks`), so of a prompt that ends with a
    block not even that one is taken.
    """
    usable = (num_tokens[order[1:]] - 1) // block_size
    return int(np.minimum(tree.num_shared(order), np.maximum(usable, 0)).sum()) * block_size


class PathRecorder:
    """Takes the tokens of prompts, row by row, and makes the tree of what they share."""

    def __init__(self, num_rows: int, block_size: int, spill: IO[bytes]):
        self._block_size = block_size
        self._spill = spill
        self._num_blocks = np.zeros(num_rows, np.int64)
        self._num_rows = 0
        slots = 2 ** int(np.ceil(np.log2(max(2**10, _SLOTS_PER_ROW * num_rows))))
        self._filter = np.zeros(min(_MOST_SLOTS, slots), np.uint8)

    def add(self, prompts: Sequence[npt.ArrayLike]) -> None:
        """Take the tokens of the next rows; a row that has none shares nothing."""
        counts, hashes = chained_hashes(prompts, self._block_size)
        self._num_blocks[self._num_rows : self._num_rows + len(counts)] = counts
        self._num_rows += len(counts)
        self._spill.write(hashes.tobytes())
        different, times = np.unique(self._slots(hashes), return_counts=True)
        before = self._filter[different]
        self._filter[different] = np.where((times > 1) | (before > 0), _AGAIN, _ONCE)

    def tree(self) -> PrefixTree:
        """The tree of all rows so far."""
        table = np.empty(0, _NODE)
        for first_row, counts, hashes in self._chunks():
            table = _merged(table, self._nodes_in(first_row, counts, hashes))
        table = table[table["rows"] > 1]
        node = np.zeros(len(self._num_blocks), np.int64)
        for first_row, counts, hashes in self._chunks():
            found = _find(table, hashes)
            depths = _leading(found >= 0, counts)
            last = np.cumsum(counts) - counts + depths - 1
            node[first_row : first_row + len(counts)][depths > 0] = found[last[depths > 0]] + 1
        parent = np.concatenate(([0], _find(table, table["parent"]) + 1))  # the root's hash is in no table: -1 + 1
        depth, first_row_of = (np.concatenate(([0], table[name])) for name in ("depth", "first_row"))
        return PrefixTree(parent, depth, _ranks(parent, depth, first_row_of), node)

    def _slots(self, hashes: Hashes) -> Ints:
        return (hashes & np.uint64(len(self._filter) - 1)).astype(np.int64)

    def _chunks(self) -> Iterator[tuple[int, Ints, Hashes]]:
        """Read back the hashes, of so many rows at a time that they fit."""
        self._spill.seek(0)
        ends = np.cumsum(self._num_blocks)
        first = 0
        while first < len(ends):
            done = ends[first - 1] if first else 0
            end = max(first + 1, int(np.searchsorted(ends, done + _HASHES_AT_ONCE, side="right")))
            counts = self._num_blocks[first:end]
            yield first, counts, np.frombuffer(self._spill.read(int(counts.sum()) * 8), np.uint64)
            first = end

    def _nodes_in(self, first_row: int, counts: Ints, hashes: Hashes) -> np.ndarray:
        """The blocks that may be shared, each row's up to the first that came once: all after it did so too."""
        depths = _leading(self._filter[self._slots(hashes)] == _AGAIN, counts)
        starts, rows = np.cumsum(counts) - counts, np.repeat(np.arange(len(counts)), counts)
        depth = np.arange(len(hashes)) - starts[rows]
        kept = np.flatnonzero(depth < depths[rows])
        found = np.empty(len(kept), _NODE)
        found["hash"], found["depth"], found["first_row"] = hashes[kept], depth[kept] + 1, first_row + rows[kept]
        found["parent"] = np.where(depth[kept] > 0, hashes[kept - 1], np.uint64(0))
        found["rows"] = 1
        return found


def chained_hashes(prompts: Sequence[npt.ArrayLike], block_size: int) -> tuple[Ints, Hashes]:
    """The number of whole blocks of each prompt, and their hashes: each stands for the block and all that is before it.

    A hash is the sum of the mixed hashes of the blocks so far, each mixed with its place. Among a billion blocks, two that
    differ are taken for one with a probability of 3 %; the price is a row in the wrong place.
    """
    whole = [np.asarray(tokens)[: min(len(np.asarray(tokens)) // block_size, MOST_BLOCKS) * block_size] for tokens in prompts]
    counts = np.array([len(tokens) // block_size for tokens in whole], np.int64)
    if not counts.sum():
        return counts, np.empty(0, np.uint64)
    blocks = np.concatenate(whole).astype(np.uint64).reshape(-1, block_size)
    rows = np.repeat(np.arange(len(counts)), counts)
    place = np.arange(len(blocks)) - (np.cumsum(counts) - counts)[rows]
    factors = _mix(np.arange(1, block_size + 1, dtype=np.uint64)) | np.uint64(1)
    own = _mix((_mix(blocks) * factors).sum(axis=1, dtype=np.uint64) + _mix(place.astype(np.uint64)))
    sums = np.cumsum(own, dtype=np.uint64)
    before = np.concatenate((np.zeros(1, np.uint64), sums))[(np.cumsum(counts) - counts)[rows]]
    return counts, _mix(sums - before)


def _mix(values: Hashes) -> Hashes:
    """The last step of splitmix64: a change of one bit changes half of them."""
    mixed = values + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


def _leading(is_good: npt.NDArray[np.bool_], counts: Ints) -> Ints:
    """How many values of each row are good before the first that is not."""
    ends = np.cumsum(counts)
    bad = np.append(np.flatnonzero(~is_good), len(is_good))
    first_bad = bad[np.searchsorted(bad, ends - counts)]
    lengths: Ints = np.minimum(first_bad, ends) - (ends - counts)
    return lengths


def _merged(table: np.ndarray, more: np.ndarray) -> np.ndarray:
    """Both tables as one, by hash; of too many nodes, those that the fewest rows share go."""
    both = np.concatenate((table, more))
    _, first, group = np.unique(both["hash"], return_index=True, return_inverse=True)  # the first is of the earliest row
    merged: np.ndarray = both[first]
    merged["rows"] = np.bincount(group.ravel(), weights=both["rows"], minlength=len(first)).astype(np.int64)
    if len(merged) > _MOST_NODES:
        merged = merged[np.sort(np.lexsort((merged["depth"], -merged["rows"]))[:_MOST_NODES])]
    return merged


def _find(table: np.ndarray, hashes: Hashes) -> Ints:
    """The place of each hash in a table that is sorted by them; -1 where it is not in it."""
    if not len(table):
        return np.full(len(hashes), -1, np.int64)
    places = np.minimum(np.searchsorted(table["hash"], hashes), len(table) - 1)
    return np.where(table["hash"][places] == hashes, places, -1)


def _ranks(parent: Ints, depth: Ints, first_row: Ints) -> Ints:
    """The place of each node in the tree read depth-first: behind its parent and all that its earlier siblings hold."""
    by_depth = np.lexsort((first_row, parent, depth))
    levels = np.split(by_depth, np.flatnonzero(np.diff(depth[by_depth])) + 1)
    sizes, ranks = np.ones(len(parent), np.int64), np.zeros(len(parent), np.int64)
    for level in reversed(levels[1:]):
        np.add.at(sizes, parent[level], sizes[level])
    for level in levels[1:]:
        before = np.cumsum(sizes[level]) - sizes[level]
        is_first = np.append(True, np.diff(parent[level]) != 0)
        start_of_family = before[is_first][np.cumsum(is_first) - 1]
        ranks[level] = ranks[parent[level]] + 1 + before - start_of_family
    return ranks
