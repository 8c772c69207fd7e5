"""Secrets come from the environment: a literal one is refused, and no value of the environment is ever shown.

What a recipe takes with ``${oc.env:NAME}`` is used as it is and written, everywhere a person or a file can see it, as
that reference.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from gymloop.config.problems import KeyPath, Problem

_WORDS = r"api_?key|access_?key|secret_?key|private_?key|token|password|passwd|secret|credentials?|authorization"
_NAME = re.compile(rf"(?:.*[_\-.])?(?:{_WORDS})", re.IGNORECASE)
_SPECIAL_TOKEN = re.compile(
    r"(?:bos|eos|pad|unk|sep|cls|mask|stop|start|end|image|video|audio|think)_token", re.IGNORECASE
)
_COUNT = re.compile(r"(?:.*[_\-.])?token", re.IGNORECASE)
"""With a number this is a misspelt ``..._tokens``; no token is a number."""
_IN_TEXT = re.compile(rf"(?:^|[^a-zA-Z])(?:{_WORDS})(?![a-zA-Z_])", re.IGNORECASE)
_IN_URL = re.compile(r"[a-zA-Z][\w+.-]*://[^/\s:@]*:[^/\s@]+@")
_ENV_DEFAULT = re.compile(r"oc\.env:[^,{}]*,\s*([^{}]*?)\s*\}")


def is_secret(key: str | int) -> bool:
    """Whether a key, by its name, holds a secret."""
    return isinstance(key, str) and bool(_NAME.fullmatch(key)) and not _SPECIAL_TOKEN.fullmatch(key)


def literals(value: Any, path: KeyPath = ()) -> Iterator[tuple[KeyPath, str]]:
    """Secrets that are written out, with their keys; values with ``${...}`` are not yet known."""
    if isinstance(value, dict | list):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from literals(inner, (*path, key))
    elif value is not None and not isinstance(value, bool):
        text = str(value)
        name = next((key for key in reversed(path) if isinstance(key, str)), "")
        named = is_secret(name) and not (isinstance(value, int | float) and _COUNT.fullmatch(name))
        if text and "${" not in text and (named or _IN_URL.match(text)):
            yield path, text


def refusal(path: KeyPath, where: str | None = None) -> Problem:
    """What to say of a secret that is written out; it is not repeated."""
    name = re.sub(r"\W+", "_", str(path[-1])).upper()
    return Problem(path, f"looks like a secret; give it through the environment: ${{oc.env:{name}}}", where)


def masked_override(text: str) -> str:
    """An override as messages may show it."""
    if not (_IN_TEXT.search(text) or _IN_URL.search(text)) or "${" in text:
        return text
    key, equals, _ = text.partition("=")
    return f"{key}=***" if equals else "***"


def default_in(expression: str) -> bool:
    """Whether an expression gives a variable's default in clear."""
    return any(match[1].strip("'\"") not in ("", "null") for match in _ENV_DEFAULT.finditer(expression))
