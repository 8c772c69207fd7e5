"""``gymloop check RECIPE [OVERRIDE ...]``: everything wrong with a recipe and its rows, or what it would run.

Starts nothing and imports nothing heavy, except with ``--deep``, which loads the tokenizer and the environments.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial

from gymloop.config.dump import as_yaml
from gymloop.config.explain import derived, environments, rows
from gymloop.config.load import Loaded, load
from gymloop.config.notes import notes
from gymloop.config.plan import Plan, compile_plan
from gymloop.config.problems import KeyPath, Problem, mask, report
from gymloop.config.schema import Recipe
from gymloop.errors import ConfigError
from gymloop.generation.vllm.support import installed_version
from gymloop.gym.nemo.gym import Gym
from gymloop.gym.nemo.recipe import hints, load_gym, settle_rows
from gymloop.gym.rows import read_demonstrations, read_rows
from gymloop.models.resolve import needs_no_network, resolve_model
from gymloop.observe.metrics import METRICS


def run(args: argparse.Namespace) -> int:
    """Print the plan in a few lines, or what was asked for.

    Raises:
        ConfigError: lists all problems.
    """
    loaded = load(args.recipe, args.overrides)
    plan = compile_plan(loaded.recipe, args.recipe)
    gym = check_outside(loaded, plan, str(args.recipe))
    plan = settle_rows(plan, gym)
    if args.resolved:
        print(as_yaml(loaded.recipe), end="")
        return 0
    fault = engine_fault(loaded.recipe)
    print(summary(plan, loaded.document.hidden, gym, None if args.deep else fault))
    if args.explain:
        print(explanation(loaded, plan, gym))
    if args.deep:
        from gymloop.cli.deep import check_deeply

        return check_deeply(plan, gym, fault)
    return 0


def check_outside(loaded: Loaded, plan: Plan, source: str) -> Gym | None:
    """What configuration alone cannot judge of a recipe: NeMo Gym's configs, rows in files, a model's folder, metrics.

    Returns:
        What the recipe starts of NeMo Gym, if anything.

    Raises:
        ConfigError: lists all problems, each with the line that names the file or metric.
    """
    problems: list[Problem] = []
    gym, names = None, _names(plan.recipe)
    try:
        gym = load_gym(plan.recipe, plan.recipe_path.parent)
        names |= dict.fromkeys(gym.plays if gym else ())
        plan = settle_rows(plan, gym)
        files = [("train", plan.train), ("validation", plan.validation)]
    except ConfigError as error:
        problems.append(located(error))
        files = []  # where rows lie and what they may name is not known
    for key, rows_of in files:
        if rows_of is not None and rows_of.data_path is not None:
            problems += _problems(
                ("data", key, "data_path"), partial(read_rows, rows_of.data_path, names, rows_of.agent)
            )
    if plan.sft_data_path is not None:
        problems += _problems(("sft_warmup", "data_path"), partial(read_demonstrations, plan.sft_data_path))
    problems += _model_problems(plan.recipe)
    if (metric := plan.recipe.checkpointing.metric_name) is not None:
        try:
            METRICS[metric]
        except KeyError as error:
            problems.append(Problem(("checkpointing", "metric_name"), str(error.args[0])))
    if problems:
        raise report(problems, source, loaded.document.positions, loaded.document.hidden)
    return gym


def _model_problems(recipe: Recipe) -> Iterator[Problem]:
    """What is wrong with a name before anything is fetched: like rows in files, a folder is the driver's to read."""
    policy = recipe.policy
    names = {policy.tokenizer.name: ("policy", "tokenizer", "name"), policy.model_name: ("policy", "model_name")}
    for name, key in names.items():
        if name is not None and needs_no_network(name):
            yield from _problems(key, partial(resolve_model, name))


class _AnyName(dict[str, None]):
    """Environments whose names nobody knows before the run asks for them."""

    def __contains__(self, _name: object) -> bool:
        return True

    def __missing__(self, _name: str) -> None:
        return None


def _names(recipe: Recipe) -> dict[str, None]:
    """The names that rows may carry, but for those of NeMo Gym's configs."""
    gym = recipe.env.nemo_gym
    return _AnyName() if gym is not None and gym.head_server_url is not None else dict.fromkeys(recipe.env.environments)


