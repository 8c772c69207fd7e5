"""The tree is the sequences, no more and no less, and its attention is ancestor-or-self."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from gymloop.policy.tree import Tree, bins, common_prefix, grow, layout

TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=9)


def arrays(*sequences: list[int]) -> list[np.ndarray]:
    return [np.array(sequence) for sequence in sequences]


def dense_attention(tree: Tree) -> np.ndarray:
    """What the blocks allow: [query node, key node]; a node that is a query twice, or never, fails."""
    arrangement = layout(tree)
    nodes = len(tree.tokens)
    flat_queries = np.concatenate([block.queries.ravel() for block in arrangement.blocks])
    assert (flat_queries[arrangement.rows] == np.arange(nodes)).all()
    allowed = np.zeros((nodes, nodes), dtype=bool)
    flat = 0
    used = set(arrangement.rows.tolist())
    for block in arrangement.blocks:
        for row in range(len(block.queries)):
            for column, node in enumerate(block.queries[row]):
                depth = block.query_depths[row, column]
                assert 0 <= depth < block.keys.shape[1]
                if flat in used:
                    allowed[node, block.keys[row, : depth + 1]] = True
                    if block.causal:
                        assert depth == column
                flat += 1
    return allowed


def brute_force_attention(tree: Tree, sequences: list[np.ndarray]) -> np.ndarray:
    prefix_of = {}
    for path, ids in zip(tree.paths, sequences, strict=True):
        for index, node in enumerate(path):
            prefix_of[int(node)] = tuple(ids[: index + 1].tolist())
    nodes = len(tree.tokens)
    return np.array([[prefix_of[i][: len(prefix_of[j])] == prefix_of[j] for j in range(nodes)] for i in range(nodes)])


def test_the_example_of_the_docstring():
    tree = grow(arrays([7, 8, 9, 10], [7, 8, 11], [20, 21]))
    assert tree.tokens.tolist() == [7, 8, 9, 10, 11, 20, 21]
    assert tree.depths.tolist() == [0, 1, 2, 3, 2, 0, 1]
    assert [path.tolist() for path in tree.paths] == [[0, 1, 2, 3], [0, 1, 4], [5, 6]]
    assert [(run.start, run.length, run.depth) for run in tree.runs] == [(0, 4, 0), (4, 1, 2), (5, 2, 0)]


def test_equal_sequences_are_computed_once():
    tree = grow(arrays([5, 6, 7], [5, 6, 7], [5, 6]))
    assert len(tree.tokens) == 3
    assert [path.tolist() for path in tree.paths] == [[0, 1, 2], [0, 1, 2], [0, 1]]


def test_token_ids_beyond_one_byte_sort_as_numbers():
    tree = grow(arrays([256, 1], [1, 256], [256, 2]))
    assert tree.tokens.tolist() == [1, 256, 256, 1, 2]


@settings(deadline=None, max_examples=200)
@given(st.lists(TOKENS, min_size=1, max_size=8))
def test_every_sequence_is_read_back_and_attends_to_its_ancestors(sequences: list[list[int]]):
    ids = arrays(*sequences)
    tree = grow(ids)
    for path, sequence in zip(tree.paths, ids, strict=True):
        assert tree.tokens[path].tolist() == sequence.tolist()
        assert tree.depths[path].tolist() == list(range(len(sequence)))
    distinct = {tuple(sequence[: index + 1]) for sequence in sequences for index in range(len(sequence))}
    assert len(tree.tokens) == len(distinct)
    assert (dense_attention(tree) == brute_force_attention(tree, ids)).all()


def test_common_prefix():
    assert common_prefix(np.array([1, 2, 3]), np.array([1, 2, 4, 5])) == 2
    assert common_prefix(np.array([1, 2]), np.array([1, 2, 3])) == 2
    assert common_prefix(np.array([], dtype=np.int64), np.array([1])) == 0
    assert common_prefix(np.array([2]), np.array([1])) == 0


def test_groups_stay_whole_and_take_the_first_microbatch_with_room():
    prompt = list(range(6))
    sequences = arrays([*prompt, 10], [*prompt, 11], list(range(20, 29)), [*prompt[:2], 50], [1, 2])
    # group a: 8 nodes, b: 9, c: 3, d: 2; limit 12
    assert bins(sequences, ["a", "a", "b", "c", "d"], 12) == [[0, 1, 3], [2, 4]]


def test_a_group_too_large_is_cut_between_neighbours():
    sequences = arrays([1, 2, 3, 4], [9, 9, 9, 9], [1, 2, 3, 5], [9, 9, 9, 8])
    assert bins(sequences, ["a"] * 4, 5) == [[0, 2], [1, 3]]


def test_a_sequence_over_the_limit_gets_its_own_microbatch():
    assert bins(arrays([1, 2], list(range(10)), [3, 4]), ["a", "b", "c"], 4) == [[0, 2], [1]]


@settings(deadline=None)
@given(st.lists(st.tuples(TOKENS, st.sampled_from("abc")), min_size=1, max_size=12), st.integers(1, 20))
def test_bins_hold_every_sequence_once_within_the_limit(rows: list[tuple[list[int], str]], limit: int):
    sequences = arrays(*[ids for ids, _ in rows])
    result = bins(sequences, [group for _, group in rows], limit)
    assert sorted(index for members in result for index in members) == list(range(len(rows)))
    for members in result:
        assert members == sorted(members)
        assert len(members) == 1 or len(grow([sequences[index] for index in members]).tokens) <= limit
