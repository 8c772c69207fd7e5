"""The grammar of ``${...}``, as OmegaConf has it: text is a row of pieces, and a piece is text or an expression.

``${a.b}`` and ``${a[0]}`` refer from the top, ``${.x}`` to a sibling, ``${..x}`` to a sibling of the block around it;
``${name:x, y}`` calls a resolver. Both may hold expressions. ``\\${`` is the text ``${``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, TypeAlias

from gymloop.config.document import read_scalar
from gymloop.config.problems import KeyPath


class Malformed(Exception):
    """Text that is no expression; says what was expected."""


@dataclass(frozen=True, slots=True)
class Reference:
    """``${a.b}``: the name, itself made of pieces."""

    name: Pieces


@dataclass(frozen=True, slots=True)
class Call:
    """``${name:argument, argument}``."""

    name: str
    arguments: tuple[Pieces, ...]


@dataclass(frozen=True, slots=True)
class Quoted:
    """Text of an argument that stood in quotes, so it is never a number."""

    text: str


Pieces: TypeAlias = "tuple[str | Quoted | Reference | Call, ...]"

_OPEN = "${"
_BEFORE_OPEN = re.compile(r"(\\*)\$\{")
_CALL = re.compile(r"\s*([A-Za-z_][\w.]*)\s*:")


def has_expression(text: str) -> bool:
    """Whether text means anything but itself."""
    return _OPEN in text


def escape(text: str) -> str:
    """Text that reads as this text."""
    return _BEFORE_OPEN.sub(lambda match: match[1] * 2 + "\\${", text)


def parse(text: str) -> Pieces:
    """The pieces of a value.

    Raises:
        Malformed: an expression does not end, or is empty.
    """
    reader = _Reader(text)
    return reader.pieces(end="")


class _Reader:
    """Recursive descent over one text."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0

    def pieces(self, end: str) -> Pieces:
        """Up to a character of ``end``, which is left, or to the end of the text when there is none."""
        found: list[str | Quoted | Reference | Call] = []
        text = ""
        while self.at < len(self.text) and (not end or self.text[self.at] not in end):
            match = _BEFORE_OPEN.match(self.text, self.at)
            if match is None:
                if end and not text.strip() and not found and self.text[self.at] in "\"'":
                    found.append(self.quoted())
                    text = ""
                    continue
                text += self.text[self.at]
                self.at += 1
                continue
            self.at = match.end()
            text += "\\" * (len(match[1]) // 2)
            if len(match[1]) % 2:
                text += _OPEN
                continue
            if text:
                found.append(text)
            text = ""
            found.append(self.expression(match.end() - 2))
        if text:
            found.append(text)
        return tuple(found)

    def expression(self, begin: int) -> Reference | Call:
        match = _CALL.match(self.text, self.at)
        if match is None:
            name = _stripped(self.pieces(end="}"))
            self.close(begin)
            if not name:
                raise Malformed("'${}' refers to nothing; expected ${key} or ${resolver:arguments}")
            return Reference(name)
        self.at = match.end()
        arguments = []
        while True:
            arguments.append(_stripped(self.pieces(end=",}")))
            if self.text[self.at : self.at + 1] != ",":
                break
            self.at += 1
        self.close(begin)
        return Call(match[1], () if arguments == [()] else tuple(arguments))

    def close(self, begin: int) -> None:
        if self.at >= len(self.text):
            raise Malformed(f"{self.text[begin:]!r} is not closed; expected '}}'")
        self.at += 1

    def quoted(self) -> Quoted:
        mark, begin = self.text[self.at], self.at
        self.at += 1
        said = ""
        while self.at < len(self.text):
            character = self.text[self.at]
            self.at += 1
            if character == mark:
                return Quoted(said)
            if character == "\\" and self.text[self.at : self.at + 1] in (mark, "\\"):
                character = self.text[self.at]
                self.at += 1
            said += character
        raise Malformed(f"{self.text[begin:]!r} has no closing quote")


def _stripped(pieces: Pieces) -> Pieces:
    """White space around an argument is not part of it."""
    rest = list(pieces)
    if rest and isinstance(rest[0], str):
        rest[0] = rest[0].lstrip()
    if rest and isinstance(rest[-1], str):
        rest[-1] = rest[-1].rstrip()
    return tuple(piece for piece in rest if piece != "")


def literal(piece: str | Quoted) -> Any:
    """An argument that is no expression: a number, boolean or null where it reads as one."""
    return piece.text if isinstance(piece, Quoted) else read_scalar(piece)


def target(name: str, path: KeyPath) -> KeyPath:
    """The key that ``${name}`` at ``path`` refers to.

    Raises:
        Malformed: the name is no key, or leads out of the recipe.
    """
    dots = len(name) - len(name.lstrip("."))
    base: KeyPath = ()
    if dots:
        if dots > len(path):
            raise Malformed(f"'${{{name}}}' leads out of the recipe: the key has {len(path) - 1} blocks around it")
        base = path[: len(path) - dots]
    parts = re.findall(r"\[([^\[\]]+)\]|([^.\[\]]+)", name[dots:])
    rebuilt = "".join(f"[{inner}]" if inner else f".{word}" for inner, word in parts).removeprefix(".")
    if not parts or rebuilt != name[dots:]:
        raise Malformed(
            f"'${{{name}}}' is no key; expected a name such as ${{grpo.seed}}, ${{.sibling}} or ${{a.list.0}}"
        )
    return (*base, *(inner.strip("'\"") or word for inner, word in parts))
