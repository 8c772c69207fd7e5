"""An attempt stays on one replica; a replica that is gone fails what is under way on it at once, and nobody loses a
rollout."""

import asyncio
import contextlib
import time

import pytest
from aiohttp import web

from gymloop.config.schema import Rollouts
from gymloop.errors import InfraError
from gymloop.gym.model_client import ModelClient
from gymloop.gym.replicas import Replicas
from gymloop.gym.session import InProcessSource
from gymloop.rollouts.collector import Collector, expand

from .scripted import Say, ScriptedModel, Weather, call_text

USER = [{"role": "user", "content": "p"}]


@contextlib.asynccontextmanager
async def replicas(*models, versions=(3, 3)):
    """Clients of one server for each model, and the servers."""
    runners, clients = [], {}
    for index, model in enumerate(models):
        app = web.Application()
        app.router.add_post("/v1/chat/completions", model.handle)
        app.router.add_get("/v1/models", _card(versions[index]))
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
        clients[f"engine-{index}"] = ModelClient(
            url, "toy", max_concurrency=64, call_timeout_s=20.0, ready_timeout_s=1.0
        )
        runners.append(runner)
    try:
        async with Replicas(clients) as opened:
            yield opened, runners
    finally:
        for runner in runners:
            await runner.cleanup()


def _card(version):
    async def models(_):
        return web.json_response({"data": [{"id": "toy", "weight_version": version}]})

    return models


def row(prompt):
    tool = {"type": "function", "name": "wx", "parameters": {"type": "object", "properties": {}}}
    return {
        "responses_create_params": {"input": [{"role": "user", "content": prompt}], "tools": [tool]},
        "agent_ref": {"name": "weather"},
    }


def collector(opened, **limits):
    return Collector(
        sources={"weather": InProcessSource("weather", Weather)},
        model=opened,
        limits=Rollouts(deadline_s=20.0, call_timeout_s=20.0, **limits),
        max_turns=4,
        max_tokens=64,
    )


async def test_every_turn_of_a_rollout_is_played_on_the_replica_of_its_first():
    script = {f"p{index}": [call_text("{}"), call_text("{}"), "done"] for index in range(8)}
    models = [ScriptedModel(script), ScriptedModel(script)]
    async with replicas(*models) as (opened, _):
        groups = await collector(opened).gather(expand(((f"g{i}", row(f"p{i}")) for i in range(8)), 2))
    assert sum(len(group.trajectories) for group in groups) == 16
    turns = [{} for _ in models]
    for model, counted in zip(models, turns, strict=True):
        for request in model.requests:
            prompt = request["messages"][0]["content"]
            said = sum(message["role"] == "assistant" for message in request["messages"])
            counted.setdefault(prompt, []).append(said)
    for counted in turns:
        for prompt, numbers in counted.items():
            played = numbers.count(0)
            assert sorted(numbers) == sorted([0, 1, 2] * played), (prompt, numbers)
    assert all(counted for counted in turns), "both were used"
    assert opened.load == {"engine-0": 0, "engine-1": 0}


async def test_every_reply_with_sampled_tokens_is_told_whichever_replica_it_comes_from():
    told = []
    async with replicas(*(ScriptedModel({"p": [Say("done", delay=0.2)]}) for _ in range(2))) as (opened, _):
        opened.on_sampled(lambda: told.append(1))
        await collector(opened).gather(expand([("g", row("p"))], 4))
    assert len(told) == 4


async def test_the_load_is_spread_evenly():
    script = {"p": [Say("done", delay=1.0)]}
    models = [ScriptedModel(script), ScriptedModel(script)]
    async with replicas(*models) as (opened, _):
        await collector(opened).gather(expand([("g", row("p"))], 10))
    assert [model.most_in_flight for model in models] == [5, 5]


async def test_a_replica_that_is_gone_fails_its_calls_at_once_and_no_rollout_is_lost():
    script = {"p": [Say("done", delay=0.5)]}
    stuck = ScriptedModel({"p": [Say("never", delay=60)]})
    async with replicas(stuck, ScriptedModel(script)) as (opened, _):
        begin = time.monotonic()
        gathering = asyncio.ensure_future(collector(opened).gather(expand([("g", row("p"))], 6)))
        while stuck.in_flight < 3:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        opened.bury("engine-0", "engine-0 died during run")
        (group,) = await gathering
        assert time.monotonic() - begin < 10
    assert [trajectory.sample_id for trajectory in group.trajectories] == list(range(6))
    assert sorted(trajectory.attempt for trajectory in group.trajectories) == [0, 0, 0, 1, 1, 1]


async def test_a_dead_replica_costs_each_rollout_one_attempt_at_most_before_its_death_is_known():
    script = {"p": [Say("done", delay=0.05)]}
    async with replicas(ScriptedModel(script), ScriptedModel(script)) as (opened, runners):
        await runners[0].cleanup()  # connections are refused from now on
        (group,) = await collector(opened).gather(expand([("g", row("p"))], 30))
    assert len(group.trajectories) == 30
    assert max(trajectory.attempt for trajectory in group.trajectories) == 1


async def test_a_call_in_progress_and_every_later_one_says_why_the_replica_is_gone():
    stuck = ScriptedModel({"p": [Say("never", delay=60)]})
    async with replicas(stuck, stuck) as (opened, _):
        with opened.lease() as model:
            call = asyncio.ensure_future(model.chat(USER, [], max_tokens=8))
            while not stuck.in_flight:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            opened.bury("engine-0", "engine-0 died during run")
            for work in (call, model.chat(USER, [], max_tokens=8)):
                with pytest.raises(InfraError, match=r"chat/completions: engine-0 died during run") as caught:
                    await asyncio.wait_for(work, 5)
                assert caught.value.cause == "disconnect"
        opened.bury("engine-1", "engine-1 died as well")
        with pytest.raises(InfraError, match="no engine replica is left"), opened.lease():
            pass


async def test_the_weight_version_is_that_of_every_replica_that_lives():
    nobody = ScriptedModel({})
    async with replicas(nobody, nobody, versions=[4, 4]) as (opened, _):
        assert await opened.weight_version() == 4
    async with replicas(nobody, nobody, versions=[4, 5]) as (opened, _):
        with pytest.raises(InfraError, match=r"different weights.*'engine-0': 4, 'engine-1': 5"):
            await opened.weight_version()
        opened.bury("engine-0", "gone")
        assert await opened.weight_version() == 5
