"""Tasks that read the rows, refuse those that leave no room for an answer, and play the warm-up's demonstrations."""

from __future__ import annotations

from typing import Any

from gymloop.config.plan import Plan
from gymloop.errors import ConfigError
from gymloop.gym.loader import GroupLoader
from gymloop.gym.rows import first_prompt, read_demonstrations, rows_beyond_context
from gymloop.gym.session import demonstrate
from gymloop.gym.sources import load_source_rows, solver
from gymloop.startup import Context
from gymloop.training.checkpoint import Checkpoint

ROWS_AT_ONCE = 256
"""Rendered by one call of the engine's worker, so that a deadline can see progress."""


async def rows(plan: Plan, checkpoint: Checkpoint | None, ctx: Context) -> dict[str, Any]:
    """Read the training and validation rows; the loader stands where the checkpoint left it."""
    recipe = plan.recipe
    sources = ctx.results["environments"]
    ctx.progress("the training and validation rows")
    rows = await ctx.in_thread(load_source_rows, plan.train, sources, plan.recipe_path.parent)
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
    if plan.validation is not None:
        validation = await ctx.in_thread(load_source_rows, plan.validation, sources, plan.recipe_path.parent)
    return {"rows": rows, "loader": loader, "validation": validation[: recipe.grpo.max_val_samples]}


async def demonstrations(plan: Plan, checkpoint: Checkpoint | None, ctx: Context) -> list[Any]:
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


async def lengths(plan: Plan, ctx: Context) -> None:
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
