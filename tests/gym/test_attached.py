"""A server that somebody else started: waited for, watched, and what rollouts are played with."""

import asyncio
import contextlib
import time

import pytest
from aiohttp import web

from gymloop.cluster.health import Health
from gymloop.errors import ConfigError, InfraError
from gymloop.gym import attached
from gymloop.gym.agents import Limited, Terms
from gymloop.gym.attached import AttachedEnvironment
from gymloop.gym.gymnasium import Gymnasium
from gymloop.gym.http_source import HttpSource
from gymloop.gym.model_client import ModelClient
from gymloop.gym.remote_agent import RemoteAgent


@contextlib.asynccontextmanager
async def answering(status=200, *, port=0, hangs=False):
    """A server of one route; yields its port."""

    async def healthz(request):
        if hangs:
            await asyncio.sleep(3600)
        return web.Response(status=status)

    app = web.Application()
    app.router.add_get("/healthz", healthz)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", port)
    await site.start()
    try:
        yield site._server.sockets[0].getsockname()[1]
    finally:
        await runner.cleanup()


def at(port, kind="tool_calling"):
    return AttachedEnvironment("sums", f"http://127.0.0.1:{port}", kind)


@pytest.fixture
def quickly(monkeypatch):
    monkeypatch.setattr(attached, "GONE_AFTER_S", 0.6)


@pytest.mark.parametrize("status", [200, 404, 401, 500])
async def test_any_answer_is_a_sign_of_life(status):
    async with answering(status) as port:
        await at(port).ready(5.0)
        await at(port).check()


async def test_a_proxy_in_front_of_nothing_is_no_sign_of_life(quickly):
    async with answering(503) as port:
        with pytest.raises(InfraError, match=r"environment server sums at \S+ is gone: GET /healthz answered 503"):
            await at(port).check()
        with pytest.raises(InfraError, match=r"did not answer within 1 s: GET /healthz answered 503"):
            await at(port).ready(1.0)


async def test_a_server_that_comes_later_is_waited_for():
    async with answering() as port:
        pass
    waiting = asyncio.create_task(at(port).ready(10.0))
    await asyncio.sleep(0.4)
    assert not waiting.done()
    async with answering(port=port):
        await waiting


async def test_a_server_that_hangs_does_not_get_ready_in_time(monkeypatch):
    monkeypatch.setattr(attached, "_PAUSE_S", 1.5)  # what is left of the deadline when it gives up
    async with answering(hangs=True) as port:
        began = time.monotonic()
        with pytest.raises(InfraError, match="did not answer within 4 s: GET /healthz was not answered"):
            await at(port).ready(4.0)
        assert time.monotonic() - began < 4.0, "before the startup task's own deadline"


async def test_a_short_restart_is_no_death():
    async with answering() as port:
        pass
    checking = asyncio.create_task(at(port).check())
    await asyncio.sleep(0.2)
    async with answering(port=port):
        await checking


async def test_health_names_a_server_that_is_gone_and_one_that_is_silent(quickly):
    hanging, asked = False, asyncio.Event()

    async def healthz(request):
        if hanging:
            await asyncio.sleep(3600)
        asked.set()
        return web.Response()

    app = web.Application()
    app.router.add_get("/healthz", healthz)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    part = at(runner.addresses[0][1])
    silent, gone = Health(0.05, 0.5), Health(0.05, 60.0)
    silent.watch(part)
    await asyncio.wait_for(asked.wait(), 10)
    hanging = True
    with pytest.raises(InfraError, match=r"sums at \S+ does not respond.*: connections are accepted"):
        await asyncio.wait_for(silent.failed(), 5)
    await runner.cleanup()
    gone.watch(part)
    with pytest.raises(InfraError, match=r"sums at \S+ is gone: GET /healthz: ClientConnectorError"):
        await asyncio.wait_for(gone.failed(), 5)
    for health in (silent, gone):
        health.forget(part)


@pytest.mark.parametrize(
    ("kind", "agent"), [("tool_calling", HttpSource), ("gymnasium", Gymnasium), ("remote", RemoteAgent)]
)
async def test_each_agent_goes_by_the_environments_name_and_needs_open_connections(kind, agent):
    part = at(1, kind)
    model = ModelClient("http://127.0.0.1:1/v1", "m", max_concurrency=1, call_timeout_s=1, ready_timeout_s=1)
    with pytest.raises(RuntimeError, match="not open"):
        part.agent(model, {})
    await part.open(call_timeout_s=1.0, max_connections=2)
    found = part.agent(model, {})
    assert type(found) is agent
    assert found.name == "sums"
    await part.close()
    await part.close()


def test_what_is_no_address_is_refused():
    with pytest.raises(ConfigError, match="expected http://host:port"):
        AttachedEnvironment("sums", "localhost:8000")


class Counting:
    """An agent that notes how many turns it was allowed."""

    name = "counting"

    async def play(self, row, model, conversation, terms):
        return terms.max_turns


@pytest.mark.parametrize(("own", "of_the_run", "allowed"), [(2, 8, 2), (9, 8, 8)])
async def test_an_agents_own_limit_of_turns_holds_beside_that_of_the_run(own, of_the_run, allowed):
    terms = Terms(max_turns=of_the_run, max_tokens=1, call_timeout_s=1, deadline_s=1)
    agent = Limited(Counting(), own)
    assert agent.name == "counting"
    assert await agent.play({}, None, None, terms) == allowed
