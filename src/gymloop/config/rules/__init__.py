"""What no single key can say: the rules between keys, each with its reason.

Rules read a schema-valid recipe, never change it, and report every violation. A violation names all keys it compared,
the one to blame first, so that a recipe with other faults is still judged by the rules whose keys are sound. No rule
asks whether a key was written or left to its default: a recipe that is complete with defaults is judged the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from gymloop.config.rules import environments, files, learning, limits, placement, saving, vllm
from gymloop.config.rules.violation import Rule, Violation
from gymloop.config.schema import Recipe

RULES: tuple[Rule, ...] = (
    *placement.RULES,
    *vllm.RULES,
    *learning.RULES,
    *limits.RULES,
    *saving.RULES,
    *files.RULES,
    *environments.RULES,
)


def violations(recipe: Recipe, folder: Path) -> Iterator[Violation]:
    """Every broken rule. ``folder`` is the recipe's: paths in it are relative to that."""
    for rule in RULES:
        yield from rule(recipe, folder)
