"""A loop that stands still is reported with the stack of what blocks it, and measured; nothing else is."""

import asyncio
import http.client
import itertools
import threading
import time
from urllib.parse import urlsplit

from gymloop.observe.watchdog import LoopWatchdog
from gymloop.serving.server import GenerationServer
from gymloop.startup import hold_socket

CULPRIT = "hold_up_everything"


def hold_up_everything(seconds):
    time.sleep(seconds)


async def reported(said):
    """The report of the stall that the test made and the line after it; a busy machine may make stalls of its own."""
    deadline = time.monotonic() + 10
    while True:
        for stack, over in itertools.pairwise(said):
            if CULPRIT in stack:
                return stack, over
        assert time.monotonic() < deadline, said
        await asyncio.sleep(0.05)


async def test_a_blocked_loop_is_reported_once_with_its_stack_and_again_when_it_runs():
    said = []
    with LoopWatchdog("the run's event loop", 0.4, said.append) as watchdog:
        await asyncio.sleep(0.3)
        hold_up_everything(1.5)
        stack, over = await reported(said)
        worst = watchdog.take_worst()
        assert watchdog.take_worst() < 1.0, "the worst is that since the last call"
    assert sum(CULPRIT in line for line in said) == 1
    assert stack.startswith("the run's event loop has stood still for ")
    assert over.startswith("the run's event loop runs again after ")
    assert worst >= 1.0


async def test_a_loop_that_runs_is_not_reported():
    said = []
    with LoopWatchdog("loop", 5.0, said.append) as watchdog:
        for _ in range(10):
            await asyncio.sleep(0.05)
    assert said == []
    assert watchdog.take_worst() < 5.0


def test_a_loop_that_closes_ends_its_watchdog():
    async def work():
        LoopWatchdog("loop", 0.2).__enter__()  # never left, as when a thread's loop just ends

    asyncio.run(work())
    deadline = time.monotonic() + 10

    while any(thread.name == "loop-watchdog" for thread in threading.enumerate()):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_the_generation_servers_loop_is_watched(caplog):
    server = GenerationServer(hold_socket(20000, 29999), "toy", None, loop_lag_s=0.4)
    handler = server._app.__call__

    class Blocking:
        """Stands for a route that computes on the event loop."""

        def __getattr__(self, name):
            return getattr(server._app, name)

        async def __call__(self, scope, receive, send):
            if scope.get("path") == "/readyz":
                hold_up_everything(1.5)
            await handler(scope, receive, send)

    server._thread._uvicorn.config.app = Blocking()
    server.start()
    try:
        connection = http.client.HTTPConnection(urlsplit(server.url).netloc, timeout=20)
        connection.request("GET", "/readyz")
        assert connection.getresponse().status == 503
        connection.close()
    finally:
        server.close()
    messages = [record.getMessage() for record in caplog.records]
    said = [message for message in messages if "stood still" in message and CULPRIT in message]
    assert len(said) == 1
    assert f"the event loop of the generation server at {server.url}" in said[0]
