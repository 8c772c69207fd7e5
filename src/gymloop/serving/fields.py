"""Reading the fields of a request: a value of the type that was expected, or a refusal that names the field.

A null value is an absent one. A boolean never passes as a number, nor text as anything else. A field that a route does
not know is refused, for it may be a misspelt one that changes the distribution.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from gymloop.serving.refusal import ApiError

_EXPECTED = {
    float: "a number",
    int: "an integer",
    bool: "true or false",
    str: "text",
    dict: "an object",
    list: "a list",
}
_SAME = (("messages", "input", "prompt"), ("max_tokens", "max_output_tokens", "max_completion_tokens"))
"""What the routes call the same thing: names that resemble each other less than they resemble others."""
Fields = Mapping[str, Any]
"""The fields that a request gives a value, by name."""


@dataclass(frozen=True, slots=True)
class Form:
    """The fields of one route beside the sampling surface.

    Attributes:
        reads: fields that the route reads.
        inert: fields that clients send and that change nothing here.
        only: fields of which this server does one thing: its values, the first of which a refusal names.
    """

    reads: frozenset[str]
    inert: frozenset[str] = frozenset()
    only: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)

    def read(self, body: Any, sampling: Collection[str] = (), where: str = "") -> Fields:
        """The fields of ``body``.

        Args:
            body: decoded JSON.
            sampling: names of fields that are checked elsewhere.
            where: of an object inside the request: its name and a dot.

        Raises:
            ApiError: the body is no object, or a field is unknown or asks for what this server does not do.
        """
        if not isinstance(body, dict):
            raise ApiError(400, "invalid_type", f"the request body is {kind_of(body)}; expected a JSON object")
        given = {name: value for name, value in body.items() if value is not None}
        known = {*self.reads, *self.inert, *self.only, *sampling}
        for name in given:
            if name not in known:
                meant = next(
                    (other for names in _SAME if name in names for other in names if other in self.reads), None
                )
                near = [meant] if meant else difflib.get_close_matches(name, sorted(known), n=1)
                hint = f"; did you mean {where}{near[0]}?" if near else ""
                message = f"{where}{name} is not a field of this route{hint}"
                raise ApiError(400, "unknown_field", message, f"{where}{name}")
        for name in self.only.keys() & given.keys():
            check_only(f"{where}{name}", given[name], self.only[name])
        return given


def check_only(name: str, value: Any, accepted: tuple[Any, ...]) -> None:
    """Refuse a value that is none of ``accepted``.

    Raises:
        ApiError: 400 ``unsupported_field``.
    """
    if not any(type(value) is type(good) and value == good for good in accepted):
        expected = f"only {show(accepted[0])} is supported" if accepted else "it is not supported"
        raise ApiError(400, "unsupported_field", f"{name} is {show(value)}; {expected}", name)


def typed(given: Fields, name: str, kind: type, default: Any = None) -> Any:
    """A field of a type; an integer passes where a float is expected.

    Raises:
        ApiError: 400 ``invalid_type``.
    """
    if name not in given:
        return default
    value = given[name]
    accepted = (int, float) if kind is float else (kind,)
    if type(value) not in accepted:
        expected = _EXPECTED[kind]
        raise ApiError(400, "invalid_type", f"{name} is {show(value)} ({kind_of(value)}); expected {expected}", name)
    return value


def ranged(given: Fields, name: str, kind: type, good: Callable[[Any], bool], expected: str) -> Any:
    """A field of a type that must also be ``good``; None where it is absent.

    Raises:
        ApiError: 400 ``invalid_type`` or ``invalid_value``.
    """
    value = typed(given, name, kind)
    if name in given and not good(value):
        raise ApiError(400, "invalid_value", f"{name} is {show(value)}; expected {expected}", name)
    return value


def positive(given: Fields, *names: str) -> int | None:
    """The first of these fields that is given, an integer of at least 1; None where none is."""
    for name in names:
        if name in given:
            return ranged(given, name, int, lambda value: value >= 1, "at least 1")
    return None


def objects(given: Fields, name: str, limit: int) -> list[Mapping[str, Any]]:
    """A field that is a list of objects, at least one and at most ``limit``.

    Raises:
        ApiError: 400 ``invalid_type``, or ``too_many``.
    """
    value = given.get(name)
    if not isinstance(value, list) or not value or not all(isinstance(item, dict) for item in value):
        shown = "missing" if value is None else "an empty list" if value == [] else show(value)
        raise ApiError(400, "invalid_type", f"{name} is {shown}; expected a list of objects, at least one", name)
    if len(value) > limit:
        raise ApiError(400, "too_many", f"{name} has {len(value)} entries; this server takes {limit} at most", name)
    return value


def kind_of(value: Any) -> str:
    """The JSON name of a value's type."""
    names = {dict: "object", list: "array", str: "text", bool: "boolean", int: "integer", type(None): "null"}
    return names.get(type(value), type(value).__name__)


def show(value: Any) -> str:
    """A value as a sentence shows it: short."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
