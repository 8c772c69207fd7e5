"""A server that was started again has lost its sessions, also where it takes their cookies as if nothing had been."""

import asyncio
import contextlib

import pytest

from gymloop.errors import ConfigError, InfraError
from gymloop.gym.agent import Conversation
from gymloop.gym.agents import Terms
from gymloop.gym.attached import AttachedEnvironment
from gymloop.gym.gymnasium import Gymnasium
from gymloop.gym.http import HttpServer
from gymloop.gym.http_source import HttpSource

from .misbehaving import Process
from .scripted import Say, ScriptedModel, serving

LOST = "the session is lost, since its server has died or was started again"
RESPONSE = {"object": "response", "status": "completed", "incomplete_details": None, "output": []}
TERMS = Terms(max_turns=4, max_tokens=64, call_timeout_s=20.0, deadline_s=60.0, rollout_id="g/0")


def row(name, **fields):
    params = {"input": [{"role": "user", "content": "hi"}], "tools": []}
    return {"responses_create_params": params, "agent_ref": {"name": "env"}, "name": name, "fault": "", **fields}


@contextlib.contextmanager
def restartable():
    """``restart()`` kills the server and starts another on its port, that takes the cookies of the first."""
    process = Process()

    def restart(meanwhile=lambda: None):
        nonlocal process
        port = process.port
        process.kill()
        meanwhile()
        process = Process(port)

    try:
        yield process.url, restart
    finally:
        process.kill()


async def test_a_session_that_began_before_a_restart_gets_neither_a_result_nor_a_reward():
    with restartable() as (url, restart):
        async with HttpSource("env", url, call_timeout_s=20.0, refused_s=0.3) as source:
            old = await source.seed_session(row("old"))
            await asyncio.to_thread(restart)
            source.server.died()  # as whoever started it again says
            with pytest.raises(InfraError, match=LOST) as caught:
                await old.verify(RESPONSE)
            assert caught.value.cause == "server_error"
            new = await source.seed_session(row("new"))
            assert (await new.verify(RESPONSE)).reward == 1.0


async def test_a_refused_connection_is_the_end_of_a_life():
    with restartable() as (url, restart):
        async with HttpSource("env", url, call_timeout_s=20.0, refused_s=0.3) as source:
            old = await source.seed_session(row("old"))
            refused = asyncio.Event()
            loop = asyncio.get_running_loop()

            def meanwhile():
                async def ask():
                    # Where the client does not know yet that its connection was closed, this is how it learns it.
                    with pytest.raises(InfraError, match="connection"):
                        await source.seed_session(row("maybe lost"))
                    with pytest.raises(InfraError, match="no connection"):
                        await source.seed_session(row("refused"))
                    refused.set()

                asyncio.run_coroutine_threadsafe(ask(), loop).result(20)

            await asyncio.to_thread(restart, meanwhile)
            assert refused.is_set()
            with pytest.raises(InfraError, match=LOST):
                await old.call_tool("wx", {"city": "Oslo"})


async def test_an_episode_that_lost_its_server_is_no_episode_of_the_next_one():
    script = ScriptedModel({"hi": [Say("hit", delay=1.0), "stand"]})
    with restartable() as (url, _):
        async with serving(script) as model, HttpServer(url, call_timeout_s=20.0) as server:
            playing = asyncio.create_task(Gymnasium("env", server).play(row("e"), model, Conversation(), TERMS))
            await asyncio.wait_for(script.asked_once.wait(), 20)
            server.died()  # as the one does that starts it again
            with pytest.raises(InfraError, match=LOST):
                await playing


async def test_a_health_check_that_is_refused_ends_the_life_of_an_attached_server():
    with restartable() as (url, restart):
        environment = AttachedEnvironment("env", url)
        await environment.open(call_timeout_s=20.0, max_connections=4)
        source = environment.agent(None, {})
        old = await source.seed_session(row("old"))
        checked = []
        loop = asyncio.get_running_loop()

        def meanwhile():
            checked.append(asyncio.run_coroutine_threadsafe(environment._asked(5.0), loop).result(20))

        await asyncio.to_thread(restart, meanwhile)
        assert "GET /healthz" in checked[0]
        await environment.check()
        with pytest.raises(InfraError, match=LOST):
            await old.verify(RESPONSE)
        await environment.close()


async def test_a_wrong_address_ends_the_run_only_while_no_session_was_ever_opened():
    process = Process()
    try:
        async with HttpSource("env", process.url, call_timeout_s=20.0) as source:
            with pytest.raises(ConfigError, match="404"):
                await source.seed_session(row("first", fault="seed says 404"))
            await (await source.seed_session(row("good"))).close()
            with pytest.raises(InfraError, match="404") as caught:
                await source.seed_session(row("later", fault="seed says 404"))
            assert caught.value.cause == "bad_reply"
    finally:
        process.kill()


async def test_a_server_that_has_freed_a_session_is_asked_to_free_the_next_whatever_it_said_of_one():
    process = Process()
    try:
        async with HttpSource("env", process.url, call_timeout_s=20.0) as source:
            for name, fault in (("a", ""), ("b", "close says 404"), ("c", "")):
                session = await source.seed_session(row(name, fault=fault))
                with contextlib.suppress(InfraError):
                    await session.close()
        log = process.log()
        assert [log[name] for name in "abc"] == [["seed", "close"]] * 3
    finally:
        process.kill()
