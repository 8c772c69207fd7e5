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


def locate(path: KeyPath, positions: Mapping[KeyPath, str]) -> str | None:
    """Where a key stands, or else the innermost block around it that stands somewhere."""
    for length in range(len(path), -1, -1):
        if (where := positions.get(path[:length])) is not None:
            return where
    return None


def report(problems: Sequence[Problem], source: str, positions: Mapping[KeyPath, str]) -> ConfigError:
    """All problems as one error, a line each: ``file:line: key: what; expected ...``."""
    lines = []
    for problem in problems:
        where = problem.where or locate(problem.path, positions) or source
        lines.append(": ".join(part for part in (where, dotted(problem.path), problem.text) if part))
    lines = sorted(dict.fromkeys(lines), key=_by_line)
    if len(lines) == 1:
        return ConfigError(lines[0])
    return ConfigError("\n  ".join([f"{source}: {len(lines)} problems", *lines]))


def _by_line(line: str) -> tuple[bool, int]:
    """Lines of the file first, in its order; then overrides as they were given (sorting is stable)."""
    match = re.match(r"[^\n]*?:(\d+): ", line)
    return match is None, int(match[1]) if match else 0
