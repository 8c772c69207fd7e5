"""Small steps that several formats share."""

from __future__ import annotations

import re

from gymloop.tokens.tool_calls import ToolCall, tool_call

_SPACE = re.compile(r"\s*")


def behind_space(text: str, start: int) -> int:
    """The offset of the first character at or after ``start`` that is no white space."""
    match = _SPACE.match(text, start)
    return match.end() if match else start


def call_of(value: object, keys: tuple[str, ...] = ("arguments",)) -> ToolCall:
    """The call that a JSON object with a name describes.

    Args:
        value: decoded JSON.
        keys: where the arguments may be, the first present one wins.

    Raises:
        ValueError: it is no object with a name, or its arguments cannot be written as JSON.
        RecursionError: they are nested beyond the stack.
    """
    if not isinstance(value, dict) or not isinstance(name := value.get("name"), str) or not name.strip():
        raise ValueError("no JSON object with a name")
    return tool_call(name, next((value[key] for key in keys if key in value), {}))


def calls_of(values: list[object], keys: tuple[str, ...] = ("arguments",)) -> tuple[ToolCall, ...]:
    """The calls of a list, at least one; otherwise as ``call_of``."""
    if not values:
        raise ValueError("an empty list calls nothing")
    return tuple(call_of(value, keys) for value in values)
