"""Schemas from signatures, and what the model is told about arguments that do not fit."""

from typing import Literal, Optional

import pytest

from gymloop.errors import ConfigError
from gymloop.gym.tools import ToolError, parse_docstring, read_tool


class Shop:
    def search(
        self,
        query: str,
        kind: Literal["book", "film"] = "book",
        limit: int = 10,
        price: Optional[float] = None,  # noqa: UP045 - both spellings must work
        tags: list[str] = [],  # noqa: B006
        options: dict | None = None,
        exact: bool = False,
    ) -> str:
        """Search the shop,
        newest first.

        Longer text that the model is not shown.

        Args:
            query: words to look for,
                all of them
            kind (str): what to look for
            limit: at most

        Returns:
            Titles.
        """
        return query


SPEC = read_tool(Shop.search, "tool Shop.search")


def test_the_schema_says_types_defaults_and_descriptions():
    schema = SPEC.schema()
    assert schema["type"] == "function"
    assert schema["name"] == "search"
    assert schema["description"] == "Search the shop, newest first."
    assert schema["parameters"] == {
        "type": "object",
        "properties": {
            "query": {"type": "string", "description": "words to look for, all of them"},
            "kind": {
                "enum": ["book", "film"],
                "type": "string",
                "description": "what to look for",
                "default": "book",
            },
            "limit": {"type": "integer", "description": "at most", "default": 10},
            "price": {"anyOf": [{"type": "number"}, {"type": "null"}]},
            "tags": {"items": {"type": "string"}, "type": "array", "default": []},
            "options": {"anyOf": [{"additionalProperties": True, "type": "object"}, {"type": "null"}]},
            "exact": {"type": "boolean", "default": False},
        },
        "required": ["query"],
    }


def test_arguments_that_fit_are_bound():
    given = {"query": "x", "price": 3, "tags": ["a"], "options": {"k": [1]}, "exact": True, "kind": "film"}
    assert SPEC.bind(given) == given
    assert SPEC.bind({"query": "x"}) == {"query": "x"}


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({}, "search needs the argument 'query'"),
        ({"query": 3}, "search, argument 'query': Input should be a valid string"),
        ({"query": "x", "limit": "3"}, "search, argument 'limit': Input should be a valid integer"),
        ({"query": "x", "limit": True}, "search, argument 'limit': Input should be a valid integer"),
        ({"query": "x", "kind": "cd"}, "search, argument 'kind': Input should be 'book' or 'film'"),
        ({"query": "x", "tags": [1]}, "search, argument 'tags': Input should be a valid string"),
        (
            {"query": "x", "page": 1},
            "search has no argument 'page'; its arguments: query, kind, limit, price, tags, options, exact",
        ),
    ],
)
def test_arguments_that_do_not_fit_are_told_in_one_sentence(arguments, text):
    with pytest.raises(ToolError) as caught:
        SPEC.bind(arguments)
    assert str(caught.value) == text


def no_docstring(self, x: str) -> str:
    return x


def no_annotation(self, x) -> str:
    """Do it."""
    return x


def many(self, *xs: str) -> str:
    """Do it."""
    return xs[0]


def odd_type(self, x: object()) -> str:  # type: ignore[valid-type]
    """Do it."""
    return x


def misspelt(self, expression: str) -> str:
    """Do it.

    Args:
        expresion: to compute
    """
    return expression


@pytest.mark.parametrize(
    ("method", "said"),
    [
        (no_docstring, "has no docstring"),
        (no_annotation, "argument 'x' has no annotation"),
        (many, "cannot be named in JSON"),
        (odd_type, "JSON cannot carry"),
        (misspelt, r"describes 'expresion' \(did you mean 'expression'\?\)"),
    ],
)
def test_a_method_that_cannot_become_a_tool_is_refused_by_name(method, said):
    with pytest.raises(ConfigError, match=f"tool T.m: .*{said}"):
        read_tool(method, "tool T.m")


def test_docstring_without_args():
    assert parse_docstring("One line.") == ("One line.", {})
    assert parse_docstring("") == ("", {})
