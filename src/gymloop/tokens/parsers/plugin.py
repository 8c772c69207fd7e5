"""Parsers from a Python file that a recipe names.

The file defines a dict ``TOOL_PARSERS`` (name to ``ToolParser``), a dict ``REASONING_PARSERS`` (name to
``ReasoningParser``), or both; a value is an object, or a class that needs no arguments::

    import re
    from gymloop.tokens.parsers import Envelope, ToolParser, tool_call

    class Bang(ToolParser):
        openers = ("!",)

        def envelopes(self, text, tools):
            for found in re.finditer(r"!(\\w+)", text):
                yield Envelope(found.start(), found.end(), (tool_call(found[1], {}),))

    TOOL_PARSERS = {"bang": Bang}

Where vLLM is installed the file may register parsers with vLLM instead (``ToolParserManager.register_module``).
"""

from __future__ import annotations

import importlib.util
import sys
import traceback
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import TypeVar

from gymloop.errors import ConfigError

Kind = TypeVar("Kind")


def plugin_parsers(
    path: str | Path,
    table: str,
    kind: type[Kind],
    taken: Mapping[str, Kind],
    key: str,
    registered: Callable[[], Collection[str]] = tuple,
) -> dict[str, Kind]:
    """Run a plug-in and return the parsers in one of its tables.

    Args:
        path: the Python file.
        table: ``TOOL_PARSERS`` or ``REASONING_PARSERS``.
        kind: what the values of the table must be.
        taken: built-in parsers, whose names a plug-in may not use.
        key: the recipe's key, for messages.
        registered: names that the plug-in has put into vLLM's registry; with some, it needs no table.

    Raises:
        ConfigError: the file is missing, fails, or has no such table of such parsers; with file and line.
    """
    found = run_plugin(path, key).get(table)
    if found is None and registered():
        return {}
    if not isinstance(found, dict) or not found:
        raise ConfigError(f"{key}: {path} defines no {table}; expected a dict of names and {kind.__name__} objects")
    return {
        name: _parser(name, value, kind, taken, f"{key}: {path}: {table}[{name!r}]") for name, value in found.items()
    }


def run_plugin(path: str | Path, key: str) -> dict[str, object]:
    """Run a plug-in; its names.

    Raises:
        ConfigError: it is missing or fails.
    """
    path = Path(path)
    if not path.is_file():
        raise ConfigError(f"{key}: the file {path} does not exist")
    name = f"gymloop_plugin_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{key}: {path} is no Python file; its name must end in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up there
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # a plug-in is a program of its own, and may fail in any way
        del sys.modules[name]
        raise ConfigError(f"{key}: {path}{_line(error, path)}: {_told(error)}") from error
    return vars(module)


def _parser(name: object, value: object, kind: type[Kind], taken: Mapping[str, Kind], where: str) -> Kind:
    if not isinstance(name, str) or not name:
        raise ConfigError(f"{where} has a name that is no text")
    if name in taken:
        raise ConfigError(f"{where} has the name of a built-in parser; give it another")
    if isinstance(value, type) and issubclass(value, kind):
        try:
            value = value()
        except Exception as error:  # code of the plug-in again
            raise ConfigError(f"{where} cannot be made: {_told(error)}") from error
    if not isinstance(value, kind):
        shown = value.__name__ if isinstance(value, type) else type(value).__name__
        raise ConfigError(f"{where} is {shown}; expected a {kind.__name__} from gymloop.tokens.parsers")
    return value


def _line(error: Exception, path: Path) -> str:
    """``":12"``, the line of the file at fault."""
    if isinstance(error, SyntaxError):
        return f":{error.lineno}"
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    return f":{lines[-1]}" if lines else ""


def _told(error: Exception) -> str:
    text = error.msg if isinstance(error, SyntaxError) else str(error)
    return f"{type(error).__name__}: {text}"
