"""A tool is a method: its signature is the schema the model sees and the check its arguments pass.

The schema is a flat Responses function tool. Arguments that do not fit never reach the method: the model reads one
short sentence about them, the same sentence every time.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar, get_type_hints

import orjson
from pydantic import TypeAdapter, ValidationError
from pydantic.errors import PydanticSchemaGenerationError, PydanticUserError

from gymloop.errors import ConfigError

_MARK = "__gymloop_tool__"
_Method = TypeVar("_Method", bound=Callable[..., Any])


class ToolError(Exception):
    """Raised by a tool to tell the model, in one sentence, why the call did not work."""


def tool(method: _Method) -> _Method:
    """Mark a method of an ``Environment`` as a tool of the model."""
    setattr(method, _MARK, True)
    return method


@dataclass(frozen=True, slots=True)
class ToolSpec:
    """What is known of a tool before it is called.

    Attributes:
        name: of the method.
        description: first paragraph of its docstring, on one line.
        parameters: JSON schema of its arguments.
        checks: one validator per argument, strict about types.
        required: arguments without a default.
    """

    name: str
    description: str
    parameters: Mapping[str, Any]
    checks: Mapping[str, TypeAdapter[Any]]
    required: frozenset[str]

    def schema(self) -> dict[str, Any]:
        """The flat function tool of the Responses interface."""
        return {
            "type": "function",
            "name": self.name,
            "description": self.description,
            "parameters": dict(self.parameters),
        }

    def bind(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Arguments as the method takes them.

        Raises:
            ToolError: an argument is unknown, missing or of another type; the text is for the model.
        """
        for name in arguments:
            if name not in self.checks:
                known = ", ".join(self.checks) or "none"
                raise ToolError(f"{self.name} has no argument '{name}'; its arguments: {known}")
        bound = {}
        for name, check in self.checks.items():
            if name in arguments:
                try:
                    # JSON mode, because the argument came as JSON: "red" is then a valid value of an enum.
                    bound[name] = check.validate_json(orjson.dumps(arguments[name]), strict=True)
                except ValidationError as error:
                    raise ToolError(f"{self.name}, argument '{name}': {error.errors()[0]['msg']}") from error
            elif name in self.required:
                raise ToolError(f"{self.name} needs the argument '{name}'")
        return bound


def read_tools(cls: type) -> dict[str, ToolSpec]:
    """The tools of a class and of its bases, in the order they are defined.

    Raises:
        ConfigError: a signature or docstring cannot become a schema.
    """
    names = dict.fromkeys(name for base in reversed(cls.__mro__) for name in vars(base))
    marked = [name for name in names if getattr(getattr(cls, name, None), _MARK, False)]
    return {name: read_tool(getattr(cls, name), f"tool {cls.__name__}.{name}") for name in marked}


def read_tool(method: Callable[..., Any], where: str) -> ToolSpec:
    """Read one method: its signature without ``self``, its docstring in Google style.

    Raises:
        ConfigError: see ``read_tools``; the message begins with ``where``.
    """
    description, documented = parse_docstring(inspect.getdoc(method) or "")
    if not description:
        raise ConfigError(f"{where}: has no docstring; the model is told what the tool does from it")
    try:
        hints = get_type_hints(method, include_extras=True)
    except NameError as error:
        raise ConfigError(f"{where}: cannot resolve the annotations of its arguments: {error}") from error
    properties: dict[str, Any] = {}
    definitions: dict[str, Any] = {}
    checks: dict[str, TypeAdapter[Any]] = {}
    required = []
    for name, parameter in list(inspect.signature(method).parameters.items())[1:]:
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise ConfigError(f"{where}: argument {parameter} cannot be named in JSON; expected plain arguments")
        if name not in hints:
            raise ConfigError(f"{where}: argument '{name}' has no annotation, such as {name}: str")
        try:
            checks[name] = TypeAdapter(hints[name])
            schema = _without_titles(checks[name].json_schema())
        except (PydanticSchemaGenerationError, PydanticUserError) as error:
            raise ConfigError(f"{where}: argument '{name}' has a type that JSON cannot carry: {hints[name]}") from error
        definitions.update(schema.pop("$defs", {}))
        if name in documented:
            schema["description"] = documented[name]
        if parameter.default is parameter.empty:
            required.append(name)
        elif parameter.default is not None:
            schema["default"] = parameter.default
        properties[name] = schema
    for name in documented:
        if name not in properties:
            raise ConfigError(f"{where}: its docstring describes '{name}'{nearest(name, properties)}, not an argument")
    parameters: dict[str, Any] = {"type": "object", "properties": properties}
    if required:
        parameters["required"] = required
    if definitions:
        parameters["$defs"] = definitions
    return ToolSpec(method.__name__, description, parameters, checks, frozenset(required))


def parse_docstring(text: str) -> tuple[str, dict[str, str]]:
    """First paragraph on one line, and the entries of ``Args:`` with their continuation lines joined."""
    lines = text.strip().split("\n")
    summary: list[str] = []
    for line in lines:
        if not line.strip() or line.strip() == "Args:":
            break
        summary.append(line.strip())
    arguments: dict[str, str] = {}
    start = next((i for i, line in enumerate(lines) if line.strip() == "Args:"), len(lines))
    indent: int | None = None
    current = ""
    for line in lines[start + 1 :]:
        depth = len(line) - len(line.lstrip())
        if line.strip() and depth == 0:
            break
        if not line.strip():
            continue
        indent = depth if indent is None else indent
        if depth <= indent:
            head, _, rest = line.strip().partition(":")
            current = head.split("(")[0].strip()
            arguments[current] = rest.strip()
        else:
            arguments[current] = f"{arguments[current]} {line.strip()}".strip()
    return " ".join(summary), arguments


def nearest(name: str, known: Iterable[str]) -> str:
    """`` (did you mean 'x'?)`` when something close exists, else nothing."""
    found = difflib.get_close_matches(name, list(known), n=1)
    return f" (did you mean '{found[0]}'?)" if found else ""


def _without_titles(schema: Any) -> Any:
    """Titles repeat names and cost prompt tokens. A property that is called ``title`` is an object and stays."""
    if isinstance(schema, dict):
        return {
            key: _without_titles(value)
            for key, value in schema.items()
            if not (key == "title" and isinstance(value, str))
        }
    return [_without_titles(value) for value in schema] if isinstance(schema, list) else schema
