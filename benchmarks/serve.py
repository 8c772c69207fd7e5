"""What HTTP costs: the generation server against its engine called directly, in the same process and the same run.

The server and its engine run in a process of their own, and so do the clients, so each one's processor time is its own.
Clients are closed loops on raw sockets: a connection sends its next request when the last reply is there, and reads no
more of a reply than its length. Both sides get the same work: prompts of the same ids, the same number of tokens each
(end tokens are off), and the engine's coroutine is awaited as the server awaits it.

    stage   engine                                    says
    fake    answers at once                           the server's ceiling, requests/s
    cpu     answers at once, 8k prompt, 256 sampled   processor time of the server per request, bundle included
    paced   16k tokens/s in 512 rows, as a GPU might  HTTP over direct once it runs, 8k prompt, 128 to 384 sampled
    burst   the same, 256 sampled by every request    HTTP over direct when all 512 replies are due at the same moment
    torch   TorchEngine                               HTTP over direct
    vllm    vLLM                                      real rollouts over AsyncLLM.generate, 256 at once; serve_vllm.py

The prompt is given by ``required_prefix_token_ids`` and one new tool message; every reply has the token bundle. Exit
status 1 when a goal is missed: at most 2 ms of processor time per request (cpu), at least 0.95 of the engine's tokens/s
(paced and torch; of AsyncLLM.generate's for vllm). The burst has no goal: no rollouts end in lockstep for long, and it
shows what it would cost if they did. --quick only shows that everything runs.

The stage vllm runs only where it is asked for. It reads no weights: MODEL may be a folder with a configuration and a
tokenizer.

usage: python benchmarks/serve.py [--stages fake cpu paced burst torch] [--concurrency 1 64 512] [--model MODEL]
                                  [--quick]
       python benchmarks/serve.py --stages vllm --model MODEL [--device cuda] [--rollouts 256] [--new-tokens 512]
                                  [--prompt-tokens 128] [--rounds 6] [--vllm-arguments JSON] [--quick]
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import orjson

import serve_vllm

STAGES = ("fake", "cpu", "paced", "burst", "torch")
GOAL_CPU_MS = 2.0
GOAL_RATIO = 0.95
LIMIT_S = 900.0
"""Of anything that one process waits for from another."""
SATURATED = 0.85
"""Share of a core from which on a process counts as the one that limits a run."""
VARIANTS = 32
"""Different requests per stage; more would only take the clients memory."""
TOOL_TEXT = '{"temperature_c": 4.5, "conditions": "light rain", "wind": {"speed_kmh": 21, "direction": "SW"}}'


@dataclasses.dataclass(frozen=True)
class Load:
    """One measurement: who asks what of which engine.

    Attributes:
        seconds: how long clients start requests, after a warm-up; None counts ``requests`` instead.
        settled_s: of these, what is left out of tokens/s at the start, when all clients ask at once; with it, the time
            after ``seconds`` is left out too, when fewer and fewer ask.
        requests: per connection.
        spread: how far a request's tokens may be from ``new_tokens``, at most.
    """

    engine: str
    prompt_tokens: int
    new_tokens: int
    concurrency: int
    seconds: float | None = None
    settled_s: float = 0.0
    requests: int = 1
    seed: int = 0
    spread: int = 0


# ---------------------------------------------------------------- engines


class FakeEngine:
    """Samples nothing and takes no time: what is left is the server."""

    def __init__(self, max_model_len: int):
        self.max_model_len = max_model_len
        self.weight_version = 1
        self._samples: dict[int, Any] = {}

    def sample(self, count: int) -> Any:
        from gymloop.generation.engine import Sample

        if count not in self._samples:
            rng = random.Random(count)
            ids = tuple(rng.randrange(40, 120) for _ in range(count))  # letters of the toy's alphabet
            self._samples[count] = Sample(ids, tuple(-rng.random() for _ in range(count)), "length", 1, 1)
        return self._samples[count]

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Any, request_id: str, on_tokens: Callable[..., None] | None = None
    ) -> Any:
        return self.sample(sampling.max_new_tokens)

    def abort(self, request_id: str) -> None:
        pass


class PacedEngine(FakeEngine):
    """Gives every request one token per step of ``step_s``, as an engine on an accelerator does; computes nothing."""

    def __init__(self, max_model_len: int, step_s: float):
        super().__init__(max_model_len)
        self._step_s = step_s

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Any, request_id: str, on_tokens: Callable[..., None] | None = None
    ) -> Any:
        await asyncio.sleep(self._step_s * sampling.max_new_tokens)
        return self.sample(sampling.max_new_tokens)


class Unending:
    """An engine whose end tokens are off, so that every request gets as many tokens as it asked for."""

    def __init__(self, engine: Any):
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Any, request_id: str, *args: Any, **named: Any
    ) -> Any:
        endless = dataclasses.replace(sampling, stop_token_ids=())
        return await self._engine.generate(prompt_ids, endless, request_id, *args, **named)


# ---------------------------------------------------------------- requests


def request_bodies(load: Load, vocab: int, end_token: int, model: str, count: int) -> list[dict[str, Any]]:
    """Chat requests that continue a turn of random ids by a tool's answer."""
    bodies = []
    for index in range(count):
        rng = random.Random(f"{load.seed}/{index}")
        prefix = [rng.randrange(40, min(vocab, 32000)) for _ in range(load.prompt_tokens - 1)]
        bodies.append(
            {
                "model": model,
                "messages": [
                    {"role": "user", "content": "What is the weather in Oslo?"},
                    {"role": "assistant", "content": "I shall look it up."},
                    {"role": "tool", "tool_call_id": f"call_{index}", "content": TOOL_TEXT},
                ],
                "required_prefix_token_ids": [*prefix, end_token],
                "max_tokens": load.new_tokens + rng.randint(-load.spread, load.spread),
                "temperature": 1.0,
            }
        )
    return bodies


