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


def _penalties(recipe: Recipe, _folder: Path) -> Iterator[Violation]:
    """A penalty without a pattern never applies; patterns in two places may differ."""
    gym = recipe.env.nemo_gym
    for advantage, name in (
        ("invalid_tool_call_advantage", "invalid_tool_call_patterns"),
        ("malformed_thinking_advantage", "thinking_tags"),
    ):
        own, theirs = getattr(recipe.rollouts, name), getattr(gym, name, None)
        if own is not None and theirs is not None:
            yield Violation(
                (f"rollouts.{name}", f"env.nemo_gym.{name}"),
                f"is given here and as env.nemo_gym.{name}, NeMo RL's key for the same; expected one of them",
            )
        if getattr(recipe.grpo, advantage) is not None and () in (own, theirs):
            key = f"rollouts.{name}" if own == () else f"env.nemo_gym.{name}"
            yield Violation(
                (f"grpo.{advantage}", key),
                f"never applies, since {key} is empty and flags no turn; expected null here, or null or patterns there",
            )


def _reward_penalties(recipe: Recipe, _folder: Path) -> Iterator[Violation]:
    """A penalty without what it looks for never applies."""
    penalties = recipe.reward_penalties
    ids = penalties.token_ids
    if penalties.penalize_unwanted_tokens and (ids is None or not ids.unwanted):
        yield Violation(
            ("reward_penalties.penalize_unwanted_tokens", "reward_penalties.token_ids.unwanted"),
            "does not know which; expected their ids in reward_penalties.token_ids.unwanted",
        )
    if ids is not None and (ids.think_open is None) != (ids.think_close is None):
        yield Violation(
            ("reward_penalties.token_ids", "reward_penalties.token_ids.think_open"),
            "has one of think_open and think_close; thinking is judged by both, so expected both or neither",
        )
    gym = recipe.env.nemo_gym
    no_tags = () in (recipe.rollouts.thinking_tags, None if gym is None else gym.thinking_tags)
    if penalties.penalize_malformed_think_tag and no_tags and (ids is None or ids.think_open is None):
        yield Violation(
            ("reward_penalties.penalize_malformed_think_tag", "rollouts.thinking_tags"),
            "never applies, since the thinking tags are an empty list and reward_penalties.token_ids names no token",
        )


RULES: tuple[Rule, ...] = (_sampling, _batches, _groups, _loss, _penalties, _reward_penalties)
