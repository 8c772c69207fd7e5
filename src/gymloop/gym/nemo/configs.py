"""NeMo Gym's config files as text, and many of them as one: which file wins, and what inherits from what.

The rules, as of NeMo Gym 0.7: a file overrides those that its ``config_paths`` name, a later sibling an earlier one,
and overrides come last; mappings merge, all else is replaced. Then ``_inherit_from`` moves and ``_copy`` copies
another block under the keys beside it, and ``_delete_key`` removes keys. Data in, data out.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from gymloop.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Source:
    """One config file: its name in messages, its content, and the places in the list of files it pulls in."""

    name: str
    content: Mapping[str, Any]
    includes: tuple[int, ...] = ()


class Yaml(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """As OmegaConf reads: numbers such as 1e-3 are numbers, and nothing is a date."""


Yaml.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if not tag.endswith((":timestamp", ":float"))]
    for first, resolvers in Yaml.yaml_implicit_resolvers.items()
}
Yaml.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(?:(?:\d[\d_]*\.?[\d_]*|\.\d[\d_]*)(?:[eE][-+]?\d+)|(?:\d[\d_]*\.[\d_]*|\.\d[\d_]*)|\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"),
    list("-+0123456789."),
)  # fmt: skip


def parse(text: str, name: str) -> dict[str, Any]:
    """Read one config file.

    Raises:
        ConfigError: it is not YAML, or not a mapping at its top.
    """
    try:
        content = yaml.load(text, Yaml)
    except yaml.YAMLError as error:
        raise ConfigError(f"{name} is not valid YAML: {' '.join(str(error).split())}") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"{name}: expected a mapping of servers and settings, got {type(content).__name__}")
    return content


def merge(sources: Sequence[Source], roots: int, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """All configs and overrides as one mapping, inheritance settled; ``${...}`` and ``???`` still stand.

    Args:
        sources: every file once.
        roots: how many of them, from the first on, the user named; the others were pulled in.
        overrides: win over every file.

    Raises:
        ConfigError: ``_inherit_from`` or ``_copy`` names nothing.
    """
    merged: dict[str, Any] = {}
    for index in _order(sources, range(roots), set()):
        merged = _merged(merged, sources[index].content)
    merged = _merged(merged, overrides)
    merged.pop("config_paths", None)
    _inherit(merged, merged, copy.deepcopy(merged))
    return merged


NOTHING = object()


def at(node: Any, path: Sequence[str]) -> Any:
    """What lies under a path of keys, or ``NOTHING``."""
    for part in path:
        if not isinstance(node, Mapping) or part not in node:
            return NOTHING
        node = node[part]
    return node


def _order(sources: Sequence[Source], level: Sequence[int], seen: set[int]) -> Iterator[int]:
    """Each file after those it pulls in, siblings as listed."""
    for index in level:
        if index not in seen:
            seen.add(index)
            yield from _order(sources, sources[index].includes, seen)
            yield index


def _merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    result = dict(below)
    for key, value in above.items():
        under = result.get(key)
        both = isinstance(under, Mapping) and isinstance(value, Mapping)
        result[key] = _merged(under, value) if both else copy.deepcopy(value)  # type: ignore[arg-type]
    return result


def _inherit(node: dict[str, Any], whole: dict[str, Any], frozen: Mapping[str, Any]) -> None:
    """Settle ``_delete_key``, ``_inherit_from``, ``_copy`` and their ``${inherit_from:...}`` forms below ``node``."""
    for key, value in list(node.items()):
        deleted: set[str] = set()
        if isinstance(value, dict) and "_delete_key" in value:
            deleted = {name.strip() for name in str(value.pop("_delete_key")).split(",")}
            for name in deleted & set(value):
                value.pop(name)
                deleted.discard(name)
        for inner in value if isinstance(value, list) else [value]:
            if isinstance(inner, dict):
                _inherit(inner, whole, frozen)
        origin, moved = _origin(value)
        if origin is None:
            continue
        path = origin.split(".")
        found = at(frozen, path)
        if found is NOTHING:
            raise ConfigError(f"env.nemo_gym: {key} inherits from {origin}, which no config has")
        if moved:
            parent = at(whole, path[:-1])
            if isinstance(parent, dict):
                parent.pop(path[-1], None)
        found = copy.deepcopy(found)
        if isinstance(value, dict) and isinstance(found, dict):
            found = _merged(found, value)
        if isinstance(found, dict):
            for name in deleted:
                if name not in found:
                    raise ConfigError(f"env.nemo_gym: {key}._delete_key names {name!r}, which {origin} does not have")
                found.pop(name)
        node[key] = found


def _origin(value: Any) -> tuple[str | None, bool]:
    """What a value inherits from, and whether it is moved from there rather than copied."""
    if isinstance(value, dict):
        for directive, moved in (("_inherit_from", True), ("_copy", False)):
            if directive in value:
                return str(value.pop(directive)), moved
    elif isinstance(value, str):
        for prefix, moved in (("${inherit_from:", True), ("${copy:", False)):
            if value.startswith(prefix):
                return value.removeprefix(prefix).removesuffix("}"), moved
    return None, False
