"""An environment server, in a process of its own, that misbehaves as each row asks: ``python misbehaving.py``.

It prints its port and serves until its standard input ends. The fault is the row's ``fault``; it is remembered under a
session cookie, as NeMo Gym does. ``GET /log`` tells what each row did: ``{name: ["seed", "tool", "verify", ...]}``.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import urllib.request
from collections import Counter
from collections.abc import Iterator

from aiohttp import web

LOGIN = "<!doctype html><html><body><h1>Please log in</h1><p>reward: 1.0</p></body></html>"
VERDICTS = {
    "missing-reward": "{}",
    "null-reward": '{"reward": null}',
    "nan-reward": '{"reward": NaN}',
    "inf-reward": '{"reward": Infinity}',
    "huge-reward": '{"reward": 1e999}',
    "bool-reward": '{"reward": true}',
    "text-reward": '{"reward": "1.0"}',
    "list-reward": '{"reward": [1.0]}',
    "components-do-not-sum": '{"reward": 1.0, "reward_components": {"a": 0.4, "b": 0.5}}',
    "component-is-null": '{"reward": 1.0, "reward_components": {"a": null}}',
    "components-are-a-list": '{"reward": 1.0, "reward_components": [1.0]}',
    "explains": '{"reward": 1, "extracted_answer": "4", "checks": [true, false], "response": {"output": ["x", null]}}',
    "mask-is-a-number": '{"reward": 0.0, "mask_sample": 1}',
    "masked": '{"reward": 0.0, "mask_sample": true, "failure_kind": "judge_unreachable", "failure_reason": "no judge"}',
    "not-json": "reward=1.0",
    "a-number": "1.0",
    "empty": "",
}


class Server:
    """One row's fault at a time, by session."""

    def __init__(self) -> None:
        self.log: dict[str, list[str]] = {}
        self.bodies: dict[str, dict[str, dict]] = {}
        self.seen: Counter[tuple[str, str]] = Counter()

    async def seed(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        name, fault = body["name"], body.get("fault", "")
        reply = await self._maybe(request, name, fault, "seed", body)
        if reply is None:
            reply = web.json_response({})
            # Quotes, padding and an attribute with a comma: what has to come back is the value alone, as it is.
            value = '"' + json.dumps([name, fault]).encode().hex() + '=="'
            reply.headers.add(
                "set-cookie", f"Session___x={value}; Path=/; HttpOnly; expires=Thu, 01 Jan 2099 00:00:00 GMT"
            )
            reply.headers.add("set-cookie", "route=backend-7; Path=/")
        return reply

    def _session(self, request: web.Request) -> tuple[str, str]:
        crumbs = dict(part.split("=", 1) for part in request.headers["cookie"].split("; "))
        assert crumbs["route"] == "backend-7"
        name, fault = json.loads(bytes.fromhex(crumbs["Session___x"].removeprefix('"').removesuffix('=="')))
        return name, fault

    async def tool(self, request: web.Request) -> web.StreamResponse:
        name, fault = self._session(request)
        body = await request.json()
        reply = await self._maybe(request, name, fault, "tool", body)
        return reply or web.json_response({"output": f"{request.match_info['tool']} {json.dumps(body)}"})

    async def verify(self, request: web.Request) -> web.StreamResponse:
        name, fault = self._session(request)
        body = await request.json()
        reply = await self._maybe(request, name, fault, "verify", body)
        if reply is None and fault in VERDICTS:
            return web.Response(text=VERDICTS[fault], content_type="application/json")
        if fault == "pays for a city":
            return web.json_response({**body, "reward": float("city" in self.bodies[name].get("tool", {}))})
        parts = {"a": 0.25, "b": 0.75} if fault == "good-components" else None
        return reply or web.json_response({**body, "reward": body.get("reward", 1.0), "reward_components": parts})

    async def close(self, request: web.Request) -> web.StreamResponse:
        name, fault = self._session(request)
        reply = await self._maybe(request, name, fault, "close", {})
        return reply or web.json_response({"closed": True})

    async def reset(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        reply = await self.seed(request)
        if reply.status == 200 and reply.content_type == "application/json":
            told = {"observation": "go", "info": {"supports_explicit_close": body.get("closes", False)}}
            reply.body = json.dumps(told).encode()
        return reply

    async def step(self, request: web.Request) -> web.StreamResponse:
        name, fault = self._session(request)
        body = await request.json()
        reply = await self._maybe(request, name, fault, "step", body)
        if reply is None and fault in VERDICTS:
            return web.Response(text=VERDICTS[fault], content_type="application/json")
        if reply is not None:
            return reply
        since_reset = self.log[name][::-1].index("seed")
        done = since_reset >= body.get("steps", 2)
        return web.json_response(
            {
                "observation": None if done else "again",
                "reward": body.get("step_reward", 0.5),
                "terminated": body.get("terminated", done),
                "truncated": False,
                "info": {},
            }
        )

    async def run(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        fault = body.get("fault", "")
        reply = await self._maybe(request, body["name"], fault, "run", body)
        if reply is None and fault in VERDICTS:
            return web.Response(text=VERDICTS[fault], content_type="application/json")
        return reply or web.json_response(body["reply"])

    async def _maybe(
        self, request: web.Request, name: str, fault: str, route: str, body: dict
    ) -> web.StreamResponse | None:
        self.log.setdefault(name, []).append(route)
        self.bodies.setdefault(name, {})[route] = body
        self.seen[name, route] += 1
        once = fault.startswith("once ")
        fault = fault.removeprefix("once ")
        if fault.startswith(f"{route} ") and not (once and self.seen[name, route] > 1):
            return await self._fault(request, fault.partition(" ")[2])
        return None

    async def _fault(self, request: web.Request, what: str) -> web.StreamResponse | None:
        kind, _, argument = what.partition(" ")
        match kind:
            case "hangs":
                await asyncio.sleep(3600)
            case "is-slow":
                await asyncio.sleep(float(argument))
            case "cuts":
                response = web.StreamResponse(headers={"content-length": "1000", "content-type": "application/json"})
                await response.prepare(request)
                await response.write(b'{"reward": 1.0, "resp')
                request.transport.abort()
                return response
            case "closes":
                request.transport.abort()
            case "dies":
                os.kill(os.getpid(), signal.SIGKILL)
            case "html":
                return web.Response(text=LOGIN, content_type="text/html", status=int(argument or 200))
            case "disguised-html":
                return web.Response(text=LOGIN, content_type="application/json")
            case "is-null":
                response = web.json_response(None)
                response.headers["set-cookie"] = "route=backend-7"
                return response
            case "redirects":
                return web.Response(status=302, headers={"location": "/log"})
            case "is-empty":
                return web.Response(body=b"")
            case "is-not-utf8":
                return web.Response(body=b'"\xff\xfe"', content_type="application/json")
            case "is-long":
                return web.json_response({"output": "x" * int(argument)})
            case "busy":
                return web.json_response({"detail": "busy"}, status=429, headers={"retry-after": argument or "0.3"})
            case "unavailable":
                return web.json_response({"detail": "later"}, status=503, headers={"retry-after": argument or "0.3"})
            case "loses-the-session":
                text = "Session not initialized. Please call seed_session first."
                return web.json_response({"detail": text}, status=400)
            case "says":
                return web.json_response({"detail": "no such thing"}, status=int(argument))
        return None


async def serve(port: int) -> None:
    server = Server()
    app = web.Application(client_max_size=64 * 2**20)

    async def log(request: web.Request) -> web.Response:
        return web.json_response({"log": server.log, "bodies": server.bodies})

    app.router.add_get("/log", log)
    for route in ("reset", "step", "run", "verify"):
        app.router.add_post(f"/{route}", getattr(server, route))
    app.router.add_post("/seed_session", server.seed)
    for route in ("close_session", "close"):
        app.router.add_post(f"/{route}", server.close)
    app.router.add_post("/{tool}", server.tool)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", port)
    await site.start()
    print(site._server.sockets[0].getsockname()[1], flush=True)
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()

    def watch() -> None:
        sys.stdin.read()
        loop.call_soon_threadsafe(ended.set)

    threading.Thread(target=watch, daemon=True).start()
    await ended.wait()
    await runner.cleanup()


class Process:
    """The server's process; ``url``, ``log()`` and ``bodies(name)``."""

    def __init__(self, port: int = 0) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(port)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.port = int(self._process.stdout.readline())
        self.url = f"http://127.0.0.1:{self.port}"

    def log(self) -> dict[str, list[str]]:
        return self._told()["log"]

    def bodies(self, name: str) -> dict[str, dict]:
        return self._told()["bodies"][name]

    def _told(self) -> dict:
        with urllib.request.urlopen(f"{self.url}/log", timeout=10) as reply:
            return json.load(reply)

    @property
    def exit_code(self) -> int | None:
        return self._process.poll()

    def kill(self) -> None:
        """SIGKILL; safe twice."""
        self._process.kill()
        self._process.wait(timeout=10)

    def stop(self) -> None:
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(timeout=10)
        self._process.stdout.close()


@contextlib.contextmanager
def misbehaving(port: int = 0) -> Iterator[Process]:
    """A running server."""
    process = Process(port)
    try:
        yield process
    finally:
        process.stop()


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1])))
