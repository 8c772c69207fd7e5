"""Read tool calls from what a model wrote, in the form of Hermes and Qwen: ``<tool_call>{"name": ...}</tool_call>``.

The parser works on text and never raises: a model may write anything. An envelope that is a JSON object with a name is
a call, whatever its arguments are (the agent answers bad arguments with an error text); any other envelope stays in the
content as it was written, and is counted.
"""

from __future__ import annotations

import json
import re
import uuid
from dataclasses import dataclass

OPEN = "<tool_call>"
CLOSE = "</tool_call>"
_SPACE = re.compile(r"\s*")


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
class ParsedReply:
    """A model's reply.

    Attributes:
        content: the text outside well-formed calls; exactly the text if there are none.
        tool_calls: in the order written.
        malformed: envelopes that are no call.
    """

    content: str
    tool_calls: tuple[ToolCall, ...]
    malformed: int


def parse(text: str) -> ParsedReply:
    """Split ``text`` into content and tool calls. An envelope whose JSON is whole may lack its closing tag."""
    calls: list[ToolCall] = []
    pieces: list[str] = []
    malformed = 0
    kept = 0  # text before this offset is in pieces or in calls
    start = text.find(OPEN)
    while start >= 0:
        body = start + len(OPEN)
        parsed = _envelope(text, body)
        if parsed is None:
            malformed += 1
            start = text.find(OPEN, body)
            continue
        call, end = parsed
        calls.append(call)
        pieces.append(text[kept:start])
        kept = end
        start = text.find(OPEN, end)
    if not calls:
        return ParsedReply(text, (), malformed)
    pieces.append(text[kept:])
    content = "\n".join(piece.strip() for piece in pieces if piece.strip())
    return ParsedReply(content, tuple(calls), malformed)


def _envelope(text: str, start: int) -> tuple[ToolCall, int] | None:
    """The call whose JSON begins at ``start`` and the offset behind it, or None."""
    begin = _skip_space(text, start)
    try:
        # The decoder, not a search for the closing tag, finds the end: an argument may hold the tag's text.
        value, end = _DECODER.raw_decode(text, begin)
        if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not value["name"].strip():
            return None
        arguments = _as_text(value.get("arguments", {}))
    except (ValueError, RecursionError):  # not JSON, a number of absurd length, or nested beyond the stack
        return None
    end = _skip_space(text, end)
    if text.startswith(CLOSE, end):
        end += len(CLOSE)
    elif end != len(text) and not text.startswith(OPEN, end):
        return None
    return ToolCall(f"call_{uuid.uuid4().hex}", _storable(value["name"]), arguments), end


def _as_text(arguments: object) -> str:
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return _storable(text) if text.strip() else "{}"


def _storable(text: str) -> str:
    """A JSON escape can spell half a surrogate pair, which no UTF-8 text can hold."""
    return text.encode("utf-8", "replace").decode("utf-8")


def _skip_space(text: str, start: int) -> int:
    match = _SPACE.match(text, start)
    return match.end() if match else start


_DECODER = json.JSONDecoder()
