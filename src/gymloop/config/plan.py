"""Everything derived from a recipe, once, before anything starts; frozen, so that no part of the run can bend it.

The Plan is plain data: it pickles into actors and imports neither torch nor ray. What only the worker's device can say,
its precision, stays ``auto`` here. On a CPU engine and policy take turns, so each is given all cores; Ray would
otherwise give an actor one thread.
"""

from __future__ import annotations

import os
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from gymloop.config.parsers import settled_parsers
from gymloop.config.paths import is_template_file
from gymloop.config.placement import Placement, placed
from gymloop.config.schema import DataSource, Generation, Recipe
from gymloop.errors import ConfigError


@dataclass(frozen=True, slots=True)
class SamplingProfile:
    """The fields of sampling that change the distribution; the server is locked to them.

    Attributes:
        temperature: 0 is greedy.
        top_p: nucleus mass in (0, 1].
        top_k: None keeps all tokens.
    """

    temperature: float
    top_p: float
    top_k: int | None


@dataclass(frozen=True, slots=True)
class PortRange:
    """Ports the generation server may bind, both ends included."""

    low: int
    high: int


@dataclass(frozen=True, slots=True)
class ActorThreads:
    """What one actor's process may compute with.

    Attributes:
        threads: of its numerical libraries; at least 1.
    """

    threads: int

    @property
    def env(self) -> dict[str, str]:
        """Variables to set before the process imports a numerical library; they are read once, at import.

        Engine and policy share cores with each other and with Ray. OpenMP threads that spin while they wait then keep
        the others from running: with both models loading at once that was measured to make each load 6 times slower.
        """
        names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
        return dict.fromkeys(names, str(self.threads)) | {"OMP_WAIT_POLICY": "PASSIVE"}


@dataclass(frozen=True, slots=True)
class RowSource:
    """Where rows come from: a file, or an environment's generator.

    Attributes:
        data_path: absolute; None when the rows are generated.
        environment: name of the generating environment; None when the rows are in a file.
        num_tasks: rows to generate; None for a file.
        seed: of the generator.
        agent: environment of the file's rows that name none; None where every row has to.
    """

    data_path: Path | None
    environment: str | None
    num_tasks: int | None
    seed: int
    agent: str | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """One run, settled.

    Attributes:
        recipe: what it was compiled from, complete with defaults.
        recipe_path: absolute.
        recipe_name: the file's stem.
        run_name: one path component, unique within the recipe unless the run is resumed.
        run_dir: absolute, ``<log_dir>/<recipe_name>/<run_name>``; not made here.
        rollouts_per_step: prompts times generations.
        optimizer_steps_per_batch: optimizer steps on one step's rollouts.
        steps_bound: training steps at most; an epoch limit on rows from a file may end the run sooner.
        train_sampling: profile of training rollouts.
        validation_sampling: profile of validation; None without validation rows.
        device: where engine and policy compute.
        precision: as in the recipe; ``auto`` is settled by the worker.
        cores: cores this process may use.
        placement: what each worker's process holds of the cluster.
        engine: threads of each engine's actor.
        policy: threads of the policy's actor.
        ports: for the generation server.
        chat_template: Jinja text; None takes the tokenizer's own.
        train: training rows.
        validation: validation rows, if any.
        sft_data_path: demonstrations of the warm-up, absolute; None asks the environment's solver.
        tool_parser_plugin: absolute; None where only built-in parsers are used.
        reasoning_parser_plugin: likewise.
    """

    recipe: Recipe
    recipe_path: Path
    recipe_name: str
    run_name: str
    run_dir: Path
    rollouts_per_step: int
    optimizer_steps_per_batch: int
    steps_bound: int
    train_sampling: SamplingProfile
    validation_sampling: SamplingProfile | None
    device: Literal["cpu", "cuda"]
    precision: Literal["auto", "float32", "bfloat16"]
    cores: int
    placement: Placement
    engine: ActorThreads
    policy: ActorThreads
    ports: PortRange
    chat_template: str | None
    train: RowSource
    validation: RowSource | None
    sft_data_path: Path | None
    tool_parser_plugin: Path | None
    reasoning_parser_plugin: Path | None


