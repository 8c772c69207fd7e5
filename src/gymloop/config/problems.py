"""One sentence for each thing wrong with a recipe, and one error that holds them all, in the order of the file."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gymloop.errors import ConfigError

KeyPath = tuple[str | int, ...]
"""Keys from the top of the recipe; list indices are integers."""


@dataclass(frozen=True, slots=True)
class Problem:
    """What is wrong with one key.

    Attributes:
        path: the key; empty for the recipe as a whole.
        text: what, what was expected, the nearest right thing.
        where: file and line, or the override; None asks ``locate`` for it.
    """

    path: KeyPath
    text: str
    where: str | None = None


def dotted(path: KeyPath) -> str:
    """``policy.optimizer.kwargs.betas.0``."""
    return ".".join(str(part) for part in path)


def mask(text: str, hidden: Mapping[str, str]) -> str:
    """``text`` with each hidden value replaced by what stands for it.

    Values of less than four characters stay: masking every ``8`` would hide what is wrong, and no secret is that short.
    """
    for value in sorted(hidden, key=len, reverse=True):
        if len(value) >= 4:
            for shape in (value, repr(value)[1:-1]):
                text = text.replace(shape, hidden[value])
    return text


def locate(path: KeyPath, positions: Mapping[KeyPath, str]) -> str | None:
    """Where a key stands, or else the innermost block around it that stands somewhere."""
    for length in range(len(path), -1, -1):
        if (where := positions.get(path[:length])) is not None:
            return where
    return None


def report(
    problems: Sequence[Problem], source: str, positions: Mapping[KeyPath, str], hidden: Mapping[str, str] | None = None
) -> ConfigError:
    """All problems as one error, a line each: ``file:line: key: what; expected ...``.

    Args:
        problems: at least one.
        source: the recipe's file; its lines come first, then those of files it inherits, then overrides.
        positions: where each key stands.
        hidden: values that are not shown, with what stands for them.
    """
    lines = []
    for problem in problems:
        where = problem.where or locate(problem.path, positions) or source
        line = ": ".join(part for part in (where, dotted(problem.path), problem.text) if part)
        lines.append((_order(where, source), mask(line, hidden or {})))
    said = [line for _, line in sorted(dict.fromkeys(lines), key=lambda item: item[0])]
    if len(said) == 1:
        return ConfigError(said[0])
    return ConfigError("\n  ".join([f"{source}: {len(said)} problems", *said]))


def _order(where: str, source: str) -> tuple[int, str, int]:
    """The recipe's own lines, then other files, then overrides as they were given (sorting is stable)."""
    if where.startswith("override "):
        return 2, "", 0
    match = re.fullmatch(r"(.*?)(?::(\d+))?", where, re.DOTALL)
    file, line = (match[1], int(match[2] or 0)) if match else (where, 0)
    return (0, "", line) if file == source else (1, file, line)
