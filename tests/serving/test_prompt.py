"""A10: every way in which a conversation can continue has one outcome: the exact ids, a new segment, or a refusal."""

from __future__ import annotations

import logging

import pytest

from gymloop.errors import DataError
from gymloop.serving.prompt import build_prompt
from gymloop.serving.refusal import ApiError
from gymloop.tokens import Renderer
from gymloop.tokens.reply import reply_reader
from toys import OK_ID, text_ids

USER = {"role": "user", "content": "Weather in Oslo?"}
AGAIN = {"role": "user", "content": "And in Lima?"}
TOOL = {"role": "tool", "tool_call_id": "c", "content": "4C, rain"}
CALL_TEXT = '\n<tool_call>\n{"name": "wx", "arguments": {"city": "Oslo"}}\n</tool_call>'
CALLS = [{"id": "c", "type": "function", "function": {"name": "wx", "arguments": '{"city":"Oslo"}'}}]
CLOSE = {"q": 2, "l": 5, "n": 11, "g": 6, "m": 2}
FAMILIES = list(CLOSE)


@pytest.fixture(scope="module")
def q(toy):
    return Renderer.load(toy("q"))


def turn(renderer, sampled, messages=(USER,), **fields):
    """An assistant message that carries its ids, and those ids."""
    prompt = renderer.render(messages)
    bundle = {"prompt_token_ids": list(prompt), "generation_token_ids": list(sampled)}
    return {"role": "assistant", **fields, **bundle}, (*prompt, *sampled)


@pytest.mark.parametrize("family", FAMILIES)
def test_a10_echoed_ids_continue_exactly(toy, family):
    renderer = Renderer.load(toy(family))
    message, exact = turn(renderer, (*text_ids("It rains."), CLOSE[family]), content="It rains.")
    prompt = build_prompt(renderer, [USER, message, AGAIN], [])
    assert prompt.new_segment is None
    assert prompt.ids[: len(exact)] == exact
    assert prompt.ids == build_prompt(renderer, [AGAIN], [], exact).ids


@pytest.mark.parametrize("family", FAMILIES)
def test_a9_ids_that_the_tokenizer_would_write_otherwise_are_kept(toy, family):
    renderer = Renderer.load(toy(family))
    message, exact = turn(renderer, (*text_ids("ok"), CLOSE[family]), content="ok")
    prompt = build_prompt(renderer, [USER, message, AGAIN], [])
    assert prompt.ids[: len(exact)] == exact
    assert OK_ID not in prompt.ids
    assert OK_ID in renderer.render([USER, {"role": "assistant", "content": "ok"}, AGAIN])  # the trap


def test_a10_reasoning_is_kept_with_ids_and_dropped_in_a_new_segment_without(q):
    said = "<think>\nsearch it\n</think>\n\n4C."
    message, exact = turn(q, (*text_ids(said), 2), content=said)
    assert (len(exact), len(build_prompt(q, [USER, message, AGAIN], []).ids)) == (67, 99)
    split = message | {"content": "4C.", "reasoning_content": "search it"}
    assert build_prompt(q, [USER, split, AGAIN], []).ids[:67] == exact
    dropped = build_prompt(q, [USER, {"role": "assistant", "content": said}, AGAIN], [])
    assert len(dropped.ids) == 71
    assert dropped.new_segment.reason == "messages[1], an assistant message, carries no token ids"
    assert dropped.new_segment.index is None


def test_a10_reasoning_that_the_prompt_opened_is_read(toy):
    renderer = Renderer.load(toy("n"), reader=reply_reader(reasoning_parser="think"))
    assert renderer.opens_reasoning(renderer.render([USER]))
    sampled = (*text_ids("search it\n</think>\n\n4C."), 11)
    message, exact = turn(renderer, sampled, content="4C.", reasoning_content="search it")
    for shown in (message, message | {"reasoning_content": None}):
        assert build_prompt(renderer, [USER, shown, AGAIN], []).ids[: len(exact)] == exact
    changed = build_prompt(renderer, [USER, message | {"reasoning_content": "guess"}, AGAIN], [])
    assert "messages[1] was edited" in changed.new_segment.reason


