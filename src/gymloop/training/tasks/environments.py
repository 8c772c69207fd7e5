"""Tasks that make the environments ready, and prove that their tools can be shown and read back."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from functools import partial

from gymloop.cluster.health import Health
from gymloop.config.plan import Plan, SamplingProfile
from gymloop.errors import ConfigError, InfraError
from gymloop.gym.agents import Agent
from gymloop.gym.attached import AttachedEnvironment
from gymloop.gym.contract import SessionSource
from gymloop.gym.items import chat_tools
from gymloop.gym.model_client import ModelClient, Profile
from gymloop.gym.nemo.attach import attach_agents
from gymloop.gym.sources import Source, build_sources, shown_tools
from gymloop.startup import Context
from gymloop.training.tasks import nemo_gym

_PAUSE_S = 0.5


async def start(plan: Plan, health: Health, hosting: nemo_gym.Hosting | None, ctx: Context) -> dict[str, Source]:
    """Import the classes of the recipe, wait for the servers that it attaches to.

    Servers that the run starts itself have tasks of their own; here their addresses are enough.
    """
    ctx.progress("the environments' modules")
    sources = await ctx.in_thread(build_sources, plan.recipe.env, plan.recipe_path.parent)
    for source in sources.values():
        if isinstance(source, AttachedEnvironment):
            await _attach(plan, health, source, ctx)
    if plan.recipe.env.nemo_gym is not None and plan.recipe.env.nemo_gym.head_server_url is not None:
        for source in await _of_head(plan, plan.recipe.env.nemo_gym.head_server_url, sources, ctx):
            await _attach(plan, health, source, ctx)
            sources[source.environment] = source
    if hosting is not None:
        for name, hosted in nemo_gym.sources(hosting.gym, ctx.results[nemo_gym.PORTS]).items():
            await _open(plan, hosted, ctx)
            hosting.players.append(hosted)
            sources[name] = hosted
    return sources


async def _of_head(plan: Plan, url: str, others: Mapping[str, Source], ctx: Context) -> list[AttachedEnvironment]:
    """An environment for each agent of a running NeMo Gym; one that is still starting is waited for."""
    ctx.progress(f"the configuration of NeMo Gym's head server at {url}")
    until = time.monotonic() + plan.recipe.startup.deadline_s - 2 * _PAUSE_S
    while True:  # bounded: by ``until``
        try:
            agents = await attach_agents(url)
        except InfraError:
            if time.monotonic() > until:
                raise
            await asyncio.sleep(_PAUSE_S)
            continue
        if both := sorted(set(agents) & set(others)):
            raise ConfigError(
                f"env.environments.{both[0]}: the NeMo Gym at {url} has an agent of that name too; rename it"
            )
        return [
            AttachedEnvironment(name, where, play.kind, max_steps=play.max_steps)
            for name, (where, play) in agents.items()
        ]


async def _open(plan: Plan, server: AttachedEnvironment, ctx: Context) -> None:
    limits = plan.recipe.rollouts
    ctx.on_teardown(server.close)
    await server.open(call_timeout_s=limits.call_timeout_s, max_connections=limits.max_concurrency)


async def _attach(plan: Plan, health: Health, server: AttachedEnvironment, ctx: Context) -> None:
    """Wait for an environment's server, and watch it until the teardown."""
    ctx.progress(f"an answer of {server.name}")
    await _open(plan, server, ctx)
    await server.ready(plan.recipe.startup.deadline_s)
    health.watch(server)
    ctx.on_teardown(partial(health.forget, server))


def agents(plan: Plan, sources: Mapping[str, Source], model: ModelClient) -> dict[str, SessionSource | Agent]:
    """What rollouts of each environment are played with."""
    train = plan.train_sampling
    profiles: dict[Profile, SamplingProfile] = {"train": train, "validation": plan.validation_sampling or train}
    # What a Responses body can say of them; the rest the generation server fills in.
    sampling = {name: {"temperature": said.temperature, "top_p": said.top_p} for name, said in profiles.items()}
    return {
        name: source.agent(model, sampling) if isinstance(source, AttachedEnvironment) else source
        for name, source in sources.items()
    }


async def check_tools(plan: Plan, ctx: Context) -> None:
    """Prove that the template shows the run's tools and that the parser reads what it writes of them."""
    data = ctx.results["data"]
    tools = shown_tools(ctx.results["environments"], [*data["rows"], *data["validation"]])
    if tools:
        ctx.progress("the template and the parser, with the tools of the environments")
        remote = ctx.results["server"]["remote"]
        await remote.call("check_tools", chat_tools(tools), timeout=plan.recipe.startup.deadline_s)
