"""Acceptance behaviours A2, A3 and A4 at their real durations, in virtual time: five seconds, twenty minutes."""

import asyncio
import time

import pytest

import virtual_time
from gymloop.errors import ConfigError
from gymloop.startup import StartupError, Task, run_graph


def sleeper(name, seconds, needs=(), error=None, undone=None, deadline_s=600):
    async def run(context):
        await asyncio.sleep(seconds)
        if error is not None:
            raise error

    async def undo(_):
        undone.append(name)

    return Task(name, run, needs, deadline_s=deadline_s, teardown=None if undone is None else undo)


async def seconds_of(work):
    """Virtual seconds until ``work`` ended, and the StartupError it ended with, if any."""
    loop = asyncio.get_running_loop()
    began, error = loop.time(), None
    try:
        await work
    except StartupError as caught:
        error = caught
    return loop.time() - began, error


def test_a2_an_environment_of_5_s_and_an_engine_of_7_s_are_up_after_7_s():
    tasks = [sleeper("environment", 5), sleeper("engine", 7)]
    assert virtual_time.run(seconds_of(run_graph(tasks))) == (pytest.approx(7.0, abs=1e-3), None)


def test_a2_the_total_is_the_longest_chain_of_the_whole_graph_and_not_the_sum():
    tasks = [
        sleeper("socket", 0.5),
        sleeper("engine", 60, ("socket",)),
        sleeper("environment", 45, ("socket",)),
        sleeper("policy", 50),
        sleeper("data", 20),
        sleeper("weights", 3, ("engine", "policy")),
    ]
    assert virtual_time.run(seconds_of(run_graph(tasks)))[0] == pytest.approx(63.5, abs=1e-3)
    assert virtual_time.run(seconds_of(run_graph(tasks, max_parallel=1)))[0] == pytest.approx(178.5, abs=1e-3)


def test_a3_a_task_that_fails_at_200_ms_beside_one_of_30_s_is_reported_within_a_second_with_its_cause():
    undone = []
    cause = ConfigError("the port range 3000..3001 is taken")
    tasks = [
        sleeper("socket", 0.1, undone=undone),
        sleeper("engine", 0.1, ("socket",), error=cause),
        sleeper("environment", 30, undone=undone),
    ]
    seconds, error = virtual_time.run(seconds_of(run_graph(tasks)))
    assert 0.2 <= seconds <= 1.2
    assert str(error) == "startup task 'engine' failed after 0.1 s: the port range 3000..3001 is taken"
    assert (error.__cause__, error.kind) == (cause, "config")
    assert undone == ["socket"], "what was built is torn down, what was cancelled never was"


def test_a3_also_beside_a_task_that_ignores_its_cancellation():
    release = asyncio.Event()

    async def stubborn(context):
        while not release.is_set():
            try:
                await release.wait()
            except asyncio.CancelledError:
                context.progress("still not listening")

    async def work():
        found = await seconds_of(
            run_graph([Task("policy", stubborn, deadline_s=60), sleeper("engine", 0.2, error=OSError("x"))])
        )
        release.set()
        await asyncio.sleep(0)
        return found

    seconds, error = virtual_time.run(work())
    assert seconds <= 1.2
    assert error.__notes__ == ["startup task 'policy' ignored its cancellation and was abandoned"]


def test_a4_a_load_of_20_minutes_that_shows_progress_never_meets_its_deadline_of_one():
    async def load(context):
        for percent in range(0, 100, 5):
            context.progress(f"the weights: {percent} % read")
            await asyncio.sleep(59)

    seconds, error = virtual_time.run(seconds_of(run_graph([Task("engine", load, deadline_s=60)])))
    assert (seconds, error) == (pytest.approx(20 * 59.0), None)


def test_a4_a_load_that_stops_making_progress_is_named_at_its_deadline_with_what_it_waits_for():
    undone = []

    async def load(context):
        context.progress("the weights: 40 % read")
        await asyncio.sleep(100)
        context.progress("the weights: 45 % read")
        await asyncio.Event().wait()

    tasks = [Task("engine", load, deadline_s=120), sleeper("environment", 5, undone=undone)]
    seconds, error = virtual_time.run(seconds_of(run_graph(tasks)))
    assert seconds == pytest.approx(220, abs=1.0)
    assert str(error) == ("startup task 'engine' made no progress for 120 s; it was waiting for the weights: 45 % read")
    assert undone == ["environment"]


def test_a_teardown_that_hangs_is_left_behind_after_its_time():
    async def forever(_):
        await asyncio.Event().wait()

    async def built(context):
        return None

    async def work():
        started = await run_graph([Task("policy", built, deadline_s=1, teardown=forever)])
        began = asyncio.get_running_loop().time()
        troubles = await started.close(15)
        return asyncio.get_running_loop().time() - began, troubles

    seconds, troubles = virtual_time.run(work())
    assert seconds == pytest.approx(15)
    assert troubles == ("teardown of startup task 'policy' did not end and was abandoned",)


def test_virtual_time_takes_no_real_time():
    began = time.monotonic()
    virtual_time.run(asyncio.sleep(3600))
    assert time.monotonic() - began < 5
