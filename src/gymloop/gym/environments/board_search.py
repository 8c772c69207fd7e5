"""Shortest solutions of a sliding puzzle by A* (Hart, Nilsson and Raphael, 1968), looking at so many positions at most.

The estimate is the sum over tiles of the distance to their place: no slide lessens it by more than one, so the first
solution found is a shortest one. It finds every 2x2, 2x3 and 3x3 board's; larger boards' where they need few slides.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from gymloop.gym.environments.board import DIRECTIONS, GAP, Board, Direction

MOST_POSITIONS = 200_000
"""Looked at before the search gives up; a few seconds of one core. A 3x3 board has 181,440."""


def shortest_solution(board: Board, most_positions: int = MOST_POSITIONS) -> list[Direction] | None:
    """Slides that solve ``board``, as few as can be.

    Args:
        board: a solvable one.
        most_positions: looked at before the search gives up.

    Returns:
        The slides, empty for the solved board; None when the search gave up.
    """
    steps = _steps(len(board.tiles), board.columns)
    distances = _distances(len(board.tiles), board.columns)
    start = board.tiles
    estimate = sum(distances[tile][place] for place, tile in enumerate(start) if tile != GAP)
    came: dict[tuple[int, ...], tuple[tuple[int, ...], Direction] | None] = {start: None}
    cost = {start: 0}
    # Of equal sums the deeper position first: a solution is then reached without looking at all of its equals.
    queue = [(estimate, 0, start, start.index(GAP))]
    looked = 0
    while queue and looked < most_positions:
        total, minus_depth, tiles, gap = heapq.heappop(queue)
        depth = -minus_depth
        if depth > cost[tiles]:  # a shorter way to it was found meanwhile
            continue
        looked += 1
        remaining = total - depth
        if remaining == 0:
            return _way(came, tiles)
        for direction, place in steps[gap]:
            tile = tiles[place]
            after = list(tiles)
            after[gap], after[place] = tile, GAP
            position = tuple(after)
            if cost.get(position, depth + 2) <= depth + 1:
                continue
            cost[position] = depth + 1
            came[position] = (tiles, direction)
            left = remaining + distances[tile][gap] - distances[tile][place]
            heapq.heappush(queue, (depth + 1 + left, -depth - 1, position, place))
    return None


def _way(
    came: dict[tuple[int, ...], tuple[tuple[int, ...], Direction] | None], tiles: tuple[int, ...]
) -> list[Direction]:
    slides: list[Direction] = []
    while (step := came[tiles]) is not None:
        tiles, direction = step
        slides.append(direction)
    return slides[::-1]


def _steps(size: int, columns: int) -> Sequence[Sequence[tuple[Direction, int]]]:
    """For each place of the gap, the directions possible and the place that the tile comes from."""
    steps = []
    for gap in range(size):
        tiles = [GAP if place == gap else 1 for place in range(size)]
        board = Board(tuple(tiles), columns)
        moved = ((direction, board.slide(direction)) for direction in DIRECTIONS)
        steps.append([(direction, after.tiles.index(GAP)) for direction, after in moved if after is not None])
    return steps


def _distances(size: int, columns: int) -> Sequence[Sequence[int]]:
    """For each tile and place, how many slides the tile is from home."""
    return [
        [abs(place // columns - (tile - 1) // columns) + abs(place % columns - (tile - 1) % columns)
         for place in range(size)]
        for tile in range(size)
    ]  # fmt: skip
