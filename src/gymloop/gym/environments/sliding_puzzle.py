"""The sliding puzzle: a game of many turns in which one number counts, whether the board was solved in time.

The board is scrambled by slides from the solved one, so it can be solved, and in no more slides than a rollout may
make. Every slide that the model asks for counts as a move, possible or not; after the last one nothing moves any more.
"""

from __future__ import annotations

import random
from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import Any

from gymloop.errors import ConfigError, DataError
from gymloop.gym.contract import Row
from gymloop.gym.environment import Call, Environment, call
from gymloop.gym.environments.board import DIRECTIONS, LARGEST, SMALLEST, Board, Direction, scrambled
from gymloop.gym.environments.board_search import shortest_solution
from gymloop.gym.tools import ToolError, tool

_PROMPT = """Sliding puzzle: _ is the gap, and slide moves the tile beside it into it. Make this board
{board}
into this one, in at most {moves} slides:
{goal}"""


class SlidingPuzzle(Environment):
    """Put the tiles in order.

    Args:
        size: rows and columns, 2 to 6 each; one number for both, or a list of the two.
        shuffle_moves: slides that scramble a generated board at most; each board draws its number from 1 on.
        max_moves: slides that a rollout may ask for, unless its row says ``max_moves``.

    Raises:
        ConfigError: an argument is out of range, or boards could need more slides than a rollout has.
    """

    def __init__(self, size: int | Sequence[int] = 3, shuffle_moves: int = 10, max_moves: int = 30) -> None:
        sides = [size, size] if isinstance(size, int) else list(size)
        if len(sides) != 2 or not all(type(side) is int and SMALLEST <= side <= LARGEST for side in sides):
            raise ConfigError(f"size is {size!r}; expected {SMALLEST} to {LARGEST}, or a list of rows and columns")
        for name, value in (("shuffle_moves", shuffle_moves), ("max_moves", max_moves)):
            if type(value) is not int or value < 1:
                raise ConfigError(f"{name} is {value!r}; expected a whole number of at least 1")
        if shuffle_moves > max_moves:
            raise ConfigError(
                f"shuffle_moves is {shuffle_moves} and max_moves {max_moves}, so a board could need more slides than "
                f"a rollout has; expected at most {max_moves} and {max_moves}"
            )
        self.size = tuple(sides)
        self.shuffle_moves = shuffle_moves
        self.max_moves = max_moves

    def tasks(self, rng: random.Random) -> Iterator[Mapping[str, Any]]:
        """Boards without end, each with slides that solve it under ``solution``."""
        rows, columns = self.size
        while True:
            board, solution = scrambled(rows, columns, rng.randint(1, self.shuffle_moves), rng)
            goal = Board.solved(rows, columns)
            prompt = _PROMPT.format(board=board.text(), moves=self.max_moves, goal=goal.text())
            yield {"prompt": prompt, "board": board.rows, "max_moves": self.max_moves, "solution": solution}

    def seed(self, row: Row) -> None:
        """Set up the board of the row.

        Raises:
            DataError: the row has no board, or one that cannot be solved, or is solved already.
        """
        self.board = _board(row)
        if self.board.is_solved:
            raise DataError("the board is solved already")
        self.left = row.get("max_moves", self.max_moves)
        if type(self.left) is not int or self.left < 1:
            raise DataError(f"max_moves is {self.left!r}; expected a whole number of at least 1")

    @tool
    def slide(self, direction: Direction) -> str:
        """Slide a tile into the gap: up, down, left or right, as the tile goes.

        Args:
            direction: where the tile goes
        """
        if self.board.is_solved:
            raise ToolError("the board is solved already")
        if not self.left:
            raise ToolError("no slides are left")
        self.left -= 1
        after = self.board.slide(direction)
        if after is None:
            possible = ", ".join(self.board.directions)
            raise ToolError(f"no tile can go {direction}; possible: {possible}. {self._left()}")
        self.board = after
        return f"{after.text()}\n{'Solved.' if after.is_solved else self._left()}"

    def verify(self, response: Mapping[str, Any]) -> float:
        """1 for a solved board, else 0."""
        return float(self.board.is_solved)

    def solve(self, row: Row) -> Generator[Call, str, str]:
        """The fewest slides, or, for a board too far from its goal to search for them, those of the row.

        Raises:
            DataError: neither is known.
        """
        slides: Sequence[str] | None = shortest_solution(_board(row)) or row.get("solution")
        if slides is None or not all(direction in DIRECTIONS for direction in slides):
            raise DataError("the board is too far from its goal to find a solution, and the row gives none")
        for direction in slides:
            yield call("slide", direction=direction)
        return "Solved."

    def _left(self) -> str:
        return f"{self.left} slide{'' if self.left == 1 else 's'} left." if self.left else "No slides left."


def _board(row: Row) -> Board:
    rows = row.get("board")
    if not isinstance(rows, list) or not all(isinstance(line, list) for line in rows):
        raise DataError(f"board is {rows!r:.80}; expected a list of rows, 0 for the gap")
    try:
        return Board.of(rows)
    except ValueError as error:
        raise DataError(f"board {error}") from error