def located(error: ConfigError) -> Problem:
    """An error about NeMo Gym as a problem of the key that it begins with."""
    text = str(error)
    match = re.match(r"((?:env|data|policy)\.[\w.-]+): ", text)
    key = match[1] if match else "env.nemo_gym.config_paths"
    return Problem(tuple(key.split(".")), text[match.end() :] if match else text)


def _problems(key: KeyPath, read: Callable[[], object]) -> list[Problem]:
    try:
        read()
    except ConfigError as error:
        return [Problem(key, str(error))]
    return []


def engine_fault(recipe: Recipe) -> str | None:
    """Why the recipe's engine would not start with this Python; None where nothing is known against it."""
    if recipe.policy.generation.backend != "vllm":
        return None
    try:
        installed_version()
    except ConfigError as error:
        return str(error)
    return None


def summary(plan: Plan, hidden: Mapping[str, str] = {}, gym: Gym | None = None, engine_fault: str | None = None) -> str:
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
        ("environment", ", ".join([*environments(recipe), *(agents(gym) if gym else ())])),
        (
            "compute",
            f"{plan.device}, {plan.engine.threads} threads for the engine, {plan.policy.threads} for the policy",
        ),
        ("engine", engine(plan)),
        ("placement", plan.placement.summary()),
        ("ports", f"{plan.ports.low}-{plan.ports.high}"),
        ("results", str(plan.run_dir.parent)),
        *(("note", text) for text in notes(recipe)),
        *(
            (("note", f"{engine_fault}; this is about this machine, and the run may be elsewhere"),)
            if engine_fault
            else ()
        ),
        *(("note", text) for text in (hints(gym) if gym else ())),
    ]
    # What the environment gave may stand in any of these lines.
    text = "\n".join([f"{plan.recipe_path.name}: OK", *(f"  {name:<11} {text}" for name, text in lines)])
    return mask(text, hidden)


def engine(plan: Plan) -> str:
    """The engine in words."""
    made, vllm = plan.placement, plan.recipe.policy.generation.backend == "vllm"
    kind = f"vLLM, tensor parallel {made.tensor_parallel}" if vllm else "embedded PyTorch"
    replicas = "1 replica" if made.replicas == 1 else f"{made.replicas} replicas"
    return f"{kind}, {replicas}, {'colocated' if made.colocated else 'not colocated'}"


def agents(gym: Gym) -> Iterator[str]:
    """Each agent of NeMo Gym's configs with what plays its rows, and where."""
    for name, play in gym.plays.items():
        limit = "" if play.max_steps is None else f", at most {play.max_steps} model calls"
        yield f"{name} ({play.kind} agent on NeMo Gym's {play.server}{limit})"


def _gym_lines(gym: Gym) -> Iterator[str]:
    low, high = gym.ports
    yield f"NeMo Gym {gym.installation.version} in {gym.installation.folder}"
    for name, block in gym.blocks.servers.items():
        port = block.settings.get("port") or f"a port of {low}-{high}"
        yield f"  server {name}: {gym.folders[name] / block.settings['entrypoint']} on {port}, logs/{name}.log"
    yield from (f"  rows of {one}" for one in agents(gym))


def explanation(loaded: Loaded, plan: Plan, gym: Gym | None = None) -> str:
    """Where derived values come from, and what a run starts."""
    from gymloop.cluster.health import Health
    from gymloop.gym.nemo.restarts import Restarts
    from gymloop.training.start import startup_tasks
    from gymloop.training.stop import StopSignal
    from gymloop.training.tasks.nemo_gym import Hosting

    lines = ["derived"]
    lines += [f"  {one.name} = {one.value}: {one.because}" for one in derived(loaded, plan)]
    lines += _gym_lines(gym) if gym is not None else []
    lines.append("startup, each task as soon as what it needs is there; a deadline counts from the last progress")
    limits = plan.recipe.health
    health = Health(limits.check_period_s, limits.unresponsive_after_s)
    hosting = None if gym is None else Hosting(gym, Restarts(limits.max_server_restarts, print))
    for task in startup_tasks(plan, None, health, StopSignal(), hosting):
        needs = f"after {', '.join(task.needs)}" if task.needs else "at once"
        lines.append(f"  {task.name:<15} {needs}; deadline {task.deadline_s:g} s")
    return mask("\n".join(lines), loaded.document.hidden)
