"""Each format, in the spellings that models are known to use; what is no call stays text."""

from __future__ import annotations

import json

import pytest

from gymloop.config import schema
from gymloop.tokens.parsers import REASONING_PARSERS, TOOL_PARSERS
from gymloop.tokens.reply import Reply, reply_reader

OSLO = '{"name": "wx", "arguments": {"city": "Oslo"}}'
XML = "<tool_call>\n<function=wx>\n<parameter=city>\nOslo\n</parameter>\n</function>\n</tool_call>"
HARMONY = '<|channel|>commentary to=functions.wx <|constrain|>json<|message|>{"city": "Oslo"}'
THE_CALL = [("wx", {"city": "Oslo"})]


def test_the_schema_names_exactly_the_built_in_parsers():
    assert set(schema.TOOL_PARSERS) == set(TOOL_PARSERS)
    assert set(schema.REASONING_PARSERS) == set(REASONING_PARSERS)


def read(parser: str, text: str, tools=None) -> Reply:
    return reply_reader(parser).read(text, tools=tools)


def calls(reply: Reply) -> list[tuple[str, object]]:
    return [(call.name, json.loads(call.arguments)) for call in reply.tool_calls]


@pytest.mark.parametrize(
    ("parser", "text"),
    [
        ("nemotron_json", f"<TOOLCALL>[{OSLO}]</TOOLCALL>"),
        ("nemotron_json", f"<TOOLCALL>\n[\n{OSLO}]\n</TOOLCALL>\n"),
        ("nemotron_json", f"<TOOLCALL>{OSLO}</TOOLCALL>"),
        ("nemotron_json", f"<TOOLCALL>[{OSLO}]"),
        ("llama3_json", OSLO),
        ("llama3_json", '\n{"type": "function", "name": "wx", "parameters": {"city": "Oslo"}}'),
        ("llama3_json", f"<|python_tag|>{OSLO}"),
        ("llama3_json", f"<|python_tag|>{OSLO};"),
        ("qwen3_coder", XML),
        ("qwen3_coder", XML.removesuffix("</tool_call>")),
        ("qwen3_coder", XML.removeprefix("<tool_call>\n").removesuffix("\n</tool_call>")),
        ("qwen3_coder", XML.replace("\n", "")),
        ("pythonic", "[wx(city='Oslo')]"),
        ("pythonic", '\n[ wx( city = "Oslo", ) ]\n'),
        ("pythonic", "<|python_start|>[wx(city='Oslo')]<|python_end|>"),
        ("mistral", f"[TOOL_CALLS] [{OSLO}]"),
        ("mistral", f"[TOOL_CALLS]{OSLO}"),
        ("mistral", '[TOOL_CALLS]wx[ARGS]{"city": "Oslo"}'),
        ("mistral", '[TOOL_CALLS]wx[CALL_ID]a1b2c3d4e[ARGS]{"city": "Oslo"}'),
        ("mistral", '[TOOL_CALLS]wx{"city": "Oslo"}'),
        ("openai", HARMONY),
        ("openai", HARMONY + "<|call|>"),
        ("openai", HARMONY.replace(" <|constrain|>json", "")),
        ("openai", HARMONY.replace("commentary", "analysis")),
        ("openai", ' to=functions.wx<|channel|>commentary json<|message|>{"city": "Oslo"}'),
        ("openai", '<|start|>assistant to=functions.wx<|channel|>commentary<|message|>{"city": "Oslo"}<|call|>'),
    ],
)
def test_a_call_is_read(parser, text):
    reply = read(parser, text)
    assert calls(reply) == THE_CALL
    assert (reply.content, reply.malformed) == ("", 0)


@pytest.mark.parametrize(
    ("parser", "text"),
    [
        ("nemotron_json", f"Look.\n\n<TOOLCALL>[{OSLO}, {OSLO}]</TOOLCALL>"),
        ("llama3_json", f"Look.\n<|python_tag|>{OSLO}; {OSLO}"),
        ("qwen3_coder", f"Look.\n{XML}\n{XML}"),
        ("mistral", f"Look.[TOOL_CALLS][{OSLO}, {OSLO}]"),
        ("mistral", 'Look.[TOOL_CALLS]wx[ARGS]{"city": "Oslo"}[TOOL_CALLS]wx[ARGS]{"city": "Oslo"}'),
        ("openai", f"<|channel|>commentary<|message|>Look.<|end|><|start|>assistant{HARMONY}<|call|>{HARMONY}"),
    ],
)
def test_several_calls_have_ids_of_their_own_and_text_before_them(parser, text):
    reply = read(parser, text)
    assert calls(reply) == THE_CALL * 2
    assert (reply.content, reply.malformed) == ("Look.", 0)
    ids = {call.id for again in (reply, read(parser, text)) for call in again.tool_calls}
    assert len(ids) == 4


