"""What a rule says when it is broken."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from gymloop.config.schema import Recipe


@dataclass(frozen=True, slots=True)
class Violation:
    """A broken rule.

    Attributes:
        keys: the keys it compared, dotted, the one to blame first.
        text: what is wrong, why, and what was expected.
    """

    keys: tuple[str, ...]
    text: str


Rule: TypeAlias = Callable[[Recipe, Path], Iterator[Violation]]
"""Reads a schema-valid recipe and its folder (paths in the recipe are relative to it); says all that it finds."""
