"""What a training run starts, and what waits for what.

ray ──> server ──────────────┐
  │                          ├──> engine ──┐
  │     model ───────────────┤             ├──> weights
  └──────────────────────────┴──> policy ──┘
environments ──> data          (an environment needs the server's URL at most, which exists before any model loads)
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from gymloop.cluster.actor import RayRemote
from gymloop.cluster.health import Health
from gymloop.cluster.local import RayCluster
from gymloop.cluster.remote import Remote
from gymloop.config.plan import ActorThreads, Plan, SamplingProfile
from gymloop.errors import ConfigError, InfraError
from gymloop.gym.agents import Agent
from gymloop.gym.attached import AttachedEnvironment
from gymloop.gym.contract import SessionSource
from gymloop.gym.items import chat_tools
from gymloop.gym.loader import GroupLoader
from gymloop.gym.model_client import ModelClient, Profile
from gymloop.gym.rows import first_prompt, read_demonstrations, rows_beyond_context
from gymloop.gym.session import demonstrate
from gymloop.gym.sources import Source, build_sources, load_source_rows, shown_tools, solver
from gymloop.lifeline import tied
from gymloop.models.identity import model_identity
from gymloop.models.resolve import resolve_model
from gymloop.observe.progress import Progress
from gymloop.observe.sinks import Sink
from gymloop.observe.watchdog import LoopWatchdog
from gymloop.policy.build import build_policy
from gymloop.policy.spec import PolicySpec
from gymloop.rollouts.collector import Collector
from gymloop.serving.guard import SamplingProfiles
from gymloop.serving.worker import EngineSpec, EngineWorker
from gymloop.startup import Context, Started, Task, run_graph
from gymloop.training.checkpoint import Checkpoint, CheckpointStore
from gymloop.training.run import Run, Saves
from gymloop.training.saving import POLICY, check_model
from gymloop.training.stop import StopSignal
from gymloop.training.sync import sync_weights
from gymloop.training.transcripts import Transcripts

logger = logging.getLogger(__name__)

LOAD_LIMIT_S = 86400.0
"""Of one load. Its task's deadline, which progress extends, ends one that is stuck long before."""
POLL_S = 1.0
SAID_BYTES = 8192
ROWS_AT_ONCE = 256
"""Rendered by one call of the engine's worker, so that a deadline can see progress."""


@dataclass(frozen=True, slots=True)
class Folders:
    """Where model and tokenizer lie on this machine, mostly the same folder; and what the model is."""

    model: Path
    tokenizer: Path
    identity: Mapping[str, str]


async def start_run(
    plan: Plan,
    checkpoint: Checkpoint | None,
    store: CheckpointStore,
    transcripts: Transcripts,
    sinks: list[Sink],
    progress: Progress,
    stop: StopSignal,
    health: Health,
    watchdog: LoopWatchdog,
    *,
    sequential: bool,
    began: float,
) -> tuple[Started, Run]:
    """Start everything at once and hand it over as a Run.

    Args:
        health: watches each part from its start.
        watchdog: of the running loop.
        began: when the run was asked for, ``time.monotonic`` seconds.

    Raises:
        StartupError: a task failed; whatever had started was torn down.
    """
    started = await run_graph(
        startup_tasks(plan, checkpoint, health, stop), progress.startup_event, max_parallel=1 if sequential else None
    )
    progress.startup_done(started.timeline)
    (plan.run_dir / "startup.json").write_text(started.timeline.to_json(), encoding="utf-8")
    results = started.results
    recipe = plan.recipe
    collector = Collector(
        sources=_agents(plan, results["environments"], results["client"]),
        model=results["client"],
        limits=recipe.rollouts,
        max_turns=recipe.grpo.max_rollout_turns,
        max_tokens=recipe.policy.generation.max_new_tokens,
        seed=recipe.grpo.seed,
    )
    rows = results["data"]["validation"]
    validator = Collector(
        sources=collector.sources,
        model=collector.model,
        limits=collector.limits,
        max_turns=collector.max_turns,
        max_tokens=collector.max_tokens,
        profile="validation",
        seed=collector.seed,
    )
    run = Run(
        plan=plan,
        health=health,
        watchdog=watchdog,
        engine=results["server"]["remote"],
        policy=results["policy"],
        collector=collector,
        validator=validator if rows else None,
        validation_rows=rows,
        loader=results["data"]["loader"],
        demonstrations=results["demonstrations"],
        saves=Saves(store, results["model"].identity, None if checkpoint is None else checkpoint.step),
        transcripts=transcripts,
        sinks=sinks,
        progress=progress,
        stop=stop,
        startup_metrics=started.timeline.metrics(),
        began=began,
        step=0 if checkpoint is None else int(checkpoint.state["step"]),
        version=results["weights"],
        skipped_in_a_row=0 if checkpoint is None else int(checkpoint.state["skipped_in_a_row"]),
    )
    return started, run