def test_a_user_who_writes_think_opens_no_reasoning(toy):
    renderer = Renderer.load(toy("q"), reader=reply_reader(reasoning_parser="think"))
    assert not renderer.opens_reasoning(renderer.render([{"role": "user", "content": "<think>"}]))


@pytest.mark.parametrize(("end", "extra"), [((), 2), ((0,), 0), ((2,), 2)])
def test_a10_cut_turns_and_several_end_tokens_end_once(q, end, extra):
    message, exact = turn(q, (*text_ids("4C."), *end), content="4C.")
    prompt = build_prompt(q, [USER, message, AGAIN], [])
    assert prompt.new_segment is None
    at = len(q.render([USER])) + 3
    assert prompt.ids[:at] == exact[:at]
    assert prompt.ids[at : at + 3] == ((end or (extra,))[0], 26, 1)


@pytest.mark.parametrize("sampled", [(), (2,)])
def test_a10_an_empty_turn_continues(q, sampled):
    message, exact = turn(q, sampled, content="")
    prompt = build_prompt(q, [USER, message, AGAIN], [])
    assert prompt.new_segment is None
    assert prompt.ids[: len(exact)] == exact


def test_a10_a_cut_call_that_was_shown_as_text_continues(q):
    message, exact = turn(q, text_ids(CALL_TEXT), content=CALL_TEXT)
    assert build_prompt(q, [USER, message, TOOL], []).ids[: len(exact)] == exact


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a10_parallel_calls_may_be_answered_in_any_order(q, order):
    text = CALL_TEXT + CALL_TEXT.replace("Oslo", "Lima")
    calls = [*CALLS, {"id": "d", "function": {"name": "wx", "arguments": '{"city": "Lima"}'}}]
    message, exact = turn(q, (*text_ids(text), 2), content=None, tool_calls=calls)
    results = [TOOL, TOOL | {"tool_call_id": "d", "content": "19C"}]
    prompt = build_prompt(q, [USER, message, *(results[i] for i in order)], [])
    assert prompt.new_segment is None
    assert prompt.ids[: len(exact)] == exact
    text = q.decode(prompt.ids[len(exact) :])
    assert (text.index("4C") < text.index("19C")) == (order == (0, 1))


def test_a10_a_message_without_ids_says_where_it_departs(q):
    message, exact = turn(q, (*text_ids("ok"), 2), content="ok")
    injected = {"role": "assistant", "content": "As I said."}
    prompt = build_prompt(q, [USER, message, AGAIN, injected, AGAIN], [])
    found = prompt.new_segment
    assert "messages[3], an assistant message, carries no token ids" in found.reason
    assert found.index == len(exact) - 3  # where "o", "k" became one token
    assert found.carried.ids[found.index - found.carried.start] == text_ids("o")[0]
    assert found.rendered.ids[found.index - found.rendered.start] == OK_ID
    assert "ok" in found.carried.text
    assert prompt.ids == q.render([USER, message, AGAIN, injected, AGAIN])


@pytest.mark.parametrize(
    ("edit", "reason"),
    [
        (lambda m: [USER, m | {"content": "It snows."}, AGAIN], r"messages[1] was edited"),
        (lambda m: [AGAIN, m, AGAIN], "the history before messages[1] was edited: at token"),
        (lambda m: [{"role": "system", "content": "x"}, USER, m, AGAIN], "the history before messages[2] was edited"),
        (lambda m: [m, AGAIN], "messages[0] is an assistant message"),
    ],
)
def test_a10_an_edited_history_is_a_new_segment_that_says_where(q, edit, reason, caplog):
    message, _ = turn(q, (*text_ids("It rains."), 2), content="It rains.")
    messages = edit(message)
    with caplog.at_level(logging.DEBUG, "gymloop.serving.prompt"):
        prompt = build_prompt(q, messages, [])
    found = prompt.new_segment
    assert reason in found.reason
    assert prompt.ids == q.render(messages)
    (line,) = [record.getMessage() for record in caplog.records]
    assert reason in line
    if found.index is not None:
        assert f"first difference at token {found.index}" in line
        assert str(list(found.carried.ids)) in line
        assert repr(found.rendered.text) in line


