"""Field case F01 and its kind: a turn is continued by exactly what the template writes after it."""

from __future__ import annotations

import pytest

from gymloop.errors import ConfigError, DataError
from gymloop.tokens import BridgeError, ConversationError, Renderer
from gymloop.tokens.tool_calls import ToolCall
from toys import FAMILIES, OK_ID, text_ids

USER = {"role": "user", "content": "Weather in Oslo?"}
TOOL = {"role": "tool", "content": "4C, rain"}
CALL_TEXT = '\n<tool_call>\n{"name": "wx", "arguments": {"city": "Oslo"}}\n</tool_call>'
CALL_FUNCTION = {"name": "wx", "arguments": '{"city": "Oslo"}'}
CALL = {"role": "assistant", "tool_calls": [{"id": "c", "type": "function", "function": CALL_FUNCTION}]}
TOOLS = [{"type": "function", "function": {"name": "wx", "parameters": {"type": "object", "properties": {}}}}]


@pytest.fixture(scope="module")
def q(toy):
    return Renderer.load(toy("q"))


def test_f01_the_separator_between_turns_is_written(q):
    prompt, sampled = q.render([USER]), (*text_ids(CALL_TEXT), 2)
    assert (len(prompt), len(sampled)) == (35, 72)
    ids = q.extend(prompt + sampled, [TOOL])
    assert len(ids) == 168
    assert ids[:107] == prompt + sampled
    assert ids[107:109] == (26, 1)
    assert all(ids[i + 1] == 26 for i, token in enumerate(ids) if token == 2)
    assert ids == q.render([USER, CALL, TOOL])


def test_f01_a_cut_turn_is_closed_by_the_template(q):
    prompt, sampled = q.render([USER]), tuple(text_ids(CALL_TEXT))
    ids = q.extend(prompt + sampled, [TOOL])
    assert len(ids) == 168
    assert ids[:106] == prompt + sampled
    assert ids[106:109] == (2, 26, 1)


def test_sampled_ids_are_never_tokenised_again(q):
    prompt = q.render([USER])
    sampled = (*text_ids("o"), *text_ids("k"), 2)  # the tokenizer itself would write one id
    assert q.render([USER, {"role": "assistant", "content": "ok"}], add_generation_prompt=False)[-3] == OK_ID
    ids = q.extend(prompt + sampled, [USER])
    assert ids[: len(prompt) + 3] == prompt + sampled


def test_an_empty_turn_can_be_continued(q):
    prompt = q.render([USER])
    assert q.extend((*prompt, 2), [TOOL]) == q.render([USER, {"role": "assistant", "content": ""}, TOOL])
    assert q.extend(prompt, [TOOL]) == q.render([USER, {"role": "assistant", "content": ""}, TOOL])


@pytest.mark.parametrize("family", ["q", "l", "g", "m"])
@pytest.mark.parametrize("tools", [None, TOOLS])
def test_extending_equals_rendering(toy, family, tools):
    renderer = Renderer.load(toy(family))
    close = {"q": 2, "l": 5, "g": 6, "m": 2}[family]
    prompt = renderer.render([USER], tools)
    said = {"role": "assistant", "content": "It rains."}
    ids = renderer.extend((*prompt, *text_ids("It rains."), close), [USER], tools)
    assert ids == renderer.render([USER, said, USER], tools)


@pytest.mark.parametrize(("family", "end", "close"), [("q", 0, 2), ("l", 4, 5), ("l", 1, 5), ("n", 2, 11), ("g", 1, 6)])
def test_whichever_end_token_was_sampled_ends_the_turn_alone(toy, family, end, close):
    renderer = Renderer.load(toy(family))
    assert {end, close} <= set(renderer.end_token_ids)
    prompt = renderer.render([USER])
    other = renderer.extend((*prompt, *text_ids("x"), end), [USER])
    usual = renderer.extend((*prompt, *text_ids("x"), close), [USER])
    at = len(prompt) + 1
    assert (other[at], usual[at]) == (end, close)
    assert other[at + 1 :] == usual[at + 1 :]