@pytest.mark.parametrize(
    ("parser", "text"),
    [
        ("nemotron_json", '<TOOLCALL>[{"name": "wx", "arguments": {"city": "Oslo"'),
        ("nemotron_json", "<TOOLCALL>[]</TOOLCALL>"),
        ("nemotron_json", f"<TOOLCALL>[{OSLO}, 3]</TOOLCALL>"),
        ("nemotron_json", f"<TOOLCALL>[{OSLO}] and more</TOOLCALL>"),
        ("llama3_json", '<|python_tag|>brave_search.call(query="Oslo")'),
        ("llama3_json", '<|python_tag|>{"name": "wx"'),
        ("llama3_json", '{"name": "wx", "parameters": {"city": "Oslo"'),
        ("qwen3_coder", "<tool_call>\n" + OSLO + "\n</tool_call>"),
        ("qwen3_coder", XML.replace("</function>", "")),
        ("qwen3_coder", XML.replace("</parameter>", "")),
        ("qwen3_coder", XML.replace("=wx", "= ")),
        ("qwen3_coder", XML.replace("<parameter", "and <parameter")),
        ("pythonic", "[wx(city='Oslo'"),
        ("pythonic", "[wx('Oslo')]"),
        ("pythonic", "[wx(city=open('/etc/passwd'))]"),
        ("pythonic", "[wx(city=Oslo)]"),
        ("pythonic", "[wx(city='\\N{no such thing}')]"),
        ("pythonic", "[wx(city='\\Uffffffff')]"),
        ("pythonic", "[wx(city={1: 2})]"),
        ("pythonic", "[wx(city=" + "[" * 101 + "]" * 101 + ")]"),
        ("pythonic", "[wx(city='Oslo')] as you asked"),
        ("pythonic", "<|python_start|>print(1)<|python_end|>"),
        ("mistral", "[TOOL_CALLS]wx[ARGS]{"),
        ("mistral", "[TOOL_CALLS]"),
        ("mistral", "[TOOL_CALLS][]"),
        ("mistral", f"[TOOL_CALLS][{OSLO}] and more"),
        ("openai", HARMONY.removesuffix("}")),
        ("openai", HARMONY + " and more<|call|>"),
        ("openai", HARMONY.replace("wx", "")),
        ("openai", "<|channel|>commentary to=functions.wx"),
    ],
)
def test_a_malformed_envelope_stays_text_and_is_counted(parser, text):
    reply = read(parser, text)
    assert (reply.content, reply.tool_calls) == (text, ())
    assert reply.malformed >= 1


@pytest.mark.parametrize(
    ("parser", "bad", "good"),
    [
        ("nemotron_json", "<TOOLCALL>[{]</TOOLCALL>", f"<TOOLCALL>[{OSLO}]</TOOLCALL>"),
        ("llama3_json", "<|python_tag|>{", f"<|python_tag|>{OSLO}"),
        ("qwen3_coder", "<tool_call></tool_call>", XML),
        ("mistral", "[TOOL_CALLS]wx[ARGS]{", f"[TOOL_CALLS][{OSLO}]"),
        ("openai", "<|channel|>commentary to=functions.wx<|message|>{<|call|>", f"<|start|>assistant{HARMONY}"),
    ],
)
def test_f05_a_good_call_after_a_bad_one_is_not_lost(parser, bad, good):
    reply = read(parser, bad + good)
    assert calls(reply) == THE_CALL
    assert (reply.content, reply.malformed) == (bad, 1)


@pytest.mark.parametrize(
    ("parser", "text"),
    [
        ("llama3_json", '{"name": "Ada", "age": 36}'),
        ("llama3_json", '{"answer": [1, 2]}'),
        ("llama3_json", "{not JSON}"),
        ("llama3_json", f"As JSON: {OSLO}"),
        ("pythonic", "[1, 2, 3]"),
        ("pythonic", "[link](http://a.b)"),
        ("pythonic", "It is [wx(city='Oslo')]"),
        ("openai", "just text"),
        ("mistral", "[INST]"),
    ],
)
def test_an_answer_is_no_call(parser, text):
    reply = read(parser, text)
    assert (reply.content, reply.tool_calls, reply.malformed) == (text, (), 0)


