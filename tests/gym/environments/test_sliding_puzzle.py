"""The sliding puzzle as a rollout meets it: what slides say and cost, when it pays, and that its solver wins."""

import asyncio
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gymloop.errors import ConfigError, DataError
from gymloop.gym.environments import SlidingPuzzle, board_search, sliding_puzzle
from gymloop.gym.environments.board import Board
from gymloop.gym.session import InProcessSource, demonstrate
from gymloop.gym.sources import load_environment

SOURCE = InProcessSource("puzzle", SlidingPuzzle, {"size": 3, "shuffle_moves": 8, "max_moves": 10})
TWO_AWAY = {"board": [[1, 2, 3], [4, 0, 5], [7, 8, 6]], "max_moves": 3}  # left, up


def play(row, *directions):
    """What the slides said, and the reward, asked for twice."""

    async def rollout():
        session = await SOURCE.seed_session(row)
        said = [await session.call_tool("slide", {"direction": way}) for way in directions]
        rewards = [(await session.verify({"output": []})).reward for _ in range(2)]
        assert rewards[0] == rewards[1]
        return said, rewards[0]

    return asyncio.run(rollout())


def test_a_solved_board_pays_one():
    said, reward = play(TWO_AWAY, "left", "up")
    assert said == ["1 2 3\n4 5 _\n7 8 6\n2 slides left.", "1 2 3\n4 5 6\n7 8 _\nSolved."]
    assert reward == 1.0


@pytest.mark.parametrize("slides", [(), ("left",), ("up", "down", "left"), ("left", "right", "left", "up")])
def test_anything_else_pays_nothing(slides):
    assert play(TWO_AWAY, *slides)[1] == 0.0


def test_an_impossible_slide_costs_a_move_and_says_what_is_possible():
    said, reward = play({"board": [[1, 2], [0, 3]], "max_moves": 2}, "right", "left", "left")
    assert said[0] == "Error: no tile can go right; possible: down, left. 1 slide left."
    assert said[1] == "1 2\n3 _\nSolved."
    assert said[2] == "Error: the board is solved already"
    assert reward == 1.0


def test_after_the_last_move_nothing_moves():
    said, reward = play(TWO_AWAY | {"max_moves": 1}, "left", "up")
    assert said == ["1 2 3\n4 5 _\n7 8 6\nNo slides left.", "Error: no slides are left"]
    assert reward == 0.0


def test_a_direction_that_is_none_is_told_to_the_model_and_costs_nothing():
    said, reward = play(TWO_AWAY, "north", "left", "up")
    assert said[0].startswith("Error: slide, argument 'direction': Input should be 'up', 'down', 'left' or 'right'")
    assert reward == 1.0


def test_the_tool_shows_its_four_directions():
    (schema,) = SOURCE.tools
    assert schema["parameters"]["properties"]["direction"]["enum"] == ["up", "down", "left", "right"]
    assert schema["parameters"]["required"] == ["direction"]


def test_the_prompt_shows_board_goal_and_moves_in_few_characters():
    row = SOURCE.generate(1, seed=0)[0]
    text = row["responses_create_params"]["input"][0]["content"]
    assert Board.of(row["board"]).text() in text
    assert "1 2 3\n4 5 6\n7 8 _" in text
    assert "at most 10 slides" in text
    assert len(text) < 200


def test_the_same_seed_gives_the_same_tasks():
    assert SOURCE.generate(50, seed=5) == SOURCE.generate(50, seed=5)
    assert SOURCE.generate(50, seed=5) != SOURCE.generate(50, seed=6)


@settings(deadline=None, max_examples=40)
@given(
    rows=st.integers(2, 4), columns=st.integers(2, 4), slides=st.integers(1, 14), seed=st.integers(0, 2**32)
)  # fmt: skip
def test_the_solver_wins_every_generated_puzzle_within_its_moves(rows, columns, slides, seed):
    source = InProcessSource(
        "puzzle", SlidingPuzzle, {"size": [rows, columns], "shuffle_moves": slides, "max_moves": slides}
    )
    for row in source.generate(3, seed):
        conversation = asyncio.run(demonstrate(source, row))  # raises unless verify gives it the whole reward
        assert conversation["messages"][-1] == {"role": "assistant", "content": "Solved."}
        assert len(conversation["messages"]) <= 2 + 2 * slides


def test_a_board_too_far_to_search_is_solved_by_the_slides_of_its_row(monkeypatch):
    monkeypatch.setattr(sliding_puzzle, "shortest_solution", lambda board: board_search.shortest_solution(board, 1))
    row = SOURCE.generate(1, seed=1)[0]
    asyncio.run(demonstrate(SOURCE, row))
    with pytest.raises(DataError, match="too far from its goal to find a solution, and the row gives none"):
        asyncio.run(demonstrate(SOURCE, {**row, "solution": None}))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"board": None}, "board is None; expected a list of rows"),
        ({"board": [1, 2]}, "board is .1, 2.; expected a list of rows"),
        ({"board": [[2, 1], [3, 0]]}, "board cannot be solved"),
        ({"board": [[1, 2], [3, 0]]}, "solved already"),
        ({"max_moves": 0}, "max_moves is 0; expected a whole number"),
        ({"max_moves": "9"}, "max_moves is '9'"),
    ],
)
def test_a_row_that_is_no_puzzle_costs_the_row_and_nothing_else(change, said):
    with pytest.raises(DataError, match=said):
        play(TWO_AWAY | change)


@pytest.mark.parametrize(
    ("kwargs", "said"),
    [
        ({"size": 1}, "size is 1; expected 2 to 6"),
        ({"size": [3]}, "size is .3."),
        ({"size": [3, 7]}, "size is .3, 7."),
        ({"size": True}, "size is True"),
        ({"shuffle_moves": 0}, "shuffle_moves is 0; expected a whole number of at least 1"),
        ({"max_moves": 2.5}, "max_moves is 2.5"),
        ({"shuffle_moves": 31}, "shuffle_moves is 31 and max_moves 30, so a board could need more"),
    ],
)
def test_arguments_that_make_no_fair_game_are_refused(kwargs, said):
    with pytest.raises(ConfigError, match=said):
        SlidingPuzzle(**kwargs)


def test_recipes_find_it_in_the_package():
    assert load_environment("gymloop.gym.environments:SlidingPuzzle", "here") is SlidingPuzzle


def test_tasks_take_all_their_randomness_from_the_seed():
    random.seed(1)
    first = SOURCE.generate(5, seed=9)
    random.seed(2)
    assert SOURCE.generate(5, seed=9) == first