# ---------------------------------------------------------------- the server's process


def server_main(settings: dict[str, Any]) -> None:
    """Serve one engine; obey lines of JSON on standard input, answer each with one on standard output."""
    from gymloop.serving.server import GenerationServer
    from gymloop.startup.sockets import hold_socket
    from gymloop.tokens.renderer import Renderer

    engines: dict[str, Any] = {
        "fake": lambda: FakeEngine(settings["max_model_len"]),
        "paced": lambda: PacedEngine(settings["max_model_len"], settings["step_s"]),
        "torch": lambda: torch_engine(settings),
    }
    renderer = Renderer.load(settings["folder"], settings["chat_template"])
    bare = engines[settings["engine"]]()
    engine = Unending(bare)
    server = GenerationServer(hold_socket(20000, 29999), "bench", None)
    server.start()
    server.ready(engine, renderer)
    thread = next(thread for thread in threading.enumerate() if thread.name == "generation-server")
    clock = time.pthread_getcpuclockid(thread.ident)  # type: ignore[arg-type]
    answer({"url": server.url, "vocab": renderer.vocab_size, "end_token": renderer.end_token_ids[0]})
    for line in sys.stdin:
        command = json.loads(line)
        if command["do"] == "cpu":
            # The server's thread alone where the engine computes in others, else everything the process does.
            seconds = time.clock_gettime(clock) if settings["engine"] == "torch" else time.process_time()
            answer({"cpu": seconds, "at": time.perf_counter()})
        elif command["do"] == "direct":
            load = Load(**command["load"])
            bodies = request_bodies(load, renderer.vocab_size, renderer.end_token_ids[0], "bench", command["bodies"])
            prompts = [renderer.extend(body["required_prefix_token_ids"], body["messages"][2:]) for body in bodies]
            counts = [body["max_tokens"] for body in bodies]
            answer(asyncio.run(direct(engine, prompts, counts, load)))
    server.close()
    if hasattr(bare, "close"):
        bare.close()


