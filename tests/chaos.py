"""A seeded schedule of trouble for a run, and what brings it about.

Step by step the parties take turns at being killed, paused and slowed. Which of a step's rollouts are hit follows from
the seed and the rollout's ids, never from the clock, so what must become of every rollout is known beforehand.

| party       | killed                              | paused                               | slowed                    |
| ----------- | ----------------------------------- | ------------------------------------ | ------------------------- |
| environment | ``verify`` raises                   | ``verify`` hangs past its deadline   | ``verify`` takes a while  |
| engine      | the request is aborted in its midst | every forward pass waits for a while | the request waits         |
| network     | reset before, or cut in, the reply  | the request is never passed on       | delayed, and in pieces    |
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal
from urllib.parse import unquote

from letters import Letters
from proxy import Deed, Proxy

Party = Literal["environment", "engine", "network"]
Manner = Literal["kill", "pause", "slow"]

TURNS: list[tuple[Party, Manner]] = list(
    itertools.product(("environment", "engine", "network"), ("kill", "pause", "slow"))
)
EVERY = 1_000_000
A_WHILE_S = 0.2


@dataclass(frozen=True)
class Trouble:
    """Who misbehaves, how, and in how many attempts of the rollout: the first only, or every one."""

    party: Party
    manner: Manner
    attempts: int

    @property
    def fails(self) -> bool:
        """Whether an attempt fails by it; else it only takes longer."""
        return self.manner == "kill" or (self.manner == "pause" and self.party != "engine")


@dataclass(frozen=True)
class Schedule:
    """The trouble of a run whose loader keeps file order.

    Attributes:
        seed: of it all.
        prompts_per_step: as in the recipe.
        share: of the rollouts that are hit.
        lasting: share of those in which every attempt is hit.
    """

    seed: int
    prompts_per_step: int
    share: float
    lasting: float

    def trouble(self, group_id: str, sample_id: int) -> Trouble | None:
        """What becomes of this rollout."""
        step = int(group_id.rpartition("r")[2]) // self.prompts_per_step
        turns = random.Random(f"{self.seed}/{step // len(TURNS)}").sample(TURNS, len(TURNS))
        chance = random.Random(f"{self.seed}/{group_id}/{sample_id}")
        if chance.random() >= self.share:
            return None
        return Trouble(*turns[step % len(TURNS)], EVERY if chance.random() < self.lasting else 1)


class Scheduler:
    """Hands out the trouble, attempt by attempt."""

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self._met: Counter[tuple[str, int]] = Counter()

    def act(self, party: Party, group_id: str, sample_id: int) -> Manner | None:
        """How ``party`` is to misbehave towards this rollout, now that it has come to it."""
        trouble = self._schedule.trouble(group_id, sample_id)
        if trouble is None or trouble.party != party:
            return None
        self._met[group_id, sample_id] += 1
        return trouble.manner if self._met[group_id, sample_id] <= trouble.attempts else None


class Troubled(Letters):
    """``Letters`` whose session may be made to misbehave; whose rows from ``dead_from`` on are never verified."""

    manner: Manner | None = None

    def __init__(self, dead_from: int | None = None) -> None:
        self.dead_from = dead_from

    def tasks(self, rng: random.Random) -> Iterable[Mapping[str, Any]]:
        return ({**task, "number": number} for number, task in enumerate(super().tasks(rng)))

    async def verify(self, response: Mapping[str, Any]) -> float:
        if self.dead_from is not None and self.row["number"] >= self.dead_from:
            raise ConnectionError("the judge is gone")
        match self.manner:
            case "kill":
                raise ConnectionError("the sandbox was killed")
            case "pause":
                await asyncio.sleep(3600)
            case "slow":
                await asyncio.sleep(A_WHILE_S)
        return super().verify(response)


def install(groups: list[str], size: int, run_seed: int, **schedule: Any) -> None:
    """Bring a schedule's trouble about in this process, whose workers are inline (see ``forked``).

    Args:
        groups: every group id that may come.
        size: rollouts per group.
        run_seed: ``grpo.seed``.
        schedule: of ``Schedule``.
    """
    scheduler = Scheduler(Schedule(**schedule))
    _trouble_environment(scheduler, groups, size, run_seed)
    _trouble_engine(scheduler)
    _trouble_network(scheduler)


def _rollout(noise_key: str) -> tuple[str, int]:
    group_id, sample_id, _ = noise_key.rsplit("/", 2)
    return group_id, int(sample_id)


def _trouble_environment(scheduler: Scheduler, groups: list[str], size: int, run_seed: int) -> None:
    from gymloop.gym.contract import ROLLOUT_SEED
    from gymloop.gym.session import InProcessSource
    from gymloop.rollouts.collector import expand, rollout_seed

    tasks = expand([(group_id, {}) for group_id in groups], size)
    ids = {rollout_seed(run_seed, task): (task.group_id, task.sample_id) for task in tasks}
    seed_session = InProcessSource.seed_session

    async def troubled(self: InProcessSource, row: Mapping[str, Any]) -> Any:
        session = await seed_session(self, row)
        session.environment.manner = scheduler.act("environment", *ids[row[ROLLOUT_SEED]])
        return session

    InProcessSource.seed_session = troubled


def _trouble_engine(scheduler: Scheduler) -> None:
    from gymloop.generation.torch_engine import TorchEngine

    generate = TorchEngine.generate

    async def troubled(self: Any, prompt: Any, sampling: Any, request_id: str, on_tokens: Any = None) -> Any:
        manner = scheduler.act("engine", *_rollout(sampling.noise_key))
        if manner == "slow":
            await asyncio.sleep(A_WHILE_S)
        elif manner == "pause":
            await asyncio.to_thread(self.pause, 30.0)
            asyncio.get_running_loop().call_later(A_WHILE_S, self.resume)
        if manner != "kill":
            return await generate(self, prompt, sampling, request_id, on_tokens)

        def abort(ids: Any, logprobs: Any) -> None:
            self.abort(request_id)

        return await generate(self, prompt, sampling, request_id, abort)

    TorchEngine.generate = troubled


def _trouble_network(scheduler: Scheduler) -> None:
    from gymloop.gym.model_client import NOISE_HEADER, ModelClient
    from gymloop.training.tasks import engine

    def decide(headers: Mapping[str, str]) -> Deed | None:
        group_id, sample_id = _rollout(unquote(headers[NOISE_HEADER]))
        manner = scheduler.act("network", group_id, sample_id)
        killed: Deed = "reset" if sample_id % 2 else "truncate"
        deeds: dict[Manner | None, Deed | None] = {
            None: None,
            "kill": killed,
            "pause": "blackhole",
            "slow": "delay",
        }
        return deeds[manner]

    class Proxied(ModelClient):
        async def __aenter__(self) -> ModelClient:
            address = self._base_url.removeprefix("http://").partition("/")[0]
            host, _, port = address.partition(":")
            self._proxy = Proxy(host, int(port), decide)
            self._base_url = self._base_url.replace(address, f"127.0.0.1:{await self._proxy.start()}")
            return await super().__aenter__()

        async def close(self) -> None:
            await super().close()
            await self._proxy.close()

    engine.ModelClient = Proxied
