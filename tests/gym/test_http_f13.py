"""F13 with an environment server over HTTP: each fault costs its own rollouts, and none becomes a reward."""

import time
from collections import Counter

import pytest

from gymloop.algorithms.step import prepare_batch
from gymloop.config.schema import Grpo, Loss, Rollouts
from gymloop.errors import InfraError
from gymloop.gym.gymnasium import Gymnasium
from gymloop.gym.http import HttpServer
from gymloop.gym.http_source import HttpSource
from gymloop.rollouts import collector as collector_module
from gymloop.rollouts.collector import Collector, RolloutTask
from gymloop.rollouts.refill import gather_step
from gymloop.rollouts.trajectory import as_record

from .misbehaving import misbehaving
from .scripted import ScriptedModel, serving

CALL_S = 2.0
LIMITS = Rollouts(call_timeout_s=CALL_S, deadline_s=3 * CALL_S, max_infra_attempts=3)
GRPO = Grpo(
    num_prompts_per_step=2,
    num_generations_per_prompt=4,
    max_num_steps=9,
    use_leave_one_out_baseline=False,
    normalize_rewards=False,
)
CALL = '<tool_call>\n{"name": "wx", "arguments": {"city": "Oslo"}}\n</tool_call>'
EIGHT = {
    "x0": ("", 1.0),
    "x1": ("once verify says 500", 0.0),
    "x2": ("verify says 500", 1.0),
    "x3": ("verify hangs", 1.0),
    "y0": ("verify cuts", 1.0),
    "y1": ("verify html", 1.0),
    "y2": (f"seed is-slow {0.2 * CALL_S}", 1.0),
    "y3": ("once verify busy 0.3", 1.0),
}


@pytest.fixture(autouse=True)
def quick_retries(monkeypatch):
    monkeypatch.setattr(collector_module, "backoff_s", lambda attempt, key: 0.01)


@pytest.fixture(scope="module")
def server():
    with misbehaving() as process:
        yield process


def row(name, fault, reward=1.0, agent="env", **fields):
    tools = [{"type": "function", "name": "wx", "parameters": {"type": "object", "properties": {}}}]
    return {
        "responses_create_params": {"input": [{"role": "user", "content": "hi"}], "tools": tools},
        "agent_ref": {"type": "responses_api_agents", "name": agent},
        "name": name,
        "fault": fault,
        "reward": reward,
        **fields,
    }


def tasks(step, faults):
    return [
        RolloutTask(f"{name[0]}-{step}", int(name[1]), row(f"{name} {step}", fault, reward))
        for name, (fault, reward) in faults.items()
    ]


async def test_f13_each_fault_of_an_environment_server_costs_its_own_rollouts(server):
    failed = []
    model = ScriptedModel({"hi": [CALL, "end"]})
    async with serving(model) as client, HttpSource("env", server.url, call_timeout_s=CALL_S) as source:
        collector = Collector({"env": source}, client, LIMITS, max_turns=3, max_tokens=8)
        for step in (1, 2):
            began = time.monotonic()
            groups = await collector.gather(tasks(step, EIGHT))
            assert time.monotonic() - began <= 3 * CALL_S * 3 + 10
            x, y = groups
            assert [(t.sample_id, t.reward, t.attempt) for t in x.trajectories] == [(0, 1.0, 0), (1, 0.0, 1)]
            assert [(t.sample_id, t.reward, t.attempt) for t in y.trajectories] == [(2, 1.0, 0), (3, 1.0, 0)]
            records = {f"{f.group_id[0]}{f.sample_id}": as_record(f) for f in x.failures + y.failures}
            causes = {name: record["cause"] for name, record in records.items()}
            assert causes == {"x2": "server_error", "x3": "timeout", "y0": "disconnect", "y1": "bad_reply"}
            for record in records.values():
                assert (record["failure"], record["where"]) == ("infra", "environment env, verify")
                assert f"{server.url}/verify" in record["reason"] or "no answer within" in record["reason"]
                assert "reward" not in record
            prepared = prepare_batch(groups, GRPO, Loss(), LIMITS)
            failed.append(prepared.metrics["rollouts/failed"])
            advantages = {(s.group_id[0], s.sample_id): float(s.advantages[0]) for s in prepared.batch.sequences}
            assert advantages == {("x", 0): 0.5, ("x", 1): -0.5, ("y", 2): 0.0, ("y", 3): 0.0}
        bad = {name: (EIGHT[kind][0], 1.0) for name, kind in zip(EIGHT, ["x2", "x3", "y0", "y1"] * 2, strict=True)}
        prepared = prepare_batch(await collector.gather(tasks(3, bad)), GRPO, Loss(), LIMITS)
        failed.append(prepared.metrics["rollouts/failed"])
        assert prepared.batch.sequences == (), "nothing is trained"
        assert f"{server.url}/verify" in prepared.empty_reason
    assert failed == [4, 4, 8]

    log = server.log()
    assert log["x0 1"] == log["y2 1"] == ["seed", "tool", "verify", "close"]
    assert log["x1 1"] == ["seed", "tool", "verify", "close"] * 2, "a retried rollout is a new session"
    assert log["x2 1"] == ["seed", "tool", "verify", "close"] * 3
    assert log["y3 1"] == ["seed", "tool", "verify", "verify", "close"], "429: it was not taken on"
    for name, did in log.items():
        assert did.count("tool") == did.count("seed"), f"{name}: one call per session"
    said = [item for request in model.requests for item in request["messages"] if item["role"] == "tool"]
    assert said, "the tool's results reached the model"
    assert not any("log in" in message["content"] for message in said)


