"""The calculator's arithmetic, its tasks, and a reward that pays for the right work only."""

import asyncio
import itertools
import random

import pytest

from gymloop.gym import ToolError
from gymloop.gym.calculator import Calculator, as_text, evaluate
from gymloop.gym.items import call_item, chat_call, message_item, output_item
from gymloop.gym.session import InProcessSource, demonstrate

SOURCE = InProcessSource("calculator", Calculator)
ONE = {"steps": ["347 * 58"]}  # 20126
TWO = {"steps": ["412 + 389", "{result} * 7"]}  # 801, 5607


@pytest.mark.parametrize(
    ("expression", "text"),
    [
        ("347 * 58", "20126"),
        (" 7-9 ", "-2"),
        ("8316 / 27", "308"),
        ("1 / 3", "0.3333333333"),
        ("7 // 2", "3"),
        ("7 % 4", "3"),
        ("2 ** 10", "1024"),
        ("2.50 * 2", "5"),
        ("-(3 + 4) * 2", "-14"),
        ("+5", "5"),
    ],
)
def test_values_are_exact_and_canonical(expression, text):
    assert as_text(evaluate(expression, max_operations=5)) == text


@pytest.mark.parametrize(
    ("expression", "said"),
    [
        ("1 / 0", "division by zero"),
        ("0 ** -1", "division by zero"),
        ("9 ** 99", "exponent is too large"),
        ("999999 ** 29", "result is too large"),
        ("(-8) ** 0.5", "not a real number"),
        ("", "not an arithmetic expression"),
        ("2 +", "not an arithmetic expression"),
        ("3(4)", "not an arithmetic expression"),
        ("abs(3)", "not an arithmetic expression"),
        ("__import__('os')", "not an arithmetic expression"),
        ("1, 2", "not an arithmetic expression"),
        ("(" * 199, "not an arithmetic expression"),
        ("1" * 100, "result is too large"),
        ("1+" * 150, "more than 200 characters"),
        ("1 + 2 + 3", "at most 1 operation in one call"),
    ],
)
def test_anything_else_is_a_short_sentence_for_the_model(expression, said):
    with pytest.raises(ToolError, match=said):
        evaluate(expression, max_operations=1)


def score(row, *steps: str, valid: bool = True) -> dict:
    """Components for a conversation: expressions are calls, the last step is the final message."""

    async def play():
        session = await SOURCE.seed_session(row)
        output = []
        for index, expression in enumerate(steps[:-1]):
            output.append(call_item("i", chat_call(f"c{index}", "calculate", "{}"), "completed"))
            output.append(output_item(f"c{index}", await session.call_tool("calculate", {"expression": expression})))
        if steps[-1]:
            output.append(message_item("m", steps[-1], "completed"))
        return await session.verify({"output": output})

    verdict = asyncio.run(play())
    assert verdict.reward == pytest.approx(sum(verdict.components.values()))
    return dict(verdict.components)


@pytest.mark.parametrize(
    ("row", "steps", "calls", "answer"),
    [
        (ONE, ("347 * 58", "Answer: 20126"), 0.4, 0.6),
        (ONE, ("347 * 58", "It is 20,126."), 0.4, 0.6),
        (ONE, ("347 * 58", "Answer: 20127"), 0.4, 0.0),
        (ONE, ("347 * 58", "20126, or is it 7"), 0.4, 0.0),
        (ONE, ("347 * 58", ""), 0.4, 0.0),  # the turn limit: no final message
        (ONE, ("347 + 58", "Answer: 405"), 0.0, 0.0),
        (ONE, ("Answer: 20126",), 0.0, 0.6),
        (ONE, ("hello",), 0.0, 0.0),
        # Trying every operation, or the right one again and again, is worth less than one right call.
        (ONE, ("347 + 58", "347 - 58", "347 / 58", "347 * 58", "?"), 0.1, 0.0),
        (ONE, ("347 * 58", "347 * 58", "Answer: 20126"), 0.2, 0.6),
        (ONE, ("nonsense", "347 * 58", "Answer: 20126"), 0.2, 0.6),
        (TWO, ("412 + 389", "801 * 7", "Answer: 5607"), 0.4, 0.6),
        (TWO, ("412 + 389", "Answer: 801"), 0.2, 0.0),
        (TWO, ("412 + 389", "801 + 7", "Answer: 808"), 0.2, 0.0),
        (TWO, ("(412 + 389) * 7", "Answer: 5607"), 0.0, 0.6),  # refused: one operation a call
    ],
)
def test_the_reward_pays_for_needed_values_and_the_right_answer(row, steps, calls, answer):
    assert score(row, *steps) == {"calls": pytest.approx(calls), "answer": answer}


def test_tasks_follow_from_the_seed_and_are_short():
    rows = SOURCE.generate(200, seed=3)
    assert rows == SOURCE.generate(200, seed=3)
    prompts = [row["responses_create_params"]["input"][0]["content"] for row in rows]
    assert max(len(prompt.split()) for prompt in prompts) <= 20
    two = sum(len(row["steps"]) == 2 for row in rows)
    assert 70 <= two <= 130
    assert len(set(prompts)) > 190


@pytest.mark.parametrize(("share", "steps"), [(0.0, 1), (1.0, 2)])
def test_the_share_of_two_step_tasks_is_a_setting(share, steps):
    tasks = itertools.islice(Calculator(two_step=share).tasks(random.Random(0)), 20)
    assert {len(task["steps"]) for task in tasks} == {steps}


async def test_the_solver_solves_every_kind_of_task():
    for row in SOURCE.generate(60, seed=11):
        demonstration = await demonstrate(SOURCE, row)
        assert len(demonstration["messages"]) == 2 + 2 * len(row["steps"])
        assert demonstration["messages"][-1]["content"].startswith("Answer: ")
