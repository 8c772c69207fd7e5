"""What a run may spend on servers that die, on real processes of a private server that behaves as told."""

from __future__ import annotations

import asyncio
import os
import signal
import time

import pytest

from gymloop.cluster.health import Health, first_failure
from gymloop.errors import InfraError
from gymloop.gym.nemo.host import close, host
from gymloop.gym.nemo.restarts import Restarts


@pytest.fixture
async def one(odd, tmp_path):
    servers = await host(odd({"a": {}}), tmp_path)
    yield servers["a"]
    await close(servers)


async def watched(server, restarts, deaths, unresponsive_after_s=60.0, how=signal.SIGKILL):
    """Kill the server so many times; what ended the watch, and how often the server was revived."""
    health = Health(0.05, unresponsive_after_s)

    async def kill():
        await asyncio.sleep(2.0 if how == signal.SIGSTOP else 0.5)  # it has answered a check before it is killed
        for _ in range(deaths):
            os.kill(server.pid, how)
            while not health.take_revived():  # noqa: ASYNC110
                await asyncio.sleep(0.05)

    health.watch(server, lambda error: restarts.revive(server, 20.0, error))
    try:
        async with asyncio.timeout(60):
            await first_failure(kill(), health.failed())
    except InfraError as error:
        return str(error)
    finally:
        health.forget(server)
    return None


async def test_deaths_within_the_budget_are_told_and_made_good_on_the_same_address(one):
    said, url = [], one.url
    assert await watched(one, Restarts(2, said.append), 2) is None
    assert [line.partition(";")[0] for line in said] == [
        "restart 1 of 2 (health.max_server_restarts), since NeMo Gym server a ended, killed by SIGKILL",
        f"NeMo Gym server a answers again at {url}",
        "restart 2 of 2 (health.max_server_restarts), since NeMo Gym server a ended, killed by SIGKILL",
        f"NeMo Gym server a answers again at {url}",
    ]
    assert "starting a" in said[0], "with the end of its log"
    assert one.url == url
    await one.check()


async def test_a_death_beyond_the_budget_is_a_failure_that_counts(one):
    failure = await watched(one, Restarts(1, print), 2)
    assert failure.startswith("NeMo Gym server a failed again after 1 restarts (health.max_server_restarts): NeMo Gym")


async def test_without_a_budget_a_death_is_told_as_it_is(one):
    assert (await watched(one, Restarts(0, print), 1)).startswith("NeMo Gym server a ended, killed by SIGKILL")


async def test_each_server_has_a_budget_of_its_own(odd, tmp_path):
    servers = await host(odd({"a": {}, "b": {}}), tmp_path)
    restarts = Restarts(1, print)
    try:
        for server in servers.values():
            assert await watched(server, restarts, 1) is None
    finally:
        await close(servers)


async def test_a_server_that_does_not_come_up_again_is_not_tried_a_further_time(odd, tmp_path):
    gym = odd({"a": {"dies_if": str(tmp_path / "flag")}})
    servers = await host(gym, tmp_path / "logs")
    (tmp_path / "flag").touch()
    begun = time.monotonic()
    try:
        failure = await watched(servers["a"], Restarts(3, print), 1)
    finally:
        await close(servers)
    assert failure.startswith(
        "NeMo Gym server a was started again and failed at once: NeMo Gym server a ended, exit code 1"
    )
    assert "no such dictionary" in failure
    assert time.monotonic() - begun < 15


async def test_a_server_that_hangs_is_killed_and_started_again(one):
    said, first = [], one.pid
    assert await watched(one, Restarts(1, said.append), 1, unresponsive_after_s=2.0, how=signal.SIGSTOP) is None
    assert "NeMo Gym server a does not respond" in said[0]
    assert one.pid != first