def test_a_template_that_refuses_the_roles_cannot_be_extended(toy):
    renderer = Renderer.load(toy("g"))
    with pytest.raises(BridgeError, match="roles must alternate"):
        renderer.extend(renderer.render([USER]), [TOOL])


def test_a_template_that_rewrites_earlier_turns_cannot_be_extended(toy):
    template = "{% for m in messages %}{{ messages | length }}{{ m.content }}<|im_end|>{% endfor %}"
    renderer = Renderer.load(toy("q"), template)
    with pytest.raises(BridgeError, match="differently"):
        renderer.extend(renderer.render([USER]), [USER])


def test_a_template_that_drops_what_was_said_cannot_be_extended(toy):
    template = "{% for m in messages if m.role == 'user' %}{{ m.content }}<|im_end|>{% endfor %}"
    renderer = Renderer.load(toy("q"), template)
    with pytest.raises(BridgeError, match="0 times"):
        renderer.extend(renderer.render([USER]), [USER])


def test_a_template_without_end_tokens_keeps_the_users_words(toy):
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    renderer = Renderer.load(toy("q"), template)
    ids = renderer.extend((*renderer.render([USER]), *text_ids("4C"), 2), [USER])
    assert renderer.decode(ids) == "user: Weather in Oslo?\n4C<|im_end|>\nuser: Weather in Oslo?\n"


def test_a_demonstration_trains_exactly_what_would_be_sampled(q):
    ids, sampled = q.demonstration([USER, CALL, TOOL, {"role": "assistant", "content": "4C."}])
    first = (*text_ids(CALL_TEXT), 2)
    assert tuple(ids[i] for i in sampled) == (*first, *text_ids("4C."), 2)
    assert ids[: 35 + 72] == q.render([USER]) + first
    assert ids[: 168 + 4] == (*q.extend(ids[:107], [TOOL]), *text_ids("4C."), 2)
    assert sampled[0] == 35
    assert sampled[72] == 168


def test_a_demonstration_keeps_reasoning_that_the_template_drops_later(q):
    thought = {"role": "assistant", "content": "4C.", "reasoning_content": "search it"}
    ids, _ = q.demonstration([USER, thought, USER, {"role": "assistant", "content": "19C."}])
    assert "search it" in q.decode(ids)
    assert "search it" not in q.decode(q.render([USER, thought, USER]))


def test_a_demonstration_needs_a_template_that_begins_turns_as_it_prompts(toy):
    with pytest.raises(DataError, match="generation prompt"):
        Renderer.load(toy("n")).demonstration([USER, {"role": "assistant", "content": "4C."}])
    with pytest.raises(DataError, match="at least one assistant"):
        Renderer.load(toy("q")).demonstration([USER])


def test_a_mapping_template_gets_arguments_as_a_mapping(toy):
    text = Renderer.load(toy("m")).decode(Renderer.load(toy("m")).render([USER, CALL, TOOL]))
    assert "<function=wx>\n<parameter=city>Oslo</parameter>" in text


def test_bad_arguments_in_history_are_one_sentence_not_a_crash(toy, q):
    bad = {"role": "assistant", "tool_calls": [{"function": {"name": "wx", "arguments": '{"city": '}}]}
    assert '"arguments": {"city": }' in q.decode(q.render([USER, bad, TOOL]))
    with pytest.raises(ConversationError, match="cannot render"):
        Renderer.load(toy("m")).render([USER, bad, TOOL])


def test_what_the_template_writes_the_parser_reads(q):
    ids, sampled = q.demonstration([USER, CALL])
    (call,) = q.reader.read(q.said([ids[i] for i in sampled])).tool_calls
    assert isinstance(call, ToolCall)
    assert (call.name, call.arguments) == ("wx", '{"city": "Oslo"}')


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        ([], "empty"),
        (["hi"], r"messages\[0\] is str"),
        ([{"role": "robot", "content": "x"}], "'robot'"),
        ([{"role": "user", "content": 3}], r"messages\[0\].content is int"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "image_url"),
        ([USER, {"role": "assistant", "tool_calls": [{"function": {}}]}], r"tool_calls\[0\]"),
    ],
)
def test_a_message_of_wrong_shape_is_named(q, messages, said):
    with pytest.raises(ConversationError, match=said):
        q.render(messages)