@pytest.mark.parametrize("fault", ["tool html", "tool hangs", "tool cuts", "tool says 500", "tool busy 30"])
async def test_f13_a_tool_that_fails_ends_the_attempt_and_nothing_of_it_reaches_the_model(server, fault):
    model = ScriptedModel({"hi": [CALL, "end"]})
    name = f"f13 {fault}"
    async with serving(model) as client, HttpSource("env", server.url, call_timeout_s=1.5) as source:
        collector = Collector({"env": source}, client, LIMITS, max_turns=3, max_tokens=8)
        (group,) = await collector.gather([RolloutTask("a", 0, row(name, fault))])
    (failure,) = group.failures
    assert (failure.kind, failure.where, failure.attempt) == ("infra", "environment env, wx", 2)
    assert server.log()[name] == ["seed", "tool", "close"] * 3
    assert Counter(len(request["messages"]) for request in model.requests) == {1: 3}


async def test_f13_a_server_that_dies_ends_the_step_by_name_within_seconds():
    limits = LIMITS.model_copy(update={"max_failed_rollouts_per_step": 1, "call_timeout_s": 20.0, "deadline_s": 20.0})
    with misbehaving() as own:
        model = ScriptedModel({"hi": [CALL, "end"]})
        async with (
            serving(model) as client,
            HttpSource("env", own.url, call_timeout_s=20.0, refused_s=0.5) as source,
        ):
            collector = Collector({"env": source}, client, limits, max_turns=3, max_tokens=8)
            prompts = [("a", row("dies", "tool dies")), ("b", row("others", ""))]
            began = time.monotonic()
            with pytest.raises(InfraError, match="worst: environment env with 2 ") as caught:
                await gather_step(collector, prompts, lambda count: [], 4, "step 1")
            assert time.monotonic() - began < 10
    assert own.url in str(caught.value)


async def test_f13_the_gymnasium_agent_is_picked_by_name_and_fails_alike(server):
    model = ScriptedModel({"hi": ["hit", "stand"]})
    async with (
        serving(model) as client,
        HttpServer(server.url, call_timeout_s=CALL_S) as http,
        HttpSource("env", server.url, call_timeout_s=CALL_S) as source,
    ):
        agents = {"env": source, "game": Gymnasium("game", http)}
        collector = Collector(agents, client, LIMITS, max_turns=3, max_tokens=8)
        rows = [row("game 1", "", agent="game"), row("game 2", "once step says 500", agent="game"), row("game 3", "")]
        rows.append(row("game 4", "step html", agent="game"))
        (group,) = await collector.gather([RolloutTask("a", index, task) for index, task in enumerate(rows)])
    assert [(t.sample_id, t.reward, t.attempt) for t in group.trajectories] == [(0, 1.0, 0), (1, 1.0, 1), (2, 1.0, 0)]
    (failure,) = group.failures
    assert (failure.cause, failure.where) == ("bad_reply", "environment game, step")
    assert server.log()["game 4"] == ["seed", "step"] * 3