def torch_engine(settings: dict[str, Any]) -> Any:
    from gymloop.generation.torch_engine import TorchEngine

    return TorchEngine(
        settings["folder"],
        dtype="float32",
        max_batch_size=settings["max_batch_size"],
        max_model_len=settings["max_model_len"],
    )


async def direct(engine: Any, prompts: list[tuple[int, ...]], wanted: list[int], load: Load) -> dict[str, float]:
    """The same closed loops, without the server."""
    from gymloop.generation.engine import Sampling

    ended: list[Ended] = []
    began = time.perf_counter()

    async def loop(index: int) -> None:
        done = 0
        while keep_on(load, began, done):
            at = time.perf_counter()
            number = (index * load.requests + done) % len(prompts)
            sample = await engine.generate(prompts[number], Sampling(wanted[number]), f"direct-{index}-{done}")
            ended.append(Ended(at - began, time.perf_counter() - began, len(sample.token_ids)))
            done += 1
            if load.seconds is not None:
                await asyncio.sleep(0)  # an engine that never waits would leave the other loops nothing

    await asyncio.gather(*(loop(index) for index in range(load.concurrency)))
    return rates(load, ended, time.perf_counter() - began)


@dataclasses.dataclass(frozen=True, slots=True)
class Ended:
    """A request, seconds since the start of all, and its tokens."""

    start: float
    end: float
    tokens: int

    def share(self, begin: float, finish: float) -> float:
        """Of its time, within these bounds."""
        return max(0.0, min(self.end, finish) - max(self.start, begin)) / (self.end - self.start)


def rates(load: Load, ended: list[Ended], wall: float) -> dict[str, float]:
    """Requests and tokens per second; a request that is partly within the time that counts, counts in part."""
    begin, finish = 0.0, wall
    if load.settled_s and load.seconds is not None:
        begin, finish = load.settled_s, load.seconds
    shares = [(one.share(begin, finish), one.tokens) for one in ended]
    lasted = finish - begin
    return {
        "requests_per_s": sum(share for share, _ in shares) / lasted,
        "tokens_per_s": sum(share * tokens for share, tokens in shares) / lasted,
    }


def keep_on(load: Load, began: float, done: int) -> bool:
    return done < load.requests if load.seconds is None else time.perf_counter() - began < load.seconds


def answer(value: dict[str, Any]) -> None:
    print(json.dumps(value), flush=True)


# ---------------------------------------------------------------- a client's process


def client_main(task: dict[str, Any]) -> None:
    """Closed loops on as many connections as the load says; prints what was done and what it cost this process."""
    load = Load(**task["load"])
    bodies = request_bodies(load, task["vocab"], task["end_token"], "bench", task["bodies"])
    requests = [(http_request(task["port"], orjson.dumps(body)), body["max_tokens"]) for body in bodies]
    answer({"ready": True})
    sys.stdin.readline()
    before = time.process_time()
    answer({**asyncio.run(clients(load, task["port"], requests)), "cpu": time.process_time() - before})


def http_request(port: int, body: bytes) -> bytes:
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


async def clients(load: Load, port: int, requests: list[tuple[bytes, int]]) -> dict[str, Any]:
    connections = [await asyncio.open_connection("127.0.0.1", port, limit=2**20) for _ in range(load.concurrency)]
    ended: list[Ended] = []
    began = time.perf_counter()

    async def loop(index: int) -> None:
        reader, writer = connections[index]
        done = 0
        while keep_on(load, began, done):
            at = time.perf_counter()
            request, count = requests[(index * load.requests + done) % len(requests)]
            writer.write(request)
            head = await reader.readuntil(b"\r\n\r\n")
            length = int(head.lower().partition(b"content-length:")[2].split(b"\r\n", 1)[0])
            body = await reader.readexactly(length)
            if (
                not head.startswith(b"HTTP/1.1 200")
                or b'"completion_tokens":%d' % count not in body[-400:] + body[:400]
            ):
                raise SystemExit(f"the server replied {head.splitlines()[0]!r} {body[:300]!r}")
            done += 1
            ended.append(Ended(at - began, time.perf_counter() - began, count))

    await asyncio.gather(*(loop(index) for index in range(load.concurrency)))
    seconds = time.perf_counter() - began
    for _, writer in connections:
        writer.close()
    latencies = sorted(one.end - one.start for one in ended)
    p99 = latencies[min(len(latencies) - 1, int(0.99 * len(latencies)))]
    return {**rates(load, ended, seconds), "requests": len(ended), "seconds": seconds, "p99_s": p99}


