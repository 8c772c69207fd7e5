"""Arithmetic that a small model cannot do in its head, so the calculator pays: tasks of one call and of two.

The calculator is a pocket calculator, one operation a call, so a two-step task truly needs two calls, the second made
from the first one's result. The reward is 0.4 for calls that computed what the task needs, shared among all calls made,
so that trying every operation is worth less than the right one, and 0.6 for the right final number.
"""

from __future__ import annotations

import ast
import operator
import random
import re
from collections.abc import Callable, Generator, Iterator, Mapping
from typing import Any

from gymloop.gym.contract import Row, Verdict
from gymloop.gym.environment import Call, Environment, call
from gymloop.gym.items import final_text
from gymloop.gym.tools import ToolError, tool

CALL_SHARE = 0.4
ANSWER_SHARE = 0.6
MAX_LENGTH = 200
MAX_DIGITS = 30

Number = int | float

_OPERATORS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
_EXPRESSION = re.compile(r"[0-9.+\-*/%()\s]+")
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")

_ONE_STEP = {
    "+": ("What is {a} + {b}?", "What is {a} plus {b}?", "Tom has {a} coins and gets {b} more. How many now?"),
    "-": ("What is {a} - {b}?", "What is {a} minus {b}?", "A shop had {a} eggs and sold {b}. How many are left?"),
    "*": ("What is {a} * {b}?", "What is {a} times {b}?", "One box holds {a} nails. How many do {b} boxes hold?"),
}
_THEN = {"+": "add {c}", "-": "subtract {c}", "*": "multiply the result by {c}"}


class Calculator(Environment):
    """Word problems with a calculator.

    Args:
        two_step: share of generated tasks that need two calls, 0 to 1.
        max_operations: operations the calculator accepts in one expression.
    """

    def __init__(self, two_step: float = 0.5, max_operations: int = 1) -> None:
        self.two_step = two_step
        self.max_operations = max_operations
        self.computed: list[Number] = []

    def tasks(self, rng: random.Random) -> Iterator[Mapping[str, Any]]:
        """Tasks without end. ``steps`` holds the expressions to compute, the next one written with ``{result}``."""
        while True:
            op = rng.choice(list(_ONE_STEP))
            a, b = _operands(op, rng)
            steps = [f"{a} {op} {b}"]
            prompt = rng.choice(_ONE_STEP[op]).format(a=a, b=b)
            if rng.random() < self.two_step:
                then = rng.choice([other for other in _THEN if other != op])
                c = rng.randint(11, 99) if then == "*" else rng.randint(100, 999)
                prompt = f"Compute {a} {op} {b}, then {_THEN[then].format(c=c)}."
                steps.append(f"{{result}} {then} {c}")
            yield {"prompt": prompt, "steps": steps}

    @tool
    def calculate(self, expression: str) -> str:
        """Compute one operation, such as 12 * 34.

        Args:
            expression: two numbers and one of + - * / // % **
        """
        value = evaluate(expression, self.max_operations)
        self.computed.append(value)
        return as_text(value)

    def verify(self, response: Mapping[str, Any]) -> Verdict:
        """Score calls by the values they computed and the answer by the last number of the final message."""
        needed = self._needed(self.row)
        calls = sum(item["type"] == "function_call" for item in response["output"])
        hits = sum(value in self.computed for value in needed)
        found = _NUMBER.findall(final_text(response))
        right = bool(found) and float(found[-1].replace(",", "")) == needed[-1]
        components = {"calls": CALL_SHARE * hits / max(calls, len(needed)), "answer": ANSWER_SHARE * right}
        return Verdict(sum(components.values()), components)

    def solve(self, row: Row) -> Generator[Call, str, str]:
        """Compute step after step, then say the result."""
        result = ""
        for step in row["steps"]:
            result = yield call("calculate", expression=step.format(result=result))
        return f"Answer: {result}"

    def _needed(self, row: Row) -> list[Number]:
        """The value of each step."""
        values: list[Number] = []
        for step in row["steps"]:
            values.append(evaluate(step.format(result=as_text(values[-1]) if values else ""), self.max_operations))
        return values


def evaluate(expression: str, max_operations: int) -> Number:
    """Value of an arithmetic expression: numbers, ``+ - * / // % **`` and parentheses, nothing else.

    Raises:
        ToolError: it is not such an expression, has too many operations, or its value is too large.
    """
    if len(expression) > MAX_LENGTH:
        raise ToolError(f"the expression has more than {MAX_LENGTH} characters")
    if not _EXPRESSION.fullmatch(expression):
        raise ToolError("not an arithmetic expression")
    try:
        tree = ast.parse(expression.strip(), mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        raise ToolError("not an arithmetic expression") from error
    operations = sum(isinstance(node, ast.BinOp) for node in ast.walk(tree))
    if operations > max_operations:
        raise ToolError(f"at most {max_operations} operation{'s' if max_operations > 1 else ''} in one call")
    return _value(tree)


def as_text(value: Number) -> str:
    """A whole number without ``.0``, any other with at most 10 significant digits."""
    return str(int(value)) if value == int(value) else f"{value:.10g}"


def _operands(op: str, rng: random.Random) -> tuple[int, int]:
    if op == "*":
        return rng.randint(100, 999), rng.randint(11, 99)
    a, b = rng.randint(1000, 9999), rng.randint(100, 999)
    return a, b


def _value(node: ast.AST) -> Number:
    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            return _bounded(value)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand)
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return _value(operand)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            a, b = _value(left), _value(right)
            if isinstance(op, ast.Pow) and abs(b) > MAX_DIGITS:
                raise ToolError("the exponent is too large")
            try:
                value = _OPERATORS[type(op)](a, b)
            except ZeroDivisionError as error:
                raise ToolError("division by zero") from error
            except OverflowError as error:
                raise ToolError("the result is too large") from error
            if isinstance(value, complex):
                raise ToolError("the result is not a real number")
            return _bounded(value)
        case _:
            raise ToolError("not an arithmetic expression")


def _bounded(value: Number) -> Number:
    if not abs(value) < 10**MAX_DIGITS:
        raise ToolError("the result is too large")
    return int(value) if isinstance(value, float) and value.is_integer() else value
