"""The tool_calling agent against a scripted chat server and a real environment (field cases F05 and F06)."""

import asyncio
import json
import logging

import pytest

from gymloop.errors import DataError, InfraError
from gymloop.gym.agent import Conversation, read_arguments, tool_calling
from gymloop.gym.items import chat_messages
from gymloop.gym.session import InProcessSource
from gymloop.rollouts.trajectory import segments
from gymloop.tokens.divergence import diverge

from . import scripted
from .scripted import END, Say, ScriptedModel, Weather, call_text, ids, row, serving


async def play(
    model: ScriptedModel, prompt: str, *, max_turns: int = 4, log=None, params=None, profile="train", rollout_id=None
):
    """Run one rollout; returns conversation, verdict and the environment's log."""
    log = [] if log is None else log
    source = InProcessSource("weather", Weather, {"log": log})
    task = row(prompt, source.tools, **(params or {}))
    async with serving(model) as client:
        session = await source.seed_session(task)
        conversation = Conversation()
        await tool_calling(
            task,
            session,
            client,
            conversation,
            environment="weather",
            max_turns=max_turns,
            max_tokens=200,
            call_timeout_s=2.0,
            profile=profile,
            rollout_id=rollout_id,
        )
        verdict = await session.verify(conversation.response())
        await session.close()
    return conversation, verdict, log


def tool_texts(conversation):
    return [item["output"] for item in conversation.output if item["type"] == "function_call_output"]


OSLO = '{"city": "Oslo"}'
UNCLOSED = json.dumps('{"city": "Oslo"')
GOOD = call_text(OSLO)
BAD_ARGUMENTS = {
    # name: (text of call 1, calls that the environment sees, tool results, reward, bad calls)
    "a": (GOOD, [("wx", "Oslo")], ["4C in Oslo"], 1.0, 0),
    "b": (call_text('""'), [("wx", "")], ["which city?"], 0.0, 0),
    "c": (call_text(UNCLOSED), [], ["Error: the arguments are not valid JSON"], 0.0, 1),
    "d": (call_text('["Oslo"]'), [], ["Error: the arguments are not a JSON object"], 0.0, 1),
    "e": (call_text("42"), [], ["Error: the arguments are not a JSON object"], 0.0, 1),
    "f": (call_text("null"), [("wx", "")], ["which city?"], 0.0, 0),
    "g": (call_text(OSLO, "wxx"), [], ["Error: there is no tool 'wxx' (did you mean 'wx'?)"], 0.0, 1),
    "h": (
        f"{call_text(UNCLOSED)}\n{GOOD}",
        [("wx", "Oslo")],
        ["Error: the arguments are not valid JSON", "4C in Oslo"],
        1.0,
        1,
    ),
    "string of an object": (call_text(json.dumps(OSLO)), [("wx", "Oslo")], ["4C in Oslo"], 1.0, 0),
    "unknown argument": (
        call_text('{"town": "Oslo"}'),
        [],
        ["Error: wx has no argument 'town'; its arguments: city"],
        0.0,
        0,
    ),
    "wrong type": (
        call_text('{"city": 7}'),
        [],
        ["Error: wx, argument 'city': Input should be a valid string"],
        0.0,
        0,
    ),
}


@pytest.mark.parametrize("case", BAD_ARGUMENTS)
async def test_f05_bad_arguments_are_answered_and_the_rollout_goes_on(case):
    text, seen, results, reward, bad = BAD_ARGUMENTS[case]
    model = ScriptedModel({"p": [text, "end"]})
    conversation, verdict, log = await play(model, "p")

    assert [entry for entry in log if entry[0] == "wx"] == seen
    assert tool_texts(conversation) == results
    assert (verdict.reward, conversation.bad_tool_calls, conversation.truncated) == (reward, bad, False)
    assert len(conversation.turns) == 2
    # What was sampled stays what is trained, byte for byte, and call 2 continues it exactly.
    first, second = conversation.turns
    assert first.sampled_ids == (*ids(text), END)
    assert second.prompt_ids[: len(first.prompt_ids) + len(first.sampled_ids)] == first.prompt_ids + first.sampled_ids
    assert len(segments(conversation.turns)) == 1
    # Each result goes back under the id of its own call.
    sent = model.requests[1]["messages"]
    asked = [call["id"] for message in sent for call in message.get("tool_calls", [])]
    assert [message["tool_call_id"] for message in sent if message["role"] == "tool"] == asked