def startup_tasks(plan: Plan, checkpoint: Checkpoint | None, health: Health, stop: StopSignal) -> list[Task[Any]]:
    """The graph of a training run; the order is that of a sequential start."""
    deadline = plan.recipe.startup.deadline_s
    task = partial(Task, deadline_s=deadline)
    return [
        task("ray", partial(_ray, plan, stop)),
        task("server", partial(_server, plan, health), ("ray",)),
        task("model", partial(_model, plan, checkpoint)),
        task("engine", partial(_engine, plan), ("server", "model")),
        task("policy", partial(_policy, plan, checkpoint, health), ("ray", "model")),
        task("environments", partial(_environments, plan, health)),
        task("data", partial(_data, plan, checkpoint), ("environments",)),
        task("lengths", partial(_lengths, plan), ("data", "engine", "server")),
        task("tools", partial(_tools, plan), ("environments", "data", "engine", "server")),
        task("client", partial(_client, plan), ("server",), teardown=lambda client: client.close()),
        task(
            "demonstrations", partial(_demonstrations, plan, checkpoint), ("data", "environments", "engine", "server")
        ),
        task("weights", partial(_weights, plan, checkpoint), ("server", "engine", "policy")),
    ]


async def _ray(plan: Plan, stop: StopSignal, ctx: Context) -> RayCluster:
    cluster = RayCluster(num_cpus=plan.cores)
    ctx.on_teardown(cluster.disconnect)
    ctx.progress("Ray's head process")
    await ctx.in_thread(cluster.connect)
    stop.claim()
    return cluster


async def _server(plan: Plan, health: Health, ctx: Context) -> dict[str, Any]:
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
    remote = _actor(plan, health, ctx, "engine", partial(EngineWorker, spec), plan.engine)
    ctx.progress("the engine's process and its socket")
    return {"remote": remote, "url": await remote.call("url", timeout=recipe.startup.deadline_s)}


def _plugin(plan: Plan, path: str | None) -> str | None:
    """A recipe's paths are relative to its folder; the engine's process has another."""
    return None if path is None else str((plan.recipe_path.parent / Path(path).expanduser()).absolute())


async def _model(plan: Plan, checkpoint: Checkpoint | None, ctx: Context) -> Folders:
    policy = plan.recipe.policy
    model = await _fetched(policy.model_name, "policy.model_name", ctx)
    identity = {"name": policy.model_name, **await ctx.in_thread(model_identity, model)}
    if checkpoint is not None:
        check_model(checkpoint, identity)
    tokenizer = (
        model if policy.tokenizer.name is None else await _fetched(policy.tokenizer.name, "policy.tokenizer.name", ctx)
    )
    return Folders(model, tokenizer, identity)


