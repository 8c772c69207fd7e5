"""Sequences that begin alike are one tree, and every token they share is computed once.

The rollouts of a group share their prompt, often their first calls, and at times everything. Laid out as a trie, one
node per distinct prefix, a microbatch is one row of tokens whose positions are depths and where a token attends to its
ancestors and itself. A node then computes exactly what its token computes in every sequence through it, so logprobs
and gradients are those of separate rows, up to the order of float additions.

    sequences    a b c d      tree, depth first    a b c d  e  x y
                 a b e                             0 1 2 3  2  0 1   depth
                 x y          runs                 [a b c d] after 0, [e] after 2 (a b), [x y] after 0

Attention is not computed over the whole row, which would cost the square of it. Sorting the sequences makes the trie a
stack walk: each adds one *run* of new nodes under a prefix of its predecessor's path, and a run attends to that path
alone. Runs of similar length are padded into one block. Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Run:
    """New nodes that one sequence adds to the tree: contiguous in the row, contiguous in depth.

    Attributes:
        start: first node.
        length: number of nodes, at least 1.
        depth: depth of the first node, which is the number of its proper ancestors.
        sequence: index of the sequence whose path the run ends.
    """

    start: int
    length: int
    depth: int
    sequence: int


@dataclass(frozen=True, slots=True)
class Tree:
    """A forest in depth-first order.

    Attributes:
        tokens: int64 [nodes].
        depths: int64 [nodes]; the position id of each token.
        paths: one int64 array per sequence, in the order given: the node of each of its tokens.
        runs: they partition the nodes, in row order.
    """

    tokens: np.ndarray
    depths: np.ndarray
    paths: tuple[np.ndarray, ...]
    runs: tuple[Run, ...]


@dataclass(frozen=True, slots=True)
class Block:
    """Runs whose attention is computed together: query i of row r attends to keys 0 to ``query_depths[r, i]``.

    Attributes:
        queries: int64 [runs, Q], nodes; padded with node 0, whose result is not used.
        keys: int64 [runs, K], the path that each run ends; padded with node 0. The key at index j has depth j.
        query_depths: int64 [runs, Q], in [0, K); a padded query repeats the last one of its run.
        causal: every run is a whole path (query i has depth i), so plain causal attention gives the same.
    """

    queries: np.ndarray
    keys: np.ndarray
    query_depths: np.ndarray
    causal: bool


@dataclass(frozen=True, slots=True)
class Layout:
    """The attention of a tree.

    Attributes:
        blocks: every node is a query of exactly one of them.
        rows: int64 [nodes], where the result of each node lies when the blocks' query rows are concatenated flat.
    """

    blocks: tuple[Block, ...]
    rows: np.ndarray


def common_prefix(first: np.ndarray, second: np.ndarray) -> int:
    """Length of the longest common prefix of two token arrays."""
    length = min(len(first), len(second))
    differs = first[:length] != second[:length]
    index = int(differs.argmax()) if length else 0
    return index if length and differs[index] else length


def lexicographic(sequences: Sequence[np.ndarray]) -> list[int]:
    """Indices that sort token sequences; a prefix comes before what it begins, equals keep their order."""
    keys = [np.asarray(ids).astype(">u8").tobytes() for ids in sequences]
    return sorted(range(len(sequences)), key=keys.__getitem__)


def grow(sequences: Sequence[np.ndarray]) -> Tree:
    """Build the tree of token sequences.

    Args:
        sequences: integer arrays, each with at least one token id, none negative.
    """
    paths: dict[int, np.ndarray] = {}
    runs: list[Run] = []
    tokens: list[np.ndarray] = []
    nodes = 0
    previous = np.empty(0, dtype=np.int64)
    path = np.empty(0, dtype=np.int64)
    for index in lexicographic(sequences):
        ids = np.asarray(sequences[index], dtype=np.int64)
        depth = common_prefix(previous, ids)
        length = len(ids) - depth
        path = np.concatenate([path[:depth], np.arange(nodes, nodes + length)])
        if length:
            runs.append(Run(nodes, length, depth, index))
            tokens.append(ids[depth:])
            nodes += length
        paths[index] = path
        previous = ids
    return Tree(
        tokens=np.concatenate(tokens),
        depths=np.concatenate([np.arange(run.depth, run.depth + run.length) for run in runs]),
        paths=tuple(paths[index] for index in range(len(sequences))),
        runs=tuple(runs),
    )


def layout(tree: Tree) -> Layout:
    """Gather runs into blocks so that at least half of each block's queries are real, single-token runs aside.

    Runs that start at a root need no mask and are kept apart from those that continue a prefix.
    """
    blocks: list[Block] = []
    rows = np.empty(len(tree.tokens), dtype=np.int64)
    offset = 0
    for members in _similar(tree.runs):
        width = members[0].length
        reach = max(run.depth + run.length for run in members)
        queries = np.zeros((len(members), width), dtype=np.int64)
        keys = np.zeros((len(members), reach), dtype=np.int64)
        query_depths = np.empty((len(members), width), dtype=np.int64)
        for row, run in enumerate(members):
            end = run.depth + run.length
            queries[row, : run.length] = np.arange(run.start, run.start + run.length)
            keys[row, :end] = tree.paths[run.sequence][:end]
            query_depths[row] = np.minimum(np.arange(run.depth, run.depth + width), end - 1)
            first = offset + row * width
            rows[run.start : run.start + run.length] = np.arange(first, first + run.length)
        offset += queries.size
        blocks.append(Block(queries, keys, query_depths, causal=members[0].depth == 0))
    return Layout(tuple(blocks), rows)


def _similar(runs: Sequence[Run]) -> list[list[Run]]:
    """Runs by descending length: roots and continuations apart, none shorter than half its block's first."""
    blocks: list[list[Run]] = []
    for is_root in (True, False):
        chosen = sorted((run for run in runs if (run.depth == 0) == is_root), key=lambda run: (-run.length, run.start))
        block: list[Run] = []
        for run in chosen:
            if not block or 2 * run.length < block[0].length:
                block = []
                blocks.append(block)
            block.append(run)
    return blocks


