"""``gymloop check RECIPE [OVERRIDE ...]``: everything wrong with a recipe and its rows, or what it would run.

Starts nothing and imports nothing heavy, except with ``--deep``, which loads the tokenizer and the environments.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from functools import partial

from gymloop.config.dump import as_yaml
from gymloop.config.explain import derived, environments, rows
from gymloop.config.load import Loaded, load
from gymloop.config.notes import notes
from gymloop.config.plan import Plan, compile_plan
from gymloop.config.problems import KeyPath, Problem, mask, report
from gymloop.errors import ConfigError
from gymloop.gym.rows import read_demonstrations, read_rows
from gymloop.observe.metrics import METRICS


def run(args: argparse.Namespace) -> int:
    """Print the plan in a few lines, or what was asked for.

    Raises:
        ConfigError: lists all problems.
    """
    loaded = load(args.recipe, args.overrides)
    plan = compile_plan(loaded.recipe, args.recipe)
    check_outside(loaded, plan, str(args.recipe))
    if args.resolved:
        print(as_yaml(loaded.recipe), end="")
        return 0
    print(summary(plan, loaded.document.hidden))
    if args.explain:
        print(explanation(loaded, plan))
    if args.deep:
        from gymloop.cli.deep import check_deeply

        return check_deeply(plan)
    return 0


def check_outside(loaded: Loaded, plan: Plan, source: str) -> None:
    """What a recipe refers to and configuration alone cannot judge: rows in files, names of metrics.

    Raises:
        ConfigError: lists all problems, each with the line that names the file or metric.
    """
    problems: list[Problem] = []
    names = dict.fromkeys(plan.recipe.env.environments)
    for key, rows_of in (("train", plan.train), ("validation", plan.validation)):
        if rows_of is not None and rows_of.data_path is not None:
            problems += _problems(("data", key, "data_path"), partial(read_rows, rows_of.data_path, names))
    if plan.sft_data_path is not None:
        problems += _problems(("sft_warmup", "data_path"), partial(read_demonstrations, plan.sft_data_path))
    if (metric := plan.recipe.checkpointing.metric_name) is not None:
        try:
            METRICS[metric]
        except KeyError as error:
            problems.append(Problem(("checkpointing", "metric_name"), str(error.args[0])))
    if problems:
        raise report(problems, source, loaded.document.positions, loaded.document.hidden)


def _problems(key: KeyPath, read: Callable[[], object]) -> list[Problem]:
    try:
        read()
    except ConfigError as error:
        return [Problem(key, str(error))]
    return []


def summary(plan: Plan, hidden: Mapping[str, str] = {}) -> str:
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
        ("train rows", rows(plan.train)),
        ("validation", rows(plan.validation) if plan.validation else "none"),
        ("environment", ", ".join(environments(recipe))),
        (
            "compute",
            f"{plan.device}, {plan.engine.threads} threads for the engine, {plan.policy.threads} for the policy",
        ),
        ("ports", f"{plan.ports.low}-{plan.ports.high}"),
        ("results", str(plan.run_dir.parent)),
        *(("note", text) for text in notes(recipe)),
    ]
    # What the environment gave may stand in any of these lines.
    text = "\n".join([f"{plan.recipe_path.name}: OK", *(f"  {name:<11} {text}" for name, text in lines)])
    return mask(text, hidden)


def explanation(loaded: Loaded, plan: Plan) -> str:
    """Where derived values come from, and what a run starts."""
    from gymloop.cluster.health import Health
    from gymloop.training.start import startup_tasks
    from gymloop.training.stop import StopSignal

    lines = ["derived"]
    lines += [f"  {one.name} = {one.value}: {one.because}" for one in derived(loaded, plan)]
    lines.append("startup, each task as soon as what it needs is there; a deadline counts from the last progress")
    limits = plan.recipe.health
    for task in startup_tasks(plan, None, Health(limits.check_period_s, limits.unresponsive_after_s), StopSignal()):
        needs = f"after {', '.join(task.needs)}" if task.needs else "at once"
        lines.append(f"  {task.name:<15} {needs}; deadline {task.deadline_s:g} s")
    return mask("\n".join(lines), loaded.document.hidden)
