"""The schema as a tree of keys: what type, default and description a dotted key has, and which key was meant."""

from __future__ import annotations

import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from gymloop.config.nearest import did_you_mean, nearest
from gymloop.config.problems import KeyPath, dotted
from gymloop.config.schema import Recipe
from gymloop.config.unsupported import not_yet


@dataclass(frozen=True, slots=True)
class Missing:
    """No default: the recipe has to give the key, or the schema does not know it."""


MISSING = Missing()


def type_at(path: KeyPath) -> Any:
    """The schema's type of a key without ``Annotated`` and ``| None``; None where the schema has nothing to say."""
    current: Any = Recipe
    for part in path:
        if isinstance(current, type) and issubclass(current, BaseModel):
            field = current.model_fields.get(str(part))
            current = _bare(field.annotation) if field else None
        elif get_origin(current) is dict:
            current = _bare(get_args(current)[1])
        elif get_origin(current) is tuple and isinstance(part, int):
            items = [item for item in get_args(current) if item is not Ellipsis]
            current = _bare(items[min(part, len(items) - 1)])
        else:
            return None
    return current


def fields_at(path: KeyPath) -> Mapping[str, FieldInfo]:
    """The keys of a block, by name; none where the key is no block of the schema."""
    section = type_at(path)
    return section.model_fields if isinstance(section, type) and issubclass(section, BaseModel) else {}


def description(path: KeyPath) -> str | None:
    """The sentence under the key in the schema."""
    field = fields_at(path[:-1]).get(str(path[-1]))
    if field is None or field.description is None:
        return None
    return " ".join(field.description.split()).rstrip(".")


def literals(path: KeyPath) -> list[str]:
    """The words that a key may have."""
    return [option for option in get_args(type_at(path)) if isinstance(option, str)]


def default_at(path: KeyPath) -> Any:
    """What a key is when no file gives it, as a recipe would write it; ``MISSING`` where the schema has no default."""
    section: type[BaseModel] = Recipe
    for depth, part in enumerate(path, start=1):
        field = section.model_fields.get(str(part))
        if field is None:
            return MISSING
        if depth == len(path) or not field.is_required():
            if field.is_required():
                return MISSING
            return _inside(field.default, path[depth:])
        inner = _bare(field.annotation)
        if not (isinstance(inner, type) and issubclass(inner, BaseModel)):
            return MISSING
        section = inner
    return MISSING


def unknown(path: KeyPath) -> str:
    """What to say of a key that the schema does not have."""
    if (sentence := not_yet(path)) is not None:
        return sentence
    siblings = fields_at(path[:-1])
    name = str(path[-1])
    elsewhere = [dotted(known) for known, _ in all_keys() if known[-1] == name]
    if nearest(name, siblings) and len(elsewhere) != 1:  # the very word, in one other place, is nearer than a like one
        return f"unknown key{did_you_mean(name, siblings)}"
    if elsewhere:
        return f"unknown key; did you mean {' or '.join(map(repr, elsewhere))}?"
    if (sentence := not_yet((*path[:-1], "*"))) is not None:
        return sentence
    return f"unknown key; expected one of {', '.join(siblings)}"


def all_keys(section: type[BaseModel] = Recipe, path: KeyPath = ()) -> Iterator[tuple[KeyPath, FieldInfo]]:
    """Every key of the schema, blocks before what is in them; ``*`` stands for a name that the recipe chooses."""
    for name, field in section.model_fields.items():
        yield (*path, name), field
        inner, below = _bare(field.annotation), (*path, name)
        if get_origin(inner) is dict:
            inner, below = _bare(get_args(inner)[1]), (*below, "*")
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            yield from all_keys(inner, below)


def reference() -> str:
    """Every key with type, default and description, one block of lines each, in the order of the schema."""
    lines = []
    for path, field in all_keys():
        inner = _bare(field.annotation)
        is_block = isinstance(inner, type) and issubclass(inner, BaseModel)
        what = "block" if is_block else _type_name(field.annotation)
        if field.is_required():
            default = "required"
        elif is_block:
            default = "optional" if field.default is None else ""
        else:
            default = f"default {_written(field.default)}"
        lines.append("  ".join(part for part in (dotted(path), what, default) if part))
        said = field.description or (inner.__doc__ if is_block else None)
        if said:
            lines.append(f"    {' '.join(said.split())}")
    return "\n".join(lines)


def _bare(annotation: Any) -> Any:
    while True:
        if get_origin(annotation) is Annotated:
            annotation = get_args(annotation)[0]
        elif get_origin(annotation) in (Union, types.UnionType):
            options = [option for option in get_args(annotation) if option is not types.NoneType]
            if len(options) != 1:
                return annotation
            annotation = options[0]
        else:
            return annotation


def _inside(value: Any, path: KeyPath) -> Any:
    for part in path:
        if isinstance(value, BaseModel) and str(part) in type(value).model_fields:
            value = getattr(value, str(part))
        else:
            return MISSING
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    return list(value) if isinstance(value, tuple) else value


def _type_name(annotation: Any) -> str:
    if get_origin(annotation) is Annotated:
        return _type_name(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        return " or ".join(_type_name(option) for option in get_args(annotation))
    if get_origin(annotation) is Literal:
        return " or ".join(map(repr, get_args(annotation)))
    if get_origin(annotation) is dict:
        return "block of names"
    if get_origin(annotation) is tuple:
        items = [item for item in get_args(annotation) if item is not Ellipsis]
        return f"list of {_type_name(items[0])}"
    names = {int: "integer", float: "number", bool: "true or false", str: "text", types.NoneType: "null"}
    return names.get(annotation, "anything" if annotation is typing.Any else str(annotation))


def _written(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(list(value)) if isinstance(value, tuple) else str(value)