async def test_f05_an_envelope_cut_short_is_a_final_text_and_is_counted():
    cut = '<tool_call>\n{"name": "wx", "arguments": {"city": "Oslo"\n</tool_call>'
    conversation, verdict, log = await play(ScriptedModel({"p": [cut, "end"]}), "p")
    assert len(conversation.turns) == 1
    assert (conversation.bad_tool_calls, verdict.reward) == (1, 0.0)
    assert not [entry for entry in log if entry[0] == "wx"]
    assert conversation.turns[0].sampled_ids == (*ids(cut), END)


def test_arguments_that_are_absent_are_an_empty_object():
    for text in ("", "  ", "null", '""', "{}"):
        assert read_arguments(text) == {}
    assert read_arguments("[1]") == "the arguments are not a JSON object"


CUT = f'{call_text(OSLO)}\n<tool_call>\n{{"name": "write", "arguments": {{"path": "/tmp/x", "text": "aaaa'


async def test_f06_a_turn_cut_by_its_limit_runs_no_tool_and_is_verified():
    conversation, verdict, log = await play(ScriptedModel({"p": [Say(CUT, finish="length")]}), "p")
    assert [entry[0] for entry in log] == ["seed", "verify", "close"]
    assert conversation.truncated
    assert conversation.tool_calls == 0
    assert verdict.reward == 0.0
    assert conversation.turns[0].finish_reason == "length"
    response = conversation.response()
    assert response["status"] == "incomplete"
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}


async def test_f06_the_same_call_with_an_end_token_runs():
    conversation, verdict, log = await play(ScriptedModel({"p": [GOOD, "end"]}), "p")
    assert ("wx", "Oslo") in log
    assert not conversation.truncated
    assert verdict.reward == 1.0
    assert conversation.response()["status"] == "completed"


async def test_parallel_calls_run_in_order():
    text = GOOD + call_text('{"path": "x"}', "write") + call_text('{"city": "Lima"}')
    conversation, _, log = await play(ScriptedModel({"p": [text, "end"]}), "p")
    assert log[1:4] == [("wx", "Oslo"), ("write", "x"), ("wx", "Lima")]
    assert conversation.tool_calls == 3


async def test_a_row_may_allow_one_call_at_a_time():
    text = GOOD + call_text('{"city": "Lima"}')
    model = ScriptedModel({"p": [text, "end"]})
    conversation, _, log = await play(model, "p", params={"parallel_tool_calls": False})
    assert [entry for entry in log if entry[0] == "wx"] == [("wx", "Oslo")]
    assert tool_texts(conversation)[1] == "Error: only one tool call at a time"
    assert conversation.bad_tool_calls == 1


async def test_the_turn_limit_truncates_after_running_the_last_tools():
    conversation, verdict, log = await play(ScriptedModel({"p": [GOOD, GOOD, GOOD]}), "p", max_turns=2)
    assert len(conversation.turns) == 2
    assert [entry[0] for entry in log].count("wx") == 2
    assert conversation.truncated
    assert verdict.reward == 1.0


async def test_the_bundle_is_on_the_last_item_of_each_model_call():
    model = ScriptedModel({"p": [f"let me look {GOOD}{GOOD}", "end"]})
    conversation, _, _ = await play(model, "p")
    kinds = [item["type"] for item in conversation.output]
    call_and_result = ["function_call", "function_call", "function_call_output", "function_call_output"]
    assert kinds == ["message", *call_and_result, "message"]
    carrying = [index for index, item in enumerate(conversation.output) if "generation_token_ids" in item]
    assert carrying == [2, 5]
    assert conversation.output[2]["prompt_token_ids"] is conversation.turns[0].prompt_ids  # by reference, not a copy


async def test_only_the_last_turns_ids_travel():
    model = ScriptedModel({"p": [GOOD, GOOD, "end"]})
    conversation, _, _ = await play(model, "p")
    assert "required_prefix_token_ids" not in model.requests[0]
    for index in (1, 2):
        before = conversation.turns[index - 1]
        assert tuple(model.requests[index]["required_prefix_token_ids"]) == before.prompt_ids + before.sampled_ids
        assert not any("token_ids" in json.dumps(message) for message in model.requests[index]["messages"])


async def test_a_prompt_that_does_not_continue_the_turn_before_is_a_new_segment(caplog):
    def forget(reply):
        reply["choices"][0]["message"]["prompt_token_ids"] = [5, 6, 7]

    with caplog.at_level(logging.DEBUG, "gymloop.gym.dialogue"):
        conversation, _, _ = await play(ScriptedModel({"p": [GOOD, Say("end", change=forget)]}), "p")
    assert conversation.new_segments == 1
    _, second = segments(conversation.turns)
    # The server said nothing, and still the record knows where the two part.
    assert second.began is conversation.turns[1].divergence
    assert (second.began.index, second.began.rendered.ids) == (0, (5, 6, 7))
    before = conversation.turns[0]
    assert second.began.carried.ids == (before.prompt_ids + before.sampled_ids)[:8]
    assert "turn 1 begins a new segment" in caplog.text


