"""Every ``${...}`` gets its value, after inheritance and overrides, and what has none is a problem with its line.

References are read where they stand (relative ones from there), may go through each other in any order, and give the
value with its type; a reference to a key that no file gives takes the schema's default. In the middle of text a value
becomes text. What the schema wants as a number is made one where nothing is lost: ``div`` divides as Python does, so
``${div:64,2}`` is 32.0 until an integer key takes it as 32, and the environment has text only.
"""

from __future__ import annotations

import contextlib
import copy
import math
import operator
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from gymloop.config.document import Document, read_scalar
from gymloop.config.expression import (
    Call,
    Malformed,
    Pieces,
    Quoted,
    Reference,
    has_expression,
    literal,
    parse,
    target,
)
from gymloop.config.keys import MISSING, all_keys, default_at, type_at
from gymloop.config.nearest import did_you_mean
from gymloop.config.paths import TEMPLATE
from gymloop.config.problems import KeyPath, Problem, dotted

ARITHMETIC: dict[str, Callable[[Any, Any], Any]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "div": operator.truediv,
    "max": max,
}
"""NeMo RL's resolvers: two numbers each."""
ENVIRONMENT = "oc.env"
RESOLVERS = (*ARITHMETIC, ENVIRONMENT)


class _Fault(Exception):
    """This expression has no value, and why."""


class _NoValue(Exception):
    """An expression has no value, and its problem is noted."""


def resolve(document: Document, environ: Mapping[str, str]) -> None:
    """Replace every expression of a document by its value.

    Args:
        document: merged and overridden; values are put in, and what is known about them is noted.
        environ: what ``oc.env`` reads.
    """
    resolver = _Resolver(document, environ)
    for path in resolver.expressions:
        with contextlib.suppress(_NoValue):
            resolver.value(path)
    document.unresolved.update(resolver.faulty)
    for path, value in resolver.found.items():
        block = _at(document.value, path[:-1])
        document.expressions[path] = block[path[-1]]
        if path in resolver.leaking:
            document.from_environment[path] = block[path[-1]]
        block[path[-1]] = _typed(value, type_at(path))


def _expressions(value: Any, path: KeyPath) -> Iterator[KeyPath]:
    if isinstance(value, dict | list):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _expressions(inner, (*path, key))
    elif isinstance(value, str) and has_expression(value) and path != TEMPLATE:
        yield path


