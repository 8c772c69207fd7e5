"""A short group is skipped or made up for from the next prompts, by rounds and never by arrival."""

import asyncio
import random

import pytest

from gymloop.config.schema import Rollouts
from gymloop.errors import InfraError
from gymloop.gym import Environment
from gymloop.gym.loader import GroupLoader
from gymloop.gym.session import InProcessSource
from gymloop.rollouts import collector as module
from gymloop.rollouts.collector import Collector
from gymloop.rollouts.refill import further, gather_step
from gymloop.rollouts.trajectory import Failure, Group, Trajectory

from ..gym.scripted import ScriptedModel, row, serving


class Brittle(Environment):
    """Rows marked so fail in all but one of their rollouts, or in all; each takes a random while."""

    def __init__(self, rng, seen):
        self.chance, self.seen = rng, seen

    async def seed(self, row):
        self.seen.append(row["id"])
        made = self.seen.count(row["id"])
        await asyncio.sleep(self.chance.random() * 0.02)
        if row["bad"] and made > row["good"]:
            raise RuntimeError("boom")

    def verify(self, response):
        return 1.0


def rows(bad, good=1):
    return [{**row("p", [], "brittle"), "id": index, "bad": index in bad, "good": good} for index in range(6)]


async def step(bad, *, arrival=0, prompts=2, good=1, steps=1, **limits):
    """Run steps; returns the last one, the loader, and which rows were asked for, in order."""
    seen = []
    source = InProcessSource("brittle", Brittle, {"rng": random.Random(arrival), "seen": seen})
    limits = Rollouts(**{"max_infra_attempts": 1, "on_short_group": "refill", "max_concurrency": 8, **limits})
    loader = GroupLoader(rows(bad, good), prompts_per_step=prompts, seed=0, shuffle=False, epochs=2)
    async with serving(ScriptedModel({"p": ["end"]})) as client:
        collector = Collector({"brittle": source}, client, limits, max_turns=1, max_tokens=8)
        for _ in range(steps):
            result = await gather_step(collector, next(loader), loader.take, 3, "step 1")
    return result, loader, list(dict.fromkeys(seen))


def names(groups):
    return [group.group_id for group in groups]


async def test_without_short_groups_nothing_is_taken():
    result, loader, seen = await step(bad=())
    assert (names(result.groups), result.refilled) == (["e0-r00000", "e0-r00001"], 0)
    assert seen == [0, 1]
    assert names_of(next(loader)) == ["e0-r00002", "e0-r00003"]


async def test_skip_takes_nothing_whatever_fails():
    result, _, seen = await step(bad={0, 1}, on_short_group="skip")
    assert (result.refilled, seen) == (0, [0, 1])
    assert [len(group.failures) for group in result.groups] == [2, 2]


async def test_a_short_group_is_made_up_for_by_the_next_prompt_and_stays_on_record():
    result, loader, seen = await step(bad={1})
    assert names(result.groups) == ["e0-r00000", "e0-r00001", "e0-r00002"]
    assert [len(group.trajectories) for group in result.groups] == [3, 1, 3]
    assert (result.refilled, seen) == (1, [0, 1, 2])
    assert names_of(next(loader)) == ["e0-r00003", "e0-r00004"], "no prompt is lost, none comes twice"


async def test_a_further_prompt_that_is_short_too_is_made_up_for_within_the_bound():
    result, _, seen = await step(bad={1, 2})
    assert (result.refilled, seen) == (2, [0, 1, 2, 3])
    assert [len(group.trajectories) for group in result.groups] == [3, 1, 1, 3]


async def test_a_step_takes_at_most_twice_its_prompts():
    result, loader, seen = await step(bad=set(range(6)), good=0)
    assert (result.refilled, seen) == (2, [0, 1, 2, 3])
    assert all(len(group.failures) == 3 for group in result.groups)
    assert names_of(next(loader)) == ["e0-r00004", "e0-r00005"]


async def test_a_group_with_enough_left_is_not_short():
    result, _, _ = await step(bad={0, 1}, good=2)
    assert result.refilled == 0


async def test_the_order_of_arrival_decides_nothing():
    first = await step(bad={1, 2}, arrival=1)
    for arrival in range(2, 6):
        other = await step(bad={1, 2}, arrival=arrival)
        assert names(other[0].groups) == names(first[0].groups)
        assert other[1].state_dict() == first[1].state_dict()


async def test_refills_reach_into_the_next_epoch_and_no_group_id_comes_twice():
    result, loader, _ = await step(bad={0, 5}, steps=3)
    assert names(result.groups) == ["e0-r00005", "e1-r00000", "e1-r00001", "e1-r00002"]
    assert names_of(next(loader)) == ["e1-r00003", "e1-r00004"]


async def test_the_budget_counts_over_all_rounds_and_ends_the_step_at_once(monkeypatch):
    monkeypatch.setattr(module, "backoff_s", lambda attempt, key: 0.01)
    with pytest.raises(InfraError, match=r"step 1: 4 rollouts failed for good, .* = 3; worst: environment brittle"):
        await step(bad={1, 2}, good=1, max_failed_rollouts_per_step=3)


async def test_progress_counts_rollouts_over_all_rounds():
    shown = []
    source = InProcessSource("brittle", Brittle, {"rng": random.Random(0), "seen": []})
    limits = Rollouts(max_infra_attempts=1, on_short_group="refill")
    loader = GroupLoader(rows({0}), prompts_per_step=1, seed=0, shuffle=False, epochs=1)
    async with serving(ScriptedModel({"p": ["end"]})) as client:
        collector = Collector({"brittle": source}, client, limits, max_turns=1, max_tokens=8)
        await gather_step(collector, next(loader), loader.take, 3, "s", lambda *shows: shown.append(shows))
    assert shown == [(1, 3), (2, 3), (3, 3), (4, 6), (5, 6), (6, 6)]


def names_of(prompts):
    return [name for name, _ in prompts]


def test_further_prompts_are_as_many_as_are_short_and_may_be_taken():
    short = Group("a", (Trajectory("a", 0, 0, (), 1.0),), (Failure("a", 1, 0, "data", "r", "w"),))
    whole = Group("b", tuple(Trajectory("b", sample, 0, (), 1.0) for sample in range(2)))
    refill = Rollouts(on_short_group="refill")
    assert further([short, whole, short], refill, 5) == 2
    assert further([short, whole, short], refill, 1) == 1
    assert further([short], refill, 0) == 0
    assert further([short], Rollouts(), 5) == 0
