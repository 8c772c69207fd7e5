"""What is allowed and perhaps not meant: said by ``gymloop check``, never a reason to refuse."""

from __future__ import annotations

from collections.abc import Iterator

from gymloop.config.placement import placed
from gymloop.config.rules.saving import VALIDATION
from gymloop.config.schema import Generation, Recipe, VllmCfg

MANY_STEPS = 100
"""A tenth of their sampling is more than half a minute."""


def notes(recipe: Recipe) -> Iterator[str]:
    """One sentence each."""
    grpo, saving, generation = recipe.grpo, recipe.checkpointing, recipe.policy.generation
    if grpo.use_leave_one_out_baseline and grpo.normalize_rewards and grpo.num_generations_per_prompt == 2:
        yield (
            "grpo.normalize_rewards has no effect with grpo.num_generations_per_prompt 2 and leave-one-out: one peer "
            "has no standard deviation"
        )
    if grpo.val_period > grpo.max_num_steps and not grpo.val_at_end:
        yield f"grpo.val_period {grpo.val_period} is past the last step, {grpo.max_num_steps}: no step is validated"
    if saving.enabled and saving.save_period > grpo.max_num_steps:
        yield f"checkpointing.save_period {saving.save_period}: only the last step, {grpo.max_num_steps}, is saved"
    ranked = saving.metric_name is not None and saving.metric_name.startswith(VALIDATION)
    if ranked and grpo.val_period and saving.save_period % grpo.val_period:
        yield (
            f"checkpoints between validations have no {saving.metric_name}: checkpointing.save_period "
            f"{saving.save_period} is no multiple of grpo.val_period {grpo.val_period}"
        )
    if _samples_long_uncompiled(recipe):
        yield (
            "policy.generation.vllm_cfg.compile is false: a long run may win more tokens/s by it than a longer first "
            "start costs"
        )
    in_flight = min(recipe.rollouts.max_concurrency, grpo.num_prompts_per_step * grpo.num_generations_per_prompt)
    (rows, key), replicas = _rows(generation), placed(recipe).replicas
    if in_flight > rows * replicas:
        decode = "the engine decodes" if replicas == 1 else f"the {replicas} engine replicas decode"
        each = "" if replicas == 1 else f", {rows} each"
        yield (
            f"{in_flight} rollouts are in flight and {decode} {rows * replicas} at once ({key}{each}): the others wait"
        )


def _samples_long_uncompiled(recipe: Recipe) -> bool:
    generation = recipe.policy.generation
    cfg = generation.vllm_cfg or VllmCfg()
    return (
        generation.backend == "vllm"
        and recipe.cluster.gpus_per_node > 0
        and recipe.grpo.max_num_steps >= MANY_STEPS
        and not (cfg.compile or cfg.enforce_eager or "compilation_config" in generation.vllm_kwargs)
    )


def _rows(generation: Generation) -> tuple[int, str]:
    """Requests that one engine decodes together, and the key that says so."""
    if generation.backend == "vllm":
        return (generation.vllm_cfg or VllmCfg()).max_num_seqs, "policy.generation.vllm_cfg.max_num_seqs"
    return generation.torch_cfg.max_batch_size, "policy.generation.torch_cfg.max_batch_size"
