"""What a training run starts, and what waits for what.

ray ──> server ──────────────┐
  │                          ├──> engine ──┐
  │     model ───────────────┤             ├──> weights
  └──────────────────────────┴──> policy ──┘
environments ──> data          (an environment needs the server's URL at most, which exists before any model loads)
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from gymloop.cluster.local import RayCluster
from gymloop.cluster.remote import RayRemote, Remote
from gymloop.config.plan import ActorThreads, Plan
from gymloop.errors import ConfigError, InfraError
from gymloop.generation.chat import SamplingProfiles
from gymloop.generation.worker import EngineSpec, EngineWorker
from gymloop.gym.loader import GroupLoader
from gymloop.gym.model_client import ModelClient
from gymloop.gym.rows import read_jsonl
from gymloop.gym.session import InProcessSource, demonstrate
from gymloop.gym.sources import build_sources, load_source_rows
from gymloop.models.resolve import resolve_model
from gymloop.observe.progress import Progress
from gymloop.observe.sinks import Sink
from gymloop.policy.spec import PolicySpec
from gymloop.rollouts.collector import Collector
from gymloop.startup.graph import Context, Started, Task, run_graph
from gymloop.training.checkpoint import Checkpoint, CheckpointStore
from gymloop.training.run import Run, StopSignal
from gymloop.training.sync import sync_weights

URL_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Folders:
    """Where model and tokenizer lie on this machine; mostly the same folder."""

    model: Path
    tokenizer: Path


async def start_run(
    plan: Plan,
    checkpoint: Checkpoint | None,
    store: CheckpointStore,
    sinks: list[Sink],
    progress: Progress,
    stop: StopSignal,
    *,
    sequential: bool,
    on_ray: Callable[[], None],
) -> tuple[Started, Run]:
    """Start everything at once and hand it over as a Run.

    Args:
        on_ray: called on the event loop once this process is connected to Ray.

    Raises:
        StartupError: a task failed; whatever had started was torn down.
    """
    started = await run_graph(
        startup_tasks(plan, checkpoint, on_ray), progress.startup_event, max_parallel=1 if sequential else None
    )
    progress.startup_done(started.timeline)
    (plan.run_dir / "startup.json").write_text(started.timeline.to_json(), encoding="utf-8")
    results = started.results
    recipe = plan.recipe
    collector = Collector(
        sources=results["environments"],
        model=results["client"],
        limits=recipe.rollouts,
        max_turns=recipe.grpo.max_rollout_turns,
        max_tokens=recipe.policy.generation.max_new_tokens,
    )
    rows = results["data"]["validation"]
    validator = Collector(
        sources=collector.sources,
        model=collector.model,
        limits=collector.limits,
        max_turns=collector.max_turns,
        max_tokens=collector.max_tokens,
        profile="validation",
    )
    run = Run(
        plan=plan,
        engine=results["server"]["remote"],
        policy=results["policy"],
        collector=collector,
        validator=validator if rows else None,
        validation_rows=rows,
        loader=results["data"]["loader"],
        demonstrations=results["demonstrations"],
        store=store,
        sinks=sinks,
        progress=progress,
        stop=stop,
        startup_metrics=started.timeline.metrics(),
        step=0 if checkpoint is None else int(checkpoint.state["step"]),
        version=results["weights"],
        saved_step=None if checkpoint is None else checkpoint.step,
    )
    return started, run


def startup_tasks(plan: Plan, checkpoint: Checkpoint | None, on_ray: Callable[[], None]) -> list[Task[Any]]:
    """The graph of a training run; the order is that of a sequential start."""
    deadline = plan.recipe.startup.deadline_s
    task = partial(Task, deadline_s=deadline)
    return [
        task("ray", partial(_ray, plan, on_ray)),
        task("server", partial(_server, plan), ("ray",)),
        task("model", partial(_model, plan)),
        task("engine", partial(_engine, plan), ("server", "model")),
        task("policy", partial(_policy, plan, checkpoint), ("ray", "model")),
        task("environments", partial(_environments, plan)),
        task("data", partial(_data, plan, checkpoint), ("environments",)),
        task("client", partial(_client, plan), ("server",), teardown=lambda client: client.close()),
        task(
            "demonstrations", partial(_demonstrations, plan, checkpoint), ("data", "environments", "engine", "server")
        ),
        task("weights", partial(_weights, plan, checkpoint), ("server", "engine", "policy")),
    ]


async def _ray(plan: Plan, on_ray: Callable[[], None], ctx: Context) -> RayCluster:
    cluster = RayCluster(num_cpus=plan.cores)
    ctx.on_teardown(cluster.disconnect)
    ctx.progress("Ray's head process")
    await ctx.in_thread(cluster.connect)
    on_ray()
    return cluster


async def _server(plan: Plan, ctx: Context) -> dict[str, Any]:
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
        stop_token_ids=recipe.policy.generation.stop_token_ids,
        chat_template=plan.chat_template,
        chat_template_kwargs=recipe.policy.tokenizer.chat_template_kwargs,
    )
    remote = _actor(plan, "engine", partial(EngineWorker, spec), plan.engine)
    ctx.on_teardown(remote.kill)
    ctx.progress("the engine's socket")
    return {"remote": remote, "url": await remote.call("url", timeout=URL_TIMEOUT_S)}


async def _model(plan: Plan, ctx: Context) -> Folders:
    policy = plan.recipe.policy
    model = await _fetched(policy.model_name, ctx)
    return Folders(model, model if policy.tokenizer.name is None else await _fetched(policy.tokenizer.name, ctx))


async def _fetched(name: str, ctx: Context) -> Path:
    """Find a model's folder, in a process of its own: a download or conversion can then be ended at once."""
    if await ctx.in_thread(os.path.isdir, name):
        return await ctx.in_thread(resolve_model, name)
    ctx.progress(f"model {name}")
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "gymloop.cli.main", "models", "fetch", name,
        stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        output, said = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        lines = said.decode(errors="replace").strip().splitlines()
        raise ConfigError(lines[-1].removeprefix("gymloop: ") if lines else f"model {name} could not be fetched")
    return Path(output.decode().strip().splitlines()[-1])


