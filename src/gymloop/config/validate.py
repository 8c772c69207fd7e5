"""From a plain tree to a Recipe, and pydantic's errors in the words of whoever wrote the recipe."""

from __future__ import annotations

import copy
import itertools
import re
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from gymloop.config.document import parse
from gymloop.config.keys import description, literals, type_at, unknown
from gymloop.config.nearest import did_you_mean
from gymloop.config.problems import KeyPath, Problem
from gymloop.config.schema import MOST, Recipe


def validate(tree: Mapping[str, Any]) -> tuple[Recipe | None, list[Problem]]:
    """The recipe, or everything that keeps the tree from being one."""
    try:
        return Recipe.model_validate(tree), []
    except ValidationError as error:
        return None, [_problem(details) for details in error.errors(include_url=False)]


def sound_part(tree: Mapping[str, Any], bad: Sequence[KeyPath]) -> Recipe | None:
    """The recipe without its faulty keys, so that the rules can judge the rest.

    What a recipe must have and this one lacks is stood in for; only rules that do not look at it have a say.
    """
    pruned = copy.deepcopy(dict(tree))
    for path in bad:
        block: Any = pruned
        for key, inner in itertools.pairwise(path):
            if isinstance(inner, int) or not isinstance(block.get(key), dict):
                block.pop(key, None)  # an item of a list, or inside something already taken out: the list goes
                break
            block = block[key]
        else:
            if path:
                block.pop(path[-1], None)
    while True:
        try:
            return Recipe.model_validate(pruned)
        except ValidationError as error:
            missing = [details["loc"] for details in error.errors() if details["type"] == "missing"]
        if not missing:
            return None
        for path in missing:
            block = pruned
            for key in path[:-1]:
                block = block[key]
            block[path[-1]] = _stand_in(path)


def _stand_in(path: KeyPath) -> Any:
    """Some value that the schema takes for a required key; what is missing in a block shows when it is there."""
    wanted = type_at(path)
    if isinstance(wanted, type) and issubclass(wanted, BaseModel):
        return {}
    return {int: 2, float: 1.0, str: "-"}.get(wanted, {})


_WANTED = {
    "int_type": "an integer",
    "int_from_float": "an integer",
    "int_parsing": "an integer",
    "float_type": "a number",
    "float_parsing": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "string_type": "text",
    "dict_type": "a block of keys",
    "model_type": "a block of keys",
    "model_attributes_type": "a block of keys",
    "tuple_type": "a list",
    "list_type": "a list",
}
_BOUNDS = {
    "greater_than_equal": ("at least", "ge"),
    "greater_than": ("more than", "gt"),
    "less_than_equal": ("at most", "le"),
    "less_than": ("less than", "lt"),
}


def _problem(error: ErrorDetails) -> Problem:
    path: KeyPath = error["loc"]
    kind, given, context = error["type"], error.get("input"), error.get("ctx", {})
    if kind == "extra_forbidden":
        return Problem(path, unknown(path))
    if kind == "missing":
        described = description(path)
        return Problem(path, f"missing; expected: {described}" if described else "missing")
    if kind in _BOUNDS:
        word, name = _BOUNDS[kind]
        return Problem(path, f"is {_shown(given)}; expected {word} {context[name]}")
    if kind == "literal_error":
        options = literals(path)
        listed = " or ".join(repr(option) for option in options) or context.get("expected", "")
        hint = did_you_mean(given, options) if isinstance(given, str) else ""
        return Problem(path, f"is {_shown(given)}; expected {listed}{hint}")
    if kind in _WANTED:
        return Problem(path, f"is {_shown(given)}; expected {_WANTED[kind]}{_mend(given, _WANTED[kind])}")
    return Problem(path, f"is {_shown(given)}; {error['msg'][:1].lower()}{error['msg'][1:]}")


def _shown(value: Any) -> str:
    if value is None:
        return "empty"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f"the text {value!r}" if len(value) <= 60 else f"the text {value[:57] + '...'!r}"
    if isinstance(value, dict):
        return "a block of keys"
    return f"a list of {len(value)}" if isinstance(value, list | tuple) else repr(value)


def _mend(value: Any, wanted: str) -> str:
    """How to write what was probably meant."""
    if isinstance(value, str):
        if wanted == "true or false" and value.lower() in ("yes", "no", "on", "off", "y", "n", "true", "false"):
            return f": write {str(value.lower() in ('yes', 'on', 'y', 'true')).lower()}, without quotes"
        if wanted in ("an integer", "a number"):
            if re.fullmatch(r"[-+]?0[0-9]+", value):
                return f": a leading zero means octal to some YAML readers, write {int(value)}"
            if isinstance(parse(value, "").value, int | float):
                return ": remove the quotes"
    if wanted == "an integer" and isinstance(value, float) and value.is_integer() and abs(value) <= MOST:
        return f": write {int(value)}"
    if value is None and wanted == "a block of keys":
        return ": give its keys or remove it"
    return ""
