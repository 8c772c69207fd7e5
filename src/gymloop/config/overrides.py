"""Overrides on the command line, in Hydra's words: change ``a.b=1``, add ``+a.b=1``, either ``++a.b=1``, drop ``~a.b``.

A plain ``a.b=1`` may also give a key that the recipe leaves to its default; whether a key exists at all is the schema's
business: a misspelt one is refused there, naming the override. ``a.b.0=1`` changes an item of a list, and ``\\.`` is a
dot inside a key. Values are read by ``override_value``; secrets in them are not repeated in messages.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from gymloop.config.document import Document
from gymloop.config.nearest import did_you_mean
from gymloop.config.override_value import BadValue, read_value
from gymloop.config.problems import KeyPath, Problem, dotted
from gymloop.config.secrets import masked_override

_KEY = r"(?:[^\s=.\\]|\\.)+"
_GRAMMAR = re.compile(rf"(?P<sign>\+\+|\+|~)?(?P<key>(?![+~]){_KEY}(?:\.{_KEY})*)(?:=(?P<value>.*))?", re.DOTALL)
_FORMS = "expected key=value, +key=value, ++key=value or ~key"


def apply(document: Document, overrides: Sequence[str]) -> None:
    """Change ``document`` by each override in turn; what cannot be done is added to its problems."""
    for text in overrides:
        shown = masked_override(text)
        where = f"override {shown!r}"
        match = _GRAMMAR.fullmatch(text)
        if match is None or (match["value"] is None and match["sign"] != "~"):
            near_miss = _near_miss(text) if shown == text else ""
            document.problems.append(Problem((), f"{_FORMS}{near_miss}", where))
            continue
        path = tuple(re.sub(r"\\(.)", r"\1", key) for key in re.split(r"(?<!\\)\.", match["key"]))
        has_value = match["value"] is not None
        try:
            value = read_value(match["value"]) if has_value else None
            problem = _apply_one(document, match["sign"] or "", path, value, has_value, where)
        except BadValue as error:
            problem = str(error)
        if problem is not None:
            secret = "cannot be done; a secret is given through the environment, as ${oc.env:NAME}"
            document.problems.append(Problem(path, problem if shown == text else secret, where))


def _near_miss(text: str) -> str:
    """What was probably meant by something that is no override."""
    spaced = re.fullmatch(r"([\w.]+)\s*(?:=\s*|:\s*|\s)(\S.*)", text)
    if spaced and _GRAMMAR.fullmatch(f"{spaced[1]}={spaced[2]}"):
        return f"; did you mean '{spaced[1]}={spaced[2]}'?"
    if text == "=" or re.fullmatch(r"[\w.]+=?", text):
        return ", without spaces around '='"
    return ""


def _apply_one(document: Document, sign: str, path: KeyPath, value: Any, has_value: bool, where: str) -> str | None:
    """Do one override; a sentence when it cannot be done."""
    block: Any = document.value
    steps: list[str | int] = []
    for key in path[:-1]:
        if isinstance(block, list):
            if (index := _index(key, block)) is None:
                return f"{dotted(tuple(steps))!r} is a list of {len(block)}, counted from 0"
            steps.append(index)
            block = block[index]
            continue
        inner = block.get(key)
        steps.append(key)
        if inner is None and sign != "~":
            inner = block[key] = {}
            document.positions.setdefault(tuple(steps), where)
        if inner is None:
            return f"nothing to remove, the recipe has no {dotted(tuple(steps))!r}{did_you_mean(str(key), block)}"
        if not isinstance(inner, dict | list):
            return f"{dotted(tuple(steps))!r} is {inner!r}, not a block of keys"
        block = inner
    if isinstance(block, list):
        return _in_list(document, sign, block, (*steps, path[-1]), value, where)
    name = path[-1]
    if sign == "~":
        if name not in block:
            return f"nothing to remove, the recipe does not give this key{did_you_mean(str(name), block)}"
        if has_value and block[name] != value:
            return f"removed only where it is {value!r}, and the recipe gives {block[name]!r}"
        del block[name]
        document.forget(path)
        return None
    if sign == "+" and name in block:
        return f"already in the recipe; change it with {dotted(path)}=... or ++{dotted(path)}=..."
    _put(document, block, (*steps, name), value, where)
    return None


def _in_list(document: Document, sign: str, block: list[Any], path: KeyPath, value: Any, where: str) -> str | None:
    index = _index(path[-1], block)
    if index is None or sign in ("~", "+"):
        doing = {"~": "items cannot be removed", "+": "items cannot be added"}.get(sign, f"it has {len(block)} items")
        return f"{dotted(path[:-1])!r} is a list and {doing}; give the whole list"
    block[index] = value
    document.forget((*path[:-1], index))
    document.positions[(*path[:-1], index)] = where
    return None


def _index(key: str | int, block: list[Any]) -> int | None:
    return int(key) if str(key).isdigit() and int(key) < len(block) else None


def _put(document: Document, block: dict[str, Any], path: KeyPath, value: Any, where: str) -> None:
    """Set a value; a block given to a block is merged into it, key by key, as Hydra does."""
    name = str(path[-1])
    present = block.get(name)
    if isinstance(value, dict) and isinstance(present, dict):
        for key, inner in value.items():
            _put(document, present, (*path, key), inner, where)
        return
    block[name] = value
    document.forget(path)
    document.positions[path] = where
