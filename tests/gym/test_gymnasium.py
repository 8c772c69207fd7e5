"""The gymnasium agent: a step a turn, rewards summed, and a step that fails ends the attempt."""

import asyncio
import contextlib
import time

import pytest

from gymloop.errors import ConfigError, InfraError
from gymloop.gym.agent import Conversation
from gymloop.gym.agents import Terms
from gymloop.gym.contract import ROLLOUT_SEED
from gymloop.gym.gymnasium import Gymnasium
from gymloop.gym.http import HttpServer
from gymloop.rollouts.trajectory import segments

from .misbehaving import misbehaving
from .scripted import Say, ScriptedModel, serving

CALL_S = 3.0
TERMS = Terms(max_turns=4, max_tokens=8, call_timeout_s=CALL_S, deadline_s=5.0, rollout_id="g/0", seed=5)


@pytest.fixture(scope="module")
def server():
    with misbehaving() as process:
        yield process


@contextlib.asynccontextmanager
async def playing(url, says):
    async with (
        serving(ScriptedModel({"hi": says})) as client,
        HttpServer(url, call_timeout_s=CALL_S) as http,
    ):
        yield Gymnasium("game", http), client


def row(name, fault="", **fields):
    return {
        "responses_create_params": {"input": [{"role": "user", "content": "hi"}]},
        "agent_ref": {"name": "game"},
        "name": name,
        "fault": fault,
        **fields,
    }


async def test_rewards_are_summed_until_the_episode_ends_and_observations_are_user_messages(server):
    conversation = Conversation()
    async with playing(server.url, ["hit", "stand", "unused"]) as (agent, model):
        verdict = await agent.play(row("game"), model, conversation, TERMS)
    assert (verdict.reward, dict(verdict.components)) == (1.0, {})
    assert server.log()["game"] == ["seed", "step", "step"], "no close: the server did not offer it"
    assert [(item["role"], item.get("content")) for item in conversation.output if item["role"] == "user"] == [
        ("user", "again")
    ]
    assert [item["role"] for item in conversation.output] == ["assistant", "user", "assistant"]
    assert len(conversation.turns) == 2
    assert len(segments(conversation.turns)) == 1, "the second prompt continues the first turn"
    assert not conversation.truncated
    bodies = server.bodies("game")
    assert bodies["seed"][ROLLOUT_SEED] == 5
    (item,) = bodies["step"]["response"]["output"]
    assert item["content"][0]["text"] == "stand", "a step holds the items of its turn"
    assert "prompt_token_ids" not in item
    assert bodies["step"]["name"] == "game", "and the row"


async def test_the_first_observation_follows_the_rows_messages(server):
    script = ScriptedModel({"hi": ["hit", "stand"]})
    async with serving(script) as client, HttpServer(server.url, call_timeout_s=CALL_S) as http:
        await Gymnasium("game", http).play(row("first"), client, Conversation(), TERMS)
    assert [message["content"] for message in script.requests[0]["messages"]] == ["hi", "go"]


async def test_an_episode_that_offers_close_is_closed_also_after_a_failure(server):
    async with playing(server.url, ["hit", "stand"]) as (agent, model):
        await agent.play(row("closes", closes=True), model, Conversation(), TERMS)
        with pytest.raises(InfraError, match="/step: 500"):
            await agent.play(row("closes-failed", "step says 500", closes=True), model, Conversation(), TERMS)
    assert server.log()["closes"] == ["seed", "step", "step", "close"]
    assert server.log()["closes-failed"] == ["seed", "step", "close"]


async def test_an_episode_that_is_cancelled_is_closed(server):
    script = ScriptedModel({"hi": [Say("hit", delay=30.0)]})
    async with serving(script) as client, HttpServer(server.url, call_timeout_s=CALL_S) as http:
        task = asyncio.create_task(
            Gymnasium("game", http).play(row("cancelled", closes=True), client, Conversation(), TERMS)
        )
        async with asyncio.timeout(10):
            await script.asked_once.wait()  # the reset was answered: the episode is known to offer close
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert server.log()["cancelled"] == ["seed", "close"]


async def test_turns_that_run_out_end_it_truncated_with_what_was_paid(server):
    conversation = Conversation()
    async with playing(server.url, ["hit"] * 9) as (agent, model):
        verdict = await agent.play(row("long", steps=9), model, conversation, TERMS)
    assert verdict.reward == 4 * 0.5
    assert conversation.truncated
    assert server.log()["long"].count("step") == 4


async def test_a_full_context_ends_it_truncated_and_is_no_step(server):
    conversation = Conversation()
    async with playing(server.url, ["hit", Say("", finish="length")]) as (agent, model):
        verdict = await agent.play(row("full", steps=9), model, conversation, TERMS)
    assert verdict.reward == 0.5
    assert conversation.truncated
    assert server.log()["full"].count("step") == 1


@pytest.mark.parametrize(
    ("fault", "cause"),
    [
        ("step hangs", "timeout"),
        ("step cuts", "disconnect"),
        ("step html", "bad_reply"),
        ("step says 500", "server_error"),
        ("step busy 30", "busy"),
        ("seed hangs", "timeout"),
        ("seed html", "bad_reply"),
    ],
)
async def test_f13_a_fault_ends_the_attempt_and_no_step_is_taken_twice(server, fault, cause):
    conversation = Conversation()
    began = time.monotonic()
    async with playing(server.url, ["hit", "stand"]) as (agent, model):
        with pytest.raises(InfraError, match=f"{server.url}/") as caught:
            await agent.play(row(fault, fault), model, conversation, TERMS)
    assert time.monotonic() - began < 10
    assert caught.value.cause == cause
    assert conversation.where == f"environment game, {'step' if fault.startswith('step') else 'reset'}"
    assert server.log()[fault].count("step") <= 1


async def test_f13_death_during_a_step_is_a_disconnect():
    with misbehaving() as own:
        async with playing(own.url, ["hit", "stand"]) as (agent, model):
            with pytest.raises(InfraError, match="/step: lost the connection") as caught:
                await agent.play(row("dies", "step dies"), model, Conversation(), TERMS)
    assert caught.value.cause == "disconnect"


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"step_reward": None}, "reward is None"),
        ({"step_reward": True}, "reward is True"),
        ({"step_reward": "1"}, "reward is '1'"),
        ({"terminated": "no"}, "terminated is 'no'; expected true or false"),
    ],
)
async def test_a_step_that_says_no_number_is_a_bad_reply(server, fields, said):
    async with playing(server.url, ["hit", "stand"]) as (agent, model):
        with pytest.raises(InfraError, match=said) as caught:
            await agent.play(row(f"step {fields}", **fields), model, Conversation(), TERMS)
    assert caught.value.cause == "bad_reply"


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("missing-reward", "the reply has no reward"),
        ("nan-reward", "not JSON"),
        ("inf-reward", "not JSON"),
        ("list-reward", r"reward is \[1.0\]"),
        ("a-number", "expected a JSON object"),
        ("empty", "an empty body"),
    ],
)
async def test_f13_a_step_without_a_number_pays_nothing(server, fault, said):
    async with playing(server.url, ["hit", "stand"]) as (agent, model):
        with pytest.raises(InfraError, match=said) as caught:
            await agent.play(row(f"step {fault}", fault), model, Conversation(), TERMS)
    assert caught.value.cause == "bad_reply"


async def test_a_server_without_reset_is_the_recipes_mistake(server):
    async with playing(server.url, ["hit"]) as (agent, model):
        with pytest.raises(ConfigError, match="/reset: 404"):
            await agent.play(row("no-reset", "seed says 404"), model, Conversation(), TERMS)