# ---------------------------------------------------------------- the run


class Child:
    """A process that speaks JSON lines."""

    def __init__(self, role: str, settings: dict[str, Any]):
        command = [sys.executable, str(Path(__file__).resolve()), "--role", role]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.tell(settings)
        self.hello: dict[str, Any] = self.hear()

    def tell(self, value: dict[str, Any]) -> None:
        assert self._process.stdin
        self._process.stdin.write(json.dumps(value) + "\n")
        self._process.stdin.flush()

    def hear(self, limit_s: float = LIMIT_S) -> Any:
        assert self._process.stdout
        timer = threading.Timer(limit_s, self._process.kill)
        timer.start()
        try:
            line = self._process.stdout.readline()
        finally:
            timer.cancel()
        if not line:
            raise SystemExit(f"a benchmark process ended with status {self._process.wait(timeout=10)}")
        return json.loads(line)

    def ask(self, value: dict[str, Any], limit_s: float = LIMIT_S) -> Any:
        self.tell(value)
        return self.hear(limit_s)

    def end(self) -> None:
        assert self._process.stdin
        self._process.stdin.close()
        try:
            self._process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(timeout=10)


@dataclasses.dataclass
class Result:
    requests_per_s: float
    tokens_per_s: float
    p99_ms: float
    server_ms: float
    server_share: float
    client_share: float


def over_http(server: Child, load: Load, bodies: int) -> Result:
    port = int(server.hello["url"].rsplit(":", 1)[1].split("/")[0])
    task = {"load": dataclasses.asdict(load), "port": port, "bodies": bodies}
    client = Child("client", {**task, **{key: server.hello[key] for key in ("vocab", "end_token")}})
    try:
        before = server.ask({"do": "cpu"})
        done = client.ask({"do": "go"})
        after = server.ask({"do": "cpu"})
    finally:
        client.end()
    cpu = after["cpu"] - before["cpu"]
    wall = done["seconds"]
    return Result(
        done["requests_per_s"],
        done["tokens_per_s"],
        1000 * done["p99_s"],
        1000 * cpu / done["requests"],
        cpu / (after["at"] - before["at"]),
        done["cpu"] / wall,
    )


def compare(server: Child, load: Load, bodies: int, rounds: int) -> tuple[float, float, Result]:
    """Medians over alternating rounds: HTTP over direct in tokens/s, direct tokens/s, and HTTP's last round.

    The first round warms both up and is not counted.
    """
    ratios, bare_rates, http = [], [], None
    for number in range(rounds + 1):
        fresh = dataclasses.replace(load, seed=load.seed + number)
        http = over_http(server, fresh, bodies)
        # Other prompts of the same lengths: an engine that remembers prefixes must not know them from the other side.
        other = dataclasses.replace(fresh, seed=fresh.seed + 1000)
        bare = server.ask({"do": "direct", "load": dataclasses.asdict(other), "bodies": bodies})
        if number:
            bare_rates.append(bare["tokens_per_s"])
            ratios.append(http.tokens_per_s / bare_rates[-1])
    assert http is not None
    return statistics.median(ratios), statistics.median(bare_rates), http


HEADER = (
    f"{'stage':<6} {'conc.':>5} {'HTTP req/s':>10} {'HTTP tok/s':>10} {'direct tok/s':>12} {'ratio':>6} "
    f"{'server ms/req':>13} {'p99 ms':>8} {'server':>6} {'client':>6}  limited by"
)


