"""Real rollouts on real vLLM: gymloop's agents and server against vLLM's own ``generate``, on one engine.

One process holds gymloop's ``VllmEngine`` (random weights) with a ``GenerationServer`` in front of it, as an engine's
worker does; another is the driver: collector, agent, an environment of one turn, trajectories. All rollouts of a round
begin at once and each samples the same number of tokens; a round lasts from the first request to the last trajectory.

The other side is ``AsyncLLM.generate`` of that same engine, called in the same process on the loop it lives on, with no
code of gymloop around it: as many requests at once, prompts as long to the token, as many tokens, logprobs of the
sampled tokens, no text. The warm-up measures it with one output for every token and with one at the end; gymloop then
takes turns with the faster of the two, first in one round and second in the next. One round says little: on an H200 the
rates of one side differ by a tenth. Prompts are new in every round and on every side; what all of them share is the
beginning that the template writes.

A last raw round has a seed in every request, as gymloop's have with ``repeatable_draws``: where it is slower, vLLM
draws seeded rows one by one.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TextIO

MODEL = "bench"
ENVIRONMENT = "once"
START_LIMIT_S = 900.0
ROUND_LIMIT_S = 300.0
KINDS = {"delta": "DELTA", "final": "FINAL_ONLY"}
"""Raw sides, and vLLM's name for how their outputs come."""
BLOCK = 128
"""The context length is a multiple of it."""


