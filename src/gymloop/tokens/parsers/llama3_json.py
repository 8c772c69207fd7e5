"""Llama 3.1 and 3.2: ``{"name": ..., "parameters": {...}}``, bare at the beginning of a reply or behind a python tag.

Several calls are separated by ``;``. An answer that is JSON but has no name, or neither ``parameters`` nor
``arguments``, is an answer.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from gymloop.tokens.parsers.scan import behind_space, call_of
from gymloop.tokens.tool_calls import Envelope, JsonText, ToolCall, ToolParser, Tools, json_value

_TAG = "<|python_tag|>"
_KEYS = ("parameters", "arguments")
_LIKE_A_CALL = re.compile(r'\{\s*"(?:name|type)"\s*:')


class Llama3Json(ToolParser):
    """See the module. What follows the last whole call is content."""

    openers = (_TAG,)
    start_openers = ("{",)

    def envelopes(self, text: str, tools: Tools) -> Iterator[Envelope]:
        """See ``ToolParser``."""
        text = JsonText(text)
        end = start = behind_space(text, 0)
        if text.startswith("{", start) and (bare := _bare(text, start)) is not None:
            yield bare
            end = bare.end
        start = text.find(_TAG, end)
        while start >= 0:
            body = start + len(_TAG)
            calls, end = _run(text, body)
            yield Envelope(start, end if calls else body, calls)
            start = text.find(_TAG, end if calls else body)


def _bare(text: str, start: int) -> Envelope | None:
    """Calls at the beginning of a reply; None where they are an answer."""
    calls, end = _run(text, start)
    if calls:
        return Envelope(start, end, calls)
    try:
        json_value(text, start)
    except (ValueError, RecursionError):
        return Envelope(start, start + 1) if _LIKE_A_CALL.match(text, start) else None
    return None


def _run(text: str, start: int) -> tuple[tuple[ToolCall, ...], int]:
    """The calls that begin at ``start`` and the offset behind the last."""
    calls: list[ToolCall] = []
    end = start
    begin = behind_space(text, start)
    while text.startswith("{", begin):
        try:
            value, behind = json_value(text, begin)
            if not any(key in value for key in _KEYS):
                break
            calls.append(call_of(value, _KEYS))
        except (ValueError, RecursionError):
            break
        end = behind
        begin = behind_space(text, behind)
        if not text.startswith(";", begin):
            break
        begin = behind_space(text, begin + 1)
        if begin == len(text):
            end = begin  # nothing follows the separator
    return tuple(calls), end
