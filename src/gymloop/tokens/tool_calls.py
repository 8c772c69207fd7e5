"""What a tool parser is and what it finds: calls in the text that a model wrote.

A parser works on text and never raises: a model may write anything. It names the *envelopes* it sees, from left to
right. An envelope that holds calls is taken out of the content; one that should hold a call and does not stays in the
content as it was written, and is counted.
"""

from __future__ import annotations

import json
import math
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Tools = Sequence[Mapping[str, Any]]
"""Tools in the OpenAI shape: ``{"type": "function", "function": {"name": ..., "parameters": <JSON schema>}}``."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call the model asked for.

    Attributes:
        id: unique over all conversations.
        name: as the model wrote it; it may name no tool.
        arguments: text as in the OpenAI shape. An object, list, number or null is written as JSON; a string is passed
            as it is, for it should hold JSON itself; an absent or blank value is ``{}``.
    """

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Envelope:
    """A stretch of text in the form of a tool call.

    Attributes:
        start: offset of its first character, which begins one of the parser's openers.
        end: offset behind its last one.
        calls: what it holds, in the order written. Without calls the envelope is malformed, unless ``text`` is given.
        text: what takes its place in the content; None takes a good envelope out and leaves a malformed one in.
    """

    start: int
    end: int
    calls: tuple[ToolCall, ...] = ()
    text: str | None = None

    @property
    def malformed(self) -> bool:
        """Whether this should have been a call and is none."""
        return not self.calls and self.text is None


class ToolParser(ABC):
    """How one family of models writes tool calls. Holds no state: one object reads all replies.

    Attributes:
        openers: every envelope begins with one of these, which begin with no white space. A stream holds text back from
            the first on.
        start_openers: openers that count only at the beginning of a reply, behind white space.
    """

    openers: tuple[str, ...] = ()
    start_openers: tuple[str, ...] = ()

    @abstractmethod
    def envelopes(self, text: str, tools: Tools) -> Iterable[Envelope]:
        """Every envelope in ``text``, malformed ones too, from left to right and without overlap.

        Args:
            text: of a whole turn, control tokens included, end token and reasoning excluded.
            tools: those the model was offered, for formats that do not write the type of an argument.
        """


def tool_call(name: str, arguments: object) -> ToolCall:
    """A call with an id of its own.

    Raises:
        ValueError: the arguments hold a number that JSON cannot.
        RecursionError: they are nested beyond the stack.
    """
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    return ToolCall(f"call_{uuid.uuid4().hex}", storable(name), storable(text) if text.strip() else "{}")


def storable(text: str) -> str:
    """``text`` with a ``?`` for each half of a surrogate pair, which a JSON escape can spell and UTF-8 cannot."""
    return text.encode("utf-8", "replace").decode("utf-8")


class JsonText(str):
    """A text that is searched for many JSON values.

    A decoder's error counts the lines of the text before it, so many errors would take quadratic time; nobody reads
    those numbers here, so this text does not count.
    """

    def count(self, *args: Any) -> int:
        """Zero."""
        return 0

    def rfind(self, *args: Any) -> int:
        """Nowhere."""
        return -1


def json_value(text: str, start: int) -> tuple[Any, int]:
    """The JSON value that begins at ``start`` and the offset behind it.

    Raises:
        ValueError: it is no JSON, or holds a number that Python cannot.
        RecursionError: it is nested beyond the stack.
    """
    return _DECODER.raw_decode(text, start)


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


def _finite(digits: str) -> float:
    if math.isinf(value := float(digits)):
        raise ValueError(f"{digits} is beyond a double")
    return value


_DECODER = json.JSONDecoder(parse_constant=_no_constant, parse_float=_finite)
