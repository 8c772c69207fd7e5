"""What no single key can say: the rules between keys, each with its reason.

Rules read a schema-valid recipe, never change it, and report every violation. A violation names all keys it compared,
the one to blame first, so that a recipe with other faults is still judged by the rules whose keys are sound.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from gymloop.config.nearest import did_you_mean
from gymloop.config.schema import DataSource, Recipe

TEMPLATE_SUFFIX = ".jinja"


@dataclass(frozen=True, slots=True)
class Violation:
    """A broken rule: the keys it compared, dotted, and the sentence."""

    keys: tuple[str, ...]
    text: str


def violations(recipe: Recipe, folder: Path) -> Iterator[Violation]:
    """Every broken rule. ``folder`` is the recipe's: paths in it are relative to that."""
    for rule in RULES:
        yield from rule(recipe, folder)


def _availability(recipe: Recipe, _folder: Path) -> Iterator[Violation]:
    if recipe.policy.generation.backend == "vllm":
        yield Violation(("policy.generation.backend",), "'vllm' is not available yet; expected 'torch'")
    if not recipe.policy.generation.colocated.enabled:
        yield Violation(
            ("policy.generation.colocated.enabled",), "separate devices are not available yet; expected true"
        )
    if recipe.cluster.num_nodes > 1:
        yield Violation(("cluster.num_nodes",), f"{recipe.cluster.num_nodes} nodes are not available yet; expected 1")


def _sampling(recipe: Recipe, _folder: Path) -> Iterator[Violation]:
    generation = recipe.policy.generation
    why = "the trainer's logprobs are over the full vocabulary, so training would be on another distribution"
    if generation.top_p < 1:
        yield Violation(
            ("policy.generation.top_p",),
            f"is {generation.top_p} but {why}; expected 1.0 (policy.generation.val_top_p limits validation only)",
        )
    if generation.top_k is not None:
        yield Violation(
            ("policy.generation.top_k",),
            f"is {generation.top_k} but {why}; expected null (policy.generation.val_top_k limits validation only)",
        )
    if generation.temperature == 0:
        yield Violation(
            ("policy.generation.temperature",),
            "0 is greedy: all rollouts of a group would be equal and carry no signal; expected more than 0 "
            "(policy.generation.val_temperature: 0 makes validation greedy)",
        )


def _lengths(recipe: Recipe, _folder: Path) -> Iterator[Violation]:
    policy, generation = recipe.policy, recipe.policy.generation
    if generation.max_new_tokens >= policy.max_total_sequence_length:
        yield Violation(
            ("policy.generation.max_new_tokens", "policy.max_total_sequence_length"),
            f"{generation.max_new_tokens} leaves no room for a prompt; expected less than "
            f"policy.max_total_sequence_length, which is {policy.max_total_sequence_length}",
        )
    if generation.port_range_low > generation.port_range_high:
        yield Violation(
            ("policy.generation.port_range_low", "policy.generation.port_range_high"),
            f"{generation.port_range_low} is above port_range_high, which is {generation.port_range_high}",
        )


def _batches(recipe: Recipe, _folder: Path) -> Iterator[Violation]:
    grpo = recipe.grpo
    prompts, generations = "grpo.num_prompts_per_step", "grpo.num_generations_per_prompt"
    rollouts = grpo.num_prompts_per_step * grpo.num_generations_per_prompt
    batch = recipe.policy.train_global_batch_size
    if batch is not None and rollouts % batch:
        yield Violation(
            ("policy.train_global_batch_size", prompts, generations),
            f"{batch} does not divide the {rollouts} rollouts of a step ({prompts} x {generations}); "
            "expected a divisor, or null for one optimizer step",
        )
    if recipe.rollouts.min_group_size > grpo.num_generations_per_prompt:
        yield Violation(
            ("rollouts.min_group_size", generations),
            f"{recipe.rollouts.min_group_size} is more than a group has ({generations} is "
            f"{grpo.num_generations_per_prompt}), so every group would be dropped",
        )
    train = recipe.data.train
    if train.environment is not None and train.num_tasks is not None and train.num_tasks < grpo.num_prompts_per_step:
        yield Violation(
            ("data.train.num_tasks", prompts),
            f"{train.num_tasks} tasks do not fill one step; expected at least {prompts}, "
            f"which is {grpo.num_prompts_per_step}",
        )