@pytest.mark.parametrize(
    ("schema", "written", "value"),
    [
        ({"type": "string"}, "5", "5"),
        ({"type": "string"}, "null", "null"),
        ({"type": "integer"}, "5", 5),
        ({"type": "integer"}, "five", "five"),
        ({"type": "integer"}, "5.5", "5.5"),
        ({"type": "number"}, "5", 5),
        ({"type": "number"}, "1e3", 1000.0),
        ({"type": "number"}, "NaN", "NaN"),
        ({"type": "boolean"}, "True", True),
        ({"type": "boolean"}, "false", False),
        ({"type": "boolean"}, "1", "1"),
        ({"type": "array"}, "[1, 2]", [1, 2]),
        ({"type": "object"}, '{"a": null}', {"a": None}),
        ({"type": "object"}, "{", "{"),
        ({"type": ["string", "null"]}, "null", None),
        ({"type": ["string", "null"]}, "None", None),
        ({"type": ["string", "integer"]}, "5 km", "5 km"),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "5", 5),
        ({"enum": [1, 2]}, "2", 2),
        ({"enum": ["1", "2"]}, "2", "2"),
        ({"const": 3}, "3", 3),
        ({"properties": {}}, "{}", {}),
        ({"items": {}}, "[]", []),
        ({}, "5", "5"),
        ({"type": 7}, "5", "5"),
        ({"type": ["integer", {}], "anyOf": 3}, "5", 5),
        ({"anyOf": {"type": "integer"}}, "5", 5),
        (None, "5", "5"),
    ],
)
def test_qwen3_coder_takes_the_type_of_a_value_from_the_schema(schema, written, value):
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": schema}}}}]
    text = f"<tool_call>\n<function=f>\n<parameter=a>\n{written}\n</parameter>\n</function>\n</tool_call>"
    assert calls(read("qwen3_coder", text, tools)) == [("f", {"a": value})]


@pytest.mark.parametrize("tools", [None, [], [{}], [{"function": None}], [{"function": {"name": "wx"}}]])
def test_qwen3_coder_without_a_schema_reads_strings(tools):
    assert calls(read("qwen3_coder", XML.replace("Oslo", "5"), tools)) == [("wx", {"city": "5"})]


def test_qwen3_coder_keeps_all_of_a_value_but_one_newline_at_each_end():
    value = "\n  def f():\n\treturn '</parameter>'\n\n"
    assert calls(read("qwen3_coder", XML.replace("Oslo", value))) == [("wx", {"city": value})]


def test_qwen3_coder_without_parameters_sends_an_empty_object():
    (call,) = read("qwen3_coder", "<tool_call>\n<function=now>\n</function>\n</tool_call>").tool_calls
    assert call.arguments == "{}"


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("-1.5e3", -1500.0),
        (".5", 0.5),
        ("+2", 2),
        ("true", True),
        ("None", None),
        ("(1, 'a')", [1, "a"]),
        ("(1)", 1),
        ("(1,)", [1]),
        ("(1 , )", [1]),
        ("()", []),
        ("{'a': {'b': []}}", {"a": {"b": []}}),
        (r"'a\'b\"c\\d\n\t\x41\u00e9\101\q'", "a'b\"c\\d\n\tAéA\\q"),
        (r"'\N{BULLET}'", "•"),
        ("'two\nlines'", "two\nlines"),
        ("'[f(a=1)]'", "[f(a=1)]"),
    ],
)
def test_pythonic_literals(written, value):
    assert calls(read("pythonic", f"[my.tool-1(a={written}), g()]")) == [("my.tool-1", {"a": value}), ("g", {})]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [("", "{}"), (r"{\"city\": \"Oslo\"", '{"city": "Oslo"'), ("x", "x")],
)
@pytest.mark.parametrize("parser", ["nemotron_json", "mistral"])
def test_f05_arguments_given_as_a_string_are_passed_as_they_are(parser, arguments, text):
    opener = {"nemotron_json": "<TOOLCALL>", "mistral": "[TOOL_CALLS]"}[parser]
    (call,) = read(parser, f'{opener}[{{"name": "wx", "arguments": "{arguments}"}}]').tool_calls
    assert call.arguments == text


def test_harmony_shows_the_answer_without_its_markers():
    text = "<|channel|>analysis<|message|>why<|end|><|start|>assistant<|channel|>final<|message|>4C.<|return|>"
    reply = reply_reader("openai", reasoning_parser="openai").read(text)
    assert (reply.reasoning, reply.content) == ("why", "4C.")
    cut = reply_reader("openai", reasoning_parser="openai").read(text.removesuffix(".<|return|>"), whole=False)
    assert (cut.reasoning, cut.content) == ("why", "4C")
    assert read("openai", text).content == "<|channel|>analysis<|message|>why<|end|>\n4C."


def test_harmony_reasons_more_than_once_and_calls_only_outside():
    text = f"<|channel|>analysis<|message|>a <|channel|>commentary to=functions.wx<|end|><|start|>assistant{HARMONY}"
    again = f"{text}<|call|><|start|>assistant<|channel|>analysis<|message|>b"
    reply = reply_reader("openai", reasoning_parser="openai").read(again)
    assert (reply.reasoning, calls(reply)) == ("a <|channel|>commentary to=functions.wx\nb", THE_CALL)


def test_harmony_keeps_the_name_of_a_built_in_tool():
    assert calls(read("openai", "<|channel|>analysis to=browser.search code<|message|>{}")) == [("browser.search", {})]
