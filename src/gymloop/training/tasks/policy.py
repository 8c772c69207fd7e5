"""Tasks that load the policy's worker and bring its weights to the engine for the first time."""

from __future__ import annotations

import logging
from functools import partial

from gymloop.cluster.health import Health
from gymloop.cluster.remote import Remote
from gymloop.config.plan import Plan
from gymloop.policy.build import build_policy
from gymloop.policy.spec import PolicySpec
from gymloop.startup import Context
from gymloop.training.checkpoint import Checkpoint
from gymloop.training.saving import POLICY
from gymloop.training.sync import SyncSettings, sync_weights
from gymloop.training.tasks.worker import loaded, worker_process
from gymloop.training.turns import Turns

logger = logging.getLogger(__name__)


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
        starts_on_host=plan.placement.takes_turns_on_gpu,
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


async def load(plan: Plan, checkpoint: Checkpoint | None, health: Health, ctx: Context) -> Remote:
    """Load the policy into its process, with the checkpoint's state where there is one."""
    recipe = plan.recipe
    spec = policy_spec(plan, str(ctx.results["model"].model))
    remote = worker_process(plan, health, ctx, plan.placement.policy, partial(build_policy, spec), plan.policy)
    await loaded(ctx, remote)
    if checkpoint is not None:
        ctx.progress(f"the policy's state in {checkpoint.folder}")
        differs = await remote.call("restore", str(checkpoint.part(POLICY)), timeout=recipe.startup.deadline_s)
        if differs is not None:
            logger.warning("%s", differs)
    return remote


async def first_sync(plan: Plan, checkpoint: Checkpoint | None, ctx: Context) -> int:
    """Prove the channel: the engines take the policy's weights before the first token is sampled.

    An engine that shares the policy's GPU has loaded there meanwhile, and gives it up for this.
    """
    version = 0 if checkpoint is None else int(checkpoint.state["version"])
    ctx.progress("the first weight sync")
    recipe = plan.recipe
    policy, engines = ctx.results["policy"], ctx.results["server"]["remotes"]
    turns = Turns(plan.placement, policy, recipe.policy.call_timeout_s)
    await turns.before_update(engines)
    await turns.before_sync(engines)
    await sync_weights(policy, engines, version, recipe.startup.deadline_s, SyncSettings.of(recipe))
    await turns.after_sync(engines)
    return version
