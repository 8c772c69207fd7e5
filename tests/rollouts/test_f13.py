"""F13: a party that misbehaves costs its own rollouts, never the step, and never becomes a reward.

The first half has a real HTTP server for the model that answers 500, 429, HTML, half a body or nothing; the same faults
of an environment in this process are in ``test_collector``.
"""

import asyncio
import time
from collections import Counter

import pytest

from gymloop.algorithms.step import prepare_batch
from gymloop.config.schema import Grpo, Loss, Rollouts
from gymloop.gym import Environment
from gymloop.gym.session import InProcessSource
from gymloop.rollouts.collector import Collector, RolloutTask
from gymloop.rollouts.refill import gather_step
from gymloop.rollouts.trajectory import as_record

from .misbehaving import misbehaving, prompt_row

CALL_S = 2.0
GRPO = Grpo(
    num_prompts_per_step=2,
    num_generations_per_prompt=4,
    max_num_steps=9,
    use_leave_one_out_baseline=False,
    normalize_rewards=False,
)
LIMITS = Rollouts(call_timeout_s=CALL_S, deadline_s=3 * CALL_S, max_infra_attempts=3)


class Counting(Environment):
    """Reward as the row says; logs what every session did, by prompt."""

    def __init__(self, log):
        self.log = log

    def _note(self, what):
        self.log.setdefault(self.row["responses_create_params"]["input"][0]["content"], []).append(what)

    async def seed(self, row):
        self._note("seed")
        await asyncio.sleep(row.get("slow_seed", 0.0))

    def verify(self, response):
        self._note("verify")
        return self.row["reward"]

    def close(self):
        self._note("close")


def eight(step):
    """Two groups of four, a fault each."""
    rows = {
        "x": [("fine", 1.0), ("500-once", 0.0), ("always-500", 1.0), ("never-answers", 1.0)],
        "y": [("cuts-the-body", 1.0), ("html", 1.0), ("slow-seed", 1.0), ("429-once", 1.0)],
    }
    return [
        RolloutTask(
            f"{group}-{step}",
            sample,
            prompt_row(
                f"{fault} {step}", "counting", reward=reward, slow_seed=0.2 * CALL_S if fault == "slow-seed" else 0.0
            ),
        )
        for group, members in rows.items()
        for sample, (fault, reward) in enumerate(members)
    ]


async def test_f13_a_misbehaving_server_costs_its_own_rollouts_in_every_step():
    log = {}
    async with misbehaving(call_timeout_s=CALL_S) as (server, client):
        source = InProcessSource("counting", Counting, {"log": log})
        collector = Collector({"counting": source}, client, LIMITS, max_turns=2, max_tokens=8)
        failed = []
        for step in (1, 2):
            began = time.monotonic()
            groups = await collector.gather(eight(step))
            assert time.monotonic() - began <= 3 * CALL_S + 10
            x, y = groups
            assert [(t.sample_id, t.reward, t.attempt) for t in x.trajectories] == [(0, 1.0, 0), (1, 0.0, 1)]
            assert [(t.sample_id, t.reward, t.attempt) for t in y.trajectories] == [(2, 1.0, 0), (3, 1.0, 0)]
            records = {f"{f.group_id[0]}{f.sample_id}": as_record(f) for f in x.failures + y.failures}
            assert {name: record["cause"] for name, record in records.items()} == {
                "x2": "server_error",
                "x3": "timeout",
                "y0": "disconnect",
                "y1": "bad_reply",
            }
            for record in records.values():
                assert (record["failure"], record["attempt"]) == ("infra", 2)
                assert record["where"] == f"model {client.url}", "party and route"
                assert "reward" not in record

            prepared = prepare_batch(groups, GRPO, Loss(), LIMITS)
            failed.append(prepared.metrics["rollouts/failed"])
            assert prepared.metrics["failures/infra"] == 4
            assert prepared.metrics["failures/attempts"] == 4 * 3 + 1
            assert prepared.metrics["reward/mean"] == 0.75, "failures are in no mean"
            assert prepared.metrics["signal/zero_groups"] == 1
            assert {(s.group_id[0], s.sample_id): float(s.advantages[0]) for s in prepared.batch.sequences} == {
                ("x", 0): 0.5,  # with failures as reward 0: 0.75 and -0.25
                ("x", 1): -0.5,
                ("y", 2): 0.0,
                ("y", 3): 0.0,
            }

        # A third step in which all eight fail: nothing is trained, and the sentence has the server.
        all_bad = [("x", "always-500"), ("x", "never-answers"), ("x", "html"), ("x", "cuts-the-body")]
        all_bad += [("y", fault) for _, fault in all_bad]
        tasks = [
            RolloutTask(f"{group}-3", index % 4, prompt_row(f"{fault} 3{group}", "counting", reward=1.0))
            for index, (group, fault) in enumerate(all_bad)
        ]
        prepared = prepare_batch(await collector.gather(tasks), GRPO, Loss(), LIMITS)
        failed.append(prepared.metrics["rollouts/failed"])
        assert failed == [4, 4, 8]
        assert prepared.batch.sequences == ()
        assert "all 2 groups were dropped; group 'x-3': 0 finished rollouts of" in prepared.empty_reason
        assert f"failed: 4 infra; first: {client.url}: 500" in prepared.empty_reason

    # A retry is a new session; every session is verified once at most and closed; nothing is asked twice in one.
    assert log["500-once 1"] == ["seed", "close", "seed", "verify", "close"]
    assert log["always-500 1"] == ["seed", "close"] * 3
    assert log["fine 1"] == log["429-once 1"] == log["slow-seed 1"] == ["seed", "verify", "close"]
    assert server.calls["429-once 1"] == 2, "busy is asked again in the same session: nothing was sampled"
    assert server.calls["html 1"] == server.calls["never-answers 1"] == 3
    for entries in log.values():
        assert Counter(entries)["seed"] == Counter(entries)["close"]
        assert Counter(entries)["verify"] <= 1


