"""What the gym layer costs: gymloop against NeMo Gym's own stack, on the same server, the same rows and the same model.

The model is a fake that answers at once, in a process of its own; so whatever a rollout costs is the layer's. Every
process counts its own processor time. Two workloads, of NeMo Gym's ``example_single_tool_call``:

    short   4 turns, 3 tool calls, first prompt of 2,048 tokens, 64 sampled a turn
    long    9 turns, 8 tool calls, first prompt of 8,192 tokens, 256 sampled a turn

    side        processes
    stack       RunHelper and its RolloutCollectionHelper: driver, relay, simple_agent, vllm_model, resources server
    gymloop     driver (collector, agent, clients, trajectories), resources server as gymloop hosts it
    bare        that server alone, driven by closed loops on raw sockets that send gymloop's calls byte for byte
    in-process  driver, with the same environment as a class of gymloop

gymloop's driver does what a training step does: groups, retries and a failure budget on, replies checked, metrics and
transcripts written. Rounds of the sides alternate; medians are printed. Exit status 1 when a goal is missed: the
driver's processor time at most 2 ms (short) and 4 ms (long) per rollout, at least 0.9 of bare's rollouts/s, at least
500 rollouts/s in-process (short). The milliseconds are those of a machine on which the stack takes 39 and 175 ms, and
are scaled by what it takes here; with --without-stack nothing is compared, and they are judged as they are.

usage: python benchmarks/gym_layer.py --gym FOLDER [--without-stack] [--rounds 3] [--concurrency 128] [--quick]

FOLDER is an environment of `gymloop gym install --python python3.13`; RunHelper needs that Python.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import orjson

SERVER = "example_single_tool_call"
CONFIG = f"resources_servers/{SERVER}/configs/{SERVER}.yaml"
GOAL_RATE_RATIO = 0.9
GOAL_IN_PROCESS = 500.0
TICK_S = 1 / os.sysconf("SC_CLK_TCK")
LIMIT_S = 600.0


@dataclasses.dataclass(frozen=True)
class Workload:
    """What one rollout is.

    Attributes:
        prompt: tokens of the first prompt.
        sampled: tokens of a turn.
        goal_ms: processor time of gymloop's driver per rollout at most, where the stack takes ``stack_ms``.
        rollouts: of one round, by gymloop and by the stack.
    """

    name: str
    turns: int
    prompt: int
    sampled: int
    goal_ms: float
    stack_ms: float
    rollouts: int
    stack_rollouts: int


WORKLOADS = (Workload("short", 4, 2048, 64, 2.0, 39.0, 1024, 256), Workload("long", 9, 8192, 256, 4.0, 175.0, 256, 64))


# ---------------------------------------------------------------- the fake model


def fake_main(settings: dict[str, Any]) -> None:
    """Serve chat completions with NeMo Gym's token bundle: tool calls, then an answer."""
    import threading

    workload = Workload(**settings["workload"])
    ready: list[int] = []
    up = threading.Event()

    async def serve() -> None:
        server = await asyncio.get_running_loop().create_server(
            lambda: _FakeConnection(workload), "127.0.0.1", 0, backlog=4096
        )
        ready.append(server.sockets[0].getsockname()[1])
        up.set()
        await server.serve_forever()

    threading.Thread(target=run_fast, args=(serve,), daemon=True).start()
    if not up.wait(timeout=30):
        raise SystemExit("the fake model did not start")
    answer({"url": f"http://127.0.0.1:{ready[0]}/v1"})
    obey({})


