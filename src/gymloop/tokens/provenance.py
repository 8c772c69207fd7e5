"""Where a token came from: the model sampled it, the template wrote it, or it is text of a message.

Only ``sampled`` is ever trained. The other two are told apart on demand, because training does not need it: the
conversation is rendered a second time with two marks around each text that a message brings, and the characters between
them are followed into tokens. The marks stand inside a text's white space, so that a template which trims texts still
does. If the marked rendering without its marks is not the plain rendering, or encodes otherwise, there is no answer
rather than a wrong one.

``environment`` is text of messages (content, reasoning, names and texts in the arguments of calls in the history) and
the descriptions of tools. ``template`` is everything else: role headers, closing tokens, the generation prompt, the
syntax around calls and schemas. A token with characters of both is ``environment``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any, Literal

from gymloop.tokens.encoding import Marks, unescape

Provenance = Literal["sampled", "template", "environment", "unlabelled"]
"""``unlabelled`` is a prompt token for which nobody asked."""
Run = tuple[Provenance, int]
"""So many tokens of one provenance."""

_TEXTS = ("content", "reasoning_content")


def runs(labels: Iterable[Provenance]) -> tuple[Run, ...]:
    """Labels of single tokens, run-length encoded."""
    return tuple((label, sum(1 for _ in group)) for label, group in groupby(labels))


def join_runs(parts: Iterable[Run]) -> tuple[Run, ...]:
    """Runs one after the other, neighbours of one provenance made one and empty ones dropped."""
    result: list[Run] = []
    for label, count in parts:
        if count and result and result[-1][0] == label:
            result[-1] = (label, result[-1][1] + count)
        elif count:
            result.append((label, count))
    return tuple(result)


def last_tokens(parts: Sequence[Run], count: int) -> tuple[Run, ...]:
    """The runs of the last ``count`` tokens; what lies before ``parts`` is ``unlabelled``."""
    surplus = sum(length for _, length in parts) - count
    if surplus < 0:
        return join_runs((("unlabelled", -surplus), *parts))
    kept: list[Run] = []
    for label, length in parts:
        dropped = min(surplus, length)
        surplus -= dropped
        kept.append((label, length - dropped))
    return join_runs(kept)


def mark_messages(messages: Sequence[Mapping[str, Any]], marks: Marks) -> list[dict[str, Any]]:
    """Messages as a template is shown them, each text of theirs between ``begin`` and ``end``."""
    return [
        {
            key: _mark(value, marks) if key in _TEXTS else _mark_calls(value, marks) if key == "tool_calls" else value
            for key, value in message.items()
        }
        for message in messages
    ]


def mark_tools(tools: Any, marks: Marks) -> Any:
    """Tools whose descriptions stand between the marks; templates compare the other texts of a schema."""
    if isinstance(tools, Mapping):
        return {
            key: _mark(value, marks) if key == "description" else mark_tools(value, marks)
            for key, value in tools.items()
        }
    return [mark_tools(tool, marks) for tool in tools] if isinstance(tools, list | tuple) else tools


def balance(marked: str, marks: Marks, texts: Iterable[str]) -> str:
    """``marked`` with a pair of marks around each text, also where a template cut a text and lost one of them.

    Args:
        marked: a rendering of marked messages.
        marks: of the conversation.
        texts: the texts that were marked; what stands beside a lonely mark is as much of one of them as fits.
    """
    marked = unescape(marked, marks.invisible)
    known = [text.strip() for text in texts]
    result: list[str] = []
    opened = False
    for piece, mark in _pieces(marked, marks):
        if mark == marks.end and not opened:  # the beginning was cut off
            size = max((_common(piece[::-1], text[::-1]) for text in known), default=0)
            size = len(piece[len(piece) - size :].lstrip())
            piece = piece[: len(piece) - size] + marks.begin + piece[len(piece) - size :]
        elif mark != marks.end and opened:  # the end was cut off
            size = max((_common(piece, text) for text in known), default=0)
            size = len(piece[:size].rstrip())
            piece = piece[:size] + marks.end + piece[size:]
        result += (piece, mark)
        opened = mark == marks.begin
    return "".join(result)


def texts_of(value: Any) -> list[str]:
    """Every string in a JSON value, keys left out."""
    if isinstance(value, str):
        return [value]
    items = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    return [text for item in items for text in texts_of(item)]


def _pieces(text: str, marks: Marks) -> Iterable[tuple[str, str]]:
    """Text before each mark, and the mark; the last piece has none."""
    start = 0
    for at, char in enumerate(text):
        if char in (marks.begin, marks.end):
            yield text[start:at], char
            start = at + 1
    yield text[start:], ""


def _common(a: str, b: str) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _mark_calls(calls: Any, marks: Marks) -> Any:
    if not isinstance(calls, list):
        return calls
    return [call | {"function": _mark(call["function"], marks)} for call in calls]


def _mark(value: Any, marks: Marks) -> Any:
    if isinstance(value, str):
        text = value.strip()
        if not text:
            return value
        start = value.index(text)
        return f"{value[:start]}{marks.begin}{text}{marks.end}{value[start + len(text) :]}"
    if isinstance(value, Mapping):
        return {key: _mark(item, marks) for key, item in value.items()}
    return [_mark(item, marks) for item in value] if isinstance(value, list | tuple) else value