class _Resolver:
    """Values of expressions, each computed once."""

    def __init__(self, document: Document, environ: Mapping[str, str]) -> None:
        self.document = document
        self.environ = environ
        self.expressions = dict.fromkeys(_expressions(document.value, ()))  # in the order of the file
        self.found: dict[KeyPath, Any] = {}
        self.open: list[KeyPath] = []
        self.faulty: set[KeyPath] = set()
        self.leaking: set[KeyPath] = set()  # expressions whose value holds something of the environment

    def value(self, path: KeyPath) -> Any:
        """The value of the expression at ``path``.

        Raises:
            _NoValue: it has none; the first time, why is added to the document's problems.
        """
        if path in self.faulty:
            raise _NoValue
        if path not in self.found:
            self.open.append(path)
            try:
                self.found[path] = self._evaluate(parse(_at(self.document.value, path)), path)
            except (_Fault, Malformed) as fault:
                self.document.problems.append(Problem(path, str(fault)))
                self.faulty.add(path)
                raise _NoValue from None
            except _NoValue:
                self.faulty.add(path)
                raise
            finally:
                self.open.pop()
        if path in self.leaking:  # what an expression took from the environment, whoever computes with it has too
            self.leaking.update(self.open)
        return self.found[path]

    def _evaluate(self, pieces: Pieces, path: KeyPath) -> Any:
        values = [self._piece(piece, path) for piece in pieces]
        if len(values) == 1:
            return values[0]
        for value in values:
            if value is None or isinstance(value, bool | dict | list):
                raise _Fault(f"only text and numbers can stand in the middle of text, and this is {_kind(value)}")
        return "".join(map(str, values))

    def _piece(self, piece: str | Quoted | Reference | Call, path: KeyPath) -> Any:
        if isinstance(piece, str):
            return piece
        if isinstance(piece, Quoted):
            return piece.text
        if isinstance(piece, Reference):
            return self._refer(str(self._evaluate(piece.name, path)), path)
        return self._call(piece, path)

    def _refer(self, name: str, path: KeyPath) -> Any:
        wanted = target(name, path)
        value: Any = self.document.value
        here: KeyPath = ()
        for part in wanted:
            if isinstance(value, list):
                if not str(part).isdigit() or int(part) >= len(value):
                    raise _Fault(f"refers to {dotted(wanted)!r}, and {dotted(here)!r} is a list of {len(value)}")
                part = int(part)
            elif not isinstance(value, dict) or part not in value:
                return self._default(wanted)
            here = (*here, part)
            value = self._resolved(here, value[part])
        return self._whole(value, here)

    def _resolved(self, path: KeyPath, raw: Any) -> Any:
        if path not in self.expressions:
            return raw
        if path in self.open:
            around = [*self.open[self.open.index(path) :], path]
            raise _Fault(f"refers to itself: {' -> '.join(map(dotted, around))}")
        return self.value(path)

    def _whole(self, value: Any, path: KeyPath) -> Any:
        """A copy of a block or list with every expression in it resolved."""
        if isinstance(value, dict):
            return {key: self._whole(self._resolved((*path, key), raw), (*path, key)) for key, raw in value.items()}
        if isinstance(value, list):
            return [self._whole(self._resolved((*path, key), raw), (*path, key)) for key, raw in enumerate(value)]
        return value

    def _default(self, wanted: KeyPath) -> Any:
        default = default_at(wanted)
        if default is not MISSING:
            return copy.deepcopy(default)
        known = sorted({dotted(path) for path in (*self.document.positions, *(path for path, _ in all_keys()))})
        raise _Fault(
            f"refers to {dotted(wanted)!r}, which the recipe does not have{did_you_mean(dotted(wanted), known)}"
        )

    def _call(self, call: Call, path: KeyPath) -> Any:
        if call.name == ENVIRONMENT:
            return self._environment(call, path)
        if call.name not in ARITHMETIC:
            raise _Fault(
                f"there is no resolver {call.name!r}; expected one of {', '.join(RESOLVERS)}"
                f"{did_you_mean(call.name, RESOLVERS)}"
            )
        if len(call.arguments) != 2:
            raise _Fault(f"{call.name} takes two numbers, and {len(call.arguments)} are given")
        numbers = [self._argument(argument, path) for argument in call.arguments]
        for number in numbers:
            if isinstance(number, bool) or not isinstance(number, int | float):
                shown = "something from the environment" if path in self.leaking else repr(number)
                raise _Fault(f"{call.name} takes two numbers, and one of them is {shown}")
        try:
            result = ARITHMETIC[call.name](*numbers)
        except ZeroDivisionError:
            raise _Fault("divides by zero") from None
        except OverflowError:
            raise _Fault(f"{call.name} gives a number that is too large") from None
        if isinstance(result, float) and not math.isfinite(result):
            raise _Fault(f"{call.name} gives {result}; expected a finite number")
        return result

    def _environment(self, call: Call, path: KeyPath) -> Any:
        if len(call.arguments) not in (1, 2):
            raise _Fault(f"{ENVIRONMENT} takes a variable and perhaps a default, and {len(call.arguments)} are given")
        name = str(self._argument(call.arguments[0], path))
        value = self.environ.get(name)
        if value is not None:
            self.leaking.update(self.open)
            self.document.hidden[value] = f"${{{ENVIRONMENT}:{name}}}"
            return value
        if len(call.arguments) == 1:
            raise _Fault(f"the environment has no variable {name!r}{did_you_mean(name, self.environ)}")
        # The default is in the recipe for all to see, but the reference has to be kept: the variable may be set later.
        self.leaking.update(self.open)
        return self._argument(call.arguments[1], path)

    def _argument(self, pieces: Pieces, path: KeyPath) -> Any:
        if len(pieces) == 1 and isinstance(pieces[0], str | Quoted):
            return literal(pieces[0])
        if not pieces:
            return ""
        value = self._evaluate(pieces, path)
        from_text = isinstance(value, str) and any(isinstance(piece, Reference | Call) for piece in pieces)
        return read_scalar(value) if from_text and self.open and self.open[-1] in self.leaking else value


def _at(value: Any, path: KeyPath) -> Any:
    for key in path:
        value = value[key]
    return value


def _kind(value: Any) -> str:
    if isinstance(value, dict | list):
        return "a block of keys" if isinstance(value, dict) else "a list"
    return "empty" if value is None else "true or false"


def _typed(value: Any, wanted: Any) -> Any:
    """The value as the schema wants it, where that loses nothing."""
    if isinstance(value, str) and wanted in (int, float, bool):
        value = read_scalar(value)
    if wanted is int and isinstance(value, float) and value.is_integer():
        return int(value)
    return value
