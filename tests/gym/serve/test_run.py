"""``POST /run`` plays whole rollouts; and a group through the server is, token for token, the group in this process."""

import asyncio
import dataclasses

import httpx
import pytest

from gymloop.config.schema import Rollouts as Limits
from gymloop.gym import Environment, Verdict, tool
from gymloop.gym.agents import agent_of
from gymloop.gym.attached import AttachedEnvironment
from gymloop.gym.bundle import read_turns
from gymloop.gym.contract import ROLLOUT_SEED
from gymloop.gym.serve.run import Play
from gymloop.gym.session import InProcessSource
from gymloop.gym.tools import ToolError
from gymloop.rollouts.collector import Collector, RolloutTask

from ..scripted import Say, ScriptedModel, call_text
from ..scripted import row as row_of
from ..scripted import serving as scripted_model
from .served import serving, until

CALL = call_text('{"by": 2}', "add")


class Dice(Environment):
    """Its tool's results depend on the seed, its reward on the calls."""

    closed = 0

    def __init__(self):
        self.sum = 0

    def close(self):
        Dice.closed += 1

    @tool
    def add(self, by: int) -> str:
        """Add, and throw a die."""
        if by > 9:
            raise ToolError("too much")
        if by == 0:
            return ""
        self.sum += by
        return f"{self.sum}, and the die shows {self.rng.randint(1, 10**9)}"

    async def verify(self, response):
        if self.row.get("judge") == "broken":
            raise RuntimeError("no judge")
        return Verdict(float(self.sum), {"sum": float(self.sum)})


TOOLS = InProcessSource("dice", Dice).tools
SCRIPTS = {
    "good": [CALL, CALL, "done"],
    "bad": [call_text('{"to": 1}', "add"), call_text('{"by": "x"}', "add"), call_text('{"by": 10}', "add"), "done"],
    "empty": [call_text('{"by": 0}', "add"), "done"],
    "cut": [CALL, Say("too long a st", finish="length")],
    "endless": [CALL] * 20,
}


def row(prompt, **fields):
    return {**row_of(prompt, TOOLS, "dice"), **fields}


def play(client, **options):
    return Play(client.url.removesuffix("/chat/completions"), "toy", **options)


async def post(served, body, route="/run", timeout=60.0):
    async with httpx.AsyncClient(base_url=served.url, timeout=timeout, trust_env=False, verify=False) as client:
        return await client.post(route, json=body)


def collector(source, model):
    return Collector({"dice": source}, model, Limits(call_timeout_s=20, deadline_s=60), max_turns=8, max_tokens=64)


async def collected(source, model, prompts):
    """The group's trajectories by id."""
    tasks = [RolloutTask(f"g-{prompt}", sample, row(prompt)) for prompt in prompts for sample in range(3)]
    found = {(one.group_id, one.sample_id): one async for one in collector(source, model).collect(tasks)}
    return [found[task.group_id, task.sample_id] for task in tasks]


def comparable(trajectory):
    """All of it but the calls' ids, which the model server draws, and what a clock said."""
    fields = dataclasses.asdict(trajectory)
    output = [{key: value for key, value in item.items() if key != "call_id"} for item in fields.pop("output")]
    clocks = ("_s", "seconds", "timing", "times")
    return {name: value for name, value in fields.items() if not name.endswith(clocks)}, output


async def test_a_group_through_the_server_is_the_group_in_process():
    prompts = [prompt for prompt in SCRIPTS if prompt != "endless"]
    async with scripted_model(ScriptedModel(SCRIPTS)) as model:
        here = await collected(InProcessSource("dice", Dice), model, prompts)
        with serving(Dice, name="dice") as served:
            environment = AttachedEnvironment("dice", served.url)
            await environment.ready(10.0)
            await environment.open(call_timeout_s=20, max_connections=8)
            try:
                there = await collected(environment.agent(model, {}), model, prompts)
            finally:
                await environment.close()
            assert len(served.app.sessions) == 0
    for one, other in zip(there, here, strict=True):
        assert comparable(one) == comparable(other)
    assert {one.reward for one in here} == {0.0, 2.0, 4.0}


async def test_run_plays_the_rollout_and_replies_as_nemo_gyms_agents_do():
    async with scripted_model(ScriptedModel(SCRIPTS)) as model:
        with serving(Dice, name="dice", play=play(model)) as served:
            body = row("good", answer=7, _ng_task_index=4, _ng_rollout_index=1)
            reply = await post(served, body)
            again = await post(served, body)
            other = await post(served, {**body, "_ng_rollout_index": 2})
    value = reply.json()
    assert reply.status_code == 200, value
    assert {key: value[key] for key in body} == body
    assert (value["reward"], value["reward_components"], value["mask_sample"]) == (4.0, {"sum": 4.0}, False)
    response = value["response"]
    assert (response["object"], response["status"], response["incomplete_details"]) == ("response", "completed", None)
    kinds = [item["type"] for item in response["output"]]
    assert kinds == ["function_call", "function_call_output", "function_call", "function_call_output", "message"]
    turns = read_turns(response["output"], cut=False, versions=(3, 3), url="x")
    assert len(turns) == 3
    assert all(turn.divergence is None for turn in turns), "contiguous"
    assert response["usage"]["total_tokens"] == sum(len(turn.prompt_ids) + len(turn.sampled_ids) for turn in turns)
    thrown = [item["output"] for item in response["output"] if item["type"] == "function_call_output"]
    assert [item["output"] for item in again.json()["response"]["output"] if "output" in item] == thrown
    assert [item["output"] for item in other.json()["response"]["output"] if "output" in item] != thrown