def compile_plan(recipe: Recipe, recipe_path: str | Path, run_name: str | None = None) -> Plan:
    """Derive the plan of one run.

    Args:
        recipe: from ``load_recipe``, so it keeps the rules between keys.
        recipe_path: the file it came from; paths in it are relative to that file's folder.
        run_name: name of the run's folder; None takes the time, ``20250131-235959``.

    Raises:
        ConfigError: the run's name is not one path component, or the chat template cannot be read or parsed.
    """
    path = Path(recipe_path).absolute()
    run = time.strftime("%Y%m%d-%H%M%S") if run_name is None else run_name
    if not re.fullmatch(r"[A-Za-z0-9_][\w.-]*", run):
        raise ConfigError(f"run name {run!r}: expected letters, digits, '_', '-' and '.', such as 'lr-1e-5'")
    grpo, generation = recipe.grpo, recipe.policy.generation
    rollouts = grpo.num_prompts_per_step * grpo.num_generations_per_prompt
    cores = len(os.sched_getaffinity(0))
    placement = placed(recipe)
    parsers = settled_parsers(recipe)
    return Plan(
        recipe=recipe,
        recipe_path=path,
        recipe_name=path.stem,
        run_name=run,
        run_dir=Path(recipe.logger.log_dir).expanduser().absolute() / path.stem / run,
        rollouts_per_step=rollouts,
        optimizer_steps_per_batch=rollouts // (recipe.policy.train_global_batch_size or rollouts),
        steps_bound=_steps_bound(recipe),
        train_sampling=SamplingProfile(generation.temperature, generation.top_p, generation.top_k),
        validation_sampling=_validation_profile(generation) if recipe.data.validation else None,
        device="cuda" if recipe.cluster.gpus_per_node else "cpu",
        precision=recipe.policy.precision,
        cores=cores,
        placement=placement,
        engine=ActorThreads(max(1, cores // (1 if placement.resource == "GPU" else placement.replicas))),
        policy=ActorThreads(cores),
        ports=PortRange(generation.port_range_low, generation.port_range_high),
        chat_template=_chat_template(recipe.policy.tokenizer.chat_template, path.parent),
        train=_row_source(recipe.data.train, path.parent),
        validation=_row_source(recipe.data.validation, path.parent) if recipe.data.validation else None,
        sft_data_path=_absolute(recipe.sft_warmup.data_path, path.parent),
        tool_parser_plugin=_absolute(parsers.tool_parser_plugin, path.parent),
        reasoning_parser_plugin=_absolute(parsers.reasoning_parser_plugin, path.parent),
    )


def _validation_profile(generation: Generation) -> SamplingProfile:
    """Each field of validation falls back to the training value."""
    return SamplingProfile(
        generation.temperature if generation.val_temperature is None else generation.val_temperature,
        generation.top_p if generation.val_top_p is None else generation.val_top_p,
        generation.top_k if generation.val_top_k is None else generation.val_top_k,
    )


def _steps_bound(recipe: Recipe) -> int:
    """The smaller of both limits, an epoch in whole steps; only where the rows can be counted without reading them."""
    grpo, tasks = recipe.grpo, recipe.data.train.num_tasks
    if tasks is None:
        return grpo.max_num_steps
    return min(grpo.max_num_steps, grpo.max_num_epochs * (tasks // grpo.num_prompts_per_step))


def _row_source(source: DataSource, folder: Path) -> RowSource:
    return RowSource(_absolute(source.data_path, folder), source.environment, source.num_tasks, source.seed)


def _absolute(name: str | None, folder: Path) -> Path | None:
    return None if name is None else (folder / Path(name).expanduser()).absolute()


def _chat_template(text: str | None, folder: Path) -> str | None:
    """The template's text, parsed once so that a slip in it is found here and not in the server."""
    if text is None:
        return None
    key = "policy.tokenizer.chat_template"
    where = key
    if is_template_file(text):
        file = folder / Path(text).expanduser()
        where = f"{key}: {file}"
        try:
            text = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{where} cannot be read: {error}") from error

    # Imported here: most of what needs a Plan needs no template, and `gymloop check` is timed.
    from jinja2 import Environment, TemplateSyntaxError, nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.parser import Parser

    class Generation(Extension):
        """Hugging Face's ``{% generation %}`` blocks, which mark assistant text."""

        tags = {"generation"}

        def parse(self, parser: Parser) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    try:
        Environment(extensions=[loopcontrols, Generation]).parse(text)
    except TemplateSyntaxError as error:
        raise ConfigError(f"{where} line {error.lineno}: not a Jinja template: {error.message}") from error
    return text
