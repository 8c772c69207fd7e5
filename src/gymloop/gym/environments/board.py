"""The board of a sliding puzzle: a frozen value; a slide makes another board.

A direction says where the *tile* goes: ``up`` slides the tile below the gap up into it. The solved board has the tiles
in reading order and the gap last.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

Direction: TypeAlias = Literal["up", "down", "left", "right"]
DIRECTIONS: tuple[Direction, ...] = get_args(Direction)
OPPOSITE: dict[Direction, Direction] = {"up": "down", "down": "up", "left": "right", "right": "left"}
GAP = 0
SMALLEST, LARGEST = 2, 6
"""Sides of a board; in a single row nothing can be put in order."""


@dataclass(frozen=True, slots=True)
class Board:
    """Tiles in reading order.

    Attributes:
        tiles: a permutation of 0 to ``rows * columns - 1``; 0 is the gap.
        columns: width of the board.
    """

    tiles: tuple[int, ...]
    columns: int

    @classmethod
    def solved(cls, rows: int, columns: int) -> Board:
        """The board to reach."""
        return cls((*range(1, rows * columns), GAP), columns)

    @classmethod
    def of(cls, rows: Sequence[Sequence[int]]) -> Board:
        """The board with these rows.

        Raises:
            ValueError: they are no board, or one that no slides lead to the solved one; the text says which.
        """
        columns = len(rows[0]) if rows else 0
        if not (SMALLEST <= len(rows) <= LARGEST and SMALLEST <= columns <= LARGEST):
            raise ValueError(f"has {len(rows)} rows of {columns}; expected {SMALLEST} to {LARGEST} of each")
        if any(len(row) != columns for row in rows):
            raise ValueError("has rows of different lengths")
        tiles = tuple(tile for row in rows for tile in row)
        if any(type(tile) is not int for tile in tiles) or sorted(tiles) != list(range(len(tiles))):
            raise ValueError(f"has tiles {list(tiles)}; expected each of 0 (the gap) to {len(tiles) - 1} once")
        board = cls(tiles, columns)
        if not board.solvable:
            raise ValueError("cannot be solved: an odd number of tiles is out of order")
        return board

    @property
    def rows(self) -> list[list[int]]:
        """The tiles, row by row."""
        return [list(self.tiles[at : at + self.columns]) for at in range(0, len(self.tiles), self.columns)]

    @property
    def is_solved(self) -> bool:
        """Whether the tiles are in order and the gap is last."""
        return self.tiles == (*range(1, len(self.tiles)), GAP)

    @property
    def solvable(self) -> bool:
        """Whether slides lead to the solved board.

        A slide swaps the gap with a tile and moves it by one place, so the parity of the permutation and that of the
        gap's distance from its corner change together (Johnson and Story, 1879).
        """
        order = [tile if tile != GAP else len(self.tiles) for tile in self.tiles]
        inversions = sum(a > b for at, a in enumerate(order) for b in order[at + 1 :])
        down, right = divmod(self.tiles.index(GAP), self.columns)
        distance = len(self.tiles) // self.columns - 1 - down + self.columns - 1 - right
        return inversions % 2 == distance % 2

    def slide(self, direction: Direction) -> Board | None:
        """The board after one slide, or None where no tile can go that way."""
        gap = self.tiles.index(GAP)
        row, column = divmod(gap, self.columns)
        match direction:
            case "up":
                tile = gap + self.columns if gap + self.columns < len(self.tiles) else None
            case "down":
                tile = gap - self.columns if row else None
            case "left":
                tile = gap + 1 if column + 1 < self.columns else None
            case "right":
                tile = gap - 1 if column else None
        if tile is None:
            return None
        tiles = list(self.tiles)
        tiles[gap], tiles[tile] = tiles[tile], GAP
        return Board(tuple(tiles), self.columns)

    @property
    def directions(self) -> list[Direction]:
        """Ways in which a tile can go."""
        return [direction for direction in DIRECTIONS if self.slide(direction) is not None]

    def text(self) -> str:
        """One line a row, ``_`` for the gap; numbers of two digits are aligned."""
        width = len(str(len(self.tiles) - 1))
        return "\n".join(
            " ".join(("_" if tile == GAP else str(tile)).rjust(width) for tile in row) for row in self.rows
        )


def scrambled(rows: int, columns: int, slides: int, rng: random.Random) -> tuple[Board, list[Direction]]:
    """A board some random slides from the solved one, none of which undoes the one before it.

    Args:
        rows: of the board.
        columns: of the board.
        slides: at least 1.
        rng: decides.

    Returns:
        The board, never the solved one, and slides that solve it: at most ``slides``, unless all of them led back to
        the solved board, which on 2x2 twelve do; then it is one.
    """
    board = Board.solved(rows, columns)
    made: list[Direction] = []
    for _ in range(slides):
        choices = [way for way in board.directions if not made or way != OPPOSITE[made[-1]]]
        board, made = _then(board, made, rng.choice(choices))
    if board.is_solved:
        board, made = _then(board, [], rng.choice(board.directions))
    return board, [OPPOSITE[way] for way in reversed(made)]


def _then(board: Board, made: list[Direction], way: Direction) -> tuple[Board, list[Direction]]:
    after = board.slide(way)
    if after is None:
        raise ValueError(f"no tile can go {way}")
    return after, [*made, way]
