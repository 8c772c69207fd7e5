"""A chat server on a real port whose replies are scripted, and environments that misbehave on purpose."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from dataclasses import dataclass, field

from aiohttp import web

from gymloop.gym import Environment, Verdict, tool
from gymloop.gym.model_client import ModelClient
from gymloop.tokens.reply import reply_reader

END = 2


def ids(text: str) -> list[int]:
    """Bytes, shifted so that they never meet the end token."""
    return [byte + 16 for byte in text.encode()]


def call_text(arguments: str, name: str = "wx") -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


@dataclass
class Say:
    """One scripted reply: text, and how it ends; ``change`` edits the reply body, ``raw`` replaces it."""

    text: str = ""
    finish: str = "stop"
    status: int = 200
    raw: bytes | None = None
    headers: dict = field(default_factory=dict)
    change: object = None
    delay: float = 0.0


class ScriptedModel:
    """Replies to a conversation by its first user message and the number of assistant messages in it."""

    def __init__(self, scripts: dict[str, list[Say | str]]) -> None:
        self.scripts = scripts
        self.requests: list[dict] = []
        self.asked_once = asyncio.Event()
        self.headers: list[dict] = []
        self.in_flight = 0
        self.most_in_flight = 0
        self.asked: Counter = Counter()

    async def handle(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.requests.append(body)
        self.asked_once.set()
        self.headers.append(dict(request.headers))
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            return await self._reply(body)
        finally:
            self.in_flight -= 1

    async def _reply(self, body: dict) -> web.Response:
        messages = body["messages"]
        prompt = next(message["content"] for message in messages if message["role"] == "user")
        turn = sum(message["role"] == "assistant" for message in messages)
        script = self.scripts[prompt]
        if isinstance(script, dict):  # replies by how often this turn was asked for
            step = script[turn][min(self.asked[prompt, turn], len(script[turn]) - 1)]
        else:
            step = script[turn]
        self.asked[prompt, turn] += 1
        say = Say(step) if isinstance(step, str) else step
        await asyncio.sleep(say.delay)
        if say.raw is not None or say.status != 200:
            return web.Response(body=say.raw or b"{}", status=say.status, headers=say.headers)
        prefix = body.get("required_prefix_token_ids", [])
        last = max((i for i, message in enumerate(messages) if message["role"] == "assistant"), default=-1)
        new = "".join(f"{message['role']}:{message['content']}\n" for message in messages[last + 1 :])
        sampled = ids(say.text) + ([END] if say.finish == "stop" else [])
        parsed = reply_reader().read(say.text)
        message = {
            "role": "assistant",
            "content": parsed.content,
            "prompt_token_ids": prefix + ids(new),
            "generation_token_ids": sampled,
            "generation_log_probs": [-0.5] * len(sampled),
        }
        if parsed.tool_calls:
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in parsed.tool_calls
            ]
        finish = "tool_calls" if say.finish == "stop" and parsed.tool_calls else say.finish
        choice = {
            "index": 0,
            "message": message,
            "finish_reason": finish,
            "weight_versions": [3, 3],
            "malformed_tool_calls": parsed.malformed,
        }
        reply = {"object": "chat.completion", "choices": [choice]}
        if say.change is not None:
            say.change(reply)
        return web.json_response(reply)


@contextlib.asynccontextmanager
async def serving(model: ScriptedModel, *, call_timeout_s: float = 5.0, ready_timeout_s: float = 5.0):
    """A client of a server that replies with ``model``."""
    app = web.Application()
    app.router.add_post("/v1/chat/completions", model.handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = site._server.sockets[0].getsockname()[1]
    client = ModelClient(
        f"http://127.0.0.1:{port}/v1",
        "toy",
        max_concurrency=8,
        call_timeout_s=call_timeout_s,
        ready_timeout_s=ready_timeout_s,
    )
    try:
        async with client:
            yield client
    finally:
        await runner.cleanup()


class Weather(Environment):
    """Reward 1 iff a valid ``wx`` call was seen; logs every call, session and close."""

    log: list = []

    def __init__(self, log: list | None = None) -> None:
        self.log = [] if log is None else log
        self.seen = False

    def seed(self, row):
        self.log.append(("seed", row["responses_create_params"]["input"][0]["content"]))

    @tool
    def wx(self, city: str = "") -> str:
        """Tell the weather."""
        self.log.append(("wx", city))
        self.seen = self.seen or bool(city)
        return f"4C in {city}" if city else "which city?"

    @tool
    def write(self, path: str) -> str:
        """Write a file."""
        self.log.append(("write", path))
        return "done"

    def verify(self, response):
        self.log.append(("verify", len(response["output"])))
        return Verdict(float(self.seen), {"seen": float(self.seen)})

    def close(self):
        self.log.append(("close",))


def row(prompt: str, tools: list, name: str = "weather", **params) -> dict:
    return {
        "responses_create_params": {"input": [{"role": "user", "content": prompt}], "tools": tools, **params},
        "agent_ref": {"type": "responses_api_agents", "name": name},
    }
