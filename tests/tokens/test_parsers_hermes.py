"""Whatever a model writes is read without raising, and what is no call stays text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gymloop.tokens.reply import reply_reader

parse = reply_reader("hermes").read

OSLO = '{"name": "wx", "arguments": {"city": "Oslo"}}'


def wrap(envelope: str) -> str:
    return f"<tool_call>\n{envelope}\n</tool_call>"


def calls_of(text: str) -> list[tuple[str, str]]:
    return [(call.name, call.arguments) for call in parse(text).tool_calls]


def test_plain_text_is_content_exactly():
    reply = parse("\n 4C, rain \n")
    assert (reply.content, reply.tool_calls, reply.malformed) == ("\n 4C, rain \n", (), 0)


def test_a_call_is_taken_out_of_the_content():
    reply = parse(f"Checking.\n{wrap(OSLO)}\nWait.")
    assert reply.content == "Checking.\nWait."
    assert [(call.name, call.arguments) for call in reply.tool_calls] == [("wx", '{"city": "Oslo"}')]


def test_parallel_calls_keep_their_order_and_have_ids_of_their_own():
    text = wrap(OSLO) + wrap(OSLO.replace("Oslo", "Lima"))
    assert calls_of(text) == [("wx", '{"city": "Oslo"}'), ("wx", '{"city": "Lima"}')]
    ids = {call.id for reply in (parse(text), parse(text)) for call in reply.tool_calls}
    assert len(ids) == 4


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ('{"city": "Oslo"}', '{"city": "Oslo"}'),
        ('""', "{}"),
        (r'"{\"city\": \"Oslo\""', '{"city": "Oslo"'),
        ('["Oslo"]', '["Oslo"]'),
        ("42", "42"),
        ("null", "null"),
    ],
)
def test_arguments_of_any_type_stay_json_text(arguments, text):
    assert calls_of(wrap(f'{{"name": "wx", "arguments": {arguments}}}')) == [("wx", text)]


def test_absent_arguments_are_an_empty_object():
    assert calls_of(wrap('{"name": "now"}')) == [("now", "{}")]


@pytest.mark.parametrize(
    "envelope",
    [
        '{"name": "wx", "arguments": {"city": "Oslo"',
        OSLO + "}",
        "[]",
        '"wx"',
        "",
        '{"arguments": {}}',
        '{"name": 3, "arguments": {}}',
        '{"name": " ", "arguments": {}}',
        "[" * 100_000,
        '{"name": "wx", "arguments": ' + "9" * 5000 + "}",
    ],
)
def test_a_malformed_envelope_stays_text_and_is_counted(envelope):
    text = wrap(envelope)
    reply = parse(text)
    assert (reply.content, reply.tool_calls, reply.malformed) == (text, (), 1)


def test_a_good_call_after_a_bad_one_is_not_lost():
    reply = parse(wrap('{"name": "wx", "arguments": {"city": "Oslo"') + wrap(OSLO))
    assert len(reply.tool_calls) == 1
    assert reply.malformed == 1
    assert '"Oslo"\n</tool_call>' in reply.content


def test_a_whole_envelope_needs_no_closing_tag():
    assert calls_of(f"<tool_call>{OSLO}") == [("wx", '{"city": "Oslo"}')]


def test_an_argument_may_hold_the_closing_tag():
    assert calls_of(wrap('{"name": "say", "arguments": {"text": "</tool_call>"}}')) == [
        ("say", '{"text": "</tool_call>"}')
    ]


def test_half_a_surrogate_pair_becomes_text_that_can_be_stored():
    reply = parse(wrap(r'{"name": "say\ud800", "arguments": {"text": "\ud800"}}'))
    for call in reply.tool_calls:
        assert (call.name.encode(), call.arguments.encode()) == (b"say?", b'{"text": "?"}')


@given(st.lists(st.sampled_from(["<tool_call>", "</tool_call>", OSLO, "{", "}", '"', "\\", "\n", "x", "null"])))
def test_no_text_raises_and_none_is_lost_without_a_call(pieces):
    text = "".join(pieces)
    reply = parse(text)
    assert reply.tool_calls or reply.content == text
