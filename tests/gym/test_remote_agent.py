"""The remote agent: turns come from the bundles on an agent server's output items, or the rollout fails by name."""

import copy
from dataclasses import replace

import pytest

from gymloop.errors import DataError, InfraError
from gymloop.gym.agent import Conversation
from gymloop.gym.agents import Terms
from gymloop.gym.http import HttpServer
from gymloop.gym.remote_agent import RemoteAgent
from gymloop.rollouts.trajectory import segments

from .misbehaving import misbehaving

TERMS = Terms(max_turns=4, max_tokens=64, call_timeout_s=1.0, deadline_s=10.0, rollout_id="g/0")
SAMPLING = {"train": {"temperature": 1.0, "top_p": 1.0}, "validation": {"temperature": 0.0}}


@pytest.fixture(scope="module")
def server():
    with misbehaving() as process:
        yield process


def message(text, **fields):
    content = [{"type": "output_text", "text": text, "annotations": []}]
    return {
        "type": "message",
        "id": f"msg_{text}",
        "role": "assistant",
        "status": "completed",
        "content": content,
    } | fields


def call(number, **fields):
    return {
        "type": "function_call",
        "call_id": f"c{number}",
        "name": "wx",
        "arguments": "{}",
        "id": f"fc{number}",
    } | fields


def output(number):
    return {"type": "function_call_output", "call_id": f"c{number}", "output": "4C"}


def bundle(prompt, sampled):
    return {
        "prompt_token_ids": prompt,
        "generation_token_ids": sampled,
        "generation_log_probs": [-0.5] * len(sampled),
    }


GOOD = {
    "response": {
        "output": [
            {"type": "reasoning", "id": "rs", "summary": []},
            call(1),
            call(2, **bundle([1, 2], [3, 4])),
            output(1),
            output(2),
            message("done", **bundle([1, 2, 3, 4, 5], [6])),
        ],
        "incomplete_details": None,
    },
    "reward": 1.0,
    "reward_components": {"a": 1.0},
}


def changed(change):
    reply = copy.deepcopy(GOOD)
    change(reply, reply["response"]["output"])
    return reply


async def play(server, name, reply, fault="", terms=TERMS):
    conversation = Conversation()
    versions = iter([7, 8])

    async def version():
        return next(versions)

    params = {"input": "hi", "max_output_tokens": 16}
    row = {"responses_create_params": params, "name": name, "fault": fault, "reply": reply}
    async with HttpServer(server.url, call_timeout_s=0.1) as http:
        agent = RemoteAgent("full", http, version, SAMPLING)
        return await agent.play(row, None, conversation, terms), conversation


async def test_turns_come_from_the_last_item_of_each_model_call(server):
    verdict, conversation = await play(server, "good", GOOD)
    assert (verdict.reward, verdict.components) == (1.0, {"a": 1.0})
    first, second = conversation.turns
    assert (first.prompt_ids, first.sampled_ids, first.logprobs) == ((1, 2), (3, 4), (-0.5, -0.5))
    assert (first.finish_reason, second.finish_reason) == ("tool_calls", "stop")
    assert {(turn.first_version, turn.last_version) for turn in conversation.turns} == {(7, 8)}
    (segment,) = segments(conversation.turns)
    assert segment.ids == (1, 2, 3, 4, 5, 6)
    assert segment.sampled == (2, 3, 5)
    assert (conversation.tool_calls, conversation.new_segments, conversation.truncated) == (2, 0, False)
    assert conversation.output == GOOD["response"]["output"]
    params = server.bodies("good")["run"]["responses_create_params"]
    assert params == {"input": "hi", "max_output_tokens": 16, "temperature": 1.0, "top_p": 1.0}


async def test_a_prompt_that_does_not_continue_begins_a_segment_that_says_where(server):
    reply = changed(lambda _, out: out[-1].update(bundle([1, 2, 9, 4, 5], [6])))
    _, conversation = await play(server, "departs", reply)
    assert conversation.new_segments == 1
    first, second = segments(conversation.turns)
    assert (first.ids, second.ids) == ((1, 2, 3, 4), (1, 2, 9, 4, 5, 6))
    assert second.began.index == 2
    assert "agent server's prompt is not the exact continuation" in second.began.reason


