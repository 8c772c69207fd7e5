"""The value of an override, in Hydra's grammar: words, 'quoted text', [lists] and {key: value} blocks.

A word is read as the recipe reads one, so ``1e-6`` is a number and ``no`` is text. A comma outside quotes and brackets
is a sweep in Hydra and refused here. ``${...}`` may stand anywhere.
"""

from __future__ import annotations

import re
from typing import Any

from gymloop.config.document import read_scalar


class BadValue(Exception):
    """The text is no value; says what was expected and where."""


def read_value(text: str) -> Any:
    """The value after the equals sign. Nothing is the empty text; null has to be written.

    Raises:
        BadValue: a bracket or quote is not closed, something follows the value, or a comma stands in plain text.
    """
    reader = _Reader(text.strip())
    if not reader.text:
        return ""
    value = reader.value("")
    reader.spaces()
    if reader.at < len(reader.text):
        rest = reader.text[reader.at :]
        if rest.startswith(","):
            raise BadValue(f"{text!r} is a sweep in Hydra; write a list as [{text}], and quote text that has a comma")
        raise BadValue(f"{rest!r} follows the value; quote the whole text if it belongs to it")
    return value


class _Reader:
    """Recursive descent over one value."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0

    def value(self, end: str) -> Any:
        """One value up to a character of ``end``, or to a comma."""
        self.spaces()
        first = self.text[self.at : self.at + 1]
        if first == "[":
            return self.list()
        if first == "{":
            return self.block()
        if first in ("'", '"') and first:
            return self.quoted()
        return read_scalar(self.word(f",{end}"))

    def list(self) -> list[Any]:
        begin = self.open()
        items: list[Any] = []
        while not self.take("]"):
            if items:
                self.need(",", begin, "']' or ','")
            if self.take("]"):  # a comma may follow the last item
                break
            items.append(self.value("]"))
        return items

    def block(self) -> dict[str, Any]:
        begin = self.open()
        block: dict[str, Any] = {}
        while not self.take("}"):
            if block:
                self.need(",", begin, "'}' or ','")
            if self.take("}"):
                break
            self.spaces()
            quoted = self.text[self.at : self.at + 1] in ("'", '"')
            key = self.quoted() if quoted else self.word(":,}")
            self.need(":", begin, f"':' after the key {key!r}")
            if key in block:
                raise BadValue(f"{key!r} is given twice in {self.text[begin:]!r}")
            block[key] = self.value("}")
        return block

    def quoted(self) -> str:
        mark, begin, said = self.text[self.at], self.at, ""
        self.at += 1
        while self.at < len(self.text):
            character = self.text[self.at]
            self.at += 1
            if character == mark:
                return said
            # Hydra: a backslash means itself unless quotes follow it.
            run = re.match(rf"(\\+){mark}", self.text[self.at - 1 :])
            if character == "\\" and run:
                self.at += len(run[1]) - 1
                said += "\\" * (len(run[1]) // 2)
                if len(run[1]) % 2:
                    said += mark
                    self.at += 1
                continue
            said += character
        raise BadValue(f"{self.text[begin:]!r} has no closing quote")

    def word(self, end: str) -> str:
        begin = self.at
        while self.at < len(self.text) and self.text[self.at] not in end:
            self.at = self.expression() if self.text.startswith("${", self.at) else self.at + 1
        return self.text[begin : self.at].strip()

    def expression(self) -> int:
        """Where the ``${...}`` that begins here ends."""
        depth = 0
        for at in range(self.at, len(self.text)):
            if self.text.startswith("${", at):
                depth += 1
            elif self.text[at] == "}":
                depth -= 1
                if not depth:
                    return at + 1
        raise BadValue(f"{self.text[self.at :]!r} is not closed; expected '}}'")

    def open(self) -> int:
        self.at += 1
        return self.at - 1

    def spaces(self) -> None:
        while self.text[self.at : self.at + 1].isspace():
            self.at += 1

    def take(self, character: str) -> bool:
        self.spaces()
        if self.text[self.at : self.at + 1] != character:
            return False
        self.at += 1
        return True

    def need(self, character: str, begin: int, what: str) -> None:
        if not self.take(character):
            raise BadValue(f"expected {what} in {self.text[begin:]!r}")
