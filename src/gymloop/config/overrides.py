"""Overrides on the command line, in Hydra's words: change ``a.b=1``, add ``+a.b=1``, either ``++a.b=1``, drop ``~a.b``.

A value is read as YAML, by the same rules as the recipe. A plain ``a.b=1`` may also give a key that the recipe leaves
to its default; whether a key exists at all is the schema's business: a misspelt one is refused there, naming the
override.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from gymloop.config.document import Document, parse
from gymloop.config.nearest import did_you_mean
from gymloop.config.problems import KeyPath, Problem, dotted

_GRAMMAR = re.compile(r"(?P<sign>\+\+|\+|~)?(?P<key>[^\s=+~.][^\s=.]*(?:\.[^\s=.]+)*)(?:=(?P<value>.*))?", re.DOTALL)


def apply(document: Document, overrides: Sequence[str]) -> None:
    """Change ``document`` by each override in turn; what cannot be done is added to its problems."""
    for text in overrides:
        where = f"override {text!r}"
        match = _GRAMMAR.fullmatch(text)
        if match is None or (match["value"] is None and match["sign"] != "~"):
            document.problems.append(Problem((), "expected key=value, +key=value, ++key=value or ~key", where))
            continue
        path = tuple(match["key"].split("."))
        given = None
        if match["value"] is not None:
            value = parse(match["value"], where)
            document.problems.extend(Problem(path, problem.text, where) for problem in value.problems)
            if value.problems:
                continue
            # Hydra: nothing after the equals sign is the empty text; null has to be written.
            given = value.value if match["value"].strip() else ""
        problem = _apply_one(document, match["sign"] or "", path, given, match["value"] is not None, where)
        if problem is not None:
            document.problems.append(Problem(path, problem, where))


def _apply_one(document: Document, sign: str, path: KeyPath, value: Any, has_value: bool, where: str) -> str | None:
    """Do one override; a sentence when it cannot be done."""
    block = document.value
    for depth, key in enumerate(path[:-1], start=1):
        inner = block.get(key)
        if inner is None and sign != "~":
            inner = block[key] = {}
            document.positions.setdefault(path[:depth], where)
        if inner is None:
            return f"nothing to remove, the recipe has no {dotted(path[:depth])!r}{did_you_mean(str(key), block)}"
        if not isinstance(inner, dict):
            return f"{dotted(path[:depth])!r} is {inner!r}, not a block of keys"
        block = inner
    name = path[-1]
    if sign == "~":
        if name not in block:
            return f"nothing to remove, the recipe does not give this key{did_you_mean(str(name), block)}"
        if has_value and block[name] != value:
            return f"removed only where it is {value!r}, and the recipe gives {block[name]!r}"
        del block[name]
        return None
    if sign == "+" and name in block:
        return f"already in the recipe; change it with {dotted(path)}=... or ++{dotted(path)}=..."
    _put(document, block, path, value, where)
    return None


def _put(document: Document, block: dict[str, Any], path: KeyPath, value: Any, where: str) -> None:
    """Set a value; a block given to a block is merged into it, key by key, as Hydra does."""
    name = str(path[-1])
    present = block.get(name)
    if isinstance(value, dict) and isinstance(present, dict):
        for key, inner in value.items():
            _put(document, present, (*path, key), inner, where)
        return
    block[name] = value
    for known in [known for known in document.positions if known[: len(path)] == path]:
        del document.positions[known]
    document.positions[path] = where
