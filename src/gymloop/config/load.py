"""From a YAML file and overrides to a Recipe, or one error that lists everything wrong with them, each with its line.

inherit ── override ── interpolate ── type-check ── cross-check

Each stage collects problems instead of stopping at one, so a recipe is mended in one round.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gymloop.config import interpolation, secrets
from gymloop.config import overrides as override_grammar
from gymloop.config.document import Document
from gymloop.config.inherit import read_chain
from gymloop.config.paths import rebase
from gymloop.config.problems import KeyPath, Problem, dotted, report
from gymloop.config.rules import violations
from gymloop.config.schema import Recipe
from gymloop.config.validate import sound_part, validate

MANDATORY = "???"
"""OmegaConf's mark of a value that has to be given elsewhere."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """A recipe and where everything in it came from."""

    recipe: Recipe
    document: Document


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read and check a recipe.

    Args:
        path: a YAML file.
        overrides: as on the command line, see ``overrides``; applied in order.

    Raises:
        ConfigError: the file cannot be read, or it and the overrides do not make a recipe; lists all problems.
    """
    return load(path, overrides).recipe


def load(path: str | Path, overrides: Sequence[str] = (), environ: Mapping[str, str] = os.environ) -> Loaded:
    """``load_recipe``, with the document that says where each value came from.

    Args:
        path: a YAML file.
        overrides: as on the command line.
        environ: what ``${oc.env:NAME}`` reads.

    Raises:
        ConfigError: see ``load_recipe``.
    """
    path = Path(path)
    source = str(path)
    document = read_chain(path)
    if document.value is None:
        raise report(document.problems, source, document.positions)
    override_grammar.apply(document, overrides)
    _check_secrets(document)
    interpolation.resolve(document, environ)
    _check_computed_secrets(document)
    rebase(document, path.parent)

    not_given = list(_not_given(document.value, ()))
    valueless = {*document.unresolved, *(problem.path for problem in not_given)}
    recipe, faults = validate(document.value)
    faults = [_without_value(fault, document) for fault in faults if not _under(fault.path, valueless)]
    document.problems += faults
    document.problems += [one for one in not_given if not _under(one.path, [fault.path for fault in faults])]
    bad = [*(problem.path for problem in document.problems), *sorted(valueless, key=str)]
    if recipe is None:
        recipe = sound_part(document.value, bad)
    if recipe is not None:
        document.problems.extend(_broken_rules(recipe, path.parent, bad))
    if document.problems or recipe is None:
        raise report(document.problems, source, document.positions, document.hidden)
    return Loaded(recipe.taken(document.from_environment), document)


def _check_secrets(document: Document) -> None:
    for path, value in list(secrets.literals(document.value)):
        document.problems.append(secrets.refusal(path))
        document.hidden[value] = "***"


def _check_computed_secrets(document: Document) -> None:
    """A secret that came through a reference or as a variable's default stands in clear somewhere all the same."""
    for path, expression in document.expressions.items():
        if secrets.is_secret(path[-1]):
            in_clear = path not in document.from_environment or secrets.default_in(expression)
            if in_clear:
                document.problems.append(secrets.refusal(path))


def _not_given(value: Any, path: KeyPath) -> Iterator[Problem]:
    if isinstance(value, dict | list):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _not_given(inner, (*path, key))
    elif value == MANDATORY:
        yield Problem(path, f"{MANDATORY} marks a value that is still to be given: here, in a recipe that inherits "
                      f"this one, or as an override {dotted(path)}=...")  # fmt: skip


def _under(path: KeyPath, known: Collection[KeyPath]) -> bool:
    return any(path[: len(one)] == one for one in known)


def _without_value(fault: Problem, document: Document) -> Problem:
    """A value of the environment is not shown, however short."""
    expression = document.from_environment.get(fault.path)
    if expression is None:
        return fault
    _, semicolon, wanted = fault.text.partition("; ")
    return Problem(
        fault.path, f"what {expression} gives does not fit{semicolon}{wanted.partition(': ')[0]}", fault.where
    )


def _broken_rules(recipe: Recipe, folder: Path, bad: Sequence[KeyPath]) -> Iterator[Problem]:
    """Violations of rules none of whose keys is already known to be faulty."""
    faulty = {dotted(path) for path in bad if path}
    for violation in violations(recipe, folder):
        if not any(key == fault or key.startswith(f"{fault}.") for key in violation.keys for fault in faulty):
            yield Problem(tuple(violation.keys[0].split(".")), violation.text)
