"""GPT-OSS's harmony: a reply is a run of messages, each with a channel and perhaps a recipient.

``<|channel|>analysis<|message|>`` reasons, ``<|channel|>final<|message|>`` answers, and
``<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}`` calls. ``<|end|>``, ``<|call|>`` or
``<|return|>`` ends a message, ``<|start|>assistant`` begins the next. The recipient may also stand before the channel.
A message with a recipient is a call on any channel; one without is content, or reasoning on the analysis channel.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from gymloop.tokens.parsers.reasoning import ReasoningParser, Split, Splitter, TaggedSplitter
from gymloop.tokens.parsers.scan import behind_space
from gymloop.tokens.tool_calls import Envelope, JsonText, ToolCall, ToolParser, Tools, json_value, tool_call

_START = "<|start|>"
_CHANNEL = "<|channel|>"
_RECIPIENT = "to="  # where the generation prompt has the role already
_HEADER = re.compile(
    r"(?:<\|start\|>assistant)?(?P<role>[^<]*)<\|channel\|>(?P<channel>[^<]*)(?:<\|constrain\|>[^<]*)?<\|message\|>"
)
_ANALYSIS = "<|channel|>analysis<|message|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>", _START)
_TO = re.compile(r"(?:^|\s)to=(\S+)")
_MARKER = re.compile(r"<\|(?:start|channel)\|>")
_END = re.compile(r"<\|(?:end|call|return)\|>|(?=<\|start\|>)|\Z")


@dataclass(frozen=True, slots=True)
class _Message:
    """One message.

    Attributes:
        start, end: its offsets, markers included.
        channel: the first word of its channel.
        recipient: None where it is for the user.
        body: its text.
        value: its body read as JSON, a tuple of one; empty where it is none.
    """

    start: int
    end: int
    channel: str
    recipient: str | None
    body: str
    value: tuple[object, ...] = ()


def _messages(text: str) -> Iterator[_Message | Envelope]:
    """Every message from left to right; a marker that begins none is a malformed envelope."""
    text = JsonText(text)
    start = behind_space(text, 0)
    if not text.startswith((_RECIPIENT, _START, _CHANNEL), start):
        start = _next_marker(text, start)
    while start >= 0:
        header = _HEADER.match(text, start)
        if header is None:
            marker = _MARKER.match(text, start)
            end = marker.end() if marker else start + len(_RECIPIENT)
            if marker:
                yield Envelope(start, end)
        else:
            message = _message(text, start, header)
            yield message
            end = message.end
        start = _next_marker(text, end)


def _message(text: str, start: int, header: re.Match[str]) -> _Message:
    to = _TO.search(header["role"]) or _TO.search(header["channel"])
    channel = next(iter(header["channel"].split()), "")
    if to is not None:
        try:
            # The decoder finds the end: an argument may spell a marker.
            value, behind = json_value(text, behind_space(text, header.end()))
        except (ValueError, RecursionError):
            pass
        else:
            end = _END.match(text, behind_space(text, behind))
            if end is not None:
                return _Message(start, end.end(), channel, to[1], text[header.end() : behind], (value,))
    end = _END.search(text, header.end())
    stop = end.end() if end else len(text)
    body = text[header.end() : end.start() if end else len(text)]
    return _Message(start, stop, channel, to[1] if to else None, body)


def _next_marker(text: str, start: int) -> int:
    marker = _MARKER.search(text, start)
    return marker.start() if marker else -1


def _reasons(message: _Message) -> bool:
    return message.channel == "analysis" and message.recipient is None


class HarmonyCalls(ToolParser):
    """See the module. Messages of the analysis channel are left to ``HarmonyReasoning``."""

    openers = (_START, _CHANNEL)
    start_openers = (_RECIPIENT,)

    def envelopes(self, text: str, tools: Tools) -> Iterator[Envelope]:
        """See ``ToolParser``. A message for the user leaves its text, without markers."""
        for message in _messages(text):
            if isinstance(message, Envelope):
                yield message
            elif message.recipient is not None:
                yield Envelope(message.start, message.end, _calls(message))
            elif not _reasons(message):
                yield Envelope(message.start, message.end, text=message.body)


def _calls(message: _Message) -> tuple[ToolCall, ...]:
    name = (message.recipient or "").removeprefix("functions.")
    if not name:
        return ()
    try:
        return tuple(tool_call(name, value) for value in message.value)
    except (ValueError, RecursionError):
        return ()


class HarmonyReasoning(ReasoningParser):
    """Reasoning is the text of all analysis messages that go to nobody; the rest keeps its markers."""

    def split(self, text: str, opened: bool) -> Split:
        """See ``ReasoningParser``."""
        reasoning: list[str] = []
        rest: list[str] = []
        kept = 0
        for message in _messages(text):
            if isinstance(message, _Message) and _reasons(message):
                reasoning.append(message.body.strip())
                rest.append(text[kept : message.start])
                kept = message.end
        if not reasoning:
            return Split(None, text)
        return Split("\n".join(filter(None, reasoning)), "".join([*rest, text[kept:]]))

    def splitter(self, opened: bool) -> Splitter:
        """See ``ReasoningParser``. The first message streams if it reasons; all else is known at the end."""
        return TaggedSplitter(_ANALYSIS, _ENDS, opened=False, drops_closer=False)