BAD = {
    "no bundle on a call in the middle": (
        lambda _, out: [out[2].pop(key) for key in bundle([], [])],
        r"output\[2\] \(function_call\) ends a model call and has no prompt_token_ids",
    ),
    "no bundle on the last call": (
        lambda _, out: [out[5].pop(key) for key in bundle([], [])],
        r"output\[5\] \(message\) ends a model call and has no",
    ),
    "part of a bundle": (
        lambda _, out: out[5].pop("generation_log_probs"),
        r"output\[5\] has prompt_token_ids but not",
    ),
    "a logprob too few": (
        lambda _, out: out[5].update(generation_log_probs=[]),
        r"output\[5\]: reply has 1 generation_",
    ),
    "ids that are no ids": (lambda _, out: out[5].update(prompt_token_ids=[1.5]), r"output\[5\]: reply has no prompt_"),
    "null logprob": (
        lambda _, out: out[5].update(generation_log_probs=[None]),
        r"output\[5\]: reply has generation_log",
    ),
    "a bundle that is a number": (
        lambda _, out: out[5].update(generation_token_ids=5),
        r"output\[5\].generation_token_ids is no list",
    ),
    "a type that is no text": (lambda _, out: out[5].update(type=[]), r"output\[5\] has type \[\]; expected text"),
    "no output": (lambda reply, _: reply["response"].pop("output"), "has no response.output"),
    "empty output": (lambda _, out: out.clear(), "response.output has no model call"),
    "no response": (lambda reply, _: reply.pop("response"), "has no response.output"),
    "no reward": (lambda reply, _: reply.pop("reward"), "the reply has no reward"),
    "components do not sum": (lambda reply, _: reply.update(reward_components={"a": 2.0}), "sum to 2"),
    "a failure of an environment server": (lambda reply, _: reply.update(failure={"failure_reason": "oom"}), "oom"),
}


@pytest.mark.parametrize("name", BAD)
async def test_a_reply_that_cannot_be_trained_whole_is_a_failure(server, name):
    change, said = BAD[name]
    with pytest.raises(InfraError, match=said) as caught:
        await play(server, name, changed(change))
    assert caught.value.cause in ("bad_reply", "server_error")
    assert f"{server.url}/run" in str(caught.value)


@pytest.mark.parametrize(
    "fault", ["null-reward", "nan-reward", "inf-reward", "bool-reward", "text-reward", "component-is-null", "a-number"]
)
async def test_f13_a_run_without_a_number_pays_nothing(server, fault):
    with pytest.raises(InfraError) as caught:
        await play(server, f"run {fault}", GOOD, fault)
    assert caught.value.cause == "bad_reply"


async def test_a_full_context_behind_good_turns_is_truncated_and_makes_no_turn(server):
    def fill(reply, out):
        out[5] = message("")
        reply["response"]["incomplete_details"] = {"reason": "max_output_tokens"}

    verdict, conversation = await play(server, "full", changed(fill))
    assert verdict.reward == 1.0
    assert len(conversation.turns) == 1
    assert conversation.truncated


@pytest.mark.parametrize("content", [None, [], [{"type": "output_text"}], [{"type": "output_text", "text": ""}]])
async def test_a_last_message_that_says_nothing_in_whatever_form_is_no_turn(server, content):
    def fill(reply, out):
        out[5] = message("", content=content)
        reply["response"]["incomplete_details"] = {"reason": "max_output_tokens"}

    _, conversation = await play(server, f"nothing {content}", changed(fill))
    assert len(conversation.turns) == 1


async def test_a_refusal_without_its_tokens_is_a_call_without_its_bundle(server):
    def fill(reply, out):
        out[5] = message("", content=[{"type": "refusal", "refusal": "I will not"}])
        reply["response"]["incomplete_details"] = {"reason": "max_output_tokens"}

    with pytest.raises(InfraError, match="ends a model call and has no"):
        await play(server, "refusal", changed(fill))


async def test_a_first_prompt_beyond_the_context_costs_its_row(server):
    def fill(reply, out):
        out[:] = [message("")]
        reply["response"]["incomplete_details"] = {"reason": "max_output_tokens"}

    with pytest.raises(DataError, match="first prompt is longer") as caught:
        await play(server, "too long", changed(fill))
    assert caught.value.cause == "too_long"


async def test_a_cut_last_turn_ends_by_length(server):
    reply = changed(lambda reply, _: reply["response"].update(incomplete_details={"reason": "max_output_tokens"}))
    _, conversation = await play(server, "cut", reply)
    assert [turn.finish_reason for turn in conversation.turns] == ["tool_calls", "length"]


@pytest.mark.parametrize(
    ("fault", "cause"),
    [
        ("run hangs", "timeout"),
        ("run cuts", "disconnect"),
        ("run says 500", "server_error"),
        ("run html", "bad_reply"),
        ("run busy 30", "busy"),
    ],
)
async def test_f13_a_fault_is_a_typed_failure_and_the_rollout_is_not_run_twice(server, fault, cause):
    terms = replace(TERMS, deadline_s=1.5) if fault == "run hangs" else TERMS
    with pytest.raises(InfraError, match="/run: ") as caught:
        await play(server, fault, GOOD, fault, terms)
    assert caught.value.cause == cause
    assert server.log()[fault] == ["run"]


async def test_a_run_has_the_rollouts_time_and_not_one_calls(server):
    verdict, _ = await play(server, "slow", GOOD, "run is-slow 0.6")
    assert verdict.reward == 1.0
