"""From a YAML file and overrides to a Recipe, or one error that lists everything wrong with them, each with its line.

Read (``document``), override (``overrides``), type-check (``schema``), cross-check (``rules``): each stage collects
problems instead of stopping at one, so a recipe is mended in one round.
"""

from __future__ import annotations

import copy
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from gymloop.config import overrides as override_grammar
from gymloop.config.document import parse
from gymloop.config.nearest import did_you_mean, nearest
from gymloop.config.problems import KeyPath, Problem, dotted, report
from gymloop.config.rules import violations
from gymloop.config.schema import Recipe
from gymloop.config.unsupported import not_yet
from gymloop.errors import ConfigError


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read and check a recipe.

    Args:
        path: a YAML file.
        overrides: as on the command line, see ``overrides``; applied in order.

    Raises:
        ConfigError: the file cannot be read, or it and the overrides do not make a recipe; lists all problems.
    """
    path = Path(path)
    source = str(path)
    document = parse(_read(path), source)
    if document.value is None and document.problems:
        raise report(document.problems, source, document.positions)
    if not isinstance(document.value, dict):
        what = "is empty" if document.value is None else f"holds a {type(document.value).__name__}"
        raise ConfigError(f"{source}: {what}; a recipe is a block of keys: {', '.join(Recipe.model_fields)}")
    override_grammar.apply(document, overrides)

    problems = [*document.problems, *_interpolations(document.value, ())]
    recipe, faults = _validate(document.value)
    problems.extend(faults)
    bad = [problem.path for problem in problems]
    if recipe is None:
        recipe = _sound_part(document.value, [fault.path for fault in faults])
    if recipe is not None:
        problems.extend(_broken_rules(recipe, path.parent, bad))
    if problems:
        raise report(problems, source, document.positions)
    return recipe  # type: ignore[return-value]  # no problems means that it validated


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        siblings = [file.name for file in path.parent.glob("*.y*ml")] if path.parent.is_dir() else []
        raise ConfigError(f"there is no recipe {path}{did_you_mean(path.name, siblings)}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: byte {error.start} is not UTF-8; a recipe is UTF-8 text") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from error


def _interpolations(value: Any, path: KeyPath) -> Iterator[Problem]:
    """``${...}`` would be taken as literal text; templates may hold it."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _interpolations(inner, (*path, key))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _interpolations(inner, (*path, index))
    elif isinstance(value, str) and "${" in value and path[-1:] != ("chat_template",):
        yield Problem(path, f"interpolation is not available yet; write the value of {value!r} out")


def _validate(tree: Mapping[str, Any]) -> tuple[Recipe | None, list[Problem]]:
    try:
        return Recipe.model_validate(tree), []
    except ValidationError as error:
        return None, [_problem(details) for details in error.errors(include_url=False)]


def _sound_part(tree: Mapping[str, Any], bad: Sequence[KeyPath]) -> Recipe | None:
    """The recipe without its faulty keys, where their defaults make one, so that the rules can judge the rest."""
    pruned = copy.deepcopy(dict(tree))
    for path in bad:
        block: Any = pruned
        for key, inner in itertools.pairwise(path):
            if isinstance(inner, int) or not isinstance(block.get(key), dict):
                block.pop(key, None)  # an item of a list, or inside something already taken out: the list goes
                break
            block = block[key]
        else:
            block.pop(path[-1], None)
    return _validate(pruned)[0]


def _broken_rules(recipe: Recipe, folder: Path, bad: Sequence[KeyPath]) -> Iterator[Problem]:
    """Violations of rules none of whose keys is already known to be faulty."""
    faulty = {dotted(path) for path in bad if path}
    for violation in violations(recipe, folder):
        if not any(key == fault or key.startswith(f"{fault}.") for key in violation.keys for fault in faulty):
            yield Problem(tuple(violation.keys[0].split(".")), violation.text)


# ---- pydantic's errors in words ----

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
        return Problem(path, _unknown(path))
    if kind == "missing":
        described = _description(path)
        return Problem(path, f"missing; expected: {described}" if described else "missing")
    if kind in _BOUNDS:
        word, name = _BOUNDS[kind]
        return Problem(path, f"is {_shown(given)}; expected {word} {context[name]}")
    if kind == "literal_error":
        options = _literals(path)
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
    if wanted == "an integer" and isinstance(value, float) and value.is_integer():
        return f": write {int(value)}"
    if value is None and wanted == "a block of keys":
        return ": give its keys or remove it"
    return ""


# ---- the schema, walked by key ----


def _bare(annotation: Any) -> Any:
    """The type without ``Annotated`` and ``| None``."""
    while True:
        if get_origin(annotation) is Annotated:
            annotation = get_args(annotation)[0]
        elif get_origin(annotation) in (Union, UnionType):
            options = [option for option in get_args(annotation) if option is not NoneType]
            if len(options) != 1:
                return annotation
            annotation = options[0]
        else:
            return annotation


def _type_at(path: KeyPath) -> Any:
    """The schema's type of a key; None where the schema has nothing to say."""
    current: Any = Recipe
    for part in path:
        if isinstance(current, type) and issubclass(current, BaseModel):
            field = current.model_fields.get(str(part))
            current = _bare(field.annotation) if field else None
        elif get_origin(current) is dict:
            current = _bare(get_args(current)[1])
        else:
            return None
    return current


def _fields(path: KeyPath) -> Mapping[str, Any]:
    section = _type_at(path)
    return section.model_fields if isinstance(section, type) and issubclass(section, BaseModel) else {}


def _description(path: KeyPath) -> str | None:
    field = _fields(path[:-1]).get(str(path[-1]))
    if field is None or field.description is None:
        return None
    return " ".join(field.description.split()).rstrip(".")


def _literals(path: KeyPath) -> list[str]:
    return [option for option in get_args(_type_at(path)) if isinstance(option, str)]


def _unknown(path: KeyPath) -> str:
    key = dotted(path)
    if (sentence := not_yet(key)) is not None:
        return sentence
    siblings = _fields(path[:-1])
    name = str(path[-1])
    if nearest(name, siblings):
        return f"unknown key{did_you_mean(name, siblings)}"
    elsewhere = [dotted(known) for known in _all_keys(Recipe, ()) if known[-1] == name]
    if elsewhere:
        return f"unknown key; did you mean {' or '.join(map(repr, elsewhere))}?"
    return f"unknown key; expected one of {', '.join(siblings)}"


def _all_keys(section: type[BaseModel], path: KeyPath) -> Iterator[KeyPath]:
    for name, field in section.model_fields.items():
        yield (*path, name)
        inner = _bare(field.annotation)
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            yield from _all_keys(inner, (*path, name))
