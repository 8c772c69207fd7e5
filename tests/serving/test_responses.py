"""The Responses route: one model call is one run of items, and the items sent back unchanged are the same turn."""

from __future__ import annotations

import pytest

from gymloop.gym import items
from gymloop.serving.response_items import chat_messages, output_items
from gymloop.tokens.conversation import TOKEN_FIELDS

from .scripted import CALL_TEXT, USER, Served, read_events

ASK = {"type": "message", "role": "user", "content": "Compare Oslo and Lima."}
OSLO = {"type": "function_call", "call_id": "c1", "name": "wx", "arguments": '{"city": "Oslo"}'}
LIMA = {"type": "function_call", "call_id": "c2", "name": "wx", "arguments": '{"city": "Lima"}'}
HISTORY = [
    ASK,
    {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "two queries"}]},
    {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Checking both."}]},
    OSLO,
    LIMA,
    {"type": "function_call_output", "call_id": "c1", "output": "4C"},
    {"type": "function_call_output", "call_id": "c2", "output": "19C"},
]
TURN = "<think>\ntwo queries\n</think>\n\nChecking both." + CALL_TEXT + CALL_TEXT.replace("Oslo", "Lima")


@pytest.fixture
def served(serve, renderer_of) -> Served:
    return serve(renderer=renderer_of("q", "think"))


def respond(served: Served, **body) -> dict:
    return served.ok("/v1/responses", **body)


def test_f04_items_of_one_turn_are_one_assistant_message(served, renderer_of):
    served.say("Done.", 2)
    respond(served, input=HISTORY)
    (prompt,) = served.engine.prompts
    text = renderer_of("q").decode(prompt)
    assert (text.count("<|im_start|>assistant"), text.count("<|im_end|>"), len(prompt)) == (2, 4, 327)


def test_f04_one_turn_is_reasoning_message_calls_with_its_tokens_on_the_last(served):
    served.say(TURN, 2)
    reply = respond(served, input=[ASK])
    items = reply["output"]
    assert [item["type"] for item in items] == ["reasoning", "message", "function_call", "function_call"]
    assert items[0]["content"][0]["text"] == "two queries"
    assert items[1]["content"][0]["text"] == "Checking both."
    assert [item["arguments"] for item in items[2:]] == ['{"city": "Oslo"}', '{"city": "Lima"}']
    assert len({item["call_id"] for item in items[2:]}) == 2
    assert len({item["id"] for item in items}) == 4
    carried = [[name for name in TOKEN_FIELDS if name in item] for item in items]
    assert carried == [[], [], [], list(TOKEN_FIELDS)]
    assert items[3]["prompt_token_ids"] == list(served.engine.prompts[0])
    assert len(items[3]["generation_token_ids"]) == len(items[3]["generation_log_probs"]) == len(TURN) + 1
    assert (reply["status"], reply["incomplete_details"]) == ("completed", None)
    assert reply["usage"]["output_tokens"] == len(TURN) + 1


def test_f04_items_sent_back_unchanged_carry_the_exact_ids(served):
    served.say(TURN, 2)
    items = respond(served, input=[ASK])["output"]
    exact = (*items[-1]["prompt_token_ids"], *items[-1]["generation_token_ids"])
    outputs = [
        {"type": "function_call_output", "call_id": item["call_id"], "output": output}
        for item, output in zip(items[2:], ("4C", "19C"), strict=True)
    ]
    served.say("Lima.", 2)
    reply = respond(served, input=[ASK, *items, *outputs])
    assert served.engine.prompts[1][: len(exact)] == exact
    assert reply["new_segment"] is False

    served.say("Sure.", 2)
    again = respond(served, input=[ASK, *items, *outputs, *reply["output"], {"role": "user", "content": "Really?"}])
    whole = (*served.engine.prompts[1], *reply["output"][-1]["generation_token_ids"])
    assert served.engine.prompts[2][: len(whole)] == whole
    assert again["new_segment"] is False


@pytest.mark.parametrize("text", ["Hi.", TURN, CALL_TEXT, "<think>\nhm\n</think>\n\n", ""])
def test_f04_chat_to_items_and_back_is_the_same_message(served, text):
    served.say(text, 2)
    message = served.chat([USER])["choices"][0]["message"]
    items = output_items(message, "completed")
    (back,) = chat_messages(items, None, 10)
    keys = ("reasoning_content", "tool_calls", *TOKEN_FIELDS)
    assert {key: back.get(key) for key in keys} == {key: message.get(key) for key in keys}
    assert back["content"] == (message["content"] or "")
    ids = [call["id"] for call in message.get("tool_calls", [])]
    assert [item["call_id"] for item in items if item["type"] == "function_call"] == ids


def test_f04_a_row_and_a_request_are_read_alike():
    """The agent reads items of checked rows, the server those of strangers; they mean the same."""
    assert chat_messages(HISTORY, "Be brief.", 100) == items.chat_messages(HISTORY, "Be brief.")
    assert chat_messages("hi", None, 100) == items.chat_messages("hi")
    summary = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "two queries"}]}
    turn = [ASK, summary, OSLO, {"role": "assistant", "content": "Checking both."}, LIMA]
    assert chat_messages(turn, None, 100) == items.chat_messages(turn)


