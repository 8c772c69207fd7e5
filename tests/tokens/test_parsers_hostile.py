"""A model may write anything: every parser ends soon, never raises, loses nothing, and streams what it reads."""

from __future__ import annotations

import itertools
import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gymloop.config.schema import REASONING_PARSERS, TOOL_PARSERS
from gymloop.tokens.reply import Reply, ReplyReader, reply_reader

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "f",
            "parameters": {"properties": {"a": {"type": ["integer", "null"]}, "b": {"anyOf": [{"type": "object"}]}}},
        },
    }
]
PIECES = [
    "<tool_call>",
    "</tool_call>",
    "<TOOLCALL>",
    "</TOOLCALL>",
    "<function=f>",
    "<function=",
    "</function>",
    "<parameter=a>",
    "</parameter>",
    "<|python_tag|>",
    "<|python_start|>",
    "<|python_end|>",
    "[TOOL_CALLS]",
    "[ARGS]",
    "[CALL_ID]",
    "<|start|>",
    "<|channel|>",
    "<|message|>",
    "<|constrain|>",
    "<|end|>",
    "<|call|>",
    "<|return|>",
    "assistant",
    "analysis",
    "commentary to=functions.f",
    " to=f",
    "final",
    "<think>",
    "</think>",
    "<thi",
    '{"name": "f", "arguments": {"a": 1}}',
    '{"name": "f", "parameters": {}}',
    '[{"name": "f", "arguments": {}}]',
    '{"name": "f", "arguments": NaN}',
    '{"name": "f", "arguments": 1e999}',
    "[f(a=1)]",
    "[f(",
    "f(a=[1, {'b': (2,)}], c='\\x41\\u12')",
    "{",
    "}",
    "[",
    "]",
    "(",
    ")",
    ";",
    ",",
    "=",
    ":",
    '"',
    "'",
    "\\",
    "\n",
    " ",
    "\x00",
    "\ud800",
    "\x85",
    "f",
    "1",
    "None",
    "true",
]
TEXT = st.lists(st.sampled_from(PIECES), max_size=14).map("".join) | st.text()
REASONING = st.sampled_from([None, *REASONING_PARSERS])
READERS = {
    (tool, reasoning): reply_reader(tool, reasoning_parser=reasoning)
    for tool, reasoning in itertools.product(TOOL_PARSERS, (None, *REASONING_PARSERS))
}


def shown(reply: Reply) -> tuple:
    """A reply without the ids of its calls, which no two readings share."""
    return reply.content, reply.reasoning, [(call.name, call.arguments) for call in reply.tool_calls], reply.malformed


@pytest.mark.parametrize("tool", TOOL_PARSERS)
@settings(max_examples=100)
@given(reasoning=REASONING, text=TEXT, opened=st.booleans(), whole=st.booleans(), data=st.data())
def test_any_text_is_read_and_streamed_alike(tool, reasoning, text, opened, whole, data):
    reader = READERS[tool, reasoning]
    reply = reader.read(text, tools=TOOLS, opened_reasoning=opened, whole=whole)
    for call in reply.tool_calls:
        call.arguments.encode()
        call.name.encode()
        assert call.name.strip()
    if not whole:
        assert (reply.tool_calls, reply.malformed) == ((), 0)
    step = data.draw(st.sampled_from([1, 2, 3, 7]), "step")
    cuts = (
        sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8), "cuts"))
        if step == 7
        else range(0, len(text), step)
    )
    streamed = stream(reader, [text[a:b] for a, b in itertools.pairwise([0, *cuts, len(text)])], opened, whole)
    assert shown(streamed) == shown(reply)


def stream(reader: ReplyReader, pieces: list[str], opened: bool, whole: bool) -> Reply:
    """What a client of a stream has at the end."""
    stream = reader.stream(TOOLS, opened)
    got = {"content": "", "reasoning": ""}
    for piece in pieces:
        for delta in stream.feed(piece):
            assert delta.text
            assert delta.kind == "reasoning" or got["content"] is not None
            got[delta.kind] += delta.text
    rest = stream.end(whole)
    reasoning = None if rest.reasoning is None else got["reasoning"] + rest.reasoning
    assert rest.reasoning is not None or not got["reasoning"]
    return Reply(got["content"] + rest.content, reasoning, rest.tool_calls, rest.malformed)


