"""The search finds shortest solutions, and stops where it is told to."""

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gymloop.gym.environments.board import Board, scrambled
from gymloop.gym.environments.board_search import shortest_solution


def after(board: Board, slides) -> Board:
    for way in slides:
        board = board.slide(way)
    return board


def depths(rows: int, columns: int) -> dict[Board, int]:
    """How far every board is from the solved one, by breadth first."""
    start = Board.solved(rows, columns)
    found, edge = {start: 0}, [start]
    for depth in itertools.count(1):
        edge = list({after for board in edge for way in board.directions if (after := board.slide(way)) not in found})
        if not edge:
            return found
        found |= dict.fromkeys(edge, depth)
    return found


@pytest.mark.parametrize(("rows", "columns", "boards", "deepest"), [(2, 2, 12, 6), (2, 3, 360, 21)])
def test_every_small_board_is_solved_in_as_few_slides_as_breadth_first_needs(rows, columns, boards, deepest):
    known = depths(rows, columns)
    assert (len(known), max(known.values())) == (boards, deepest)
    for board, depth in known.items():
        slides = shortest_solution(board)
        assert len(slides) == depth
        assert after(board, slides).is_solved


@pytest.mark.parametrize("rows", [[[8, 6, 7], [2, 5, 4], [3, 0, 1]], [[6, 4, 7], [8, 5, 0], [3, 2, 1]]])
def test_the_two_boards_that_are_farthest_of_all_3x3_need_31_slides(rows):
    board = Board.of(rows)
    slides = shortest_solution(board)
    assert len(slides) == 31  # no 3x3 board needs more
    assert after(board, slides).is_solved


@settings(deadline=None, max_examples=60)
@given(
    rows=st.integers(2, 5), columns=st.integers(2, 5), slides=st.integers(1, 18), seed=st.integers(0, 2**32)
)  # fmt: skip
def test_every_generated_puzzle_is_solved_in_at_most_the_slides_that_scrambled_it(rows, columns, slides, seed):
    board, scramble = scrambled(rows, columns, slides, random.Random(seed))
    found = shortest_solution(board)
    assert len(found) <= len(scramble)
    assert after(board, found).is_solved


def test_the_search_gives_up_at_its_bound():
    board = Board.of([[8, 6, 7], [2, 5, 4], [3, 0, 1]])
    assert shortest_solution(board, most_positions=100) is None
    assert shortest_solution(Board.solved(5, 5), most_positions=1) == []