class _FakeConnection(asyncio.Protocol):
    """HTTP/1.1 as far as clients that send a content-length need it."""

    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        self._held = bytearray()

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        held = self._held
        held += data
        while (end := held.find(b"\r\n\r\n")) >= 0:
            head = bytes(held[:end])
            length = int((head.lower().partition(b"content-length:")[2].split(b"\r\n", 1)[0]) or 0)
            if len(held) < end + 4 + length:
                return
            body = bytes(held[end + 4 : end + 4 + length])
            del held[: end + 4 + length]
            said = orjson.dumps(self._reply(body) if body else {"object": "list", "data": [{"id": "fake"}]})
            self._transport.write(
                b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(said) + said
            )

    def _reply(self, body: bytes) -> dict[str, Any]:
        request = orjson.loads(body)
        messages = request["messages"]
        turn = sum(message["role"] == "assistant" for message in messages)
        workload = self._workload
        prefix = request.get("required_prefix_token_ids")
        if prefix is None:
            carriers = [message for message in messages if "prompt_token_ids" in message]
            prefix = [*carriers[-1]["prompt_token_ids"], *carriers[-1]["generation_token_ids"]] if carriers else []
        new = [7] * 48 if prefix else list(range(1000, 1000 + workload.prompt))
        sampled = [2000 + turn] * (workload.sampled - 1) + [2]
        message: dict[str, Any] = {
            "role": "assistant",
            "content": None,
            "prompt_token_ids": [*prefix, *new],
            "generation_token_ids": sampled,
            "generation_log_probs": [-0.25 - 1 / (1 + index) for index in range(len(sampled))],
        }
        calls = turn < workload.turns - 1
        if calls:
            function = {"name": "get_weather", "arguments": '{"city":"SF"}'}
            message["tool_calls"] = [{"id": f"call_{turn}", "type": "function", "function": function}]
        else:
            message["content"] = "It is cold in San Francisco."
        choice = {
            "index": 0,
            "message": message,
            "finish_reason": "tool_calls" if calls else "stop",
            "weight_versions": [1, 1],
            "malformed_tool_calls": 0,
        }
        count = len(message["prompt_token_ids"])
        usage = {"prompt_tokens": count, "completion_tokens": len(sampled), "total_tokens": count + len(sampled)}
        return {
            "id": "chatcmpl-fake", "object": "chat.completion", "created": int(time.time()), "model": "fake",
            "choices": [choice], "usage": usage,
        }  # fmt: skip


# ---------------------------------------------------------------- gymloop's driver


def driver_main(settings: dict[str, Any]) -> None:
    """Collect rollouts as a training step does; ``server`` is the address of the environment, None for in-process."""
    workload = Workload(**settings["workload"])
    rows = settings["rows"]
    answer({"ready": True})

    def collect(count: int, concurrency: int) -> dict[str, Any]:
        return run_fast(lambda: collect_once(workload, settings, rows, count, concurrency))

    def record() -> list[tuple[str, str]]:
        return run_fast(lambda: recorded_calls(workload, settings, rows[0]))

    obey({"collect": collect, "record": record})