@dataclass(frozen=True)
class Work:
    """One round.

    Attributes:
        rollouts: at once.
        new_tokens: of each.
        prompt_tokens: of each, about.
    """

    rollouts: int
    new_tokens: int
    prompt_tokens: int

    @property
    def tokens(self) -> int:
        """Sampled in a round."""
        return self.rollouts * self.new_tokens

    @property
    def max_model_len(self) -> int:
        """Room for prompts half as long again."""
        return -(-(3 * self.prompt_tokens // 2 + self.new_tokens) // BLOCK) * BLOCK


# ---------------------------------------------------------------- the engine's process


def engine_main(settings: Mapping[str, Any], endless: Callable[[Any], Any]) -> None:
    """Serve one vLLM engine; obey lines of JSON on standard input.

    Args:
        settings: ``work``, ``folder``, ``device`` and further ``arguments`` of vLLM's engine.
        endless: an engine whose end tokens are off.
    """
    told = kept_output()
    from gymloop.config.plan import SamplingProfile
    from gymloop.garbage import keep
    from gymloop.serving.engines import load_engine, settled_device
    from gymloop.serving.guard import SamplingProfiles
    from gymloop.serving.server import GenerationServer
    from gymloop.startup.sockets import hold_socket
    from gymloop.tokens.renderer import Renderer

    began = time.perf_counter()
    work, folder = Work(**settings["work"]), Path(settings["folder"])
    spec = engine_spec(work, folder, settled_device(settings["device"], on_vllm=True), settings["arguments"])
    engine, _, facts = load_engine(spec, folder, spec.device, lambda *_: None, keep)
    profiles = SamplingProfiles(SamplingProfile(temperature=1.0, top_p=1.0, top_k=None))
    server = GenerationServer(hold_socket(*spec.port_range), MODEL, profiles, request_timeout_s=ROUND_LIMIT_S)
    try:
        server.start()
        server.ready(endless(engine), Renderer.load(folder))
        clocks = {
            thread.name: time.pthread_getcpuclockid(thread.ident) for thread in threading.enumerate() if thread.ident
        }
        prompts = Prompts(Renderer.load(folder), work)  # the other renderer is the server's thread's

        def cpu() -> dict[str, float]:
            seconds = {side: time.clock_gettime(clocks[name]) for side, name in THREADS.items()}
            return seconds | {"process": time.process_time()}

        def raw(seed: int, kind: str, seeded: bool) -> dict[str, Any]:
            call = raw_round(engine._llm, prompts.twins(seed), work.new_tokens, kind, f"raw-{kind}-{seed}", seeded)
            return engine._loop.submit(call).result(ROUND_LIMIT_S)

        tell(told, {"url": server.url, "facts": facts, "seconds": time.perf_counter() - began})
        obey(told, {"texts": prompts.texts, "cpu": cpu, "raw": raw, "lengths": prompts.lengths})
    finally:
        server.close()
        engine.close()  # type: ignore[attr-defined]


THREADS = {"server": "generation-server", "loop": "vllm-engine"}


def engine_spec(work: Work, folder: Path, device: str, arguments: Mapping[str, Any]) -> Any:
    """As the Plan makes one; the KV cache holds every row full, so that no request waits or is computed twice."""
    from gymloop.compat import settle_precision
    from gymloop.generation import capacity
    from gymloop.generation.vllm.memory import kv_cache_bytes
    from gymloop.generation.vllm.settings import VllmSettings
    from gymloop.serving.engine_spec import EngineSpec

    config, precision = capacity.text_config(folder), settle_precision("auto", device)
    room = sys.maxsize  # what does not fit is said by vLLM
    kv_bytes = kv_cache_bytes(config, precision, "auto", work.max_model_len, work.rollouts, room, device)
    return EngineSpec(
        MODEL,
        profiles=None,
        port_range=(20000, 29999),
        max_model_len=work.max_model_len,
        max_batch_size=work.rollouts,
        request_timeout_s=ROUND_LIMIT_S,
        device=device,
        vllm=VllmSettings(load_format="dummy", kv_cache_memory_bytes=kv_bytes, kwargs=dict(arguments)),
    )


class Prompts:
    """User texts by seed, and prompts that are as long as theirs and others."""

    def __init__(self, renderer: Any, work: Work) -> None:
        self._renderer = renderer
        self._work = work
        empty, many = (len(self._ids(_words(random.Random(0), count))) for count in (0, 64))
        self._words = max(1, round((work.prompt_tokens - empty) / ((many - empty) / 64)))

    def texts(self, seed: int) -> list[str]:
        """One a rollout."""
        rng = random.Random(seed)
        return [_words(rng, self._words) for _ in range(self._work.rollouts)]

    def lengths(self, seed: int) -> list[int]:
        """Of their prompts, tokens."""
        return [len(self._ids(text)) for text in self.texts(seed)]

    def twins(self, seed: int) -> list[list[int]]:
        """For each prompt of ``texts(seed)`` another one that begins as all of them do, and goes on with other ids."""
        rng = random.Random(f"twins {seed}")
        rendered = [list(self._ids(text)) for text in self.texts(seed)]
        shared = next((at for at, tokens in enumerate(zip(*rendered, strict=False)) if len(set(tokens)) > 1), 0)
        pool = [token for ids in rendered for token in ids[shared:]]
        return [[*ids[:shared], *rng.choices(pool, k=len(ids) - shared)] for ids in rendered]

    def _ids(self, text: str) -> tuple[int, ...]:
        return self._renderer.render([{"role": "user", "content": text}])


def _words(rng: random.Random, count: int) -> str:
    return " ".join("".join(rng.choices("abcdefgh", k=4)) for _ in range(count))


async def raw_round(
    llm: Any, prompts: Sequence[list[int]], new_tokens: int, kind: str, name: str, seeded: bool
) -> dict[str, Any]:
    """All requests at once on vLLM's own object.

    Args:
        llm: ``AsyncLLM``, on whose loop this runs.
        prompts: token ids.
        new_tokens: of each.
        kind: of ``KINDS``.
        name: begins the names of its requests.
        seeded: give each request a seed.
    """
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    seconds = []
    began = time.perf_counter()

    async def one(index: int, ids: list[int]) -> int:
        params = SamplingParams(
            max_tokens=new_tokens,
            temperature=1.0,
            ignore_eos=True,
            logprobs=0,
            detokenize=False,
            seed=hash((name, index)) % 2**63 if seeded else None,
            output_kind=RequestOutputKind[KINDS[kind]],
        )
        count, at = 0, time.perf_counter()
        prompt = {"type": "token", "prompt_token_ids": ids}  # the form that takes vLLM the least work
        async for output in llm.generate(prompt, params, f"{name}-{index}"):
            count += len(output.outputs[0].token_ids)
        seconds.append(time.perf_counter() - at)
        return count

    counts = await asyncio.gather(*(one(index, ids) for index, ids in enumerate(prompts)))  # bounded by the caller
    return {"tokens": sum(counts), "seconds": time.perf_counter() - began, "each": seconds}


# ---------------------------------------------------------------- the driver's process


def driver_main(settings: Mapping[str, Any]) -> None:
    """Collect rounds of rollouts as a training step does."""
    told = kept_output()
    from gymloop.loops import fast_loop

    with asyncio.Runner(loop_factory=fast_loop()) as runner:
        runner.run(drive(settings, told))


async def drive(settings: Mapping[str, Any], told: TextIO) -> None:
    from gymloop.config.schema import Rollouts
    from gymloop.gym import Environment
    from gymloop.gym.model_client import ModelClient
    from gymloop.gym.replicas import Replicas
    from gymloop.gym.session import InProcessSource
    from gymloop.rollouts.collector import Collector
    from gymloop.rollouts.refill import gather_step

    class Once(Environment):
        """Whatever is said is right."""

        def verify(self, response: Mapping[str, Any]) -> float:
            return float(bool(response["output"]))

    work = Work(**settings["work"])
    limits = Rollouts(
        max_concurrency=work.rollouts,
        deadline_s=ROUND_LIMIT_S,
        call_timeout_s=ROUND_LIMIT_S,
        max_infra_attempts=1,
        max_failed_rollouts_per_step=0,
    )
    client = ModelClient(
        settings["url"],
        MODEL,
        max_concurrency=work.rollouts,
        call_timeout_s=ROUND_LIMIT_S,
        ready_timeout_s=60.0,
    )
    async with Replicas({"engine": client}) as model:
        collector = Collector(
            {ENVIRONMENT: InProcessSource(ENVIRONMENT, Once)}, model, limits, max_turns=1, max_tokens=work.new_tokens
        )
        tell(told, {"ready": True})
        # bounded: standard input ends with the process that writes there
        while line := await asyncio.to_thread(sys.stdin.readline):
            command = json.loads(line)
            prompts = [(f"g{index:05d}", row_of(text)) for index, text in enumerate(command["texts"])]
            began, cpu = time.perf_counter(), time.process_time()
            step = await gather_step(collector, prompts, lambda _: (), 1, command["name"], None)
            done = {"seconds": time.perf_counter() - began, "cpu": time.process_time() - cpu}
            rollouts = [rollout for group in step.groups for rollout in group.trajectories]
            counts = [len(rollout.turns[-1].sampled_ids) for rollout in rollouts]
            lengths = [len(rollout.turns[-1].prompt_ids) for rollout in rollouts]
            done |= {"tokens": sum(counts), "each": [rollout.seconds for rollout in rollouts], "prompts": lengths}
            tell(told, done)


def row_of(text: str) -> dict[str, Any]:
    return {
        "agent_ref": {"type": "responses_api_agents", "name": ENVIRONMENT},
        "responses_create_params": {"input": [{"role": "user", "content": text}]},
    }


# ---------------------------------------------------------------- lines of JSON


def kept_output() -> TextIO:
    """Standard output for answers alone; whatever else is printed, by vLLM's processes too, goes to standard error."""
    told = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return told


def tell(told: TextIO, value: Any) -> None:
    told.write(json.dumps(value) + "\n")
    told.flush()


def obey(told: TextIO, commands: Mapping[str, Callable[..., Any]]) -> None:
    """Answer each line ``{"do": name, ...arguments}`` until standard input ends."""
    for line in sys.stdin:
        command = json.loads(line)
        tell(told, commands[command.pop("do")](**command))


# ---------------------------------------------------------------- the comparison


class Child(Protocol):
    """A process that speaks JSON lines."""

    hello: dict[str, Any]

    def ask(self, value: dict[str, Any], limit_s: float) -> Any:
        """Tell it something, and hear what it answers within a time."""

    def end(self) -> None:
        """End it."""


@dataclass(frozen=True)
class Side:
    """One side of one round.

    Attributes:
        tokens_per_s: of all requests, from the first's start to the last's end.
        p50_s, p99_s: of one request.
        server_ms: processor time of the server's thread per request.
        server, loop, driver: shares of a core: the server's thread, the thread of vLLM's front end, the driver.
    """

    tokens_per_s: float
    p50_s: float
    p99_s: float
    server_ms: float
    server: float
    loop: float
    driver: float


HEADER = (
    f"{'round':<8} {'side':<11} {'tok/s':>8} {'ratio':>6} {'server ms/req':>13} {'server':>6} {'loop':>6} "
    f"{'driver':>6} {'p50 s':>7} {'p99 s':>7}"
)


def measure(
    start: Callable[[str, dict[str, Any]], Child],
    folder: Path,
    work: Work,
    device: str,
    arguments: Mapping[str, Any],
    rounds: int,
) -> float | None:
    """Run and print all rounds, each as soon as it is there.

    Args:
        start: a process by its role, ``vllm-engine`` or ``vllm-driver``, and its settings.
        folder: of a model's configuration and tokenizer; its weights are not read.
        work: of a round.
        device: ``auto``, ``cpu`` or ``cuda``.
        arguments: further ones of vLLM's engine.
        rounds: after the warm-up.

    Returns:
        The median ratio of gymloop over the raw side of the same round; None where no round came to its end.
    """
    shared = {"work": work.__dict__, "folder": str(folder), "device": device, "arguments": dict(arguments)}
    ratios: list[float] = []
    engine = start("vllm-engine", shared)
    try:
        lengths = engine.ask({"do": "lengths", "seed": 0}, ROUND_LIMIT_S)
        print(f"vllm: ready after {engine.hello['seconds']:.1f} s: {json.dumps(engine.hello['facts'])}")
        prompts = f"prompts of {min(lengths)} to {max(lengths)} tokens"
        print(f"{work.rollouts} at once, {work.new_tokens} tokens each, {prompts}")
        print("shares of a core: the server's thread, vLLM's front end in the same process (loop), the driver")
        print(HEADER, flush=True)
        driver = start("vllm-driver", shared | {"url": engine.hello["url"]})
        try:
            raw_side(engine, work, 9, "final")  # the first round compiles kernels
            bare = {}
            for place, kind in enumerate(KINDS):
                bare[kind] = raw_side(engine, work, place, kind)
                print(row("warm-up", f"raw {kind}", bare[kind], None), flush=True)
            fastest = max(bare, key=lambda kind: bare[kind].tokens_per_s)
            for number in range(rounds + 1):
                label = str(number or "warm-up")
                raw = raw_side(engine, work, 10 * number + 4, fastest) if number % 2 else None
                own = gymloop_side(engine, driver, work, 10 * number + 3)
                raw = raw or raw_side(engine, work, 10 * number + 4, fastest)
                print(row(label, "gymloop", own, own.tokens_per_s / raw.tokens_per_s), flush=True)
                print(row(label, f"raw {fastest}", raw, None), flush=True)
                if number:
                    ratios.append(own.tokens_per_s / raw.tokens_per_s)
            seeded = raw_side(engine, work, 10 * (rounds + 1), fastest, seeded=True)
            print(row("after", "raw seeded", seeded, None), flush=True)
        finally:
            driver.end()
    finally:
        engine.end()
        if ratios:
            print(f"gymloop over raw, median of {len(ratios)}: {statistics.median(ratios):.3f}", flush=True)
    return statistics.median(ratios) if ratios else None


def raw_side(engine: Child, work: Work, seed: int, kind: str, seeded: bool = False) -> Side:
    before = engine.ask({"do": "cpu"}, ROUND_LIMIT_S)
    done = engine.ask({"do": "raw", "seed": seed, "kind": kind, "seeded": seeded}, ROUND_LIMIT_S)
    return side_of(work, done, before, engine.ask({"do": "cpu"}, ROUND_LIMIT_S))


def gymloop_side(engine: Child, driver: Child, work: Work, seed: int) -> Side:
    texts = engine.ask({"do": "texts", "seed": seed}, ROUND_LIMIT_S)
    before = engine.ask({"do": "cpu"}, ROUND_LIMIT_S)
    done = driver.ask({"texts": texts, "name": f"round {seed}"}, ROUND_LIMIT_S)
    after = engine.ask({"do": "cpu"}, ROUND_LIMIT_S)
    if done["prompts"] != engine.ask({"do": "lengths", "seed": seed}, ROUND_LIMIT_S):
        raise SystemExit("the rollouts' prompts are not those that were rendered for the comparison")
    return side_of(work, done, before, after)


def side_of(work: Work, done: Mapping[str, Any], before: Mapping[str, float], after: Mapping[str, float]) -> Side:
    if done["tokens"] != work.tokens:
        raise SystemExit(f"{done['tokens']} tokens were sampled; expected {work.tokens}")
    wall = done["seconds"]
    server, loop = (after[name] - before[name] for name in THREADS)
    return Side(
        work.tokens / wall,
        percentile(done["each"], 0.5),
        percentile(done["each"], 0.99),
        1000 * server / work.rollouts,
        server / wall,
        loop / wall,
        done.get("cpu", 0.0) / wall,
    )


def percentile(values: Iterable[float], share: float) -> float:
    found = sorted(values)
    return found[min(len(found) - 1, int(share * len(found)))]


def row(label: str, name: str, side: Side, ratio: float | None) -> str:
    """Raw sides have no server, no driver and no ratio."""
    own = ["-", "-", "-", "-"]
    if ratio is not None:
        own = [f"{ratio:.3f}", f"{side.server_ms:.2f}", f"{side.server:.0%}", f"{side.driver:.0%}"]
    return (
        f"{label:<8} {name:<11} {side.tokens_per_s:>8.0f} {own[0]:>6} {own[1]:>13} {own[2]:>6} {side.loop:>6.0%} "
        f"{own[3]:>6} {side.p50_s:>7.2f} {side.p99_s:>7.2f}"
    )
