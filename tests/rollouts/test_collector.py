"""Rollouts to their end: retries in new sessions, typed failures without reward, order by id (F13, A13, A14, A15)."""

import asyncio
import contextlib
import itertools
import math
import random
import sys
import time

import pytest

from gymloop.config.schema import Rollouts
from gymloop.errors import ConfigError, DataError, GymloopError
from gymloop.gym import Environment, Verdict
from gymloop.gym.session import InProcessSource
from gymloop.gym.tools import ToolError
from gymloop.rollouts import collector as module
from gymloop.rollouts.collector import Collector, RolloutTask, assemble_groups, expand
from gymloop.rollouts.trajectory import Failure, Trajectory

from ..gym.scripted import Say, ScriptedModel, Weather, call_text, row, serving

GOOD = call_text('{"city": "Oslo"}')


@pytest.fixture(autouse=True)
def quick_retries(monkeypatch):
    monkeypatch.setattr(module, "backoff_s", lambda attempt, key: 0.01)


class Flaky(Environment):
    """Behaves as its row says, which names faults per method and how often they happen; keeps counts by prompt."""

    def __init__(self, log):
        self.log = log

    def _fault(self, method):
        prompt = self.row["responses_create_params"]["input"][0]["content"]
        self.log.setdefault(prompt, []).append(method)
        fault, times = self.row.get(method, (None, 0))
        return fault if self.log[prompt].count(method) <= times else None

    async def seed(self, row):
        await self._act(self._fault("seed"))

    async def verify(self, response):
        fault = self._fault("verify")
        await self._act(fault)
        if fault == "nan":
            return math.nan
        if fault == "bool":
            return True
        if fault == "parts":
            return Verdict(1.0, {"a": 0.4, "b": 0.5})
        return float(self.row.get("reward", 1.0))

    def close(self):
        self._fault("close")

    async def _act(self, fault):
        if fault == "raise":
            raise RuntimeError("boom")
        if fault == "hang":
            await asyncio.sleep(60)
        if fault == "data":
            raise DataError("row has no answer")
        if fault == "config":
            raise ConfigError("no such judge")
        if fault == "slow":
            await asyncio.sleep(0.2)


def flaky(prompt: str, **fields) -> dict:
    return {**row(prompt, [], "flaky"), **fields}


@contextlib.asynccontextmanager
async def collecting(scripts, *, call_timeout_s=1.5, deadline_s=5.0, max_concurrency=8, attempts=3, **options):
    sources = {
        "flaky": InProcessSource("flaky", Flaky, {"log": {}}),
        "weather": InProcessSource("weather", Weather, {"log": []}),
    }
    model = ScriptedModel(scripts)
    limits = Rollouts(
        call_timeout_s=call_timeout_s,
        deadline_s=deadline_s,
        max_concurrency=max_concurrency,
        max_infra_attempts=attempts,
    )
    async with serving(model) as client:
        yield Collector(sources, client, limits, **{"max_turns": 4, "max_tokens": 64, **options}), model


def log_of(collector: Collector, name: str):
    """What the environment's sessions did: by prompt for ``flaky``, in order for ``weather``."""
    return collector.sources[name].kwargs["log"]


def weather_row(prompt: str) -> dict:
    return row(prompt, InProcessSource("weather", Weather).tools, "weather")


async def test_a_group_of_good_rollouts():
    async with collecting({"p": [GOOD, "end"]}) as (collector, _):
        groups = await collector.gather(expand([("e0-r00000", weather_row("p"))], 3))
    (group,) = groups
    assert [t.sample_id for t in group.trajectories] == [0, 1, 2]
    first = group.trajectories[0]
    assert (first.reward, first.components, first.tool_calls, first.attempt) == (1.0, {"seen": 1.0}, 1, 0)
    assert len(first.turns) == 2
    assert first.output[-1]["type"] == "message"
    assert first.seconds > 0


