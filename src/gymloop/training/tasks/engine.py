"""Tasks that start Ray, the engine's worker with its server, and the client that rollouts ask."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from gymloop.cluster.health import Health
from gymloop.cluster.local import RayCluster
from gymloop.config.plan import Plan
from gymloop.gym.model_client import ModelClient
from gymloop.serving.guard import SamplingProfiles
from gymloop.serving.worker import EngineSpec, EngineWorker
from gymloop.startup import Context
from gymloop.training.stop import StopSignal
from gymloop.training.tasks.model import Folders
from gymloop.training.tasks.worker import loaded, worker_process


async def ray(plan: Plan, stop: StopSignal, ctx: Context) -> RayCluster:
    """Start or join Ray."""
    cluster = RayCluster(num_cpus=plan.cores)
    ctx.on_teardown(cluster.disconnect)
    ctx.progress("Ray's head process")
    await ctx.in_thread(cluster.connect)
    stop.claim()
    return cluster


async def server(plan: Plan, health: Health, ctx: Context) -> dict[str, Any]:
    """Start the engine's process; its URL is true from here on, and no model is loaded yet."""
    recipe = plan.recipe
    spec = EngineSpec(
        model_name=recipe.policy.model_name,
        profiles=SamplingProfiles(plan.train_sampling, plan.validation_sampling),
        port_range=(plan.ports.low, plan.ports.high),
        max_model_len=recipe.policy.max_total_sequence_length,
        max_batch_size=recipe.policy.generation.torch_cfg.max_batch_size,
        request_timeout_s=recipe.rollouts.call_timeout_s,
        precision=plan.precision,
        device=plan.device,
        seed=recipe.grpo.seed,
        threads=plan.engine.threads,
        deterministic=recipe.deterministic,
        stop_token_ids=recipe.policy.generation.stop_token_ids,
        chat_template=plan.chat_template,
        chat_template_kwargs=recipe.policy.tokenizer.chat_template_kwargs,
        tool_parser=recipe.policy.tokenizer.tool_parser,
        tool_parser_plugin=_plugin(plan, recipe.policy.tokenizer.tool_parser_plugin),
        reasoning_parser=recipe.policy.tokenizer.reasoning_parser,
        reasoning_parser_plugin=_plugin(plan, recipe.policy.tokenizer.reasoning_parser_plugin),
        loop_lag_s=recipe.health.loop_lag_s,
    )
    remote = worker_process(plan, health, ctx, "engine", partial(EngineWorker, spec), plan.engine)
    ctx.progress("the engine's process and its socket")
    return {"remote": remote, "url": await remote.call("url", timeout=recipe.startup.deadline_s)}


def _plugin(plan: Plan, path: str | None) -> str | None:
    """A recipe's paths are relative to its folder; the engine's process has another."""
    return None if path is None else str((plan.recipe_path.parent / Path(path).expanduser()).absolute())


async def load(plan: Plan, ctx: Context) -> Mapping[str, Any]:
    """Load tokenizer and model into the engine's process."""
    folders: Folders = ctx.results["model"]
    return await loaded(ctx, ctx.results["server"]["remote"], str(folders.model), str(folders.tokenizer))


async def client(plan: Plan, ctx: Context) -> ModelClient:
    """Open the rollouts' connections to the server."""
    limits = plan.recipe.rollouts
    client = ModelClient(
        ctx.results["server"]["url"],
        plan.recipe.policy.model_name,
        max_concurrency=limits.max_concurrency,
        call_timeout_s=limits.call_timeout_s,
        ready_timeout_s=plan.recipe.startup.deadline_s,
        provenance=limits.record_provenance,
    )
    return await client.__aenter__()