async def _fetched(name: str, key: str, ctx: Context) -> Path:
    """Find the folder of the model that ``key`` names.

    In a process of its own: a download or conversion can then be ended at once.
    """
    if await ctx.in_thread(os.path.isdir, name):
        return await ctx.in_thread(partial(resolve_model, name, key=key))
    ctx.progress(f"model {name}")
    process = await asyncio.create_subprocess_exec(
        *tied([sys.executable, "-m", "gymloop.cli.main", "models", "fetch", name]),
        stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        # bounded: by the task's deadline; cancelling the task kills the process
        output, said = await asyncio.gather(_read(process.stdout), _read(process.stderr, ctx, name))
        await process.wait()  # bounded: by the task's deadline; cancelling the task kills the process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()  # bounded: it was killed
    if process.returncode:
        lines = said.strip().splitlines()
        why = lines[-1].removeprefix("gymloop: ") if lines else f"model {name} could not be fetched"
        raise ConfigError(f"{key}: {why}")
    return Path(output.strip().splitlines()[-1])


async def _read(stream: asyncio.StreamReader | None, ctx: Context | None = None, name: str = "") -> str:
    """The end of what a process writes; with ``ctx`` each piece of it extends the task's deadline."""
    said = b""
    while stream is not None and (piece := await stream.read(4096)):
        said = (said + piece)[-SAID_BYTES:]
        if ctx is not None and (words := said.decode(errors="replace").split()):
            ctx.progress(f"model {name}: {' '.join(words[-8:])}")
    return said.decode(errors="replace")


async def _engine(plan: Plan, ctx: Context) -> Mapping[str, Any]:
    folders: Folders = ctx.results["model"]
    return await _loaded(ctx, ctx.results["server"]["remote"], str(folders.model), str(folders.tokenizer))


async def _loaded(ctx: Context, remote: Remote, *args: Any) -> Any:
    """The worker's ``load``; whatever changes in its ``load_progress`` extends the task's deadline."""
    ctx.progress(f"the {remote.name}'s process")
    loading = asyncio.ensure_future(remote.call("load", *args, timeout=LOAD_LIMIT_S))
    seen = None
    try:
        while not (await asyncio.wait({loading}, timeout=POLL_S))[0]:
            what, done, total = now = await remote.call("load_progress", timeout=LOAD_LIMIT_S)
            if now != seen:
                seen = now
                share = f", {done / 1e6:.0f} of {total / 1e6:.0f} MB" if total else ""
                ctx.progress(f"the {remote.name}: {what}{share}")
        return loading.result()
    finally:
        loading.cancel()


def policy_spec(plan: Plan, model_folder: str) -> PolicySpec:
    """What the policy's worker is told of a plan; the model lies in ``model_folder``."""
    recipe = plan.recipe
    optimizer_steps = plan.optimizer_steps_per_batch
    return PolicySpec(
        model_folder=model_folder,
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
        deterministic=recipe.deterministic,
        threads=plan.policy.threads,
    )


async def _policy(plan: Plan, checkpoint: Checkpoint | None, health: Health, ctx: Context) -> Remote:
    recipe = plan.recipe
    spec = policy_spec(plan, str(ctx.results["model"].model))
    remote = _actor(plan, health, ctx, "policy", partial(build_policy, spec), plan.policy)
    await _loaded(ctx, remote)
    if checkpoint is not None:
        ctx.progress(f"the policy's state in {checkpoint.folder}")
        differs = await remote.call("restore", str(checkpoint.part(POLICY)), timeout=recipe.startup.deadline_s)
        if differs is not None:
            logger.warning("%s", differs)
    return remote


async def _environments(plan: Plan, health: Health, ctx: Context) -> dict[str, Source]:
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


def _agents(plan: Plan, sources: Mapping[str, Source], model: ModelClient) -> dict[str, SessionSource | Agent]:
    """What rollouts of each environment are played with."""
    train = plan.train_sampling
    profiles: dict[Profile, SamplingProfile] = {"train": train, "validation": plan.validation_sampling or train}
    # What a Responses body can say of them; the rest the generation server fills in.
    sampling = {name: {"temperature": said.temperature, "top_p": said.top_p} for name, said in profiles.items()}
    return {
        name: source.agent(model, sampling) if isinstance(source, AttachedEnvironment) else source
        for name, source in sources.items()
    }


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
        loader.load_state_dict(checkpoint.state["loader"], accept_changed_data=recipe.checkpointing.accept_changed_data)
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
        conversations = await ctx.in_thread(read_demonstrations, plan.sft_data_path)
    else:
        sources = ctx.results["environments"]
        rows = ctx.results["data"]["rows"][:wanted]
        conversations = [await demonstrate(solver(sources, row["agent_ref"]["name"]), row) for row in rows]
    if len(conversations) < wanted:
        raise ConfigError(
            f"sft_warmup takes {warmup.steps} x {warmup.batch_size} = {wanted} demonstrations, "
            f"{plan.sft_data_path or 'data.train'} gives {len(conversations)}"
        )
    remote = ctx.results["server"]["remote"]
    return await remote.call("render_demonstrations", conversations[:wanted], timeout=plan.recipe.startup.deadline_s)


async def _lengths(plan: Plan, ctx: Context) -> None:
    """Refuse rows that leave no room for an answer before the first step meets one of them."""
    data, remote = ctx.results["data"], ctx.results["server"]["remote"]
    limit = plan.recipe.policy.max_total_sequence_length
    said = []
    for key, rows in (("data.train", data["rows"]), ("data.validation", data["validation"])):
        lengths: list[int | str] = []
        for first in range(0, len(rows), ROWS_AT_ONCE):
            ctx.progress(f"the prompts of {key}, {first} of {len(rows)}")
            prompts = [first_prompt(row) for row in rows[first : first + ROWS_AT_ONCE]]
            lengths += await remote.call("prompt_lengths", prompts, timeout=plan.recipe.startup.deadline_s)
        said += [f"{key}: {what}" for what in rows_beyond_context(rows, lengths, limit)]
    if said:
        raise ConfigError("; ".join(said))


async def _tools(plan: Plan, ctx: Context) -> None:
    """Prove that the template shows the run's tools and that the parser reads what it writes of them."""
    data = ctx.results["data"]
    tools = shown_tools(ctx.results["environments"], [*data["rows"], *data["validation"]])
    if tools:
        ctx.progress("the template and the parser, with the tools of the environments")
        remote = ctx.results["server"]["remote"]
        await remote.call("check_tools", chat_tools(tools), timeout=plan.recipe.startup.deadline_s)


async def _client(plan: Plan, ctx: Context) -> ModelClient:
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


async def _weights(plan: Plan, checkpoint: Checkpoint | None, ctx: Context) -> int:
    """Prove the channel: the engine takes the policy's weights before the first token is sampled."""
    version = 0 if checkpoint is None else int(checkpoint.state["version"])
    ctx.progress("the first weight sync")
    await sync_weights(ctx.results["policy"], ctx.results["server"]["remote"], version, plan.recipe.startup.deadline_s)
    return version


def _actor(plan: Plan, health: Health, ctx: Context, name: str, build: Any, threads: ActorThreads) -> Remote:
    """A worker's process, watched until it is torn down."""
    log_file = plan.run_dir / "logs" / f"{name}.log"
    gpus = 0.5 if plan.device == "cuda" else 0
    try:
        remote: Remote = RayRemote(name, build, env=threads.env, log_file=log_file, num_gpus=gpus)
    except ValueError as error:
        raise InfraError(f"could not place the {name} actor: {error}") from error
    ctx.on_teardown(remote.kill)
    health.watch(remote)
    ctx.on_teardown(partial(health.forget, remote))
    return remote