def row(stage: str, load: Load, ratio: float | None, bare: float | None, http: Result) -> str:
    return (
        f"{stage:<6} {load.concurrency:>5} {http.requests_per_s:>10.1f} {http.tokens_per_s:>10.0f} "
        f"{'-' if bare is None else f'{bare:.0f}':>12} {'-' if ratio is None else f'{ratio:.3f}':>6} "
        f"{http.server_ms:>13.2f} {http.p99_ms:>8.1f} {http.server_share:>6.0%} {http.client_share:>6.0%}  "
        f"{limited_by(stage, http)}"
    )


def limited_by(stage: str, http: Result) -> str:
    """Where a closed loop spends its time; with an engine that takes none it is the busier of the two processes."""
    if http.client_share > max(SATURATED, http.server_share):
        return "the client"
    if http.server_share > SATURATED:
        return "the server"
    return "the engine" if stage in ("paced", "burst", "torch") else "neither: the machine is shared"


def run_stage(stage: str, args: argparse.Namespace, toy: Path) -> list[tuple[str, float, bool]]:
    """Measure and print one stage; returns its goals as (sentence, value, met)."""
    quick = args.quick
    goals: list[tuple[str, float, bool]] = []
    seconds = 1.0 if quick else 8.0
    settings: dict[str, Any] = {"engine": "fake", "folder": str(toy), "chat_template": None, "max_model_len": 16384}
    if stage in ("paced", "burst"):
        settings |= {"engine": "paced", "step_s": 512 / 16384}
    elif stage == "torch":
        settings |= {"engine": "torch", "max_batch_size": 8 if quick else 64, "max_model_len": 256}
        if not quick:
            settings |= model_settings(args.model)
    server = Child("server", settings)
    try:
        if stage == "fake":
            for concurrency in args.concurrency:
                load = Load("fake", 128, 32, concurrency, seconds)
                ratio, bare, http = compare(server, load, VARIANTS, 1)
                print(row(stage, load, ratio, bare, http), flush=True)
        elif stage == "cpu":
            costs = []
            load = Load("fake", 8192, 256, 16, seconds)
            over_http(server, dataclasses.replace(load, seconds=1.0), VARIANTS)
            for number in range(1 if quick else 3):
                http = over_http(server, dataclasses.replace(load, seed=number), VARIANTS)
                costs.append(http.server_ms)
                print(row(stage, load, None, None, http), flush=True)
            cost = statistics.median(costs)
            goals.append((f"server CPU per request at most {GOAL_CPU_MS:g} ms", cost, cost <= GOAL_CPU_MS))
        elif stage == "paced":
            load = Load(
                "paced", 8192, 256, 64 if quick else 512, 5.0 if quick else 30.0, 3.0 if quick else 12.0, spread=128
            )
            ratio, bare, http = compare(server, load, VARIANTS, 1 if quick else 3)
            print(row(stage, load, ratio, bare, http), flush=True)
            goals.append((f"paced: at least {GOAL_RATIO:g} of the engine's tokens/s", ratio, ratio >= GOAL_RATIO))
        elif stage == "burst":
            load = Load("paced", 8192, 256, 64 if quick else 512, None, 1 if quick else 3)
            ratio, bare, http = compare(server, load, VARIANTS, 1 if quick else 3)
            print(row(stage, load, ratio, bare, http), flush=True)
        else:
            for concurrency in args.concurrency:
                rounds = 5 if concurrency == 1 else 3 if concurrency < 512 else 1
                # Every prompt is new, so that the engine's prefix reuse has nothing to reuse.
                load = Load(
                    "torch", 48, 16 if concurrency < 512 else 8, concurrency, None, 4 if concurrency == 1 else 1
                )
                bodies = concurrency * load.requests
                ratio, bare, http = compare(server, load, bodies, 1 if quick else rounds)
                print(row(stage, load, ratio, bare, http), flush=True)
                met = ratio >= GOAL_RATIO
                goals.append((f"torch at {concurrency}: at least {GOAL_RATIO:g} of its tokens/s", ratio, met))
    finally:
        server.end()
    return goals


