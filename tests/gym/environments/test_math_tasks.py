"""Generated problems: their answers are right, by arithmetic done again here, and follow from the seed."""

import random
import re
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gymloop.gym.environments.math_tasks import KINDS, latex

LARGEST = st.integers(1, 1000)
SEEDS = st.integers(0, 2**32)


def value(answer: str) -> Fraction:
    found = re.fullmatch(r"(-?)\\frac\{(\d+)\}\{(\d+)\}", answer)
    return Fraction(answer) if found is None else Fraction(f"{found[1]}{found[2]}/{found[3]}")


@given(seed=SEEDS, largest=LARGEST, kind=st.sampled_from(["addition", "subtraction", "multiplication", "fractions"]))
def test_arithmetic_is_right(seed, largest, kind):
    text, answer = KINDS[kind](random.Random(seed), largest)
    a, op, b = re.match(r"What is (\S+) ([-+*]) ([^?\s]+)\?", text).groups()
    a, b = Fraction(a), Fraction(b)
    assert value(answer) == {"+": a + b, "-": a - b, "*": a * b}[op]


@given(seed=SEEDS, largest=LARGEST)
def test_a_linear_equation_has_its_solution(seed, largest):
    text, answer = KINDS["linear"](random.Random(seed), largest)
    a, b, c = map(int, re.fullmatch(r"Solve (\d+)x \+ (\d+) = (-?\d+) for x\.", text).groups())
    assert a * int(answer) + b == c


@given(seed=SEEDS, largest=LARGEST)
def test_a_quadratic_equation_has_exactly_its_solutions(seed, largest):
    text, answer = KINDS["quadratic"](random.Random(seed), largest)
    found = re.fullmatch(r"Find all solutions of x\^2(?: ([-+]) (\d*)x)?(?: ([-+]) (\d+))? = 0\.", text)
    b = int((found[1] or "+") + (found[2] or "1")) if found[1] else 0
    c = int(found[3] + found[4]) if found[3] else 0
    roots = {int(root) for root in answer.split(", ")}
    assert all(root * root + b * root + c == 0 for root in roots)
    assert len(roots) == (1 if b * b == 4 * c else 2)


@pytest.mark.parametrize(
    ("fraction", "text"),
    [(Fraction(3), "3"), (Fraction(-3), "-3"), (Fraction(1, 2), "\\frac{1}{2}"), (Fraction(-6, 4), "-\\frac{3}{2}")],
)
def test_fractions_are_written_as_latex(fraction, text):
    assert latex(fraction) == text
