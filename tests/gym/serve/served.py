"""Environments behind a real server on a held socket, and one that does what its row says."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import httpx

from gymloop.asgi.thread import ServerThread
from gymloop.errors import DataError
from gymloop.gym import Environment, Verdict, tool
from gymloop.gym.serve.app import Bounds, EnvironmentApp
from gymloop.gym.serve.run import Play
from gymloop.gym.serve.server import environment_server
from gymloop.gym.session import InProcessSource
from gymloop.gym.tools import ToolError

ROW = {"responses_create_params": {"input": [{"role": "user", "content": "hi"}], "tools": []}}
SAID = {"type": "message", "role": "assistant", "content": "done"}


class Odd(Environment):
    """Counts, waits and fails as it is told; what happened is in ``log``, which its sessions share."""

    def __init__(self, log: list | None = None) -> None:
        self.log = [] if log is None else log
        self.count = 0

    async def seed(self, row):
        self.log.append(("seed", row.get("name"), self.rng.random()))
        if row.get("unusable"):
            raise DataError("the row has no answer")
        if row.get("broken"):
            raise RuntimeError("no dictionary")
        await asyncio.sleep(row.get("seed_s", 0))

    @tool
    def add(self, by: int = 1) -> str:
        """Add to the count.

        Args:
            by: how much.
        """
        if by < 0:
            raise ToolError("only upwards")
        self.count += by
        return str(self.count) if by else ""

    @tool
    def told(self, what: str) -> dict:
        """Say it in JSON."""
        return {"what": what}

    @tool
    async def wait(self, seconds: float) -> str:
        """Take a while."""
        self.log.append(("waits", seconds))
        await asyncio.sleep(seconds)
        self.log.append(("waited", seconds))
        return "waited"

    @tool
    def fail(self) -> str:
        """Raise."""
        raise RuntimeError("boom")

    def verify(self, response):
        self.log.append(("verify", self.row.get("name")))
        if self.row.get("bad_verdict"):
            raise RuntimeError("no judge")
        return Verdict(float(self.count), {"count": float(self.count)})

    def close(self):
        self.log.append(("close", self.row.get("name")))


@dataclass
class Served:
    """A running server."""

    url: str
    port: int
    app: EnvironmentApp
    server: ServerThread
    log: list

    def client(self) -> httpx.Client:
        """With a cookie jar of its own."""
        return httpx.Client(base_url=self.url, timeout=60, trust_env=False, verify=False)  # no certificates to load


@contextlib.contextmanager
def serving(
    environment: type[Environment] = Odd, *, name: str = "odd", play: Play | None = None, port: int = 0, **bounds: Any
) -> Iterator[Served]:
    """``environment`` behind HTTP, on ``port`` or any."""
    log: list = []
    source = InProcessSource(name, environment, {"log": log} if environment is Odd else {})
    held = socket.create_server(("127.0.0.1", port))
    at = held.getsockname()[:2]
    app = EnvironmentApp(source, at, play, replace(Bounds(sweep_s=0.05), **bounds))
    server = environment_server(held, app)
    server.start()
    try:
        yield Served(f"http://{at[0]}:{at[1]}", at[1], app, server, log)
    finally:
        server.close()


def seeded(client: httpx.Client, **fields: Any) -> httpx.Client:
    """The client with a session."""
    reply = client.post("/seed_session", json={**ROW, **fields})
    assert reply.status_code == 200, reply.text
    return client


def verify(client: httpx.Client, *output: dict, **fields: Any) -> httpx.Response:
    return client.post("/verify", json={**ROW, **fields, "response": {"output": list(output) or [SAID]}})


def until(true, seconds: float = 10.0) -> None:
    """Wait until something is so."""
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, "it did not come true"
        time.sleep(0.01)


def in_background(work) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread
