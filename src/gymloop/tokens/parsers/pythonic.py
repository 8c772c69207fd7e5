"""Llama 3.2 and 4: a Python list of calls, ``[f(a=1), g(b="x")]``, and nothing else in the reply.

Read by a grammar of its own that knows calls with named arguments and literals. Nothing is evaluated, and nothing in a
text can exhaust the reader, as it can Python's parser. Beyond Python it takes JSON's ``true``, ``false`` and ``null``,
line breaks inside strings, and dashes and dots in names, since models write them.
"""

from __future__ import annotations

import re
import sys
import unicodedata
from collections.abc import Iterator
from typing import Any

from gymloop.tokens.parsers.scan import behind_space
from gymloop.tokens.tool_calls import Envelope, ToolCall, ToolParser, Tools, tool_call

_TAG = "<|python_start|>"
_TAG_END = "<|python_end|>"
_LIKE_A_CALL = re.compile(r"\[\s*[\w.\-]+\(")
_TOKEN = re.compile(
    r"""\s*(?:
    (?P<string>"[^"\\]*(?:\\.[^"\\]*)*"|'[^'\\]*(?:\\.[^'\\]*)*')
    |(?P<number>[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?(?![\w.]))
    |(?P<word>[^\W\d][\w.\-]*)
    |(?P<mark>[\[\](){},=:])
    )""",
    re.VERBOSE | re.DOTALL,
)
_WORDS = {"True": True, "true": True, "False": False, "false": False, "None": None, "null": None}
_ESCAPE = re.compile(
    r"\\(\n|[\\'\"abfnrtv]|[0-7]{1,3}|x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|N\{[^{}]*\})", re.DOTALL
)
_PLAIN = {"\n": "", "a": "\a", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v"}
_MAX_DEPTH = 100


class Pythonic(ToolParser):
    """See the module. A reply that begins with ``[name(`` should be a list of calls; other lists are text."""

    openers = (_TAG,)
    start_openers = ("[",)

    def envelopes(self, text: str, tools: Tools) -> Iterator[Envelope]:
        """See ``ToolParser``."""
        start = behind_space(text, 0)
        if text.startswith("[", start):
            begin = start
        else:
            start = text.find(_TAG)
            if start < 0:
                return
            begin = behind_space(text, start + len(_TAG))
        try:
            reader = _Reader(text, begin)
            calls = reader.calls()
        except ValueError:
            calls = ()
        else:
            end = behind_space(text, reader.at)
            if text.startswith(_TAG_END, end):
                end = behind_space(text, end + len(_TAG_END))
            if end == len(text):
                yield Envelope(start, end, calls)
                return
        if text.startswith(_TAG, start) or _LIKE_A_CALL.match(text, start):
            yield Envelope(start, min(begin + 1, len(text)))


class _Reader:
    """Recursive descent over one text. Every method raises ValueError where the text is something else."""

    def __init__(self, text: str, at: int):
        self._text = text
        self.at = at
        self._depth = 0

    def calls(self) -> tuple[ToolCall, ...]:
        self._mark("[")
        calls = [self._call()]
        while self._mark("],") == ",":
            calls.append(self._call())
        return tuple(calls)

    def _call(self) -> ToolCall:
        kind, name = self._next()
        if kind != "word":
            raise ValueError(f"{name} is no name")
        self._mark("(")
        arguments: dict[str, Any] = {}
        while not self._skip(")"):
            kind, key = self._next()
            if kind != "word":
                raise ValueError(f"{key} is no name of an argument")
            self._mark("=")
            arguments[key] = self._value()
            if self._mark(",)") == ")":
                break
        return tool_call(name, arguments)

    def _value(self) -> Any:
        kind, text = self._next()
        if kind == "string":
            return _unescaped(text[1:-1])
        if kind == "number":
            return _number(text)
        if kind == "word" and text in _WORDS:
            return _WORDS[text]
        if text not in ("[", "(", "{"):
            raise ValueError(f"{text} is no literal")
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise ValueError("nested too deep")
        value = self._mapping() if text == "{" else self._sequence("]" if text == "[" else ")")
        self._depth -= 1
        return value

    def _sequence(self, closer: str) -> Any:
        items: list[Any] = []
        while not self._skip(closer):
            items.append(self._value())
            if self._mark(f",{closer}") == closer:
                if closer == ")" and len(items) == 1 and self._text[self.at - 2] != ",":
                    return items[0]  # a value in parentheses
                break
        return items

    def _mapping(self) -> dict[str, Any]:
        items: dict[str, Any] = {}
        while not self._skip("}"):
            key = self._value()
            if not isinstance(key, str):
                raise ValueError("JSON has no other keys than strings")
            self._mark(":")
            items[key] = self._value()
            if self._mark(",}") == "}":
                break
        return items

    def _next(self) -> tuple[str, str]:
        token = _TOKEN.match(self._text, self.at)
        if token is None or token.lastgroup is None:
            raise ValueError("no token")
        self.at = token.end()
        return token.lastgroup, token[token.lastgroup]

    def _mark(self, expected: str) -> str:
        kind, text = self._next()
        if kind != "mark" or text not in expected:
            raise ValueError(f"{text} where one of {expected} belongs")
        return text

    def _skip(self, mark: str) -> bool:
        """Whether ``mark`` came next; if so it is behind us."""
        at = behind_space(self._text, self.at)
        if not self._text.startswith(mark, at):
            return False
        self.at = at + 1
        return True


def _number(text: str) -> int | float:
    if re.fullmatch(r"[+-]?\d+", text):
        return int(text)  # refuses thousands of digits, as json does
    return float(text)


def _unescaped(text: str) -> str:
    """What a Python string literal means; an escape that Python does not know stays as written."""
    return _ESCAPE.sub(_meaning, text) if "\\" in text else text


def _meaning(escape: re.Match[str]) -> str:
    code = escape[1]
    if code[0] in "xuU":
        if (number := int(code[1:], 16)) > sys.maxunicode:
            raise ValueError(f"no character has the number {number}")
        return chr(number)
    if code[0] in "01234567":
        return chr(int(code, 8))
    if code[0] == "N":
        try:
            return unicodedata.lookup(code[2:-1])
        except KeyError as error:
            raise ValueError(f"no character has the name {code[2:-1]}") from error
    return _PLAIN.get(code, code)