async def test_a_cut_rollout_is_judged_and_says_why_it_ended():
    async with scripted_model(ScriptedModel(SCRIPTS)) as model:
        with serving(Dice, name="dice", play=play(model, max_turns=3)) as served:
            cut = (await post(served, row("cut"))).json()
            endless = (await post(served, row("endless"))).json()
    assert (cut["reward"], endless["reward"]) == (2.0, 6.0)
    assert cut["response"]["incomplete_details"] == {"reason": "max_output_tokens"}
    # Out of turns, but whole: as an agent of NeMo Gym's says it.
    assert (endless["response"]["status"], endless["response"]["incomplete_details"]) == ("completed", None)


async def test_what_failed_has_no_reward_and_one_sentence():
    scripts = {"lost": [Say(status=500)], "unjudged": ["done"], "good": SCRIPTS["good"]}
    async with scripted_model(ScriptedModel(scripts)) as model:
        with serving(Dice, name="dice", play=play(model)) as served:
            lost = await post(served, row("lost"))
            unjudged = await post(served, row("unjudged", judge="broken"))
            assert (await post(served, row("good"))).json()["reward"] == 4.0
    assert lost.status_code == unjudged.status_code == 500
    assert ": 500" in lost.json()
    assert unjudged.json() == "environment dice, verify: RuntimeError: no judge"


@pytest.mark.parametrize(
    ("body", "place"),
    [
        ({}, ["responses_create_params"]),
        ({"responses_create_params": []}, ["responses_create_params"]),
        ({"responses_create_params": {}}, ["responses_create_params", "input"]),
        ({"responses_create_params": {"input": []}}, ["responses_create_params", "input"]),
        ({"responses_create_params": {"input": 3}}, ["responses_create_params"]),
        ({"responses_create_params": {"input": [{"role": "user"}]}}, ["responses_create_params"]),
        ({"responses_create_params": {"input": [{"type": "image"}]}}, ["responses_create_params"]),
        ({"responses_create_params": {"input": "x", "tools": [{}]}}, ["responses_create_params"]),
        ({"responses_create_params": {"input": "x", "tools": [{"name": 3}]}}, ["responses_create_params", "tools"]),
        (
            {"responses_create_params": {"input": "x", "max_output_tokens": 0}},
            ["responses_create_params", "max_output_tokens"],
        ),
        ({"responses_create_params": {"input": "x"}, ROLLOUT_SEED: "1"}, [ROLLOUT_SEED]),
        ({"episode_id": {}, "task": []}, ["task", "task_id"]),
        ({"episode_id": {}, "task": {"task_id": {}}}, ["task", "task_input"]),
        (
            {"episode_id": {}, "task": {"task_id": {}, "task_input": {}}},
            ["task", "task_input", "responses_create_params"],
        ),
    ],
)
async def test_a_row_that_cannot_be_played_is_a_422_that_names_the_place(body, place):
    with serving(Dice, name="dice", play=Play("http://127.0.0.1:9/v1", "toy")) as served:
        reply = await post(served, body)
    (problem,) = reply.json()["detail"]
    assert (reply.status_code, problem["loc"]) == (422, ["body", *place]), reply.text


async def test_a_materialised_task_gets_an_episodes_reply_failures_included():
    scripts = {"lost": [Say(status=500)], **SCRIPTS}
    task_id = {"taskset": "t", "task_id": "1"}

    def episode(prompt, **fields):
        task = {"task_id": task_id, "task_input": row(prompt, **fields)}
        return {"episode_id": {"rollout_id": "a", "attempt": 0}, "task": task}

    async with scripted_model(ScriptedModel(scripts)) as model:
        with serving(Dice, name="dice", play=play(model)) as served:
            good = (await post(served, episode("good"))).json()
            lost = (await post(served, episode("lost"))).json()
    assert (good["episode_id"], good["task_id"]) == ({"rollout_id": "a", "attempt": 0}, task_id)
    assert good["result"]["reward"] == 4.0
    assert set(lost) == {"episode_id", "task_id", "failure"}
    assert lost["failure"]["terminal"] is False
    assert ": 500" in lost["failure"]["failure_reason"]


async def test_a_collector_that_goes_away_ends_its_rollout():
    model = ScriptedModel({"slow": [Say("done", delay=30.0)]})
    async with scripted_model(model) as client:
        with serving(Dice, name="dice", play=play(client)) as served:
            before = Dice.closed
            asking = asyncio.create_task(post(served, row("slow")))
            await asyncio.wait_for(model.asked_once.wait(), 20)
            asking.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asking
            # Long before the model would have answered.
            await asyncio.to_thread(until, lambda: Dice.closed > before, 20.0)


async def test_a_rollout_has_a_deadline_that_says_what_was_waited_for():
    async with scripted_model(ScriptedModel({"slow": [Say("done", delay=30.0)]})) as model:
        with serving(Dice, name="dice", play=play(model, rollout_timeout_s=0.5)) as served:
            reply = await post(served, row("slow"))
    assert reply.status_code == 500
    assert "within 0.5 s" in reply.json()


async def test_more_rollouts_than_are_played_at_once_wait_for_their_turn():
    model = ScriptedModel({"slow": [Say("done", delay=0.3)]})
    async with scripted_model(model) as client:
        with serving(Dice, name="dice", play=play(client, at_once=3)) as served:
            replies = await asyncio.gather(*(post(served, row("slow")) for _ in range(12)))
    assert [reply.status_code for reply in replies] == [200] * 12
    assert model.most_in_flight == 3


def test_the_servers_agent_is_the_one_of_the_collector():
    assert type(agent_of(InProcessSource("dice", Dice))).__name__ == "ToolCalling"