async def test_f13_a_server_that_stays_busy_is_a_failure_of_its_own_kind():
    limits = LIMITS.model_copy(update={"max_infra_attempts": 1})
    async with misbehaving(call_timeout_s=CALL_S, ready_timeout_s=0.5) as (_, client):
        source = InProcessSource("counting", Counting, {"log": {}})
        collector = Collector({"counting": source}, client, limits, max_turns=2, max_tokens=8)
        (group,) = await collector.gather([RolloutTask("a", 0, prompt_row("429-for-ever", "counting", reward=1.0))])
    (failure,) = group.failures
    assert failure.cause == "busy"
    assert "still 429 after 0.5 s" in failure.reason


class Hostile(Environment):
    """Its tools misbehave: what a page said can become neither a tool's result nor a reward where it is not text."""

    async def verify(self, response):
        return "<html>reward 1</html>"


async def test_f13_a_verdict_that_is_text_is_no_reward():
    limits = LIMITS.model_copy(update={"max_infra_attempts": 2})
    async with misbehaving(call_timeout_s=CALL_S) as (_, client):
        collector = Collector(
            {"hostile": InProcessSource("hostile", Hostile)}, client, limits, max_turns=2, max_tokens=8
        )
        (group,) = await collector.gather([RolloutTask("a", 0, prompt_row("fine", "hostile"))])
    (failure,) = group.failures
    assert (failure.cause, failure.where, failure.attempt) == ("bad_reply", "environment hostile, verify", 1)


@pytest.mark.parametrize(("limit", "ends"), [(3, True), (4, False)])
async def test_f13_the_budget_of_a_step_ends_it_with_the_servers_name(limit, ends):
    limits = LIMITS.model_copy(update={"max_failed_rollouts_per_step": limit})
    async with misbehaving(call_timeout_s=CALL_S) as (_, client):
        source = InProcessSource("counting", Counting, {"log": {}})
        collector = Collector({"counting": source}, client, limits, max_turns=2, max_tokens=8)
        prompts = [
            ("a", prompt_row("always-500", "counting", reward=1.0)),
            ("b", prompt_row("fine", "counting", reward=1.0)),
        ]
        work = gather_step(collector, prompts, lambda count: [], 4, "step 7")
        if not ends:
            assert [len(group.failures) for group in (await work).groups] == [4, 0]
            return
        with pytest.raises(Exception, match=r"step 7: 4 rollouts failed for good, .* = 3; worst: model http") as caught:
            await work
    assert type(caught.value).__name__ == "InfraError"
    assert "with 4 (4 server_error)" in str(caught.value)
