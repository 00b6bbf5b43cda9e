"""The tree of shared prefixes: its order is the best there is, and what it predicts is what a cache of one row gives."""

import io
from itertools import pairwise, permutations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pipelines.prefix_order import PathRecorder, PrefixTree, chained_hashes, num_hit_tokens

_BLOCK = 2
PROMPTS = st.lists(st.lists(st.integers(0, 2), max_size=9), max_size=12)


def tree_of(prompts: list[list[int]], block_size: int = _BLOCK, *, at_once: int = 5) -> PrefixTree:
    recorder = PathRecorder(len(prompts), block_size, io.BytesIO())
    for start in range(0, len(prompts), at_once):
        recorder.add(prompts[start : start + at_once])
    return recorder.tree()


def predicted(tree: PrefixTree, order: list[int], prompts: list[list[int]], block_size: int = _BLOCK) -> int:
    return num_hit_tokens(tree, np.array(order, np.int64), np.array([len(p) for p in prompts], np.int64), block_size)


def counted(order: list[int], prompts: list[list[int]], block_size: int = _BLOCK) -> int:
    """Token by token: whole blocks that the row before has too, but never the last token."""
    total = 0
    for one, other in pairwise(order):
        before, after = prompts[one], prompts[other]
        blocks = 0
        while (end := (blocks + 1) * block_size) < len(after) and before[:end] == after[:end] and end <= len(before):
            blocks += 1
        total += blocks * block_size
    return total


@given(PROMPTS)
def test_the_order_is_a_permutation_that_predicts_what_is_there(prompts: list[list[int]]) -> None:
    tree = tree_of(prompts)
    order = tree.order().tolist()
    as_is = list(range(len(prompts)))
    assert sorted(order) == as_is
    for one in (order, as_is):
        assert predicted(tree, one, prompts) == counted(one, prompts)
    assert tree_of(prompts, at_once=3).order().tolist() == order


@given(st.lists(st.lists(st.integers(0, 1), max_size=5), max_size=5))
def test_no_order_has_more_hits(prompts: list[list[int]]) -> None:
    prompts = [[*prompt, 100 + number] for number, prompt in enumerate(prompts)]  # a last token of its own is computed anyway
    best = counted(tree_of(prompts, 1).order().tolist(), prompts, 1)
    assert best == max(counted(list(order), prompts, 1) for order in permutations(range(len(prompts))))


@given(st.lists(st.lists(st.integers(0, 5), max_size=9), max_size=12))
def test_rows_that_share_nothing_keep_their_order(prompts: list[list[int]]) -> None:
    own = [[100 + number, *prompt] for number, prompt in enumerate(prompts)]
    assert tree_of(own).order().tolist() == list(range(len(own)))


def test_groups_come_in_the_order_of_their_first_rows_and_blocks_of_one_row_do_not_count() -> None:
    prompts = [[1, 1, 9, 9], [2, 2, 8, 8], [7, 7, 5, 5], [1, 1, 3, 3], [2, 2, 8, 8], [1, 1, 0, 0]]
    assert tree_of(prompts).order().tolist() == [2, 0, 3, 5, 1, 4]


@given(PROMPTS)
def test_hashes_are_equal_where_all_tokens_so_far_are(prompts: list[list[int]]) -> None:
    counts, hashes = chained_hashes(prompts, _BLOCK)
    paths = [tuple(p[: (i + 1) * _BLOCK]) for p in prompts for i in range(len(p) // _BLOCK)]
    assert counts.tolist() == [len(p) // _BLOCK for p in prompts]
    assert len(hashes) == len(paths)
    assert len({*zip(paths, hashes.tolist(), strict=True)}) == len(set(paths)) == len(set(hashes.tolist()))
