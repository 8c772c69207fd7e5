"""The board: what a slide does, which boards can be solved, and that scrambled ones always can."""

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gymloop.gym.environments.board import DIRECTIONS, OPPOSITE, Board, scrambled

CENTRE = Board.of([[1, 2, 3], [4, 0, 5], [6, 7, 8]])


@pytest.mark.parametrize(
    ("direction", "rows"),
    [
        ("up", [[1, 2, 3], [4, 7, 5], [6, 0, 8]]),
        ("down", [[1, 0, 3], [4, 2, 5], [6, 7, 8]]),
        ("left", [[1, 2, 3], [4, 5, 0], [6, 7, 8]]),
        ("right", [[1, 2, 3], [0, 4, 5], [6, 7, 8]]),
    ],
)
def test_a_direction_says_where_the_tile_goes(direction, rows):
    assert CENTRE.slide(direction).rows == rows


def test_no_tile_comes_from_beyond_the_edge():
    solved = Board.solved(2, 3)
    assert solved.rows == [[1, 2, 3], [4, 5, 0]]
    assert solved.slide("up") is None
    assert solved.slide("left") is None  # and no tile of the next row passes for a neighbour
    assert solved.directions == ["down", "right"]
    assert Board.of([[1, 2, 0], [4, 5, 3]]).slide("left") is None


def test_text_is_a_line_a_row_and_aligned_only_where_numbers_have_two_digits():
    assert CENTRE.text() == "1 2 3\n4 _ 5\n6 7 8"
    assert Board.solved(2, 6).text() == " 1  2  3  4  5  6\n 7  8  9 10 11  _"


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([], "has 0 rows of 0"),
        ([[1, 2, 0]], "has 1 rows of 3"),
        ([[1, 2], [0]], "different lengths"),
        ([[1, 1], [2, 0]], "each of 0 .the gap. to 3 once"),
        ([[1, 2], [3, 4]], "each of 0"),
        ([[1, 2], [3, False]], "each of 0"),
        ([["1", 2], [3, 0]], "each of 0"),
        ([[2, 1], [3, 0]], "cannot be solved"),
        ([[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12], [13, 15, 14, 0]], "cannot be solved"),  # Loyd's
        ([[0] * 7] * 7, "has 7 rows of 7"),
    ],
)
def test_what_is_no_board_is_said(rows, said):
    with pytest.raises(ValueError, match=said):
        Board.of(rows)


@pytest.mark.parametrize(("rows", "columns"), [(2, 2), (2, 3), (3, 2)])
def test_solvable_is_exactly_what_slides_can_reach(rows, columns):
    start = Board.solved(rows, columns)
    reached, edge = {start}, [start]
    while edge:
        edge = [after for board in edge for way in board.directions if (after := board.slide(way)) not in reached]
        reached |= set(edge)
    every = (Board(tiles, columns) for tiles in itertools.permutations(range(rows * columns)))
    assert {board for board in every if board.solvable} == reached


SIDES = st.integers(2, 5)


@given(rows=SIDES, columns=SIDES, slides=st.integers(1, 60), seed=st.integers(0, 2**32))
def test_a_scrambled_board_is_unsolved_and_its_slides_solve_it(rows, columns, slides, seed):
    board, solution = scrambled(rows, columns, slides, random.Random(seed))
    assert not board.is_solved
    assert board.solvable
    assert 1 <= len(solution) <= slides
    assert Board.of(board.rows) == board
    for way in solution:
        board = board.slide(way)
    assert board.is_solved


def test_twelve_slides_around_the_smallest_board_are_not_left_solved():
    boards = [scrambled(2, 2, 12, random.Random(seed)) for seed in range(20)]
    assert all(not board.is_solved and len(solution) == 1 for board, solution in boards)


@given(seed=st.integers(0, 2**32))
def test_a_slide_back_undoes_a_slide(seed):
    board, _ = scrambled(3, 4, 30, random.Random(seed))
    for way in board.directions:
        assert board.slide(way).slide(OPPOSITE[way]) == board
    assert all((board.slide(way) is not None) == (way in board.directions) for way in DIRECTIONS)
