"""Tasks that make the environments ready, and prove that their tools can be shown and read back."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from gymloop.cluster.health import Health
from gymloop.config.plan import Plan, SamplingProfile
from gymloop.gym.agents import Agent
from gymloop.gym.attached import AttachedEnvironment
from gymloop.gym.contract import SessionSource
from gymloop.gym.items import chat_tools
from gymloop.gym.model_client import ModelClient, Profile
from gymloop.gym.sources import Source, build_sources, shown_tools
from gymloop.startup import Context


async def start(plan: Plan, health: Health, ctx: Context) -> dict[str, Source]:
    """Import the classes of the recipe, wait for the servers that it attaches to."""
    ctx.progress("the environments' modules")
    sources = await ctx.in_thread(build_sources, plan.recipe.env, plan.recipe_path.parent)
    for source in sources.values():
        if isinstance(source, AttachedEnvironment):
            await _attach(plan, health, source, ctx)
    return sources


async def _attach(plan: Plan, health: Health, server: AttachedEnvironment, ctx: Context) -> None:
    """Wait for an environment's server, and watch it until the teardown."""
    limits = plan.recipe.rollouts
    ctx.progress(f"an answer of {server.name}")
    ctx.on_teardown(server.close)
    await server.open(call_timeout_s=limits.call_timeout_s, max_connections=limits.max_concurrency)
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
