"""A server over an engine that says what it is told: the real server, the real renderer, and no model.

``serve(family, ...)`` in a test starts one; ``Served.say`` queues what the engine says next.
"""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import httpx
import orjson

from gymloop.config.plan import SamplingProfile
from gymloop.errors import InfraError
from gymloop.generation.engine import Sample, Sampling
from gymloop.serving.guard import SamplingProfiles
from gymloop.serving.server import GenerationServer
from toys import text_ids

USER = {"role": "user", "content": "Weather in Oslo?"}
TOOL = {"role": "tool", "tool_call_id": "c", "content": "4C, rain"}
CALL_TEXT = '\n<tool_call>\n{"name": "wx", "arguments": {"city": "Oslo"}}\n</tool_call>'
PROFILES = SamplingProfiles(train=SamplingProfile(1.0, 1.0, None), validation=SamplingProfile(0.0, 1.0, None))
WX = {"type": "function", "function": {"name": "wx", "parameters": {"type": "object", "properties": {}}}}


@dataclass
class ScriptedEngine:
    """Says what it is told, ``piece`` tokens at a time; with nothing to say it never answers.

    ``hold`` keeps it silent after the first so many tokens of every sample, until ``abort`` or cancellation.
    """

    script: list[tuple[int, ...]] = field(default_factory=list)
    max_model_len: int = 1000
    weight_version: int = 7
    piece: int = 1
    hold: int | None = None
    prompts: list[tuple[int, ...]] = field(default_factory=list)
    samplings: list[Sampling] = field(default_factory=list)
    request_ids: list[str] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    cancelled: threading.Event = field(default_factory=threading.Event)
    refusal: str | None = None

    def require_serving(self):
        if self.refusal is not None:
            raise InfraError(self.refusal)

    async def generate(self, prompt_ids, sampling, request_id, on_tokens=None):
        self.prompts.append(tuple(prompt_ids))
        self.samplings.append(sampling)
        self.request_ids.append(request_id)
        if not self.script:
            await self._silence()
        ids = self.script.pop(0)[: sampling.max_new_tokens]
        said = 0
        while on_tokens is not None and said < len(ids) and request_id not in self.aborted:
            if self.hold is not None and said >= self.hold:
                await self._silence()
            piece = ids[said : said + self.piece]
            on_tokens(piece, (-0.5,) * len(piece))
            said += len(piece)
            await asyncio.sleep(0)
        if request_id in self.aborted:
            return Sample(ids[:said], (-0.5,) * said, "abort", 6, 7)
        reason = "stop" if ids and ids[-1] in sampling.stop_token_ids else "length"
        return Sample(ids, (-0.5,) * len(ids), reason, 6, 7)

    async def _silence(self):
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            self.cancelled.set()
            raise

    def abort(self, request_id):
        self.aborted.append(request_id)


@dataclass
class Served:
    """A running server, its engine, and a client."""

    server: GenerationServer
    engine: Any
    client: httpx.Client

    def say(self, text: str, *end: int) -> None:
        self.engine.script.append((*text_ids(text), *end))

    def post(self, route: str = "/v1/chat/completions", headers: dict | None = None, **body) -> httpx.Response:
        return self.client.post(route, json=body, headers=headers)

    def ok(self, route: str, headers: dict | None = None, **body) -> dict:
        response = self.post(route, headers, **body)
        assert response.status_code == 200, response.text
        return response.json()

    def chat(self, messages: list, headers: dict | None = None, **body) -> dict:
        return self.ok("/v1/chat/completions", headers, messages=messages, **body)

    def connected(self) -> socket.socket:
        """A bare connection."""
        url = urlsplit(self.server.url)
        return socket.create_connection((url.hostname, url.port), timeout=20)

    def leave(self) -> None:
        """Ask for a turn, and go away once the engine has the prompt."""
        body = orjson.dumps({"messages": [USER]})
        head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        with self.connected() as sock:
            sock.sendall(head + b"content-length: %d\r\n\r\n" % len(body) + body)
            until(lambda: self.engine.prompts)

    def refused(
        self, status: int, headers: dict | None = None, route: str = "/v1/chat/completions", **body
    ) -> tuple[str, str | None]:
        given = {"/v1/chat/completions": {"messages": [USER]}, "/v1/responses": {"input": "hi"}}
        response = self.post(route, headers, **{**given.get(route, {"prompt": "hi"}), **body})
        assert response.status_code == status, response.text
        error = response.json()["error"]
        assert error["message"]
        return error["code"], error["param"]

    def stream(self, route: str = "/v1/chat/completions", **body) -> list[dict]:
        """The events of a streamed reply; ``[DONE]`` is checked and left out where the route has one."""
        response = self.post(route, stream=True, **body)
        assert response.status_code == 200, response.text
        assert response.headers["content-type"].startswith("text/event-stream")
        return read_events(response.text, done=route != "/v1/responses")

    def metric(self, name: str) -> float:
        """The value of one line of ``/metrics``."""
        lines = self.client.get("/metrics").text.splitlines()
        return next(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"{name} "))


def read_events(text: str, done: bool = True) -> list[dict]:
    events = text.strip().split("\n\n")
    if done:
        assert events.pop() == "data: [DONE]"
    read = [orjson.loads(event.partition("data: ")[2]) for event in events]
    if not done:
        assert [event.partition("\n")[0] for event in events] == [f"event: {one['type']}" for one in read]
    return read


def listen() -> socket.socket:
    sock = socket.socket()
    sock.bind(("127.0.0.1", 0))
    sock.listen(128)
    return sock


@contextmanager
def servers(renderer_of: Callable[..., Any]) -> Iterator[Callable[..., Served]]:
    """``start(family, ...)`` starts a server with a scripted engine, or the one it is given."""
    running: list[Served] = []

    def start(
        family="q", profiles=PROFILES, max_model_len=1000, ready=True, engine=None, renderer=None, **named
    ) -> Served:
        server = GenerationServer(listen(), "toy", profiles, **named)
        engine = engine or ScriptedEngine(max_model_len=max_model_len)
        client = httpx.Client(base_url=server.url.removesuffix("/v1"), timeout=20, trust_env=False)
        running.append(Served(server, engine, client))
        server.start()
        if ready:
            server.ready(engine, renderer or renderer_of(family))
        return running[-1]

    try:
        yield start
    finally:
        for served in running:
            served.client.close()
            served.server.close()


def until(true: Callable[[], Any], seconds: float = 10.0) -> None:
    """Wait until something is so."""
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, "it did not come true"
        time.sleep(0.01)