async def test_f13_one_flaky_environment_costs_only_its_own_rollouts():
    """F13 with the faults that an in-process environment can have: X group and Y group, four rollouts each."""
    rows = {
        ("x", 0): flaky("X0", reward=1.0),
        ("x", 1): flaky("X1", verify=("raise", 1), reward=0.0),
        ("x", 2): flaky("X2", verify=("raise", 99)),
        ("x", 3): flaky("X3", verify=("hang", 99)),
        ("y", 0): flaky("Y0", verify=("nan", 99)),
        ("y", 1): flaky("Y1", verify=("parts", 99)),
        ("y", 2): flaky("Y2", seed=("slow", 1)),
        ("y", 3): flaky("Y3", verify=("bool", 1)),
    }
    tasks = [RolloutTask(group, sample, value) for (group, sample), value in rows.items()]
    seen = []
    start = time.monotonic()
    async with collecting({f"{group}{sample}": ["end"] for group in "XY" for sample in range(4)}) as (collector, _):
        groups = await collector.gather(tasks, on_rollout=lambda rollout, done: seen.append(done))
        log = log_of(collector, "flaky")
    assert time.monotonic() - start < 15
    assert seen == list(range(1, 9))

    x, y = groups
    assert (x.group_id, y.group_id) == ("x", "y")
    assert [(t.sample_id, t.reward, t.attempt) for t in x.trajectories] == [(0, 1.0, 0), (1, 0.0, 1)]
    assert [(t.sample_id, t.reward, t.attempt) for t in y.trajectories] == [(2, 1.0, 0), (3, 1.0, 1)]
    failures = {(f.group_id, f.sample_id): f for f in x.failures + y.failures}
    assert {f.kind for f in failures.values()} == {"infra"}
    assert {f.where for f in failures.values()} == {"environment flaky, verify"}
    assert {f.attempt for f in failures.values()} == {2}
    causes = {f"{group}{sample}": f.cause for (group, sample), f in failures.items()}
    assert causes == {"x2": "raised", "x3": "timeout", "y0": "bad_reply", "y1": "bad_reply"}
    assert not any(hasattr(f, "reward") for f in failures.values())
    assert "RuntimeError: boom" in failures["x", 2].reason
    assert "no answer within 1.5 s" in failures["x", 3].reason
    assert "returned nan" in failures["y", 0].reason
    assert "components sum to 0.9" in failures["y", 1].reason
    # A retry is a new session, every session is verified once at most, and every session is closed.
    assert log["X1"] == ["seed", "verify", "close"] * 2
    assert log["X2"] == ["seed", "verify", "close"] * 3
    assert log["X3"] == ["seed", "verify", "close"] * 3
    assert log["X0"] == ["seed", "verify", "close"]


async def test_f13_when_every_rollout_fails_the_groups_hold_only_failures():
    tasks = expand([("a", flaky("p", seed=("raise", 99)))], 4)
    async with collecting({"p": ["end"]}) as (collector, _):
        (group,) = await collector.gather(tasks)
    assert group.trajectories == ()
    assert [f.sample_id for f in group.failures] == [0, 1, 2, 3]
    assert all(f.where == "environment flaky, seed_session" for f in group.failures)


async def test_a13_a_bad_row_costs_itself_and_is_not_retried():
    async with collecting({"p": ["end"]}) as (collector, _):
        (group,) = await collector.gather(expand([("a", flaky("p", verify=("data", 99)))], 1))
        log = log_of(collector, "flaky")
    (failure,) = group.failures
    assert (failure.kind, failure.reason, failure.attempt) == ("data", "row has no answer", 0)
    assert failure.party == "environment flaky"
    assert log["p"] == ["seed", "verify", "close"]


async def test_a_config_error_stops_everything_and_closes_every_session():
    tasks = [
        RolloutTask("a", 0, flaky("bad", verify=("config", 99))),
        RolloutTask("a", 1, flaky("waits", verify=("hang", 99))),
    ]
    async with collecting({"bad": [Say("end", delay=0.1)], "waits": ["end"]}, call_timeout_s=30) as (collector, _):
        start = time.monotonic()
        with pytest.raises(ConfigError, match="no such judge"):
            await collector.gather(tasks)
        assert time.monotonic() - start < 3
        assert log_of(collector, "flaky")["waits"] == ["seed", "verify", "close"]


async def test_a_programming_error_is_raised_not_recorded():
    class Buggy:
        name = "flaky"

        async def seed_session(self, row):
            return 1 / 0

    async with collecting({"p": ["end"]}) as (collector, _):
        collector.sources["flaky"] = Buggy()
        with pytest.raises(ZeroDivisionError):
            await collector.gather(expand([("a", flaky("p"))], 2))


async def test_a_model_that_is_not_there_stops_the_run():
    scripts = {"p": [Say(status=404, raw=b'{"error": {"code": "model_not_found", "message": "no toy"}}')]}
    async with collecting(scripts) as (collector, _):
        with pytest.raises(ConfigError, match="404 model_not_found: no toy"):
            await collector.gather(expand([("a", weather_row("p"))], 2))


async def test_a_model_failure_is_retried_from_a_new_session():
    scripts = {"p": {0: [GOOD], 1: [Say(status=500, raw=b'{"error": "engine died"}'), "end"]}}
    async with collecting(scripts) as (collector, _):
        (group,) = await collector.gather(expand([("a", weather_row("p"))], 1))
        log = log_of(collector, "weather")
    (trajectory,) = group.trajectories
    assert trajectory.attempt == 1
    assert len(trajectory.turns) == 2  # nothing of the first attempt remains
    assert [entry[0] for entry in log] == ["seed", "wx", "close", "seed", "wx", "verify", "close"]


async def test_a13_a_dead_model_is_named_by_its_url():
    scripts = {"p": [Say(status=500, raw=b'{"error": "engine died"}')]}
    async with collecting(scripts) as (collector, _):
        (group,) = await collector.gather(expand([("a", weather_row("p"))], 1))
        assert group.failures[0].where == f"model {collector.model.url}"
    assert "500: engine died" in group.failures[0].reason


async def test_the_deadline_of_an_attempt_says_what_was_waited_for():
    scripts = {"p": [Say(GOOD, delay=0.1)] * 50}
    async with collecting(scripts, deadline_s=0.35, attempts=1, max_turns=50) as (collector, _):
        (group,) = await collector.gather(expand([("a", weather_row("p"))], 1))
        log = log_of(collector, "weather")
    (failure,) = group.failures
    assert failure.reason == "rollout: no answer within 0.35 s"
    assert failure.where.startswith("model http://127.0.0.1:")
    assert log[-1] == ("close",)


async def test_concurrency_is_bounded_and_used():
    scripts = {"p": [Say("end", delay=0.05)]}
    async with collecting(scripts, max_concurrency=3) as (collector, model):
        await collector.gather(expand([("a", weather_row("p")), ("b", weather_row("p"))], 6))
    assert model.most_in_flight == 3


async def test_a14_records_come_as_they_finish():
    scripts = {"slow": [Say("end", delay=1.0)], "fast": ["end"]}
    tasks = [RolloutTask("a", 0, weather_row("slow")), RolloutTask("b", 0, weather_row("fast"))]
    async with collecting(scripts) as (collector, _):
        order = [rollout.group_id async for rollout in collector.collect(tasks)]
    assert order == ["b", "a"]


async def test_cancelling_the_collector_closes_every_session():
    scripts = {"p": [Say("end", delay=60)]}
    async with collecting(scripts) as (collector, model):
        running = asyncio.create_task(collector.gather(expand([("a", weather_row("p"))], 4)))
        while model.in_flight < 4:  # noqa: ASYNC110 - the test's own timeout bounds it
            await asyncio.sleep(0.01)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        log = log_of(collector, "weather")
    assert [entry[0] for entry in log].count("close") == 4
    assert [entry[0] for entry in log].count("seed") == 4


async def test_leaving_the_generator_cancels_the_rest():
    scripts = {"slow": [Say("end", delay=60)], "fast": ["end"]}
    tasks = [RolloutTask("a", 0, weather_row("slow")), RolloutTask("b", 0, weather_row("fast"))]
    async with collecting(scripts) as (collector, _):
        async with contextlib.aclosing(collector.collect(tasks)) as records:
            async for record in records:
                assert record.group_id == "b"
                break
        assert [entry[0] for entry in log_of(collector, "weather")].count("close") == 2


