"""Which turns are flagged: every part of every text, one turn at a time, and nothing where the list is empty."""

import pytest

from gymloop.rollouts.flags import Flags, Patterns, flag_turns, turn_flags

CALL, THINKING, BOTH, NONE = Flags(True, False), Flags(False, True), Flags(True, True), Flags()


def message(*parts, role="assistant", **more):
    return {
        "type": "message",
        "role": role,
        "content": [{"type": "output_text", "text": part} for part in parts],
    } | more


def reasoning(*parts, key="summary", **more):
    return {"type": "reasoning", key: [{"type": "summary_text", "text": part} for part in parts]} | more


def called(**more):
    return {"type": "function_call", "call_id": "c", "name": "wx", "arguments": '{"text": "<think><tool_call>"}'} | more


RESULT = {"type": "function_call_output", "call_id": "c", "output": "<tool_call> <think>"}
IDS = {"prompt_token_ids": [1], "generation_token_ids": [2], "generation_log_probs": [-1.0]}


@pytest.mark.parametrize(
    ("items", "flags"),
    [
        ([message("fine")], NONE),
        ([message("a <tool_call> b")], CALL),
        ([message("a </tool_call>")], CALL),
        ([message("<function_call>")], CALL),
        ([message("fine", "also fine", "</function_call>")], CALL),  # not only the first part
        ([message("well </think> then")], THINKING),
        ([message("fine", "<think>")], THINKING),
        ([message("<think>", "<tool_call>")], BOTH),
        ([{"role": "assistant", "content": "<tool_call>"}], CALL),  # a content that is text, an item without a type
        ([{"type": "message", "role": "assistant", "content": [{"type": "refusal", "refusal": "<think>"}]}], THINKING),
        ([message(), {"type": "message", "role": "assistant", "content": None}], NONE),
        ([called()], NONE),  # arguments are the tool's business
        ([message("<tool_call>{"), called()], CALL),  # one call was read, another was not
        ([reasoning("<think> once")], NONE),
        ([reasoning("<think> and <think>")], THINKING),
        ([reasoning("fine", "a </think> b </think>")], THINKING),
        ([reasoning("</think>", "</think>")], NONE),  # each part is a text of its own
        ([reasoning("<think> <think>"), message("fine")], THINKING),
        ([reasoning("a <tool_call>")], CALL),  # the turn ended inside its thinking
        ([reasoning("fine", "a <tool_call>", key="content")], CALL),
        ([reasoning("I could write <tool_call>"), called()], NONE),
        ([reasoning("I could write <tool_call>"), message("fine")], NONE),
    ],
)
def test_every_part_of_every_text_is_looked_at(items, flags):
    assert turn_flags(items, 0, Patterns()) == flags


def test_a_call_that_the_parser_could_not_read_is_flagged_whatever_its_text():
    assert turn_flags([message('[TOOL_CALLS] wx {"city"')], 1, Patterns()) == CALL


def test_an_empty_list_disables_its_flag_and_leaves_the_other():
    items = [message("<tool_call> <think>")]
    assert turn_flags(items, 2, Patterns(invalid_tool_call=())) == THINKING
    assert turn_flags(items, 0, Patterns(thinking=())) == CALL
    assert turn_flags([reasoning("<think><think><tool_call>")], 1, Patterns((), ())) == NONE


def test_patterns_are_texts_and_not_expressions():
    patterns = Patterns(("[TOOL_CALLS]",), ("<|t|>",))
    assert turn_flags([message("T O <tool_call> <think>")], 0, patterns) == NONE
    assert turn_flags([message("[TOOL_CALLS] <|t|>")], 0, patterns) == BOTH


def test_a_flag_belongs_to_its_turn_and_to_no_given_item():
    output = [
        message("<tool_call>", role="user"),
        reasoning("a"),
        message("<tool_call>"),
        called(**IDS),
        RESULT,
        message("<think>", **IDS),
        message("<tool_call> <think>", role="user"),
        message("fine", **IDS),
        message("<think>", **IDS),  # nothing given in between: the bundle ends a turn
    ]
    assert flag_turns(output, [0] * 4, Patterns()) == (CALL, THINKING, NONE, THINKING)


def test_turns_without_token_ids_end_where_something_is_given():
    output = [message("<tool_call>"), called(), RESULT, message("fine"), message("<think>", role="user"), called()]
    assert flag_turns(output, [0, 0, 1], Patterns()) == (CALL, NONE, CALL)


def test_a_turn_that_found_the_context_full_has_no_item_and_no_flag():
    assert flag_turns([message("<think>", **IDS)], [0, 0], Patterns()) == (THINKING, NONE)