def bins(sequences: Sequence[np.ndarray], groups: Sequence[str], limit: int) -> list[list[int]]:
    """Distribute sequences over microbatches of at most ``limit`` packed tokens.

    Groups stay whole where they fit; a larger one is cut between neighbours in sorted order, which share most. The
    pieces go, in group order, to the first microbatch with room. A sequence longer than ``limit`` gets its own.

    Args:
        sequences: token arrays.
        groups: the group id of each.
        limit: tokens, shared ones counted once per piece.

    Returns:
        Indices into ``sequences``, ascending within each microbatch; each index once. Depends on nothing but the input.
    """
    by_group: dict[str, list[int]] = {}
    for index, group in enumerate(groups):
        by_group.setdefault(group, []).append(index)
    filled: list[int] = []
    result: list[list[int]] = []
    for members in by_group.values():
        for piece, size in _pieces(sequences, members, limit):
            number = next((bin_ for bin_, used in enumerate(filled) if used + size <= limit), len(filled))
            if number == len(filled):
                filled.append(0)
                result.append([])
            filled[number] += size
            result[number].extend(piece)
    return [sorted(members) for members in result]


def _pieces(sequences: Sequence[np.ndarray], members: list[int], limit: int) -> list[tuple[list[int], int]]:
    """Cut one group into runs of neighbours with at most ``limit`` distinct nodes, and say how many each has."""
    pieces: list[tuple[list[int], int]] = []
    piece: list[int] = []
    size = 0
    for position in lexicographic([sequences[index] for index in members]):
        index = members[position]
        ids = sequences[index]
        added = len(ids) - common_prefix(sequences[piece[-1]], ids) if piece else len(ids)
        if piece and size + added > limit:
            pieces.append((piece, size))
            piece, size, added = [], 0, len(ids)
        piece.append(index)
        size += added
    pieces.append((piece, size))
    return pieces
