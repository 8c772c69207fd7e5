r"""Problems with a known answer, made from random numbers: arithmetic, fractions, equations.

The answer is LaTeX as it stands in ``\boxed``, always reduced, and is computed here with whole numbers and fractions,
never read from the text of the problem.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from fractions import Fraction

Problem = tuple[str, str]
"""Text and answer."""


def addition(rng: random.Random, largest: int) -> Problem:
    """Sum of two whole numbers."""
    a, b = rng.randint(1, largest), rng.randint(1, largest)
    return f"What is {a} + {b}?", str(a + b)


def subtraction(rng: random.Random, largest: int) -> Problem:
    """Difference of two whole numbers, perhaps negative."""
    a, b = rng.randint(1, largest), rng.randint(1, largest)
    return f"What is {a} - {b}?", str(a - b)


def multiplication(rng: random.Random, largest: int) -> Problem:
    """Product of two whole numbers."""
    a, b = rng.randint(2, max(2, largest)), rng.randint(2, max(2, largest))
    return f"What is {a} * {b}?", str(a * b)


def fractions(rng: random.Random, largest: int) -> Problem:
    """Sum of two fractions."""
    a, b = (Fraction(rng.randint(1, largest), rng.randint(2, max(2, largest))) for _ in range(2))
    return f"What is {a} + {b}? Give a reduced fraction or a whole number.", latex(a + b)


def linear(rng: random.Random, largest: int) -> Problem:
    """A linear equation with a whole-numbered solution."""
    a, x, b = rng.randint(2, max(2, largest)), rng.randint(-largest, largest), rng.randint(1, largest)
    return f"Solve {a}x + {b} = {a * x + b} for x.", str(x)


def quadratic(rng: random.Random, largest: int) -> Problem:
    """A quadratic equation whose solutions are whole numbers, perhaps one twice."""
    p, q = rng.randint(-largest, largest), rng.randint(-largest, largest)
    text = f"x^2{_term(-(p + q), 'x')}{_term(p * q, '')}"
    return f"Find all solutions of {text} = 0.", ", ".join(str(root) for root in sorted({p, q}))


def _term(factor: int, name: str) -> str:
    if factor == 0:
        return ""
    size = "" if abs(factor) == 1 and name else str(abs(factor))
    return f" {'+' if factor > 0 else '-'} {size}{name}"


def latex(value: Fraction) -> str:
    """A whole number as it is, any other as ``\\frac``."""
    if value.denominator == 1:
        return str(value.numerator)
    return f"{'-' if value < 0 else ''}\\frac{{{abs(value.numerator)}}}{{{value.denominator}}}"


KINDS: dict[str, Callable[[random.Random, int], Problem]] = {
    kind.__name__: kind for kind in (addition, subtraction, multiplication, fractions, linear, quadratic)
}
"""By the name that recipes use."""
