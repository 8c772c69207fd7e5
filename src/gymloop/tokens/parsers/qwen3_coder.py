"""Qwen3-Coder and Nemotron 3: calls as XML, one element a parameter.

``<tool_call><function=NAME><parameter=KEY>VALUE</parameter>...</function></tool_call>``, with white space between
elements and one newline around a value. Nothing is escaped: a value ends at the first ``</parameter>`` that another
parameter or the end of the function follows. The text does not say what is a number and what a string, so the tool's
JSON schema decides; without one a value is a string. The outer tags may be missing.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from gymloop.tokens.parsers.scan import behind_space
from gymloop.tokens.tool_calls import Envelope, ToolParser, Tools, json_value, tool_call

_OPEN = "<tool_call>"
_CLOSE = "</tool_call>"
_OPENERS = re.compile(r"<tool_call>|<function=")
_FUNCTION = re.compile(r"<function=([^<>\n]*)>\s*")
_FUNCTION_END = "</function>"
_PARAMETER = re.compile(r"<parameter=([^<>\n]*)>\n?")
_VALUE_END = re.compile(r"\n?</parameter>\s*+(?=<parameter=|</function>)")
_PYTHON_WORDS = {"True": True, "False": False, "None": None}  # templates write these where a value is no container


class Qwen3Coder(ToolParser):
    """See the module."""

    openers = (_OPEN, "<function=")

    def envelopes(self, text: str, tools: Tools) -> Iterator[Envelope]:
        """See ``ToolParser``."""
        scan = _Scan(text)
        opener = _OPENERS.search(text)
        while opener is not None:
            found = scan.envelope(opener, tools) or Envelope(opener.start(), opener.end())
            yield found
            opener = _OPENERS.search(text, found.end)


class _Scan:
    """Reads one text. What it learns on the way keeps the whole search linear, whatever the text is."""

    def __init__(self, text: str):
        self._text = text
        self._dead: set[int] = set()  # offsets of elements from which no function is whole
        self._searched: tuple[int, re.Match[str] | None] = (len(text) + 1, None)  # from where, with what result

    def envelope(self, opener: re.Match[str], tools: Tools) -> Envelope | None:
        text = self._text
        wrapped = opener.group() == _OPEN
        function = _FUNCTION.match(text, behind_space(text, opener.end()) if wrapped else opener.start())
        if function is None or not function[1].strip():
            return None
        name = function[1].strip()
        schemas = _parameter_schemas(name, tools)
        arguments: dict[str, Any] = {}
        at = function.end()
        walked = [at]
        while not text.startswith(_FUNCTION_END, at):
            parameter = None if at in self._dead else _PARAMETER.match(text, at)
            value_end = self._value_end(parameter.end()) if parameter else None
            if parameter is None or value_end is None:
                self._dead.update(walked)
                return None
            arguments[parameter[1].strip()] = _typed(
                text[parameter.end() : value_end.start()], schemas.get(parameter[1].strip(), {})
            )
            at = value_end.end()
            walked.append(at)
        end = at + len(_FUNCTION_END)
        behind = behind_space(text, end)
        if wrapped and text.startswith(_CLOSE, behind):
            end = behind + len(_CLOSE)
        try:
            return Envelope(opener.start(), end, (tool_call(name, arguments),))
        except (ValueError, RecursionError):
            return None

    def _value_end(self, start: int) -> re.Match[str] | None:
        """The first end of a value at or after ``start``."""
        searched, match = self._searched
        if not (searched <= start and (match is None or start <= match.start())):
            match = _VALUE_END.search(self._text, start)
            self._searched = (start, match)
        return match


def _parameter_schemas(name: str, tools: Tools) -> Mapping[str, Any]:
    for tool in tools:
        function = tool.get("function", tool)
        if isinstance(function, Mapping) and function.get("name") == name:
            parameters = function.get("parameters")
            properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
            return properties if isinstance(properties, Mapping) else {}
    return {}


def _typed(text: str, schema: Any) -> Any:
    """The value that ``text`` spells under ``schema``; the text itself where it spells none."""
    types = _types(schema)
    if not types - {"string"}:
        return text
    word = text.strip()
    if word in _PYTHON_WORDS:
        value = _PYTHON_WORDS[word]
    else:
        try:
            value, end = json_value(word, 0)
        except (ValueError, RecursionError):
            return text
        if end != len(word):
            return text
    return value if _type_of(value) in types or ("number" in types and _type_of(value) == "integer") else text


def _types(schema: Any, depth: int = 8) -> set[str]:
    """The JSON types that a schema names, for the ways in which tools are commonly described."""
    if not isinstance(schema, Mapping) or not depth:
        return set()
    types = {one for one in _listed(schema.get("type")) if isinstance(one, str)}
    for option in (*_listed(schema.get("anyOf")), *_listed(schema.get("oneOf"))):
        types |= _types(option, depth - 1)
    if not types:
        types = {_type_of(value) for value in _listed(schema.get("enum"))}
        types |= {_type_of(schema["const"])} if "const" in schema else set()
        types |= {"object"} if "properties" in schema else {"array"} if "items" in schema else set()
    return types


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [] if value is None else [value]


def _type_of(value: Any) -> str:
    if isinstance(value, float) and value.is_integer():
        return "integer"  # JSON schema counts 5.0 as one
    names = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}
    return names.get(type(value), "null")