def run_vllm(args: argparse.Namespace, root: Path) -> list[tuple[str, float, bool]]:
    """Measure and print the stage vllm; returns its goal as (sentence, value, met)."""
    if args.quick:
        folder = toy_folder(root, max_position_embeddings=1024, for_vllm=True)
        work, rounds = serve_vllm.Work(rollouts=32, new_tokens=64, prompt_tokens=64), 1
    else:
        given = Path(args.model)
        folder = given if given.is_dir() else Path(model_settings(args.model)["folder"])
        work, rounds = serve_vllm.Work(args.rollouts, args.new_tokens, args.prompt_tokens), args.rounds
    ratio = serve_vllm.measure(Child, folder, work, args.device, args.vllm_arguments, rounds)
    goal = f"vllm: at least {GOAL_RATIO:g} of the tokens/s of AsyncLLM.generate"
    return [] if ratio is None else [(goal, ratio, ratio >= GOAL_RATIO)]


def model_settings(model: str) -> dict[str, Any]:
    from gymloop.models.resolve import resolve_model

    return {"folder": str(resolve_model(model))}


def toy_folder(root: Path, for_vllm: bool = False, **shape: Any) -> Path:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
    import toys

    return toys.build_toy(root, "q", **(toys.FOR_VLLM if for_vllm else {}), **shape)


ROLES: dict[str, Callable[[dict[str, Any]], None]] = {
    "server": server_main,
    "client": client_main,
    "vllm-engine": lambda settings: serve_vllm.engine_main(settings, Unending),
    "vllm-driver": serve_vllm.driver_main,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", nargs="+", choices=(*STAGES, "vllm"), default=STAGES)
    parser.add_argument("--concurrency", type=int, nargs="+", default=(1, 64, 512))
    parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct", help="folder or Hugging Face id")
    parser.add_argument(
        "--quick", action="store_true", help="seconds instead of minutes, a toy model instead of --model"
    )
    vllm = parser.add_argument_group("the stage vllm")
    vllm.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    vllm.add_argument("--rollouts", type=int, default=256, help="at once")
    vllm.add_argument("--new-tokens", type=int, default=512, help="of each rollout")
    vllm.add_argument("--prompt-tokens", type=int, default=128, help="of each rollout, about")
    vllm.add_argument("--rounds", type=int, default=6, help="after the warm-up")
    vllm.add_argument("--vllm-arguments", type=json.loads, default={}, help="further ones of AsyncEngineArgs, JSON")
    parser.add_argument("--role", choices=ROLES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.role:
        ROLES[args.role](json.loads(sys.stdin.readline()))
        return 0

    print(
        f"{os.cpu_count()} cores, load average {os.getloadavg()[0]:.2f} at the start{', quick' if args.quick else ''}"
    )
    closed_loops = [stage for stage in args.stages if stage in STAGES]
    goals = []
    with tempfile.TemporaryDirectory(prefix="gymloop-bench-") as folder:
        if closed_loops:
            print("closed-loop clients in one process of their own")
            print(
                "server ms/req: processor time of the server's process (torch: of its thread); "
                "server, client: share of a core"
            )
            print(HEADER, flush=True)
            toy = toy_folder(Path(folder))
            for stage in closed_loops:
                goals += run_stage(stage, args, toy)
        if "vllm" in args.stages:
            goals += run_vllm(args, Path(folder) / "vllm")
    print(f"load average {os.getloadavg()[0]:.2f} at the end")
    if args.quick:
        print("quick: too short, and the toy too fast, for the goals to be judged")
        return 0
    for sentence, value, met in goals:
        print(f"{'met   ' if met else 'MISSED'} {sentence}: {value:.3f}")
    return 0 if all(met for _, _, met in goals) else 1


if __name__ == "__main__":
    raise SystemExit(main())
