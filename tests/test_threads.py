"""Blocking work beside the event loop: the loop goes on, errors travel, what nobody takes is undone."""

import asyncio
import contextvars
import threading

import pytest

from gymloop.threads import in_thread


async def test_the_loop_goes_on_while_the_work_blocks():
    release = threading.Event()
    work = asyncio.ensure_future(in_thread(lambda: release.wait(30)))
    await asyncio.sleep(0.05)
    assert not work.done()
    release.set()
    assert await work is True


async def test_the_work_sees_the_callers_context_and_runs_in_a_named_daemon_thread():
    variable = contextvars.ContextVar("variable")
    variable.set("mine")
    value, thread = await in_thread(lambda: (variable.get(), threading.current_thread()), "reader")
    assert value == "mine"
    assert thread.name == "reader"
    assert thread.daemon


@pytest.mark.parametrize(("raised", "arrives"), [(ValueError("x"), ValueError), (StopIteration(), RuntimeError)])
async def test_what_the_work_raises_arrives(raised, arrives):
    def work():
        raise raised

    with pytest.raises(arrives):
        await in_thread(work)


async def test_a_result_that_nobody_awaits_any_more_is_undone():
    release, undone, told = threading.Event(), [], threading.Event()

    def work():
        release.wait(30)
        return "a process"

    def undo(result):
        undone.append(result)
        told.set()

    waiting = asyncio.ensure_future(in_thread(work, undo=undo))
    await asyncio.sleep(0.05)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    release.set()
    assert await in_thread(lambda: told.wait(30))
    assert undone == ["a process"]