def test_f02_reasoning_is_kept_through_items(served):
    served.say("<think>\nsearch it\n</think>\n\n4C.", 2)
    items = respond(served, input="Weather in Oslo?")["output"]
    served.say("19C.", 2)
    user = {"role": "user", "content": "Weather in Oslo?"}
    again = {"role": "user", "content": "And in Lima?"}
    reply = respond(served, input=[user, *items, again])
    assert (len(served.engine.prompts[1]), reply["new_segment"]) == (99, False)
    exact = (*items[-1]["prompt_token_ids"], *items[-1]["generation_token_ids"])
    assert (len(items[-1]["prompt_token_ids"]), len(exact)) == (35, 67)
    assert served.engine.prompts[1][:67] == exact
    assert tuple(reply["output"][-1]["prompt_token_ids"]) == served.engine.prompts[1]

    # Without the ids the template drops the reasoning, and the reply says that a new segment begins.
    bare = [{key: value for key, value in item.items() if key not in TOKEN_FIELDS} for item in items]
    served.say("19C.", 2)
    reply = respond(served, input=[user, *bare, again])
    assert (len(served.engine.prompts[2]), reply["new_segment"]) == (71, True)
    assert tuple(reply["output"][-1]["prompt_token_ids"]) == served.engine.prompts[2]


def test_f06_a_cut_turn_is_incomplete_and_shows_no_call(served):
    grep = '\n<tool_call>\n{"name": "grep", "arguments": {"q": "alpha"}}\n</tool_call>'
    write = '\n<tool_call>\n{"name": "write", "arguments": {"path": "/tmp/x", "text": "aaaa'
    served.say(grep + write)
    reply = respond(served, input="hi", max_output_tokens=147)
    assert (reply["status"], reply["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    (item,) = reply["output"]
    assert (item["type"], item["status"]) == ("message", "incomplete")
    assert len(item["generation_token_ids"]) == reply["usage"]["output_tokens"] == 147

    served.say(grep, 2)
    reply = respond(served, input="hi", max_output_tokens=147)
    assert (reply["status"], reply["incomplete_details"]) == ("completed", None)
    assert [(item["type"], item.get("name")) for item in reply["output"]] == [("function_call", "grep")]


def test_instructions_are_the_system_message(served, renderer_of):
    served.say("Hi.", 2)
    respond(served, instructions="Be brief.", input="hi")
    served.say("Hi.", 2)
    served.chat([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}])
    assert served.engine.prompts[0] == served.engine.prompts[1]


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"previous_response_id": "resp_1"}, "unsupported_field", "previous_response_id"),
        ({"conversation": "conv_1"}, "unsupported_field", "conversation"),
        ({"background": True}, "unsupported_field", "background"),
        ({"truncation": "auto"}, "unsupported_field", "truncation"),
        ({"include": ["message.output_text.logprobs"]}, "unsupported_field", "include"),
        ({"reasoning": {"effort": "high"}}, "unsupported_field", "reasoning.effort"),
        ({"input": []}, "invalid_type", "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "unsupported_item", "input[0].type"),
        ({"input": [{"type": "function_call", "call_id": "c", "name": "f"}]}, "invalid_type", "input[0].arguments"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "unsupported_item", "input[0].content"),
        ({"tools": [{"type": "web_search"}]}, "invalid_value", "tools[0]"),
        ({"max_output_tokens": 0}, "invalid_value", "max_output_tokens"),
        ({"input": [{"role": "robot", "content": "hi"}]}, "invalid_value", "input[0].role"),
        ({"input": [{"type": "message", "content": "hi"}]}, "invalid_value", "input[0].role"),
        ({"max_tokens": 5}, "unknown_field", "max_tokens"),
    ],
)
def test_what_is_not_served_is_refused_by_name(served, fields, code, param):
    assert served.refused(400, route="/v1/responses", **fields) == (code, param)


@pytest.mark.parametrize("piece", [1, 1000])
@pytest.mark.parametrize("text", ["Hi.", TURN, CALL_TEXT, "<think>\nhm\n</think>\n\nHi.", ""])
def test_the_events_tell_the_response(served, text, piece):
    served.engine.piece = piece
    served.say(text, 2)
    whole = respond(served, input="hi")
    served.say(text, 2)
    events = served.stream("/v1/responses", input="hi")
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    last = events[-1]
    assert (last["type"], last["response"]["status"]) == ("response.completed", "completed")

    def bare(items):
        return [{key: value for key, value in item.items() if key not in ("id", "call_id")} for item in items]

    output = last["response"]["output"]
    assert bare(output) == bare(whole["output"])
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == output
    for index, item in enumerate(output):
        mine = [event for event in events if event.get("output_index") == index]
        assert mine[0]["type"] == "response.output_item.added"
        deltas = "".join(event["delta"] for event in mine if event["type"].endswith(".delta"))
        assert deltas == (item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"])


def test_a_stream_of_a_cut_turn_ends_incomplete(served):
    served.say(CALL_TEXT)
    events = served.stream("/v1/responses", input="hi", max_output_tokens=5)
    assert events[-1]["type"] == "response.incomplete"
    assert events[-1]["response"]["output"][-1]["generation_token_ids"] == events[-2]["item"]["generation_token_ids"]


def test_a_failure_in_the_middle_of_events_is_an_error_event(serve):
    served = serve(request_timeout_s=2.0)
    served.engine.hold = 2
    served.say("4C. and more", 2)
    response = served.post("/v1/responses", input="hi", stream=True)
    last = read_events(response.text, done=False)[-1]
    assert (last["type"], last["code"]) == ("error", "request_timeout")