def test_what_is_missing_is_said_before_anything_runs(toy, tmp_path):
    with pytest.raises(ConfigError, match="no chat template"):
        Renderer.load(toy("bare"))
    with pytest.raises(ConfigError, match=r"nowhere\.jinja does not exist"):
        Renderer.load(toy("q"), "nowhere.jinja")
    with pytest.raises(ConfigError, match="does not exist"):
        Renderer.load(tmp_path / "none")
    with pytest.raises(ConfigError, match="no tokenizer"):
        Renderer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{", encoding="utf-8")
    with pytest.raises(ConfigError, match="no tokenizer"):
        Renderer.load(tmp_path)


def test_a_template_file_and_its_variables_are_used(toy, tmp_path):
    path = tmp_path / "t.jinja"
    path.write_text("{{ greeting }}{{ messages[0].content }}<|im_end|>", encoding="utf-8")
    renderer = Renderer.load(toy("q"), str(path), {"greeting": "Hi "})
    assert renderer.decode(renderer.render([USER])) == "Hi Weather in Oslo?<|im_end|>"


def test_end_tokens_come_from_config_tokenizer_and_template(toy, tmp_path):
    assert Renderer.load(toy("q")).end_token_ids == (2, 0)
    assert Renderer.load(toy("l")).end_token_ids == (1, 4, 5)
    # The generation config is silent about <|eot_id|>, yet the template closes turns with it.
    assert Renderer.load(toy("l"), end_token_ids=()).end_token_ids == (1, 5)


# F01, its whole kind: every family, every end, a turn whole or cut


@pytest.mark.parametrize("family", [name for name, family in FAMILIES.items() if family.template])
@pytest.mark.parametrize("cut", [False, True])
def test_f01_what_stands_between_turns_is_the_templates(toy, family, cut):
    renderer = Renderer.load(toy(family))
    said = {"role": "assistant", "content": "It rains."}
    whole = renderer.render([USER, said, USER])
    before = renderer.render([USER, said], add_generation_prompt=False)
    at = max(i for i, token in enumerate(before) if token in FAMILIES[family].end_ids)
    text = renderer._tokenizer.encode("It rains.", add_special_tokens=False)
    prefix = (*renderer.render([USER]), *text, *(() if cut else (whole[at],)))
    ids = renderer.extend(prefix, [USER])
    assert ids[: len(prefix)] == prefix
    # The end token is sampled or the template's, once; behind it stands what a full rendering writes there.
    assert ids[len(renderer.render([USER])) + len(text) :] == whole[at:]


def test_f01_parallel_results_follow_in_the_order_they_were_sent(q):
    two = {"role": "assistant", "tool_calls": [*CALL["tool_calls"], {"id": "d", "function": CALL_FUNCTION}]}
    prompt = q.render([USER])
    exact = (*prompt, *text_ids(CALL_TEXT * 2), 2)
    other = TOOL | {"content": "19C"}
    for results in ([TOOL, other], [other, TOOL]):
        assert q.extend(exact, results) == q.render([USER, two, *results])


def test_a_tool_result_that_needs_a_call_before_it_is_bridged(toy):
    s = Renderer.load(toy("s"))
    with pytest.raises(ConversationError, match="must answer a call"):
        s.render([USER, {"role": "assistant", "content": "x"}, TOOL])
    results = [TOOL | {"tool_call_id": "a"}, TOOL | {"content": "19C"}]
    exact = (*s.render([USER]), *s._tokenizer.encode("[TOOL_CALLS] wx {}", add_special_tokens=False), 2)
    assert s.decode(s.extend(exact, results)[len(exact) :]) == (
        "[TOOL_RESULTS] 4C, rain [/TOOL_RESULTS][TOOL_RESULTS] 19C [/TOOL_RESULTS]"
    )
    assert s.decode(s.extend(exact[:-1], results)[len(exact) - 1 :]).startswith("</s>[TOOL_RESULTS]")


@pytest.mark.parametrize("text", ["Zürich 東京", "\U0001f469\u200d\U0001f52c", "e\u0301", "a\u2028b", "\x00\x7f"])
@pytest.mark.parametrize("family", ["q", "s"])
def test_unicode_and_byte_fallback_come_back_as_they_went_in(toy, family, text):
    renderer = Renderer.load(toy(family))
    ids = renderer.render([{"role": "user", "content": text}])
    assert text in renderer.decode(ids)
    sampled = renderer._tokenizer.encode(text, add_special_tokens=False)
    assert renderer.said((*sampled, renderer.end_token_ids[0])) == text


# Provenance


def labelled(renderer, messages, tools=None):
    """The text of each run of a rendered prompt."""
    ids = renderer.render(messages, tools)
    result, start = [], 0
    for label, count in renderer.provenance(ids, messages, tools):
        result.append((label, renderer.decode(ids[start : start + count])))
        start += count
    assert start == len(ids)
    return result


def texts(runs, label="environment"):
    return [text for name, text in runs if name == label]


def test_what_the_template_writes_and_what_messages_say_are_told_apart(q):
    assert labelled(q, [USER, CALL, TOOL]) == [
        ("template", "<|im_start|>user\n"),
        ("environment", "Weather in Oslo?"),
        ("template", '<|im_end|>\n<|im_start|>assistant\n\n<tool_call>\n{"name": "'),
        ("environment", "wx"),
        ("template", '", "arguments": {"city": "'),
        ("environment", "Oslo"),
        ("template", '"}}\n</tool_call><|im_end|>\n<|im_start|>user\n<tool_response>\n'),
        ("environment", "4C, rain"),
        ("template", "\n</tool_response><|im_end|>\n<|im_start|>assistant\n"),
    ]


@pytest.mark.parametrize("family", ["q", "l", "n", "g", "m", "s"])
def test_the_same_word_in_template_and_message_is_told_apart(toy, family):
    runs = labelled(Renderer.load(toy(family)), [{"role": "user", "content": "user"}])
    assert texts(runs) == ["user"]


def test_control_text_and_private_characters_in_a_message_are_environment(q):
    text = "\ue000<|im_end|>\ue001 <|im_start|>"
    assert texts(labelled(q, [{"role": "user", "content": text}])) == [text]


def test_white_space_that_a_template_trims_is_no_token(toy):
    runs = labelled(Renderer.load(toy("g")), [{"role": "user", "content": "  two words \n"}])
    assert texts(runs) == ["two words"]


def test_text_that_a_template_cuts_is_found(q):
    said = {"role": "assistant", "content": "<think>\nsearch it\n</think>\n\n4C."}
    assert texts(labelled(q, [USER, said, USER])) == ["Weather in Oslo?", "4C.", "Weather in Oslo?"]


def test_descriptions_of_tools_are_environment_and_their_syntax_is_not(q):
    tools = [{"type": "function", "function": {"name": "wx", "description": "Tell <|im_end|> it", "parameters": {}}}]
    assert texts(labelled(q, [USER], tools)) == ["Tell <|im_end|> it", "Weather in Oslo?"]


def test_a_template_that_reads_its_messages_closely_gives_no_provenance_rather_than_a_wrong_one(toy):
    template = "{% for m in messages %}{{ m.content | length }}{{ m.content }}<|im_end|>{% endfor %}"
    renderer = Renderer.load(toy("q"), template)
    assert renderer.provenance(renderer.render([USER]), [USER]) is None


def test_bytes_of_one_character_share_its_provenance(toy):
    assert texts(labelled(Renderer.load(toy("s")), [{"role": "user", "content": "ü"}])) == ["ü"]
