"""JSON between two tags.

Hermes and Qwen write ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, one envelope a call; Nemotron Nano 2
writes ``<TOOLCALL>[{"name": ..., "arguments": {...}}, ...]</TOOLCALL>``, one envelope for all.

An envelope that is a JSON object with a name is a call, whatever its arguments are: the agent answers bad arguments
with an error text. One whose JSON is whole may lack its closing tag before the next envelope or the end.
"""

from __future__ import annotations

from collections.abc import Iterator

from gymloop.tokens.parsers.scan import behind_space, call_of, calls_of
from gymloop.tokens.tool_calls import Envelope, JsonText, ToolParser, Tools, json_value


class TaggedJson(ToolParser):
    """See the module."""

    def __init__(self, opener: str, closer: str, lists: bool = False):
        """Read JSON between ``opener`` and ``closer``; with ``lists`` it may be a list of calls."""
        self.openers = (opener,)
        self._opener = opener
        self._closer = closer
        self._lists = lists

    def envelopes(self, text: str, tools: Tools) -> Iterator[Envelope]:
        """See ``ToolParser``."""
        text = JsonText(text)
        start = text.find(self._opener)
        while start >= 0:
            body = start + len(self._opener)
            found = self._envelope(text, start, body) or Envelope(start, body)
            yield found
            start = text.find(self._opener, found.end)

    def _envelope(self, text: str, start: int, body: int) -> Envelope | None:
        begin = behind_space(text, body)
        if not text.startswith(("{", "[") if self._lists else "{", begin):
            return None
        try:
            # The decoder, not a search for the closing tag, finds the end: an argument may hold the tag's text.
            value, end = json_value(text, begin)
            calls = calls_of(value) if isinstance(value, list) else (call_of(value),)
        except (ValueError, RecursionError):
            return None
        end = behind_space(text, end)
        if text.startswith(self._closer, end):
            end += len(self._closer)
        elif end != len(text) and not text.startswith(self._opener, end):
            return None
        return Envelope(start, end, calls)