async def test_a_session_that_fails_to_close_changes_nothing(caplog):
    class Sticky(Weather):
        def close(self):
            raise OSError("stuck")

    async with collecting({"p": ["end"]}) as (collector, _):
        collector.sources["weather"] = InProcessSource("weather", Sticky)
        (group,) = await collector.gather(expand([("a", weather_row("p"))], 1))
    assert len(group.trajectories) == 1
    assert "environment weather, close: OSError: stuck" in caplog.text


async def test_a14_two_tasks_of_one_id_are_refused():
    async with collecting({}) as (collector, _):
        with pytest.raises(GymloopError, match="rollout a/0 appears 2 times"):
            await collector.gather([RolloutTask("a", 0, {}), RolloutTask("a", 0, {})])


def trajectory(group_id, sample_id, reward=0.0):
    return Trajectory(group_id, sample_id, 0, (), reward)


def test_a14_groups_are_assembled_by_id_whatever_the_arrival():
    tasks = expand([("b", {}), ("a", {})], 2)
    failure = Failure("a", 1, 2, "infra", "r", "w")
    groups = assemble_groups(tasks, [trajectory("b", 1), failure, trajectory("b", 0), trajectory("a", 0)])
    assert [group.group_id for group in groups] == ["a", "b"]
    assert [t.sample_id for t in groups[1].trajectories] == [0, 1]
    assert groups[0].failures == (failure,)


@pytest.mark.parametrize(
    ("rollouts", "said"),
    [
        ([trajectory("a", 0)], "rollout a/1 has no record"),
        ([trajectory("a", 0), trajectory("a", 1), trajectory("a", 1)], "rollout a/1 appears 2 times"),
        ([trajectory("a", 0), trajectory("a", 1), trajectory("c", 0)], "rollout c/0 was never asked for"),
    ],
)
def test_a14_missing_duplicate_and_foreign_records_are_errors(rollouts, said):
    with pytest.raises(GymloopError, match=said):
        assemble_groups(expand([("a", {})], 2), rollouts)


async def test_a14_any_order_of_completion_gives_the_same_groups():
    """Every rollout says its own name; delays make them finish in six different orders."""
    names = ["a", "b", "c"]
    for delays in itertools.permutations((0.0, 0.04, 0.08)):
        scripts = {name: [Say(f"this is {name}", delay=delay)] for name, delay in zip(names, delays, strict=True)}
        tasks = [RolloutTask(name, 7, weather_row(name)) for name in random.Random(0).sample(names, 3)]
        async with collecting(scripts) as (collector, _):
            groups = await collector.gather(tasks)
        assert [group.group_id for group in groups] == names
        for group in groups:
            (trajectory,) = group.trajectories
            assert trajectory.group_id == group.group_id
            assert trajectory.sample_id == 7
            assert trajectory.output[-1]["content"][0]["text"] == f"this is {group.group_id}"


async def test_a13_one_bad_row_of_many_leaves_the_others_as_they_are():
    scripts = {"good": ["end"], "long": [Say(status=400, raw=b'{"error": {"code": "context_length_exceeded"}}')]}
    rows = [("a", weather_row("good")), ("b", weather_row("long")), ("c", weather_row("good"))]
    async with collecting(scripts) as (collector, model):
        a, b, c = await collector.gather(expand(rows, 2))
    assert (len(a.trajectories), len(b.trajectories), len(c.trajectories)) == (2, 0, 2)
    assert {(f.kind, f.cause, f.attempt) for f in b.failures} == {("data", "too_long", 0)}
    assert len(model.requests) == 6, "a prompt that is too long is not asked for again"


@pytest.mark.parametrize(
    ("script", "max_turns", "truncated"),
    [
        (["end"], 4, False),
        ([Say("end", finish="length")], 4, True),
        ([GOOD, Say("end", finish="length")], 4, True),
        ([GOOD, GOOD, "end"], 4, False),
        ([GOOD, GOOD, "end"], 2, True),
        (["x" * 63], 4, False),  # with its end token exactly the 64 that were allowed
    ],
)
async def test_a15_truncation_is_what_the_finish_reasons_say_and_no_count_of_tokens(script, max_turns, truncated):
    async with collecting({"p": script}, max_turns=max_turns) as (collector, _):
        (group,) = await collector.gather(expand([("a", weather_row("p"))], 1))
    (trajectory,) = group.trajectories
    assert trajectory.truncated is truncated
    by_reason = any(turn.finish_reason == "length" for turn in trajectory.turns)
    assert truncated is (by_reason or max_turns == 2)


