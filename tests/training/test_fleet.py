"""Replicas that are lost: who is told, who goes on, and what a sync that was cut short comes to."""

import asyncio
from contextlib import suppress

import pytest

from gymloop.cluster.health import Health
from gymloop.errors import ConfigError, InfraError
from gymloop.training.fleet import Fleet
from gymloop.weights.place import Place


class Engine:
    """An engine's worker that takes any weights until it is dead."""

    def __init__(self, name):
        self.name = name
        self.versions = []
        self.dead = None
        self.dies_in = None
        self.killed = False

    async def check(self):
        if self.dead:
            raise InfraError(self.dead)

    def symptoms(self):
        return ""

    async def call(self, method, *args, timeout):
        if method == "sync_state":
            await self.check()
            return Place("host", "127.0.0.1", "cpu"), self.versions[-1] if self.versions else None
        assert (method, args[0]) == ("load_weights", "weights")
        version = args[1]
        await asyncio.sleep(0.01)
        if self.dies_in == version:
            self.dead = f"{self.name} died during load_weights"
        await self.check()
        self.versions.append(version)

    def kill(self):
        self.killed = True


class Policy:
    name = "policy"

    def refer(self, method, request):
        assert method == "offer_weights"
        return "weights"

    async def call(self, method, *args, timeout):
        if method == "place":
            return Place("host", "127.0.0.1", "cpu")
        assert method == "release_weights"
        return {"bytes": 1.0, "copy_bytes_per_s": 1.0}

    async def check(self):
        pass


class Models:
    def __init__(self):
        self.buried = {}

    def bury(self, name, why):
        self.buried[name] = why


class Scene:
    def __init__(self, count, on_death="continue", period_s=0.05):
        self.engines = [Engine(f"engine-{index}") for index in range(count)]
        self.models, self.said = Models(), []
        self.health = Health(period_s=period_s, unresponsive_after_s=60)
        for engine in self.engines:
            self.health.watch(engine)
        self.fleet = Fleet(self.engines, self.models, self.health, on_death, self.said.append)

    async def lost(self):
        """Wait until a replica was given up; raises what has ended the run, where that was not all."""
        async with asyncio.timeout(10):
            while not self.models.buried:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        with suppress(TimeoutError):
            await asyncio.wait_for(self.health.failed(), 0.1)

    def end(self):
        for engine in self.engines:
            self.health.forget(engine)


async def test_one_of_several_that_dies_is_named_killed_and_routed_around_and_the_run_goes_on():
    scene = Scene(3)
    scene.engines[1].dead = "engine-1 died during run"
    await scene.lost()
    assert [engine.name for engine in scene.fleet.engines] == ["engine-0", "engine-2"]
    assert scene.models.buried == {"engine-1": "engine-1 died during run"}
    assert scene.engines[1].killed
    assert scene.said == ["engine-1 died during run\nthe run goes on with 2 of 3 engine replicas"]
    scene.end()


async def test_the_last_one_ends_the_run_and_says_so():
    scene = Scene(2)
    scene.engines[0].dead = "engine-0 died"
    await scene.lost()
    scene.engines[1].dead = "engine-1 died"
    with pytest.raises(InfraError, match=r"^engine-1 died; it was the last of 2 engine replicas$"):
        await asyncio.wait_for(scene.health.failed(), 5)
    scene.end()


@pytest.mark.parametrize(("count", "on_death"), [(2, "stop"), (1, "continue"), (1, "stop")])
async def test_a_recipe_that_says_stop_and_an_only_engine_end_the_run_under_its_name(count, on_death):
    scene = Scene(count, on_death)
    scene.engines[0].dead = "engine-0 died"
    with pytest.raises(InfraError, match=r"^engine-0 died$"):
        await asyncio.wait_for(scene.health.failed(), 5)
    assert len(scene.fleet.engines) == count
    scene.end()


async def test_a_sync_that_a_dead_replica_cut_short_is_repeated_with_the_others_under_the_same_version():
    scene = Scene(3, period_s=60)  # so that the sync is the first to know
    await scene.fleet.sync(Policy(), 1, 5.0)
    scene.engines[2].dies_in = 2
    await scene.fleet.sync(Policy(), 2, 5.0)
    assert [engine.versions[-1] for engine in scene.engines] == [2, 2, 1]
    assert list(scene.models.buried) == ["engine-2"]
    await scene.fleet.sync(Policy(), 3, 5.0)
    assert scene.engines[2].versions == [1]
    scene.end()


async def test_a_sync_whose_every_receiver_died_names_the_last():
    scene = Scene(2, period_s=60)
    for engine in scene.engines:
        engine.dies_in = 1
    with pytest.raises(InfraError, match="engine-1 died during load_weights; it was the last of 2"):
        await scene.fleet.sync(Policy(), 1, 5.0)
    scene.end()


@pytest.mark.parametrize("error", [InfraError("policy died during snapshot"), ConfigError("the weights do not fit")])
async def test_a_sync_that_failed_while_all_replicas_live_is_not_repeated(error):
    scene = Scene(2)

    async def refuse(*_, timeout):
        raise error

    scene.engines[0].call = refuse
    with pytest.raises(type(error), match=str(error)):
        await scene.fleet.sync(Policy(), 1, 5.0)
    assert len(scene.fleet.engines) == 2
    scene.end()