def test_a_template_that_cannot_be_bridged_continues_where_its_rendering_does(toy):
    # It refuses the base conversation, so there is no bridge; its whole rendering still begins with the exact ids.
    template = "{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}"
    refusing = template + "{% if messages[0].content == 'x' %}{{ raise_exception('no x') }}{% endif %}"
    renderer = Renderer.load(toy("q"), refusing)
    message, exact = turn(renderer, (*text_ids("4C."), 2), content="4C.")
    for prompt in (
        build_prompt(renderer, [USER, message, AGAIN], []),
        build_prompt(renderer, [USER, {"role": "assistant", "content": "4C."}, AGAIN], [], exact),
    ):
        assert prompt.new_segment is None
        assert prompt.ids[: len(exact)] == exact
    message, exact = turn(renderer, (*text_ids("ok"), 2), content="ok")
    prompt = build_prompt(renderer, [USER, {"role": "assistant", "content": "ok"}, AGAIN], [], exact)
    assert "no x" in prompt.new_segment.reason
    assert prompt.new_segment.index == len(exact) - 3


def test_strict_roles_are_a_typed_refusal(toy):
    g = Renderer.load(toy("g"))
    message, exact = turn(g, (*text_ids("4C."), 6), content="4C.")
    with pytest.raises(DataError, match="roles must alternate"):
        build_prompt(g, [USER, message, TOOL], [])
    with pytest.raises(ApiError, match="cannot be continued and no history was sent") as refused:
        build_prompt(g, [TOOL], [], exact)
    assert refused.value.code == "cannot_continue"
    assert build_prompt(g, [USER, message, AGAIN], []).new_segment is None


def test_bytes_of_half_a_character_are_carried(toy):
    s = Renderer.load(toy("s"))
    half = 16 + "ü".encode()[0]
    prompt = s.render([USER])
    text = s.said((half,))
    assert text == "\ufffd"
    message = {"role": "assistant", "content": text, "prompt_token_ids": list(prompt), "generation_token_ids": [half]}
    ids = build_prompt(s, [USER, message, AGAIN], []).ids
    assert ids[: len(prompt) + 2] == (*prompt, half, 2)


def test_a_turn_that_a_stop_string_ended_continues_by_its_ids_alone(serve):
    served = serve(profiles=None)
    served.say("one STOP two", 2)
    message = served.chat([USER], stop="STOP")["choices"][0]["message"]
    exact = (*message["prompt_token_ids"], *message["generation_token_ids"])
    assert message["content"] == "one "
    again = {"role": "user", "content": "And?"}
    served.say("4C.", 2)
    assert served.chat([USER, message, again])["choices"][0]["new_segment"] is True
    served.say("4C.", 2)
    bare = {"role": "assistant", "content": "one "}
    reply = served.chat([USER, bare, again], required_prefix_token_ids=exact)
    assert reply["choices"][0]["new_segment"] is False
    assert served.engine.prompts[-1][: len(exact)] == exact


def test_provenance_is_told_only_when_asked(q):
    message, exact = turn(q, (*text_ids(CALL_TEXT), 2), content=None, tool_calls=CALLS)
    assert build_prompt(q, [USER, message, TOOL], []).provenance is None
    first = build_prompt(q, [USER], [], provenance=True)
    assert first.provenance == (("template", 6), ("environment", 16), ("template", 13))
    prompt = build_prompt(q, [USER, message, TOOL], [], provenance=True)
    assert prompt.ids == build_prompt(q, [USER, message, TOOL], []).ids
    assert prompt.provenance == (("template", 23), ("environment", 8), ("template", 30))
    assert sum(count for _, count in prompt.provenance) == len(prompt.ids) - len(exact)