@pytest.mark.parametrize("tool", TOOL_PARSERS)
@given(reasoning=REASONING, text=TEXT, opened=st.booleans())
@settings(max_examples=60)
def test_no_character_is_lost_but_tags_and_white_space(tool, reasoning, text, opened):
    reply = READERS[tool, reasoning].read(text, tools=TOOLS, opened_reasoning=opened)
    if reply.tool_calls or "openai" in (tool, reasoning):  # harmony's markers are no text
        return
    kept = "".join(f"{reply.reasoning or ''}{reply.content}".split())
    said = "".join(text.split())
    possible = {said}
    if reply.reasoning is not None:
        possible |= {said.removeprefix("<think>")}
        possible |= {one.replace("</think>", "", 1) for one in possible}
    assert kept in possible


def bombs(size: int) -> dict[str, str]:
    """Texts of about ``size`` characters, each made to defeat one kind of search."""
    openers = ["<tool_call>", "<TOOLCALL>", "<|python_tag|>", "[TOOL_CALLS]", "<|start|>", "<|channel|>", "<think>"]
    units = {
        **{opener: opener for opener in openers},
        **{f"{opener} with an object": opener + "{" for opener in openers},
        **{f"{opener} with a string": opener + '{"name": "' for opener in openers},
        **{f"{opener} with a list": opener + "[[[" for opener in openers},
        "functions": "<tool_call><function=a>",
        "parameters": "<tool_call><function=a><parameter=b>",
        "values": "<tool_call><function=a><parameter=b></parameter>",
        "channels": "<|channel|>commentary to=functions.a<|message|>{",
        "messages": "<|channel|>analysis<|message|>",
        "args": "[TOOL_CALLS]a[ARGS]",
        "brackets": "[",
        "braces": '{"a":',
        "calls": "[f(a=",
        "minus": "-",
        "backslashes": "\\",
        "spaces": " ",
        "letters": "a",
        "smaller": "<",
        "space and tag": " <tool_call",
        "close": "</parameter> ",
    }
    texts = {name: unit * (size // len(unit)) for name, unit in units.items()}
    half = size // 2
    parameters = "<parameter=b></parameter>" * (half // 25)
    functions = "<tool_call><function=a><parameter=b>" * (half // 36)
    return texts | {
        "functions, then parameters": functions + parameters,
        "functions, then parameters, then no end": functions + parameters + "<parameter=c</function></tool_call>",
        "functions, then one value": functions * 2 + "</parameter><parameter=",
        "an unclosed string": '<tool_call>{"name": "' + "a" * size,
        "an unclosed python string": '[f(a="' + "\\a" * half,
        "a nested list": "[f(a=" + "[" * half,
        "a nested object": '<tool_call>{"name": "f", "arguments": ' + '{"a":' * (size // 5),
        "a long integer": '<tool_call>{"name": "f", "arguments": ' + "9" * size,
        "a long python integer": "[f(a=" + "9" * size + ")]",
        "spaces behind a value": "<tool_call><function=a><parameter=b></parameter>" + " " * size,
        "a long name": "<|channel|>" + "a" * size,
        "a long recipient": "to=" + "a" * size,
        "many calls": '<tool_call>{"name": "f", "arguments": {}}</tool_call>' * (size // 52),
    }


BOMBS = bombs(200_000)


@pytest.mark.parametrize("bomb", BOMBS)
def test_hostile_text_is_read_in_linear_time(bomb):
    text = BOMBS[bomb]
    slow = {}
    for names, reader in READERS.items():
        if names[1] is None or names in (("openai", "openai"), ("hermes", "think")):
            begin = time.process_time()
            reader.read(text, tools=TOOLS)
            slow[names] = time.process_time() - begin
    assert max(slow.values()) < 1.0, slow


@pytest.mark.parametrize("bomb", ["spaces", "smaller", "letters", "space and tag", "brackets", "<think>"])
def test_hostile_text_is_streamed_in_linear_time(bomb):
    text = BOMBS[bomb][:20_000]
    for reader in (READERS["hermes", "think"], READERS["pythonic", None], READERS["openai", "openai"]):
        stream = reader.stream()
        begin = time.process_time()
        for character in text:
            stream.feed(character)
        stream.end()
        assert time.process_time() - begin < 1.0


def test_a_long_reply_is_read_in_a_millisecond():
    reader = READERS["hermes", "think"]
    call = '<tool_call>\n{"name": "f", "arguments": {"a": ' + json.dumps("word " * 200) + "}}\n</tool_call>"
    text = "<think>\n" + "so it is. " * 700 + "\n</think>\n\n" + "Fine. " * 300 + call
    assert len(text) > 9_000
    best = min(timed(lambda: reader.read(text)) for _ in range(300))
    assert best < 0.002


def timed(work) -> float:
    begin = time.thread_time()
    work()
    return time.thread_time() - begin