class Leaving(Environment):
    """Ends its task or its process from inside, as libraries do that were not written for this."""

    def __init__(self, how):
        self.how = how

    async def verify(self, response):
        if self.how == "cancel":
            raise asyncio.CancelledError
        if self.how == "tool error":
            raise ToolError("only a tool may say this")
        sys.exit(3)

    def close(self):
        raise ToolError("nor close")


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("cancel", "CancelledError that nobody asked for"),
        ("exit", "SystemExit: 3"),
        ("tool error", "ToolError: only a tool may say this"),
    ],
)
async def test_f13_an_environment_that_leaves_costs_its_rollout_and_not_the_step(how, said):
    async with collecting({"p": ["end"]}) as (collector, _):
        collector.sources["leaving"] = InProcessSource("leaving", Leaving, {"how": how})
        bad, good = await collector.gather(
            [RolloutTask("a", 0, row("p", [], "leaving")), RolloutTask("b", 0, weather_row("p"))]
        )
    (failure,) = bad.failures
    assert (failure.kind, failure.cause, failure.where) == ("infra", "raised", "environment leaving, verify")
    assert said in failure.reason
    assert len(good.trajectories) == 1


def test_a_failure_says_once_who_failed():
    named = Failure("a", 0, 2, "infra", "environment toy, verify: boom", "environment toy, verify")
    assert str(named) == "environment toy, verify: boom"
    assert (
        str(Failure("a", 0, 2, "data", "no answer", "environment toy, verify")) == "environment toy, verify: no answer"
    )
    assert str(Failure("a", 0, 2, "infra", "http://h/v1: 500", "model http://h/v1")) == "http://h/v1: 500"


@pytest.mark.parametrize(
    ("say", "kind", "cause", "asked"),
    [
        (Say(status=400, raw=b'{"error": {"code": "off_profile", "message": "no"}}'), "data", "refused", 1),
        (Say(status=400, raw=b'{"error": {"code": "context_length_exceeded"}}'), "data", "too_long", 1),
        (Say("end", finish="abort"), "infra", "aborted", 2),
        (Say(status=503, raw=b"{}"), "infra", "busy", 2),
        (Say(status=502, raw=b"<html>Bad Gateway</html>"), "infra", "server_error", 2),
        (Say("end", change=lambda reply: reply["choices"][0].pop("weight_versions")), "infra", "bad_reply", 2),
    ],
)
async def test_a13_what_the_model_server_did_is_the_cause_and_decides_on_another_attempt(say, kind, cause, asked):
    async with collecting({"p": [say]}, attempts=2) as (collector, model):
        (group,) = await collector.gather(expand([("a", weather_row("p"))], 1))
    (failure,) = group.failures
    assert (failure.kind, failure.cause, failure.attempt, len(model.requests)) == (kind, cause, asked - 1, asked)
    assert failure.party == failure.where == f"model {collector.model.url}"


async def test_a17_equal_prompts_stay_two_groups_and_a_groups_own_prompts_stay_one():
    """What a group is, the ids say: the same row twice is two groups, one group may hold different prompts."""
    scripts = {"same": ["end"], "other": [GOOD, "end"]}
    tasks = expand([("a", weather_row("same")), ("b", weather_row("same"))], 2)
    tasks += [RolloutTask("c", 0, weather_row("same")), RolloutTask("c", 1, weather_row("other"))]
    async with collecting(scripts) as (collector, _):
        groups = await collector.gather(tasks)
    rewards = {group.group_id: [trajectory.reward for trajectory in group.trajectories] for group in groups}
    assert rewards == {"a": [0.0, 0.0], "b": [0.0, 0.0], "c": [0.0, 1.0]}