async def collect_once(
    workload: Workload, settings: Mapping[str, Any], rows: Sequence[Any], count: int, concurrency: int
) -> dict[str, Any]:
    from gymloop.algorithms.step import rollout_metrics
    from gymloop.config.schema import Rollouts
    from gymloop.gym.model_client import ModelClient
    from gymloop.rollouts.collector import Collector
    from gymloop.rollouts.refill import gather_step
    from gymloop.training.transcripts import Transcripts

    size = 8
    prompts = [(f"g{index:05d}", rows[index % len(rows)]) for index in range(count // size)]
    limits = Rollouts(max_concurrency=concurrency, max_failed_rollouts_per_step=0)
    gc.collect()
    began, cpu = time.perf_counter(), time.process_time()
    async with (
        ModelClient(
            settings["model"], "fake", max_concurrency=concurrency, call_timeout_s=300, ready_timeout_s=5
        ) as model,
        source_of(settings) as source,
    ):
        collector = Collector({SERVER: source}, model, limits, max_turns=workload.turns, max_tokens=workload.sampled)
        step = await gather_step(collector, prompts, lambda _: (), size, "step 1", lambda *_: None)
        collected = time.process_time() - cpu
        metrics = rollout_metrics(step.groups, group_size=size)
        with tempfile.TemporaryDirectory() as folder:
            Transcripts(Path(folder)).write("step", 1, step.groups)
        done = {"seconds": time.perf_counter() - began, "cpu": time.process_time() - cpu, "collecting": collected}
    for group in step.groups:
        for trajectory in group.trajectories:
            turn = trajectory.turns[-1]
            if len(trajectory.turns) != workload.turns or len(turn.prompt_ids) < workload.prompt:
                raise SystemExit(f"a rollout of {len(trajectory.turns)} turns is not the workload's")
    return done | {"rollouts": sum(len(group.trajectories) for group in step.groups), "reward": metrics["reward/mean"]}


def source_of(settings: Mapping[str, Any]) -> Any:
    """The environment, hosted or as a class of this process."""
    from contextlib import nullcontext

    from gymloop.gym import Environment, tool
    from gymloop.gym.http_source import HttpSource
    from gymloop.gym.session import InProcessSource

    if settings["server"] is not None:
        return HttpSource(SERVER, settings["server"], call_timeout_s=300, max_connections=1024)

    class Weather(Environment):
        """As ``example_single_tool_call``."""

        @tool
        def get_weather(self, city: str) -> dict[str, str]:
            """Get the weather of a city.

            Args:
                city: which one.
            """
            return {"city": city, "weather_description": f"The weather in {city} is cold."}

        def verify(self, response: Mapping[str, Any]) -> float:
            return float(any(item["type"] == "function_call" for item in response["output"]))

    return nullcontext(InProcessSource(SERVER, Weather))


async def recorded_calls(workload: Workload, settings: Mapping[str, Any], row: Any) -> list[tuple[str, str]]:
    """Route and body of every call that one rollout makes of the environment's server."""
    from gymloop.config.schema import Rollouts
    from gymloop.gym.http import HttpServer
    from gymloop.gym.model_client import ModelClient
    from gymloop.rollouts.collector import Collector, RolloutTask

    calls: list[tuple[str, str]] = []
    post = HttpServer.post

    async def noted(self: Any, route: str, body: Any, *args: Any, **named: Any) -> Any:
        calls.append((route, orjson.dumps(body).decode()))
        return await post(self, route, body, *args, **named)

    HttpServer.post = noted  # type: ignore[method-assign]
    try:
        async with (
            ModelClient(settings["model"], "fake", max_concurrency=1, call_timeout_s=60, ready_timeout_s=5) as model,
            source_of(settings) as source,
        ):
            collector = Collector(
                {SERVER: source}, model, Rollouts(), max_turns=workload.turns, max_tokens=workload.sampled
            )
            for sample in range(2):  # the first may close its session by a route that the server does not have
                calls.clear()
                await collector.gather([RolloutTask("g", sample, row)])
    finally:
        HttpServer.post = post  # type: ignore[method-assign]
    return calls


# ---------------------------------------------------------------- the server alone


def bare_main(settings: dict[str, Any]) -> None:
    """Closed loops that send recorded calls to the environment's server, each session with its own cookie."""
    port = int(settings["server"].rsplit(":", 1)[1])
    calls = [(route, body.encode()) for route, body in settings["calls"]]
    answer({"ready": True})
    obey({"loop": lambda count, concurrency: run_fast(lambda: bare_loop(port, calls, count, concurrency))})


async def bare_loop(port: int, calls: Sequence[tuple[str, bytes]], count: int, concurrency: int) -> dict[str, Any]:
    left = iter(range(count))
    connections = [await asyncio.open_connection("127.0.0.1", port, limit=2**24) for _ in range(concurrency)]
    began, cpu = time.perf_counter(), time.process_time()

    async def loop(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for _ in left:
            cookie = b""
            for route, body in calls:
                writer.write(
                    b"POST %s HTTP/1.1\r\nhost: 127.0.0.1:%d\r\ncontent-type: application/json\r\n%s"
                    b"content-length: %d\r\n\r\n" % (route.encode(), port, cookie, len(body)) + body
                )
                head = await reader.readuntil(b"\r\n\r\n")
                lower = head.lower()
                length = int(lower.partition(b"content-length:")[2].split(b"\r\n", 1)[0])
                await reader.readexactly(length)
                if not head.startswith(b"HTTP/1.1 200"):
                    raise SystemExit(f"{route}: the server replied {head.splitlines()[0]!r}")
                if (at := lower.find(b"set-cookie:")) >= 0:
                    value = head[at + 11 :].split(b"\r\n", 1)[0].split(b";")[0].strip()
                    cookie = b"cookie: %s\r\n" % value

    await asyncio.gather(*(loop(*connection) for connection in connections))
    seconds = time.perf_counter() - began
    for _, writer in connections:
        writer.close()
    return {"rollouts": count, "seconds": seconds, "cpu": time.process_time() - cpu}


# ---------------------------------------------------------------- NeMo Gym's stack

STACK = """
import asyncio, json, os, signal, sys, time
settings = json.loads(sys.stdin.readline())
signal.alarm(1800)
told = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
def answer(value):
    told.write(json.dumps(value) + chr(10)); told.flush()
from nemo_gym.cli.env import RunHelper
from nemo_gym.global_config import GlobalConfigDictParserConfig
from nemo_gym.rollout_collection import RolloutCollectionHelper
from nemo_gym.server_utils import BaseServerConfig, get_global_aiohttp_client
from omegaconf import OmegaConf
import psutil
helper = RunHelper()
def cpu():
    found = {"driver": time.process_time()}
    for name, process in helper._processes.items():
        each = [psutil.Process(process.pid)]
        each += each[0].children(recursive=True)
        found[name] = sum(sum(one.cpu_times()[:2]) for one in each)
    return found
async def collect(count):
    rows = []
    for index in range(count):
        row = json.loads(json.dumps(settings["rows"][index % len(settings["rows"])]))
        row |= {"agent_ref": {"type": "responses_api_agents", "name": settings["agent"]}, "_rowidx": index,
                "_ng_task_index": index, "_ng_rollout_index": 0}
        rows.append(row)
    before, began = cpu(), time.perf_counter()
    head = BaseServerConfig(host="127.0.0.1", port=settings["head"])
    results = []
    for task in RolloutCollectionHelper().run_examples(rows, head_server_config=head):
        results.append((await task)[1])
    seconds, after = time.perf_counter() - began, cpu()
    turns = sum("prompt_token_ids" in item for item in results[0]["response"]["output"])
    return {"rollouts": len(results), "seconds": seconds, "turns": turns,
            "reward": sum(one["reward"] for one in results) / len(results),
            "cpu": {name: after[name] - before[name] for name in after}}
async def main():
    answer({"ready": True})
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        command = json.loads(line)
        answer(await collect(command["count"]))
    await get_global_aiohttp_client().close()
try:
    helper.start(GlobalConfigDictParserConfig(
        initial_global_config_dict=OmegaConf.create(settings["config"]),
        skip_load_from_cli=True, skip_load_from_dotenv=True))
    asyncio.run(main())
finally:
    helper.shutdown()
"""


@contextmanager
def stack(args: argparse.Namespace, folder: Path, model: str, workload: Workload, rows: list[Any]) -> Iterator[Child]:
    """RunHelper with the fastest settings it has: one environment that exists already, no probe of the model."""
    gym = args.gym.resolve()
    types = (f"resources_servers/{SERVER}", "responses_api_agents/simple_agent", "environment_servers/legacy_agent",
             "responses_api_models/vllm_model")  # fmt: skip
    for one in types:
        (folder / "venvs" / one).mkdir(parents=True)
        (folder / "venvs" / one / ".venv").symlink_to(gym)
    head = free_port()
    config = {
        "config_paths": [CONFIG, "responses_api_models/vllm_model/configs/vllm_model_for_training.yaml"],
        "policy_model_name": "fake",
        "policy_api_key": "none",
        "policy_base_url": [model],
        "model_endpoint_readiness_timeout_seconds": 0,
        "uv_venv_dir": str(folder / "venvs"),
        "skip_venv_if_present": True,
        "head_server": {"host": "127.0.0.1", "port": head},
        "global_aiohttp_connector_limit_per_host": 16384,
        "global_aiohttp_connector_limit": 65536,
        f"{SERVER}_simple_agent": {"responses_api_agents": {"simple_agent": {"max_steps": workload.turns}}},
    }
    (folder / "uv.toml").write_text('[pip]\npython-version = "3.13.14"\n')
    bins = f"{gym / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    environ = {
        **os.environ, "PATH": bins, "RAY_TMPDIR": str(folder), "UV_CONFIG_FILE": str(folder / "uv.toml"),
    }  # fmt: skip
    settings = {"config": config, "rows": rows, "agent": f"{SERVER}_simple_agent", "head": head}
    command = [str(gym / "bin" / "python"), "-c", STACK]
    child = Child(command, settings, cwd=folder, env=environ, log=folder / "stack.log")
    try:
        yield child
    finally:
        child.end()


def free_port() -> int:
    import socket

    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


# ---------------------------------------------------------------- processes that speak JSON lines


class Child:
    def __init__(self, command: list[str], settings: dict[str, Any], *, log: Path | None = None, **named: Any) -> None:
        self._log = log
        with open(log or os.devnull, "w") as errors:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors if log else None, text=True,
                **named,
            )  # fmt: skip
        self.tell(settings)
        self.hello = self.hear()

    @classmethod
    def of(cls, role: str, settings: dict[str, Any]) -> Child:
        return cls([sys.executable, str(Path(__file__).resolve()), "--role", role], settings)

    def tell(self, value: dict[str, Any]) -> None:
        assert self._process.stdin
        self._process.stdin.write(json.dumps(value) + "\n")
        self._process.stdin.flush()

    def hear(self) -> Any:
        assert self._process.stdout
        line = self._process.stdout.readline()
        if not line:
            self.end()
            told = "" if self._log is None else self._log.read_text()[-3000:]
            raise SystemExit(f"a benchmark process ended with status {self._process.returncode}\n{told}")
        return json.loads(line)

    def ask(self, do: str, **given: Any) -> Any:
        self.tell({"do": do, **given})
        return self.hear()

    def end(self) -> None:
        assert self._process.stdin
        self._process.stdin.close()
        try:
            self._process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(timeout=10)


def answer(value: Any) -> None:
    print(json.dumps(value), flush=True)


def obey(commands: Mapping[str, Callable[..., Any]]) -> None:
    """Answer lines of standard input until it ends."""
    for line in sys.stdin:
        given = json.loads(line)
        do = given.pop("do")
        answer(time.process_time() if do == "cpu" else commands[do](**given))


def run_fast(work: Callable[[], Any]) -> Any:
    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(work())


def cpu_of(pid: int) -> float:
    """Processor time of a process and the children it has waited for, seconds."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) * TICK_S


# ---------------------------------------------------------------- the run


@dataclasses.dataclass
class Side:
    """The rounds of one side: rollouts/s, and processor time per rollout by process, ms."""

    rates: list[float] = dataclasses.field(default_factory=list)
    costs: list[dict[str, float]] = dataclasses.field(default_factory=list)

    def add(self, rollouts: int, seconds: float, cpu: Mapping[str, float]) -> None:
        self.rates.append(rollouts / seconds)
        self.costs.append({name: 1000 * value / rollouts for name, value in cpu.items()})

    @property
    def rate(self) -> float:
        return statistics.median(self.rates)

    def cost(self, name: str) -> float:
        return statistics.median(cost[name] for cost in self.costs)

    def total(self, *without: str) -> float:
        return sum(self.cost(name) for name in self.costs[0] if name not in without)


async def measure(args: argparse.Namespace, workload: Workload, rows: list[Any]) -> dict[str, Side]:
    from gymloop.gym.nemo.host import Gym, close, host
    from gymloop.gym.nemo.install import Installation

    sides = {name: Side() for name in ("gymloop", "bare", "in-process")}
    gym = Gym.load(Installation.at(args.gym), {"config_paths": [CONFIG]}, [], os.environ)
    count = workload.rollouts // 16 if args.quick else workload.rollouts
    with tempfile.TemporaryDirectory(prefix="gymloop-bench-") as folder:
        servers = await host(gym, Path(folder))
        children: list[Child] = []

        def child(role: str, **settings: Any) -> Child:
            children.append(Child.of(role, {"workload": dataclasses.asdict(workload), **settings}))
            return children[-1]

        try:
            server = servers[SERVER]
            fake = child("fake")
            given = {"model": fake.hello["url"], "rows": rows}
            hosted = child("driver", server=server.url, **given)
            alone = child("driver", server=None, **given)
            bare = child("bare", server=server.url, calls=hosted.ask("record"))

            def round_of(side: str, asked: Child, do: str) -> None:
                before = fake.ask("cpu"), cpu_of(server.pid or 0)
                done = asked.ask(do, count=count, concurrency=args.concurrency)
                after = fake.ask("cpu"), cpu_of(server.pid or 0)
                cpu = {"driver": done["cpu"], "resources": after[1] - before[1], "fake": after[0] - before[0]}
                sides[side].add(done["rollouts"], done["seconds"], cpu)
                print(describe(side, workload, sides[side], -1), flush=True)

            for number in range(args.rounds + 1):
                round_of("bare", bare, "loop")
                round_of("gymloop", hosted, "collect")
                round_of("in-process", alone, "collect")
                if number == 0:  # warms up, is not counted
                    for side in sides.values():
                        side.rates.clear()
                        side.costs.clear()
                    print("  (the round above is not counted)")
        finally:
            for one in reversed(children):
                one.end()
            await close(servers)
    return sides


def measure_stack(args: argparse.Namespace, workload: Workload, rows: list[Any]) -> Side:
    from gymloop.lifeline import reaped

    side = Side()
    count = 8 if args.quick else workload.stack_rollouts
    with tempfile.TemporaryDirectory(prefix="gymloop-bench-") as folder, reaped():
        fake = Child.of("fake", {"workload": dataclasses.asdict(workload)})
        try:
            with stack(args, Path(folder), fake.hello["url"], workload, rows) as child:
                for number in range(args.rounds + 1):
                    before = fake.ask("cpu")
                    done = child.ask("collect", count=count)
                    if done["turns"] != workload.turns:
                        raise SystemExit(f"the stack made {done['turns']} turns, not {workload.turns}")
                    cpu = done["cpu"] | {"fake": fake.ask("cpu") - before}
                    side.add(done["rollouts"], done["seconds"], cpu)
                    print(describe("stack", workload, side, -1), flush=True)
                    if number == 0:
                        side.rates.clear()
                        side.costs.clear()
                        print("  (the round above is not counted)")
        finally:
            fake.end()
    return side


def describe(name: str, workload: Workload, side: Side, which: int | None = None) -> str:
    cost = {key: side.cost(key) for key in side.costs[0]} if which is None else side.costs[which]
    rate = side.rate if which is None else side.rates[which]
    parts = ", ".join(f"{key.removeprefix(SERVER + '_')} {value:.2f}" for key, value in cost.items())
    return f"{workload.name:<6} {name:<11} {rate:>8.1f} rollouts/s  CPU ms/rollout: {parts}"


def judge(workload: Workload, sides: Mapping[str, Side], side: Side | None) -> list[tuple[str, float, bool]]:
    ours = sides["gymloop"]
    for name, one in sides.items():
        print(describe(name, workload, one))
    if side is not None:
        print(describe("stack", workload, side))
        print(
            f"{workload.name}: stack over gymloop, CPU without the fake: "
            f"{side.total('fake'):.1f} / {ours.total('fake'):.1f} ms = {side.total('fake') / ours.total('fake'):.1f}; "
            f"rollouts/s: {ours.rate:.0f} / {side.rate:.0f} = {ours.rate / side.rate:.1f}"
        )
    cost, ratio = ours.cost("driver"), ours.rate / sides["bare"].rate
    server = sides["bare"].cost("resources")
    print(
        f"{workload.name}: gymloop's own part over the server alone, CPU: {cost:.2f} / {server:.2f} ms = "
        f"{cost / server:.2f}; rollouts/s: {ours.rate:.0f} / {sides['bare'].rate:.0f} = {ratio:.2f}"
    )
    part = f"{workload.name}: gymloop's own part at most {workload.goal_ms:g} ms"
    if side is not None:
        cost *= workload.stack_ms / side.total("fake")
        part += f" where the stack takes {workload.stack_ms:g}"
    goals = [
        (part, cost, cost <= workload.goal_ms),
        (f"{workload.name}: at least {GOAL_RATE_RATIO:g} of the server alone", ratio, ratio >= GOAL_RATE_RATIO),
    ]
    if workload.name == "short":
        rate = sides["in-process"].rate
        goals.append((f"in-process: at least {GOAL_IN_PROCESS:g} rollouts/s", rate, rate >= GOAL_IN_PROCESS))
    return goals


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gym", type=Path, metavar="FOLDER")
    parser.add_argument("--workloads", nargs="+", choices=[one.name for one in WORKLOADS])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--concurrency", type=int, default=128)
    parser.add_argument("--without-stack", action="store_true", help="for machines without Python 3.13")
    parser.add_argument("--quick", action="store_true", help="only shows that everything runs")
    parser.add_argument("--role", choices=("fake", "driver", "bare"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.role:
        main_of = {"fake": fake_main, "driver": driver_main, "bare": bare_main}[args.role]
        main_of(json.loads(sys.stdin.readline()))
        return 0
    if args.gym is None:
        parser.error("--gym FOLDER is needed: an environment of `gymloop gym install --python python3.13`")
    if args.quick:
        args.rounds = 1
    from gymloop.gym.nemo.install import Installation

    data = Installation.at(args.gym).site_packages / "resources_servers" / SERVER / "data" / "example.jsonl"
    rows = [json.loads(line) for line in data.read_text().splitlines()]
    for row in rows:
        row["agent_ref"] = {"type": "responses_api_agents", "name": SERVER}
    print(f"{os.cpu_count()} cores, load average {os.getloadavg()[0]:.2f} at the start, {args.concurrency} concurrent")
    goals = []
    for workload in WORKLOADS:
        if args.workloads and workload.name not in args.workloads:
            continue
        sides = asyncio.run(measure(args, workload, rows))
        goals += judge(workload, sides, None if args.without_stack else measure_stack(args, workload, rows))
    print(f"load average {os.getloadavg()[0]:.2f} at the end")
    if args.quick:
        print("quick: too short for the goals to be judged")
        return 0
    for sentence, value, met in goals:
        print(f"{'met   ' if met else 'MISSED'} {sentence}: {value:.2f}")
    return 0 if all(met for _, _, met in goals) else 1


if __name__ == "__main__":
    raise SystemExit(main())
