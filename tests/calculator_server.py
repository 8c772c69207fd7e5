"""The calculator as a server of NeMo Gym's routes, in a process of its own: ``python calculator_server.py PORT``.

It prints its port and serves until its standard input ends. ``--ignore-sigterm`` makes it as stubborn as it says.
``GET /log`` tells how often each route was called.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
import uuid
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NAME = "calculator"


def rows(count: int, seed: int = 1) -> list[dict[str, Any]]:
    """As a data file has them."""
    from gymloop.gym.calculator import Calculator
    from gymloop.gym.session import InProcessSource

    return InProcessSource(NAME, Calculator).generate(count, seed)


def write_rows(path: Path, tasks: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(task) + "\n" for task in tasks))


def application() -> Any:
    import httpx
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import JSONResponse, PlainTextResponse, Response
    from starlette.routing import Route

    from gymloop.gym.calculator import Calculator
    from gymloop.gym.tools import ToolError

    sessions: dict[str, Calculator] = {}
    calls: Counter[str] = Counter()

    async def healthz(request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def log(request: Request) -> Response:
        return JSONResponse({**calls, "open": len(sessions)})

    async def seed_session(request: Request) -> Response:
        calls["seed_session"] += 1
        environment = Calculator()
        environment.row = await request.json()
        name = uuid.uuid4().hex
        sessions[name] = environment
        reply = JSONResponse({})
        reply.set_cookie("session", name)
        return reply

    async def calculate(request: Request) -> Response:
        calls["calculate"] += 1
        arguments = await request.json()
        try:
            return PlainTextResponse(sessions[request.cookies["session"]].calculate(**arguments))
        except (ToolError, TypeError) as error:
            return PlainTextResponse(f"Error: {error}", status_code=422)

    async def verify(request: Request) -> Response:
        calls["verify"] += 1
        body = await request.json()
        verdict = sessions[request.cookies["session"]].verify(body["response"])
        return JSONResponse({**body, "reward": verdict.reward, "reward_components": dict(verdict.components)})

    async def close_session(request: Request) -> Response:
        calls["close_session"] += 1
        sessions.pop(request.cookies["session"], None)
        return JSONResponse({})

    async def run(request: Request) -> Response:
        """An agent of one call, which asks the model at the row's ``model_url``."""
        body = await request.json()
        params = body["responses_create_params"]
        async with httpx.AsyncClient(timeout=30.0, trust_env=False) as client:
            reply = await client.post(f"{body['model_url']}/responses", json=params)
        calls["run"] += reply.status_code == 200
        return JSONResponse({"response": reply.json(), "reward": 0.5}, status_code=reply.status_code)

    routes = [Route("/healthz", healthz), Route("/log", log)]
    posted = (seed_session, calculate, verify, close_session, run)
    routes += [Route(f"/{one.__name__}", one, methods=["POST"]) for one in posted]
    return Starlette(routes=routes)


def serve(port: int, stubborn: bool) -> None:
    import uvicorn

    held = socket.create_server(("127.0.0.1", port))
    server = uvicorn.Server(uvicorn.Config(application(), log_level="error"))
    threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()
    print(held.getsockname()[1], flush=True)
    if stubborn:
        server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign]
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    server.run(sockets=[held])


class Process:
    """The server's process."""

    def __init__(self, *arguments: str, port: int = 0) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(port), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.url = f"http://127.0.0.1:{int(self._process.stdout.readline())}"

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        return self._process.poll()

    def log(self) -> dict[str, int]:
        """Calls by route, and the sessions that are open."""
        with urllib.request.urlopen(f"{self.url}/log", timeout=10) as reply:
            return json.load(reply)

    def kill(self) -> None:
        self._process.kill()

    def stop(self) -> None:
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        self._process.kill()
        self._process.wait(timeout=10)
        self._process.stdout.close()


@contextlib.contextmanager
def serving(*arguments: str) -> Iterator[Process]:
    """A running server."""
    process = Process(*arguments)
    try:
        yield process
    finally:
        process.stop()


if __name__ == "__main__":
    serve(int(sys.argv[1]), "--ignore-sigterm" in sys.argv)
