"""A parser from a file works as a built-in one; what is wrong with the file is one sentence."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from gymloop.errors import ConfigError
from gymloop.tokens.parsers import REASONING_PARSERS, TOOL_PARSERS
from gymloop.tokens.reply import reply_reader

DOCS = (Path(__file__).parents[2] / "docs" / "parsers.md").read_text(encoding="utf-8")

BANG = """
from __future__ import annotations
import re
from dataclasses import dataclass
from gymloop.tokens.parsers import Envelope, TaggedReasoning, ToolParser, tool_call

@dataclass
class Bang(ToolParser):
    mark: str = "!"
    openers = ("!",)

    def envelopes(self, text, tools):
        for found in re.finditer(self.mark + r"(\\w*)", text):
            calls = (tool_call(found[1], {}),) if found[1] else ()
            yield Envelope(found.start(), found.end(), calls)

TOOL_PARSERS = {"bang": Bang, "object": Bang()}
REASONING_PARSERS = {"stars": TaggedReasoning("*", "*")}
"""


@pytest.fixture
def plugin(tmp_path):
    def write(text: str) -> str:
        path = tmp_path / "mine.py"
        path.write_text(text, encoding="utf-8")
        return str(path)

    return write


@pytest.mark.parametrize("name", ["bang", "object"])
def test_a_plug_in_reads_and_streams(plugin, name):
    path = plugin(BANG)
    reader = reply_reader(name, path, "stars", path)
    reply = reader.read("*why*Now. !wx !")
    assert (reply.reasoning, reply.content, reply.malformed) == ("why", "Now.\n!", 1)
    assert [call.name for call in reply.tool_calls] == ["wx"]
    stream = reader.stream()
    deltas = [delta for character in "*why*Now. !wx !" for delta in stream.feed(character)]
    assert "".join(delta.text for delta in deltas) == "whyNow."
    assert stream.end().content == "\n!"


def test_built_in_names_still_work_beside_a_plug_in(plugin):
    assert reply_reader("mistral", plugin(BANG)).tool_parser is reply_reader("mistral").tool_parser


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1\ny = 1/0\n", r"tool_parser_plugin: .*mine\.py:2: ZeroDivisionError: division by zero$"),
        ("\ndef (:\n", r"mine\.py:2: SyntaxError: invalid syntax$"),
        ("import no_such_module\n", r"mine\.py:1: ModuleNotFoundError: No module named 'no_such_module'$"),
        ("x = 1\n", r"mine\.py defines no TOOL_PARSERS; expected a dict of names and ToolParser objects$"),
        ("TOOL_PARSERS = {'a': 3}\n", r"mine\.py: TOOL_PARSERS\['a'\] is int; expected a ToolParser"),
        ("TOOL_PARSERS = {'a': int}\n", r"mine\.py: TOOL_PARSERS\['a'\] is int; expected a ToolParser"),
        ("TOOL_PARSERS = {3: 3}\n", r"TOOL_PARSERS\[3\] has a name that is no text"),
        (BANG.replace('"bang"', '"hermes"'), r"TOOL_PARSERS\['hermes'\] has the name of a built-in parser"),
        (BANG.replace("def envelopes", "def envelope"), r"TOOL_PARSERS\['bang'\] cannot be made: TypeError: "),
        (BANG.replace('"bang"', '"bong"'), r"tool_parser is 'bang'; .*; did you mean 'bong'\?"),
    ],
)
def test_what_is_wrong_with_a_plug_in_is_one_sentence(plugin, text, message):
    if '"object": Bang()' in text and "def envelope(" in text:
        text = text.replace(', "object": Bang()', "")
    with pytest.raises(ConfigError, match=message) as caught:
        reply_reader("bang", plugin(text))
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_named():
    with pytest.raises(ConfigError, match=r"reasoning_parser_plugin: the file no/such\.py does not exist"):
        reply_reader("hermes", None, "think", "no/such.py")


def test_a_file_that_is_no_python_is_named(tmp_path):
    path = tmp_path / "mine.txt"
    path.write_text("TOOL_PARSERS = {}")
    with pytest.raises(ConfigError, match=r"mine\.txt is no Python file; its name must end in \.py"):
        reply_reader("hermes", path)


def test_the_documented_parser_works_as_it_stands_there(plugin):
    code = re.search(r"```python\n(.*?)```", DOCS, re.DOTALL)
    assert code is not None
    path = plugin(code[1])
    reply = reply_reader("chevrons", path, "reason", path).read("[reason]why[/reason] Now <<find:a > b>> << c")
    assert (reply.reasoning, reply.content, reply.malformed) == ("why", "Now\n<< c", 1)
    assert [(call.name, call.arguments) for call in reply.tool_calls] == [("find", '{"query": "a > b"}')]


def test_every_built_in_parser_is_documented():
    named = set(re.findall(r"^\| `(\w+)` \|", DOCS, re.MULTILINE)) - {"tool_parser", "reasoning_parser"}
    assert named == set(TOOL_PARSERS) | set(REASONING_PARSERS)