def _loss(recipe: Recipe, _folder: Path) -> Iterator[Violation]:
    loss = recipe.loss_fn
    if loss.truncated_importance_sampling_ratio is not None and not loss.use_importance_sampling_correction:
        yield Violation(
            ("loss_fn.truncated_importance_sampling_ratio", "loss_fn.use_importance_sampling_correction"),
            "has no effect while loss_fn.use_importance_sampling_correction is false; set that to true or remove this",
        )


def _validation(recipe: Recipe, _folder: Path) -> Iterator[Violation]:
    if recipe.data.validation is not None:
        return
    grpo, generation = recipe.grpo, recipe.policy.generation
    asked = {
        "grpo.val_period": grpo.val_period > 0,
        "grpo.val_at_start": grpo.val_at_start,
        "grpo.val_at_end": grpo.val_at_end,
        "grpo.max_val_samples": grpo.max_val_samples is not None,
        "policy.generation.val_temperature": generation.val_temperature is not None,
        "policy.generation.val_top_p": generation.val_top_p is not None,
        "policy.generation.val_top_k": generation.val_top_k is not None,
    }
    for key, is_asked in asked.items():
        if is_asked:
            yield Violation((key, "data.validation"), "asks for validation, and data.validation is missing")


def _data(recipe: Recipe, folder: Path) -> Iterator[Violation]:
    for key, source in (("data.train", recipe.data.train), ("data.validation", recipe.data.validation)):
        if source is not None:
            yield from _data_source(key, source, recipe, folder)
    yield from _file("sft_warmup.data_path", recipe.sft_warmup.data_path, folder)


def _data_source(key: str, source: DataSource, recipe: Recipe, folder: Path) -> Iterator[Violation]:
    path_key, environment_key, tasks_key = f"{key}.data_path", f"{key}.environment", f"{key}.num_tasks"
    if (source.data_path is None) == (source.environment is None):
        given = "neither is given" if source.data_path is None else "both are given"
        yield Violation((key, path_key, environment_key), f"expected data_path or environment, exactly one; {given}")
        return
    if source.data_path is not None:
        if source.num_tasks is not None:
            yield Violation((tasks_key, path_key), "counts generated tasks; with data_path the file has the rows")
        yield from _file(path_key, source.data_path, folder)
        return
    known = recipe.env.environments
    if source.environment is not None and source.environment not in known:
        names = ", ".join(sorted(known)) or "none"
        yield Violation(
            (environment_key, "env.environments"),
            f"{source.environment!r} is not under env.environments, which has {names}"
            f"{did_you_mean(source.environment, known)}",
        )
    if source.num_tasks is None:
        yield Violation((tasks_key, environment_key), "missing; with environment, the number of tasks to generate")


def _entrypoints(recipe: Recipe, _folder: Path) -> Iterator[Violation]:
    for name, spec in recipe.env.environments.items():
        if not re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", spec.entrypoint):
            yield Violation(
                (f"env.environments.{name}.entrypoint",),
                f"{spec.entrypoint!r} names no class; expected 'module:Class' such as 'my_gym.tasks:Sorting'",
            )


def _template(recipe: Recipe, folder: Path) -> Iterator[Violation]:
    template = recipe.policy.tokenizer.chat_template
    if template is not None and is_template_file(template):
        yield from _file("policy.tokenizer.chat_template", template, folder)


def is_template_file(chat_template: str) -> bool:
    """Whether ``policy.tokenizer.chat_template`` is a path; anything else is the template itself."""
    return chat_template.endswith(TEMPLATE_SUFFIX) and "\n" not in chat_template and "{" not in chat_template


def _file(key: str, name: str | None, folder: Path) -> Iterator[Violation]:
    """The file must be there, relative to the recipe."""
    if name is None:
        return
    path = folder / Path(name).expanduser()
    if path.is_file():
        return
    if not path.parent.is_dir():
        yield Violation((key,), f"{path} does not exist, nor does its folder")
        return
    siblings = [sibling.name for sibling in path.parent.iterdir()]
    yield Violation((key,), f"there is no file {path}{did_you_mean(path.name, siblings)}")


RULES: tuple[Callable[[Recipe, Path], Iterator[Violation]], ...] = (
    _availability,
    _sampling,
    _lengths,
    _batches,
    _loss,
    _validation,
    _data,
    _entrypoints,
    _template,
)
