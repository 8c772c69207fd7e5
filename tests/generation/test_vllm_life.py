"""Whatever waits for an engine ends with it, under the cause of its death."""

import asyncio
import time

import pytest

from gymloop.errors import InfraError
from gymloop.generation.vllm.life import Life


async def test_a_call_ends_with_the_engine_and_names_why():
    deaths = []
    life = Life(lambda: deaths.append("told"))
    ended = asyncio.Event()

    async def never():
        try:
            await asyncio.sleep(3600)
        finally:
            ended.set()

    call = asyncio.ensure_future(life.unless_dead(never()))
    await asyncio.sleep(0)
    life.die("its core was killed by SIGKILL")
    life.die("and something else")
    with pytest.raises(InfraError, match="the engine is dead: its core was killed by SIGKILL"):
        await asyncio.wait_for(call, 5)
    await asyncio.wait_for(ended.wait(), 5)
    assert deaths == ["told"]
    assert str(life.loss("r1")) == "request 'r1' was lost: the engine is dead: its core was killed by SIGKILL"
    with pytest.raises(InfraError, match="SIGKILL"):
        life.require()


async def test_a_call_gives_its_result_or_its_own_error_while_the_engine_lives():
    life = Life(lambda: None)

    async def three():
        return 3

    async def wrong():
        raise ValueError("no such method")

    assert await life.unless_dead(three()) == 3
    with pytest.raises(ValueError, match="no such method"):
        await life.unless_dead(wrong())
    life.require()


async def test_a_death_that_is_not_told_is_waited_for_no_longer_than_asked():
    life = Life(lambda: None)
    began = time.monotonic()
    await life.told(0.05)
    assert time.monotonic() - began < 5
    assert not life.dead


def test_closed_is_over_but_not_dead():
    life = Life(lambda: None)
    life.closed = True
    assert (life.over, life.dead) == (True, False)
    with pytest.raises(InfraError, match="the engine was closed"):
        life.require()
