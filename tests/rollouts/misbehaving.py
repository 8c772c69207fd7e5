"""A model server on a real port that misbehaves by prompt, as servers and what stands before them do."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter

from aiohttp import web

from ..gym.scripted import ScriptedModel, row, serving

LOGIN = b"<!doctype html><html><body><h1>Please log in</h1><p>reward 1</p></body></html>"


class Misbehaving(ScriptedModel):
    """Answers ``end`` to every prompt, after the fault that the prompt's name asks for; counts requests by prompt."""

    def __init__(self) -> None:
        super().__init__({})
        self.calls: Counter = Counter()

    async def handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        prompt = body["messages"][0]["content"]
        self.calls[prompt] += 1
        self.scripts[prompt] = ["end"]
        fault = prompt.partition(" ")[0]
        match fault:
            case "500-once" if self.calls[prompt] == 1:
                return web.Response(status=500, body=b'{"error": "engine hiccup"}')
            case "always-500":
                return web.Response(status=500, body=b'{"error": "engine hiccup"}')
            case "never-answers":
                await asyncio.sleep(60)
            case "cuts-the-body":
                return await self._cut(request)
            case "html":
                return web.Response(body=LOGIN, content_type="text/html")
            case "429-once" if self.calls[prompt] == 1:
                return web.Response(status=429, body=b'{"error": "busy"}', headers={"Retry-After": "0.3"})
            case "429-for-ever":
                return web.Response(status=429, body=b'{"error": "busy"}', headers={"Retry-After": "0.3"})
        return await super().handle(request)

    async def _cut(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Length": "1000", "Content-Type": "application/json"})
        await response.prepare(request)
        await response.write(b'{"choices": [{"message": {"content": "rew')
        request.transport.abort()
        return response


@contextlib.asynccontextmanager
async def misbehaving(*, call_timeout_s: float, ready_timeout_s: float = 5.0):
    """The server, and a client of it."""
    server = Misbehaving()
    async with serving(server, call_timeout_s=call_timeout_s, ready_timeout_s=ready_timeout_s) as client:
        yield server, client


def prompt_row(prompt: str, environment: str, **fields) -> dict:
    """A row of ``environment`` without tools."""
    return {**row(prompt, [], environment), **fields}
