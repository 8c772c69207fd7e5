"""Tasks that start Ray, the engines' workers with their servers, and the clients that rollouts ask."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from gymloop.cluster.health import Health, first_failure
from gymloop.cluster.local import RayCluster
from gymloop.cluster.placement import Reservation, reserve
from gymloop.cluster.remote import Remote
from gymloop.config.parsers import settled_parsers
from gymloop.config.plan import Plan
from gymloop.config.schema import Generation, VllmCfg
from gymloop.errors import ConfigError
from gymloop.generation.vllm.settings import VllmSettings
from gymloop.gym.model_client import ModelClient
from gymloop.gym.replicas import Replicas
from gymloop.serving.engine_spec import EngineSpec
from gymloop.serving.guard import SamplingProfiles
from gymloop.serving.worker import EngineWorker
from gymloop.startup import Context
from gymloop.threads import in_thread
from gymloop.training.stop import StopSignal
from gymloop.training.tasks.model import Folders
from gymloop.training.tasks.worker import loaded, worker_process


async def ray(plan: Plan, stop: StopSignal, ctx: Context) -> RayCluster:
    """Start or join Ray."""
    reserved = plan.placement.demand if plan.placement.resource == "CPU" else 0
    cluster = RayCluster(num_cpus=max(plan.cores, reserved))
    ctx.on_teardown(partial(_leave, cluster, stop))
    ctx.progress("Ray's head process")
    await ctx.in_thread(cluster.connect)
    stop.claim()
    return cluster


async def _leave(cluster: RayCluster, stop: StopSignal) -> None:
    """Disconnect; the signals stay the run's."""
    try:
        await first_failure(in_thread(cluster.disconnect, "leave-ray"), stop.keep())
    finally:
        stop.claim()


async def placement(plan: Plan, ctx: Context) -> Reservation:
    """Reserve what all workers need, before the first of them starts."""
    ctx.progress(plan.placement.needs())
    timeout_s = plan.recipe.cluster.placement_timeout_s

    def undo(reservation: Reservation) -> None:
        ctx.on_teardown(reservation.release)

    return await ctx.in_thread(reserve, plan.placement, timeout_s, ctx.progress, undo)


async def server(plan: Plan, health: Health, syncs: bool, ctx: Context) -> dict[str, Any]:
    """Start the engines' processes; their URLs are true from here on, and no model is loaded yet.

    Args:
        syncs: whether a policy brings them its weights before the first rollout.

    Returns:
        ``remotes`` and ``urls`` of all replicas, in order; ``remote`` and ``url`` of the first, for what any of them
        can do.
    """
    recipe = plan.recipe
    parsers = settled_parsers(recipe)
    vllm, rows = _engine_settings(recipe.policy.generation, syncs)
    spec = EngineSpec(
        model_name=recipe.policy.model_name,
        profiles=SamplingProfiles(plan.train_sampling, plan.validation_sampling),
        port_range=(plan.ports.low, plan.ports.high),
        max_model_len=recipe.policy.max_total_sequence_length,
        max_batch_size=rows,
        request_timeout_s=recipe.rollouts.call_timeout_s,
        precision=plan.precision,
        device=plan.device,
        seed=recipe.grpo.seed,
        threads=plan.engine.threads,
        deterministic=recipe.deterministic,
        stop_token_ids=recipe.policy.generation.stop_token_ids,
        chat_template=plan.chat_template,
        chat_template_kwargs=recipe.policy.tokenizer.chat_template_kwargs,
        tool_parser=parsers.tool_parser,
        tool_parser_plugin=_text(plan.tool_parser_plugin),
        reasoning_parser=parsers.reasoning_parser,
        reasoning_parser_plugin=_text(plan.reasoning_parser_plugin),
        loop_lag_s=recipe.health.loop_lag_s,
        vllm=vllm,
    )
    remotes = []
    for index, share in enumerate(plan.placement.engines):
        # Each draws from a stream of its own, or replicas would say the same; noise that is named needs one seed.
        own = spec if recipe.deterministic else dataclasses.replace(spec, seed=recipe.grpo.seed + index)
        build = partial(_worker, own, ctx.results["ray"].joins)
        remotes.append(worker_process(plan, health, ctx, share, build, plan.engine))
    ctx.progress("the engine's process and its socket")
    # bounded: each call by its timeout
    urls = await asyncio.gather(*(remote.call("url", timeout=recipe.startup.deadline_s) for remote in remotes))
    return {"remotes": remotes, "urls": urls, "remote": remotes[0], "url": urls[0]}


def _worker(spec: EngineSpec, on_cluster: bool) -> EngineWorker:
    """Runs in the engine's process. On a cluster that was joined, others reach it by the address of its node."""
    if on_cluster:
        from ray.util import get_node_ip_address

        spec = dataclasses.replace(spec, host=get_node_ip_address())
    return EngineWorker(spec)


def _engine_settings(generation: Generation, syncs: bool) -> tuple[VllmSettings | None, int]:
    """What the backend is to run with, None for the embedded engine, and how many requests it decodes together."""
    if generation.backend != "vllm":
        return None, generation.torch_cfg.max_batch_size
    cfg = generation.vllm_cfg or VllmCfg()
    if cfg.load_format == "dummy" and not syncs:
        raise ConfigError(
            "policy.generation.vllm_cfg.load_format is 'dummy', and nothing brings the engine weights where no policy "
            "trains; expected null, 'auto' or 'safetensors'"
        )
    settings = VllmSettings(
        tensor_parallel_size=cfg.tensor_parallel_size,
        gpu_memory_utilization=cfg.gpu_memory_utilization,
        kv_cache_memory_bytes=cfg.kv_cache_memory_bytes,
        enforce_eager=cfg.enforce_eager,
        compile=cfg.compile,
        load_format=cfg.load_format or "auto",
        kv_cache_dtype=cfg.kv_cache_dtype,
        enable_prefix_caching=cfg.enable_prefix_caching,
        repeatable_draws=cfg.repeatable_draws,
        kwargs=generation.vllm_kwargs,
    )
    return settings, cfg.max_num_seqs


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path)


async def load(plan: Plan, ctx: Context) -> Mapping[str, Any]:
    """Load tokenizer and model into the engines' processes, all at once; what the first one says of itself."""
    folders: Folders = ctx.results["model"]
    remotes: list[Remote] = ctx.results["server"]["remotes"]
    # bounded: by the task's deadline, and its teardown ends the processes
    told = await asyncio.gather(
        *(loaded(ctx, remote, str(folders.model), str(folders.tokenizer)) for remote in remotes)
    )
    if found := told[0].get("compile_cache"):
        ctx.remark(f"compile cache {found}")
    return told[0]


async def client(plan: Plan, ctx: Context) -> Replicas:
    """Open the rollouts' connections to the servers."""
    limits, server = plan.recipe.rollouts, ctx.results["server"]
    clients = {
        remote.name: ModelClient(
            url,
            plan.recipe.policy.model_name,
            max_concurrency=limits.max_concurrency,
            call_timeout_s=limits.call_timeout_s,
            ready_timeout_s=plan.recipe.startup.deadline_s,
            provenance=limits.record_provenance,
        )
        for remote, url in zip(server["remotes"], server["urls"], strict=True)
    }
    return await Replicas(clients).__aenter__()
