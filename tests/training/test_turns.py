"""Engine and policy on one GPU, as a machine with memory to count: what is there together, in every moment of a run."""

import asyncio

import pytest

from gymloop.config.placement import Placement, Share
from gymloop.errors import InfraError
from gymloop.training.turns import Turns

SHARES = (Share("policy", 0, 0.5), Share("engine", 0, 0.5))
SHARED = Placement("GPU", (1,), (0,), True, 1, 1, 1, SHARES)
SPLIT = Placement("GPU", (1, 1), (0, 0), False, 1, 1, 1, (Share("policy", 0, 1.0), Share("engine", 1, 1.0)))
CPU = Placement("CPU", (1,), (0,), True, 1, 0, 0, SHARES)


class Gpu:
    """What is on it; fails the moment that the KV cache and the policy are there together."""

    def __init__(self):
        self.held = {"engine weights", "KV cache"}  # as an engine is that has just loaded
        self.log = []

    def change(self, what, *, add=(), drop=()):
        self.log.append(what)
        self.held = (self.held | set(add)) - set(drop)
        assert not {"KV cache", "policy"} <= self.held, f"after {self.log}"


class Engine:
    name = "engine"

    def __init__(self, gpu):
        self.gpu = gpu

    async def call(self, method, *args, timeout):
        assert timeout == 7.0
        await asyncio.sleep(0)
        if method == "sleep":
            assert args == (2,)
            self.gpu.change("sleep", drop=("engine weights", "KV cache"))
        elif method == "wake_up":
            (tags,) = args
            names = {"weights": "engine weights", "kv_cache": "KV cache"}
            self.gpu.change(f"wake {','.join(tags)}", add=[names[tag] for tag in tags])
        else:
            raise AssertionError(method)


class Policy:
    name = "policy"

    def __init__(self, gpu):
        self.gpu = gpu

    async def call(self, method, *args, timeout):
        await asyncio.sleep(0)
        assert not args
        if method == "to_device":
            self.gpu.change("policy on", add=("policy",))
        else:
            assert method == "to_host"
            self.gpu.change("policy off", drop=("policy",))


async def test_the_order_around_updates_and_syncs_never_has_kv_cache_and_policy_there_together():
    gpu = Gpu()
    engines, policy = [Engine(gpu)], Policy(gpu)
    turns = Turns(SHARED, policy, 7.0)
    for _ in range(3):  # the first sync of the startup, then two steps
        await turns.before_update(engines)
        assert gpu.held == {"policy"}, "the update has the GPU to itself"
        await turns.before_sync(engines)
        assert gpu.held == {"policy", "engine weights"}, "weights can go from one to the other on the device"
        gpu.log.append("sync")
        await turns.after_sync(engines)
        assert gpu.held == {"engine weights", "KV cache"}, "rollouts have the GPU to themselves"
    once = ["sleep", "policy on", "wake weights", "sync", "policy off", "wake kv_cache"]
    assert gpu.log == once * 3


@pytest.mark.parametrize("placement", [SPLIT, CPU])
async def test_where_nothing_is_shared_nobody_moves(placement):
    gpu = Gpu()
    turns = Turns(placement, Policy(gpu), 7.0)
    for take in (turns.before_update, turns.before_sync, turns.after_sync):
        await take([Engine(gpu)])
    assert gpu.log == []


async def test_all_engines_move_at_once_and_the_policy_only_after_the_last_of_them():
    gpu, moving = Gpu(), []

    class Slow(Engine):
        async def call(self, method, *args, timeout):
            moving.append(self)
            while len(moving) < 2:  # noqa: ASYNC110
                await asyncio.sleep(0)
            await asyncio.sleep(0.05 if self is moving[0] else 0)
            await super().call(method, *args, timeout=timeout)

    await Turns(SHARED, Policy(gpu), 7.0).before_update([Slow(gpu), Slow(gpu)])
    assert gpu.log == ["sleep", "sleep", "policy on"]


async def test_an_engine_that_dies_on_its_way_ends_the_order_under_its_name():
    gpu = Gpu()

    class Dying(Engine):
        async def call(self, method, *args, timeout):
            raise InfraError("engine died during sleep")

    with pytest.raises(InfraError, match="engine died during sleep"):
        await Turns(SHARED, Policy(gpu), 7.0).before_update([Dying(gpu)])
    assert gpu.log == [], "the policy does not move onto a GPU that nobody left"
