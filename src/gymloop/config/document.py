"""YAML as people mean it: ``1e-6`` is a number, ``no`` and ``010`` are text, and a key given twice is an error.

YAML 1.1 reads ``1e-6`` as text, ``no`` as false and ``010`` as 8, and PyYAML keeps the last of two equal keys; each of
these has cost somebody a training run. Here a scalar is a number or boolean only where every reader agrees, all else is
text, and the schema then says what it wanted. Every key's line is kept for the messages.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import yaml

from gymloop.config.problems import KeyPath, Problem


class _Loader(yaml.SafeLoader):
    """Only composes: PyYAML's scanner, parser and anchors with scalar rules of our own."""

    yaml_implicit_resolvers: dict[str, Any] = {}


_INT = re.compile(r"[-+]?(?:0|[1-9][0-9]*(?:_[0-9]+)*)|0x[0-9a-fA-F]+")
_FLOAT = re.compile(
    r"[-+]?(?:[0-9]+(?:_[0-9]+)*\.[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?"
    r"|[-+]?[0-9]+[eE][-+]?[0-9]+"
    r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)"
)
for _tag, _pattern, _first in (
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("int", _INT.pattern, "-+0123456789"),
    ("float", _FLOAT.pattern, "-+.0123456789"),
    ("null", r"~|null|Null|NULL|", "~nN"),
    ("merge", r"<<", "<"),
):
    _Loader.add_implicit_resolver(
        f"tag:yaml.org,2002:{_tag}", re.compile(f"^(?:{_pattern})$"), [*_first, *([""] if _tag == "null" else [])]
    )

IMPLICIT_RESOLVERS = _Loader.yaml_implicit_resolvers
"""By first character: which plain words are something else than text, as (tag, pattern)."""


@dataclass(slots=True)
class Document:
    """A YAML text as plain data.

    Attributes:
        value: dicts, lists, text, numbers, booleans, None; None when the text cannot be parsed at all.
        positions: ``source:line`` of every key and list item.
        problems: duplicate keys, syntax errors and the like.
        expressions: keys whose value was computed from ``${...}``, with that text.
        from_environment: those of them that hold something of the environment.
        unresolved: keys without a value, such as those whose ``${...}`` has none; a problem says why, here or at what
            it refers to.
        hidden: values that no message may show, with what stands for them.
    """

    value: Any = None
    positions: dict[KeyPath, str] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    expressions: dict[KeyPath, str] = field(default_factory=dict)
    from_environment: dict[KeyPath, str] = field(default_factory=dict)
    unresolved: set[KeyPath] = field(default_factory=set)
    hidden: dict[str, str] = field(default_factory=dict)

    def file_of(self, path: KeyPath) -> str | None:
        """The file that gives a key, as messages name it; None for an override or a key that nobody gives."""
        match = re.fullmatch(r"(.*):[0-9]+", self.positions.get(path, ""), re.DOTALL)
        return match[1] if match and not match[1].startswith("override ") else None

    def forget(self, path: KeyPath) -> None:
        """Drop what is known about where a key and everything in it stands."""
        for known in [known for known in self.positions if known[: len(path)] == path]:
            del self.positions[known]


def parse(text: str, source: str) -> Document:
    """Read one YAML document; what is wrong with it is in ``problems``, nothing is raised."""
    document = Document()
    loader = None
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{source}:{mark.line + 1}" if mark else source
        what = " ".join(part for part in (error.context, error.problem) if part)
        document.problems.append(Problem((), f"not valid YAML: {what}", where))
        return document
    except yaml.YAMLError as error:
        document.problems.append(Problem((), f"not valid YAML: {' '.join(str(error).split())}", source))
        return document
    finally:
        if loader is not None:
            loader.dispose()
    if node is not None:
        document.value = _Reader(document, source).read(node, ())
    return document


class _Reader:
    """Turns composed nodes into data, noting lines and problems on the way."""

    def __init__(self, document: Document, source: str) -> None:
        self.document = document
        self.source = source
        self.open: set[int] = set()  # nodes being read: an alias to one of them refers to itself

    def read(self, node: yaml.Node, path: KeyPath) -> Any:
        self.document.positions.setdefault(path, self.line(node))
        if isinstance(node, yaml.ScalarNode):
            return self.scalar(node, path)
        if node.tag not in ("tag:yaml.org,2002:map", "tag:yaml.org,2002:seq"):
            return self.no_value(node, path, f"tag {node.tag!r} has no meaning in a recipe; remove it")
        if id(node) in self.open:
            return self.no_value(node, path, "refers to itself")
        self.open.add(id(node))
        try:
            if isinstance(node, yaml.SequenceNode):
                return [self.read(item, (*path, index)) for index, item in enumerate(node.value)]
            return self.mapping(node, path)
        finally:
            self.open.discard(id(node))

    def mapping(self, node: yaml.Node, path: KeyPath) -> dict[str, Any]:
        own: dict[str, Any] = {}
        merged: dict[str, Any] = {}
        lines: dict[str, yaml.Node] = {}
        for key_node, value_node in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                for base in reversed(value_node.value) if isinstance(value_node, yaml.SequenceNode) else [value_node]:
                    if isinstance(base, yaml.MappingNode):
                        merged.update(self.read(base, path))
                    else:
                        self.wrong(base, path, "'<<' merges blocks of keys; an alias to one was expected")
                continue
            if not isinstance(key_node, yaml.ScalarNode):
                self.wrong(key_node, path, "a key must be text")
                continue
            key = key_node.value
            if key in lines:
                first = lines[key].start_mark.line + 1
                self.wrong(key_node, (*path, key), f"given twice, first on line {first}; keep one")
            lines[key] = key_node
            self.document.positions[(*path, key)] = self.line(key_node)
            own[key] = self.read(value_node, (*path, key))
        return {**merged, **own}

    def scalar(self, node: yaml.ScalarNode, path: KeyPath) -> Any:
        kind = node.tag.removeprefix("tag:yaml.org,2002:")
        text = node.value
        if kind in ("str", "merge"):
            return text
        if kind == "null":
            return None
        if kind == "bool" and text.lower() in ("true", "false"):
            return text.lower() == "true"
        if kind == "int" and _INT.fullmatch(text):
            return int(text.replace("_", ""), 0)
        if kind == "float" and (_FLOAT.fullmatch(text) or _INT.fullmatch(text)):
            return _to_float(text.replace("_", "").lower())
        return self.no_value(node, path, f"tag {node.tag!r} on {text!r} has no meaning in a recipe; remove it")

    def no_value(self, node: yaml.Node, path: KeyPath, text: str) -> None:
        self.wrong(node, path, text)
        self.document.unresolved.add(path)

    def wrong(self, node: yaml.Node, path: KeyPath, text: str) -> None:
        self.document.problems.append(Problem(path, text, self.line(node)))

    def line(self, node: yaml.Node) -> str:
        return f"{self.source}:{node.start_mark.line + 1}"


def read_scalar(text: str) -> Any:
    """A word as the recipe would read it: number, boolean, null, or text where it is none of these."""
    for tag, pattern in IMPLICIT_RESOLVERS.get(text[:1], []):
        if pattern.match(text) and not tag.endswith("merge"):
            return _Reader(Document(), "").scalar(yaml.ScalarNode(tag, text), ())
    return text


def _to_float(text: str) -> float:
    """YAML writes ``.inf`` and ``.nan``."""
    return float(text.replace(".inf", "inf").replace(".nan", "nan"))
