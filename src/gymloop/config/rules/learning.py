"""Rules without which a run would learn from something else than it seems to: sampling, groups, loss."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from gymloop.config.rules.violation import Rule, Violation
from gymloop.config.schema import Recipe

PROMPTS, GENERATIONS = "grpo.num_prompts_per_step", "grpo.num_generations_per_prompt"


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


def _batches(recipe: Recipe, _folder: Path) -> Iterator[Violation]:
    policy, grpo = recipe.policy, recipe.grpo
    rollouts = grpo.num_prompts_per_step * grpo.num_generations_per_prompt
    batch = policy.train_global_batch_size
    if batch is not None and rollouts % batch:
        yield Violation(
            ("policy.train_global_batch_size", PROMPTS, GENERATIONS),
            f"{batch} does not divide the {rollouts} rollouts of a step ({PROMPTS} x {GENERATIONS}); "
            "expected a divisor, or null for one optimizer step",
        )
    elif not policy.sequence_packing.enabled and policy.train_micro_batch_size > (batch or rollouts):
        yield Violation(
            ("policy.train_micro_batch_size", "policy.train_global_batch_size", PROMPTS, GENERATIONS),
            f"{policy.train_micro_batch_size} sequences are more than an optimizer step has ({batch or rollouts}); "
            f"expected at most {batch or rollouts}",
        )


def _groups(recipe: Recipe, _folder: Path) -> Iterator[Violation]:
    grpo, rollouts = recipe.grpo, recipe.rollouts
    if rollouts.min_group_size > grpo.num_generations_per_prompt:
        yield Violation(
            ("rollouts.min_group_size", GENERATIONS),
            f"{rollouts.min_group_size} is more than a group has ({GENERATIONS} is "
            f"{grpo.num_generations_per_prompt}), so every group would be dropped",
        )
    train = recipe.data.train
    if train.environment is not None and train.num_tasks is not None and train.num_tasks < grpo.num_prompts_per_step:
        yield Violation(
            ("data.train.num_tasks", PROMPTS),
            f"{train.num_tasks} tasks do not fill one step; expected at least {PROMPTS}, "
            f"which is {grpo.num_prompts_per_step}",
        )
    one_step = train.num_tasks == grpo.num_prompts_per_step and grpo.max_num_epochs == 1
    if rollouts.on_short_group == "refill" and one_step:
        yield Violation(
            ("rollouts.on_short_group", "data.train.num_tasks", PROMPTS, "grpo.max_num_epochs"),
            f"'refill' takes the next prompt for a short group, and one pass over {train.num_tasks} tasks is one step, "
            "so there is no next one; expected more tasks or epochs, or 'skip'",
        )


def _loss(recipe: Recipe, _folder: Path) -> Iterator[Violation]:
    loss, correction = recipe.loss_fn, "loss_fn.use_importance_sampling_correction"
    if loss.truncated_importance_sampling_ratio is not None and not loss.use_importance_sampling_correction:
        yield Violation(
            ("loss_fn.truncated_importance_sampling_ratio", correction),
            f"has no effect while {correction} is false; set that to true or remove this",
        )
    if loss.ratio_clip_c is not None and loss.ratio_clip_c <= 1 + loss.ratio_clip_max:
        yield Violation(
            ("loss_fn.ratio_clip_c", "loss_fn.ratio_clip_max"),
            f"{loss.ratio_clip_c} is inside the clip range: the dual clip is for ratios above it; expected more than "
            f"1 + ratio_clip_max, which is {1 + loss.ratio_clip_max:g}",
        )


RULES: tuple[Rule, ...] = (_sampling, _batches, _groups, _loss)
