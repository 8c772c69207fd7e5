"""Mistral: ``[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]``, and since tokenizer 11 one
``[TOOL_CALLS]name[ARGS]{...}`` a call, with ``[CALL_ID]id`` before the arguments in some versions.

Nothing closes an envelope, so behind its JSON must come the next envelope or the end.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from gymloop.tokens.parsers.scan import behind_space, calls_of
from gymloop.tokens.tool_calls import Envelope, JsonText, ToolParser, Tools, json_value, tool_call

_OPEN = "[TOOL_CALLS]"
_HEAD = re.compile(r"\s*([^\s\[\]{}]+)\s*(?:\[CALL_ID\][^\s\[\]{}]*)?(?:\[ARGS\])?\s*")


class Mistral(ToolParser):
    """See the module. Ids that the model writes are not used: nothing makes them unique."""

    openers = (_OPEN,)

    def envelopes(self, text: str, tools: Tools) -> Iterator[Envelope]:
        """See ``ToolParser``."""
        text = JsonText(text)
        start = text.find(_OPEN)
        while start >= 0:
            body = start + len(_OPEN)
            found = _envelope(text, start, body) or Envelope(start, body)
            yield found
            start = text.find(_OPEN, found.end)


def _envelope(text: str, start: int, body: int) -> Envelope | None:
    begin = behind_space(text, body)
    try:
        if text.startswith(("[", "{"), begin):
            value, end = json_value(text, begin)
            calls = calls_of(value if isinstance(value, list) else [value])
        elif head := _HEAD.match(text, body):
            value, end = json_value(text, head.end())
            calls = (tool_call(head[1], value),)
        else:
            return None
    except (ValueError, RecursionError):
        return None
    end = behind_space(text, end)
    return Envelope(start, end, calls) if end == len(text) or text.startswith(_OPEN, end) else None