async def test_what_the_server_says_of_a_new_segment_is_recorded():
    told = diverge("messages[1] was edited", [21, 22], [5, 6, 7], str)

    def forget(reply):
        reply["choices"][0]["message"]["prompt_token_ids"] = [5, 6, 7]
        reply["choices"][0]["divergence"] = told.as_record()

    conversation, _, _ = await play(ScriptedModel({"p": [GOOD, Say("end", change=forget)]}), "p")
    assert conversation.turns[1].divergence == told


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning"])
async def test_reasoning_is_kept_and_sent_back(field):
    def think(reply):
        reply["choices"][0]["message"][field] = "search it"

    model = ScriptedModel({"p": [Say(GOOD, change=think), "end"]})
    conversation, _, _ = await play(model, "p")
    assert model.requests[1]["messages"][1]["reasoning_content"] == "search it"
    assert [item["type"] for item in conversation.output[:2]] == ["reasoning", "function_call"]
    assert conversation.output[0]["summary"] == [{"type": "summary_text", "text": "search it"}]
    assert "generation_token_ids" in conversation.output[1]
    # The items give the same messages back.
    (message, *_) = chat_messages(conversation.output)
    assert message == model.requests[1]["messages"][1]


async def test_every_call_names_its_noise():
    model = ScriptedModel({"p": [GOOD, "end"]})
    await play(model, "p", rollout_id="e0/p 1\n/3")
    assert [headers["x-gymloop-noise-key"] for headers in model.headers] == ["e0/p%201%0A/3/0", "e0/p%201%0A/3/1"]
    model = ScriptedModel({"p": ["end"]})
    await play(model, "p")
    assert "x-gymloop-noise-key" not in model.headers[0]


async def test_sampling_fields_of_a_row_reach_the_server_and_its_refusal_costs_the_row():
    refused = json.dumps({"error": {"code": "sampling_not_allowed", "message": "temperature must be 1.0"}}).encode()
    model = ScriptedModel({"p": [Say(status=400, raw=refused)]})
    with pytest.raises(DataError, match=r"400 sampling_not_allowed: temperature must be 1\.0"):
        await play(model, "p", params={"temperature": 0.7, "top_p": None, "max_output_tokens": 9})
    assert model.requests[0]["temperature"] == 0.7
    assert "top_p" not in model.requests[0]
    assert model.requests[0]["max_tokens"] == 9


async def test_validation_requests_are_marked():
    model = ScriptedModel({"p": ["end"]})
    await play(model, "p", profile="validation")
    assert model.headers[0]["x-gymloop-profile"] == "validation"
    model = ScriptedModel({"p": ["end"]})
    await play(model, "p")
    assert "x-gymloop-profile" not in model.headers[0]


async def test_a_full_context_mid_rollout_truncates_and_on_the_first_call_costs_the_row():
    full = Say(status=400, raw=b'{"error": {"code": "context_length_exceeded", "message": "too long"}}')
    conversation, verdict, _ = await play(ScriptedModel({"p": [GOOD, full]}), "p")
    assert conversation.truncated
    assert verdict.reward == 1.0
    with pytest.raises(DataError, match="context_length_exceeded"):
        await play(ScriptedModel({"p": [full]}), "p")


async def test_an_empty_turn_still_carries_its_bundle():
    conversation, _, _ = await play(ScriptedModel({"p": [Say("", finish="length")]}), "p")
    assert conversation.turns[0].sampled_ids == ()
    assert conversation.output[0]["generation_token_ids"] == ()
    assert conversation.truncated


async def test_a_tool_past_its_deadline_is_an_infra_error_that_names_it():
    class Slow(Weather):
        @scripted.tool
        async def wx(self, city: str = "") -> str:
            """Tell the weather."""
            await asyncio.sleep(30)
            return city

    source = InProcessSource("slow", Slow)
    task = row("p", source.tools, "slow")
    async with serving(ScriptedModel({"p": [GOOD, "end"]})) as client:
        session = await source.seed_session(task)
        with pytest.raises(InfraError, match=r"environment slow, wx: no answer within 0\.2 s"):
            await tool_calling(
                task,
                session,
                client,
                Conversation(),
                environment="slow",
                max_turns=2,
                max_tokens=9,
                call_timeout_s=0.2,
                profile="train",
            )
