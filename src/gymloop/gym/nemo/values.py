"""``${...}`` and ``???`` in NeMo Gym's configs: in the end each value of a needed block is there, or a problem is."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import yaml

from gymloop.gym.nemo.configs import NOTHING, Yaml, at

_REFERENCE = re.compile(r"\$\{([^${}]*)\}")
_DEEPEST = 20


def settle(
    value: Any,
    whole: Mapping[str, Any],
    environ: Mapping[str, str],
    path: tuple[str, ...],
    problems: list[str],
    used: set[str],
    depth: int = 0,
) -> Any:
    """A value with every ``${...}`` below it replaced.

    Args:
        value: anything that YAML holds.
        whole: the merged configs, which references are looked up in.
        environ: for ``${oc.env:NAME}``.
        path: keys that lead to the value, for messages.
        problems: takes a clause for each reference that leads nowhere and each ``???``.
        used: takes the top-level keys that were referred to.
        depth: references followed so far.
    """
    if isinstance(value, Mapping):
        return {
            key: settle(item, whole, environ, (*path, str(key)), problems, used, depth) for key, item in value.items()
        }
    if isinstance(value, list):
        return [
            settle(item, whole, environ, (*path, str(index)), problems, used, depth) for index, item in enumerate(value)
        ]
    where = ".".join(path)
    if value == "???":
        problems.append(f"{where} is ???: give env.nemo_gym.{where}")
        return None
    while isinstance(value, str) and (match := _REFERENCE.search(value)):
        if depth > _DEEPEST:
            problems.append(f"{where} refers to itself")
            return None
        depth += 1
        found = _referred(match[1], whole, environ, where, problems, used)
        found = settle(found, whole, environ, path, problems, used, depth)
        if match[0] == value:
            return found
        value = value.replace(match[0], "null" if found is None else str(found))
    return value


def _referred(
    inside: str, whole: Mapping[str, Any], environ: Mapping[str, str], where: str, problems: list[str], used: set[str]
) -> Any:
    resolver, colon, rest = inside.partition(":")
    name, comma, default = (part.strip() for part in (rest if colon else inside).partition(","))
    if resolver == "oc.env" and name in environ:
        return environ[name]
    if not colon or resolver == "oc.select":
        found = at(whole, name.split("."))
        if found is not NOTHING:
            used.add(name.split(".")[0])
            return found
    elif resolver != "oc.env":
        problems.append(f"{where}: ${{{inside}}} is no reference that gymloop knows; known are oc.env and oc.select")
        return None
    if comma:
        parsed = yaml.load(default, Yaml) if default else ""
        # A default of oc.env is text once it is read, as in OmegaConf: false is "False".
        return str(parsed) if resolver == "oc.env" and parsed is not None else parsed
    if resolver == "oc.select":
        return None
    what = f"environment variable {name} is not set" if resolver == "oc.env" else f"no config has {name}"
    problems.append(f"{where}: ${{{inside}}}: {what}")
    return None