async def _engine(plan: Plan, ctx: Context) -> Mapping[str, Any]:
    folders: Folders = ctx.results["model"]
    ctx.progress("the engine's model")
    return await ctx.results["server"]["remote"].call(
        "load", str(folders.model), str(folders.tokenizer), timeout=plan.recipe.startup.deadline_s
    )


async def _policy(plan: Plan, checkpoint: Checkpoint | None, ctx: Context) -> Remote:
    recipe = plan.recipe
    optimizer_steps = plan.optimizer_steps_per_batch
    spec = PolicySpec(
        model_folder=str(ctx.results["model"].model),
        temperature=plan.train_sampling.temperature,
        loss=recipe.loss_fn,
        optimizer=recipe.policy.optimizer.kwargs,
        precision=plan.precision,
        device=plan.device,
        lr_warmup_steps=recipe.policy.lr_warmup_steps,
        max_grad_norm=recipe.policy.max_grad_norm,
        packing=recipe.policy.sequence_packing.enabled,
        train_mb_tokens=recipe.policy.sequence_packing.train_mb_tokens,
        train_micro_batch_size=recipe.policy.train_micro_batch_size,
        rollouts_per_optimizer_step=plan.rollouts_per_step // optimizer_steps if optimizer_steps > 1 else None,
        seed=recipe.grpo.seed,
    )
    remote = _actor(plan, "policy", partial(build_policy, spec), plan.policy)
    ctx.on_teardown(remote.kill)
    ctx.progress("the policy's model")
    await remote.call("load", timeout=recipe.startup.deadline_s)
    if checkpoint is not None:
        ctx.progress(f"the policy's state in {checkpoint.folder}")
        await remote.call("restore", str(checkpoint.part("policy")), timeout=recipe.startup.deadline_s)
    return remote


