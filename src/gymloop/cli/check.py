"""``gymloop check RECIPE [OVERRIDE ...]``: everything wrong with a recipe, or what it would run; starts nothing."""

from __future__ import annotations

import argparse

from gymloop.config.load import load_recipe
from gymloop.config.plan import Plan, RowSource, compile_plan


def run(args: argparse.Namespace) -> int:
    """Print the plan in a few lines.

    Raises:
        ConfigError: lists all problems.
    """
    recipe = load_recipe(args.recipe, args.overrides)
    print(summary(compile_plan(recipe, args.recipe)))
    return 0


def summary(plan: Plan) -> str:
    """The plan as a person wants it: what is trained, on what, how long, where."""
    recipe, grpo = plan.recipe, plan.recipe.grpo
    steps = f"{plan.optimizer_steps_per_batch} optimizer step{'s' if plan.optimizer_steps_per_batch > 1 else ''}"
    lines = [
        ("model", f"{recipe.policy.model_name}, {recipe.policy.max_total_sequence_length} tokens, {plan.precision}"),
        (
            "step",
            f"{grpo.num_prompts_per_step} prompts x {grpo.num_generations_per_prompt} rollouts = "
            f"{plan.rollouts_per_step}, {steps}",
        ),
        ("length", f"at most {plan.steps_bound} steps, after {recipe.sft_warmup.steps} of supervised warm-up"),
        ("train rows", _rows(plan.train)),
        ("validation", _rows(plan.validation) if plan.validation else "none"),
        (
            "compute",
            f"{plan.device}, {plan.engine.threads} threads for the engine, {plan.policy.threads} for the policy",
        ),
        ("ports", f"{plan.ports.low}-{plan.ports.high}"),
        ("results", str(plan.run_dir.parent)),
    ]
    return "\n".join([f"{plan.recipe_path.name}: OK", *(f"  {name:<11} {text}" for name, text in lines)])


def _rows(source: RowSource) -> str:
    if source.data_path is not None:
        return str(source.data_path)
    return f"{source.num_tasks} tasks of {source.environment}, seed {source.seed}"
