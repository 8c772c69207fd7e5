"""Reasoning, content and calls are told apart, and a stream tells them apart in the same way."""

from __future__ import annotations

import pytest

from gymloop.errors import ConfigError
from gymloop.tokens.parsers import Envelope, TaggedReasoning, ToolParser, tool_call
from gymloop.tokens.reply import ReplyReader, reply_reader

CALL = '<tool_call>\n{"name": "wx", "arguments": {}}\n</tool_call>'


def parts(text: str, reasoning: str = "think", **kwargs) -> tuple:
    reply = reply_reader("hermes", reasoning_parser=reasoning).read(text, **kwargs)
    return reply.reasoning, reply.content, [call.name for call in reply.tool_calls]


@pytest.mark.parametrize(
    ("text", "opened", "expected"),
    [
        ("<think>\nwhy\n</think>\n\n4C.", False, ("why", "4C.", [])),
        ("\n<think>why</think>4C.", False, ("why", "4C.", [])),
        ("why\n</think>\n\n4C.", True, ("why", "4C.", [])),
        ("<think>why</think>4C.", True, ("why", "4C.", [])),  # opened twice
        ("<think>\n\n</think>\n\n4C.", False, ("", "4C.", [])),
        ("<think>why", False, ("why", "", [])),
        ("why ", True, ("why", "", [])),
        ("", True, ("", "", [])),
        ("", False, (None, "", [])),
        (" 4C.\n", False, (None, " 4C.\n", [])),
        ("why</think>4C.", False, (None, "why</think>4C.", [])),
        ("Tags like <think>this</think>.", False, (None, "Tags like <think>this</think>.", [])),
        ("<think>a</think>b</think>c", False, ("a", "b</think>c", [])),
        (f"<think>{CALL}</think>4C.", False, (CALL, "4C.", [])),
        (f"<think>why {CALL}", False, (f"why {CALL}", "", [])),
        (f"<think>why</think>\n{CALL}", False, ("why", "", ["wx"])),
        (f"<think>why</think>\n\nNow.\n{CALL}\n", False, ("why", "Now.", ["wx"])),
    ],
)
def test_think_tells_reasoning_from_the_rest(text, opened, expected):
    assert parts(text, opened_reasoning=opened) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("why\n</think>\n\n4C.", ("why", "4C.", [])),
        ("<think>why</think>4C.", ("why", "4C.", [])),
        ("why, and no end", ("why, and no end", "", [])),
        (f"why {CALL}</think>{CALL}", (f"why {CALL}", "", ["wx"])),
    ],
)
def test_deepseek_r1_may_leave_out_the_opening_tag(text, expected):
    assert parts(text, "deepseek_r1") == expected


def test_without_a_reasoning_parser_reasoning_is_content():
    reply = reply_reader().read("<think>why</think>4C.")
    assert (reply.reasoning, reply.content) == (None, "<think>why</think>4C.")


@pytest.mark.parametrize(("prompt", "opened"), [("assistant\n<think>\n", True), ("<think>\n\n</think>\n\n", False)])
def test_a_prompt_that_opens_reasoning_is_known(prompt, opened):
    assert reply_reader("hermes", reasoning_parser="think").opened_by(prompt) is opened
    assert reply_reader("hermes").opened_by(prompt) is False


def test_f06_a_cut_turn_shows_no_call_even_where_a_whole_one_stands_in_it():
    text = f'<think>why</think>\n\nNow.\n{CALL}\n<tool_call>\n{{"name": "write", "arguments": {{"path": "/tmp'
    reply = reply_reader("hermes", reasoning_parser="think").read(text, whole=False)
    assert (reply.reasoning, reply.tool_calls, reply.malformed) == ("why", (), 0)
    assert f"<think>why</think>\n\n{reply.content}" == text


def test_text_around_calls_is_joined_by_a_newline_and_keeps_its_outer_borders():
    reply = reply_reader().read(f"  one \n{CALL} two {CALL}\n\nthree \n")
    assert reply.content == "  one\ntwo\nthree \n"


def test_a_stream_gives_text_as_soon_as_it_is_certain():
    stream = reply_reader("hermes", reasoning_parser="think").stream()
    given = [
        [(delta.kind, delta.text) for delta in stream.feed(piece)]
        for piece in ("<thi", "nk>\nso", " it", " is.\n</th", "ink>\n", "\nFine", ". <", "b> <tool", "_call>{", "}")
    ]
    assert given == [
        [],
        [("reasoning", "so")],
        [("reasoning", " it")],
        [("reasoning", " is.")],
        [],
        [("content", "Fine")],
        [("content", ".")],
        [("content", " <b>")],
        [],
        [],
    ]
    rest = stream.end()
    assert (rest.content, rest.reasoning, rest.malformed) == (" <tool_call>{}", "", 1)


def test_harmony_streams_the_reasoning_that_comes_first():
    stream = reply_reader("openai", reasoning_parser="openai").stream()
    pieces = [
        "<|channel|>analysis",
        "<|message|>so",
        " it is",
        "<|end|><|start|>assistant<|channel|>final<|message|>4C",
    ]
    given = [delta for piece in pieces for delta in stream.feed(piece)]
    assert [(delta.kind, delta.text) for delta in given] == [("reasoning", "so"), ("reasoning", " it is")]
    rest = stream.end()
    assert (rest.content, rest.reasoning) == ("4C", "")


def test_a_parser_that_breaks_its_promise_is_named():
    class Late(ToolParser):
        openers = ("!",)

        def envelopes(self, text, tools):
            yield Envelope(text.index("?"), len(text), (tool_call("f", {}),))

    with pytest.raises(ConfigError, match=r"tool parser Late names an envelope at 6:7 that begins with none of its op"):
        ReplyReader(Late(), TaggedReasoning("<a>", "</a>")).read("Well !?")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("qwen3-coder",), r"policy\.tokenizer\.tool_parser is 'qwen3-coder'; .*; did you mean 'qwen3_coder'\?"),
        (("hermes", None, "thnk"), r"policy\.tokenizer\.reasoning_parser is 'thnk'; .*; did you mean 'think'\?"),
        (("xyz",), r"expected one of hermes, qwen3_coder, .*, openai$"),
    ],
)
def test_an_unknown_name_is_refused_with_the_nearest(arguments, message):
    with pytest.raises(ConfigError, match=message):
        reply_reader(*arguments)