def build_policy(spec: PolicySpec) -> Any:
    """Make the policy's worker where it runs: only there is torch imported."""
    from gymloop.policy.worker import PolicyWorker

    return PolicyWorker(spec)


async def _environments(plan: Plan, ctx: Context) -> dict[str, InProcessSource]:
    ctx.progress("the environments' modules")
    return await ctx.in_thread(build_sources, plan.recipe.env, plan.recipe_path.parent)


async def _data(plan: Plan, checkpoint: Checkpoint | None, ctx: Context) -> dict[str, Any]:
    recipe = plan.recipe
    sources = ctx.results["environments"]
    ctx.progress("the training and validation rows")
    rows = await ctx.in_thread(load_source_rows, recipe.data.train, sources, plan.recipe_path.parent)
    loader = GroupLoader(
        rows,
        prompts_per_step=recipe.grpo.num_prompts_per_step,
        seed=recipe.grpo.seed,
        shuffle=recipe.data.shuffle,
        epochs=recipe.grpo.max_num_epochs,
    )
    if checkpoint is not None:
        loader.load_state_dict(checkpoint.state["loader"])
    validation = []
    if recipe.data.validation is not None:
        validation = await ctx.in_thread(load_source_rows, recipe.data.validation, sources, plan.recipe_path.parent)
    return {"rows": rows, "loader": loader, "validation": validation[: recipe.grpo.max_val_samples]}


async def _demonstrations(plan: Plan, checkpoint: Checkpoint | None, ctx: Context) -> list[Any]:
    """As many as the warm-up takes, from the file or by running the solver on the first training rows."""
    warmup = plan.recipe.sft_warmup
    wanted = warmup.steps * warmup.batch_size
    if not wanted or checkpoint is not None:
        return []
    if plan.sft_data_path is not None:
        lines = await ctx.in_thread(read_jsonl, plan.sft_data_path)
        conversations = [row for _, row in lines]
        for number, row in lines:
            if not isinstance(row.get("messages"), list):
                raise ConfigError(f"{plan.sft_data_path} line {number}: a demonstration needs a list 'messages'")
    else:
        sources = ctx.results["environments"]
        rows = ctx.results["data"]["rows"][:wanted]
        conversations = [await demonstrate(sources[row["agent_ref"]["name"]], row) for row in rows]
    if len(conversations) < wanted:
        raise ConfigError(
            f"sft_warmup takes {warmup.steps} x {warmup.batch_size} = {wanted} demonstrations, "
            f"{plan.sft_data_path or 'data.train'} gives {len(conversations)}"
        )
    remote = ctx.results["server"]["remote"]
    return await remote.call("render_demonstrations", conversations[:wanted], timeout=plan.recipe.startup.deadline_s)


async def _client(plan: Plan, ctx: Context) -> ModelClient:
    limits = plan.recipe.rollouts
    client = ModelClient(
        ctx.results["server"]["url"],
        plan.recipe.policy.model_name,
        max_concurrency=limits.max_concurrency,
        call_timeout_s=limits.call_timeout_s,
        ready_timeout_s=plan.recipe.startup.deadline_s,
    )
    return await client.__aenter__()


async def _weights(plan: Plan, checkpoint: Checkpoint | None, ctx: Context) -> int:
    """Prove the channel: the engine takes the policy's weights before the first token is sampled."""
    version = 0 if checkpoint is None else int(checkpoint.state["version"])
    ctx.progress("the first weight sync")
    await sync_weights(ctx.results["policy"], ctx.results["server"]["remote"], version, plan.recipe.startup.deadline_s)
    return version


def _actor(plan: Plan, name: str, build: Any, threads: ActorThreads) -> Remote:
    log_file = plan.run_dir / "logs" / f"{name}.log"
    try:
        return RayRemote(name, build, env=threads.env, log_file=log_file, num_gpus=0.5 if plan.device == "cuda" else 0)
    except ValueError as error:
        raise InfraError(f"could not place the {name} actor: {error}") from error
