"""Tasks that start NeMo Gym's servers: all addresses are true at once, then each server in a task of its own.

A server needs neither model nor Ray, unless it calls the policy itself or joins the run's Ray; only those wait.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from gymloop.cluster.health import Health
from gymloop.config.plan import Plan
from gymloop.errors import GymloopError, InfraError
from gymloop.gym.attached import AttachedEnvironment
from gymloop.gym.nemo.gym import Gym
from gymloop.gym.nemo.host import address, hold, hosted
from gymloop.gym.nemo.recipe import hints
from gymloop.gym.nemo.restarts import Restarts
from gymloop.startup import Context, Task

PORTS = "gym"
"""The task that holds the ports."""
_MARGIN_S = 1.0


@dataclass(frozen=True, slots=True)
class Hosting:
    """The servers of NeMo Gym that a run starts.

    Attributes:
        gym: which they are.
        restarts: what the run may spend on those that die.
        players: who plays on them; their sessions end with a server.
    """

    gym: Gym
    restarts: Restarts
    players: list[AttachedEnvironment] = field(default_factory=list)


def tasks(plan: Plan, health: Health, hosting: Hosting, task: Callable[..., Task[Any]]) -> Iterator[Task[Any]]:
    """One that holds the ports, and one for each server.

    Args:
        plan: of the run.
        health: watches the servers.
        hosting: what to start.
        task: makes a task with the run's deadline.
    """
    gym = hosting.gym
    yield task(PORTS, partial(_hold, gym))
    for name in gym.blocks.servers:
        needs = [PORTS]
        needs += ["server"] if gym.needs_model(name) else []
        needs += ["ray"] if gym.needs_ray(name) else []
        yield task(f"{PORTS}.{name}", partial(_serve, plan, health, hosting, name), tuple(needs))


async def _hold(gym: Gym, ctx: Context) -> Mapping[str, socket.socket]:
    """Hold a port for every server."""
    held = hold(gym)
    for sock in held.values():
        ctx.on_teardown(sock.close)
    return held


async def _serve(plan: Plan, health: Health, hosting: Hosting, name: str, ctx: Context) -> None:
    """Start a server, wait for its answer, and watch it until the teardown."""
    gym, held = hosting.gym, ctx.results[PORTS]
    model = None
    if gym.needs_model(name):
        url = urlsplit(ctx.results["server"]["url"])
        model = (str(url.hostname), int(url.port or 80))
    ray_address = ctx.results["ray"].address if gym.needs_ray(name) else None
    server = hosted(gym, held, name, plan.run_dir / "logs", model, ray_address, os.environ)
    ctx.progress(f"an answer of {server.name} at {server.url}")
    ctx.on_teardown(server.close)
    server.start()  # on the event loop's thread, which outlives it
    deadline_s = min(gym.deadline_s, max(_MARGIN_S, plan.recipe.startup.deadline_s - _MARGIN_S))
    try:
        await server.ready(deadline_s)
    except InfraError as error:
        wanted = [hint for hint in hints(gym) if hint.startswith(f"server {name} ")]
        raise InfraError("; ".join([*wanted, str(error)]), cause=error.cause) from error

    async def revive(trouble: GymloopError) -> None:
        for player in hosting.players:
            if player.url == server.url:
                player.died()
        await hosting.restarts.revive(server, gym.deadline_s, trouble)

    health.watch(server, revive)
    ctx.on_teardown(partial(health.forget, server))


def sources(gym: Gym, held: Mapping[str, socket.socket]) -> dict[str, AttachedEnvironment]:
    """Who plays the rows of each agent, by the name that rows carry; no connection is made yet."""
    return {
        name: AttachedEnvironment(name, address(held[play.server]), play.kind, max_steps=play.max_steps)
        for name, play in gym.plays.items()
    }
