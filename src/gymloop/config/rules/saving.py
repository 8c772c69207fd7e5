"""Rules between validation and checkpoints: what is asked for must be able to happen."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path

from gymloop.config.rules.violation import Rule, Violation
from gymloop.config.schema import Recipe

VALIDATION = "validation/"
"""What names of metrics that come from validation begin with."""


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


def _best(recipe: Recipe, _folder: Path) -> Iterator[Violation]:
    saving, grpo = recipe.checkpointing, recipe.grpo
    name, name_key, top_key = saving.metric_name, "checkpointing.metric_name", "checkpointing.keep_top_k"
    if name is None:
        if saving.keep_top_k is not None:
            yield Violation((top_key, name_key), f"keeps the best by {name_key}, which is missing")
        return
    if saving.keep_top_k is None:
        yield Violation((name_key, top_key), f"ranks checkpoints, and {top_key} does not say how many to keep")
    if ":" in name:
        meant = f"{VALIDATION}reward/mean" if name.startswith("val") else "reward/mean"
        yield Violation((name_key,), f"{name!r} is a name of NeMo RL; expected one of metrics.jsonl, such as {meant!r}")
        return
    if not name.startswith(VALIDATION):
        return
    if recipe.data.validation is None:
        yield Violation(
            (name_key, "data.validation"), f"{name!r} comes from validation, and data.validation is missing"
        )
    elif not grpo.val_period and not grpo.val_at_end:
        yield Violation(
            (name_key, "grpo.val_period", "grpo.val_at_end"),
            f"{name!r} is measured by validation, and none follows a step; expected grpo.val_period or grpo.val_at_end",
        )
    elif not _ever_ranked(recipe):
        yield Violation(
            (name_key, "grpo.val_period", "checkpointing.save_period", "grpo.max_num_steps"),
            f"no step is both validated (every {grpo.val_period}) and saved (every {saving.save_period}) within "
            f"{grpo.max_num_steps} steps, so no checkpoint has {name!r}; expected a multiple of val_period to save at",
        )


def _ever_ranked(recipe: Recipe) -> bool:
    grpo, saving = recipe.grpo, recipe.checkpointing
    last_has_it = grpo.val_at_end or (grpo.val_period > 0 and grpo.max_num_steps % grpo.val_period == 0)
    return last_has_it or math.lcm(grpo.val_period, saving.save_period) <= grpo.max_num_steps


def _off(recipe: Recipe, _folder: Path) -> Iterator[Violation]:
    saving = recipe.checkpointing
    if saving.enabled:
        return
    for key, given in (
        ("metric_name", saving.metric_name),
        ("keep_top_k", saving.keep_top_k),
        ("checkpoint_must_save_by", saving.checkpoint_must_save_by),
    ):
        if given is not None:
            yield Violation(
                (f"checkpointing.{key}", "checkpointing.enabled"), "has no effect while checkpointing.enabled is false"
            )


def _deadline(recipe: Recipe, _folder: Path) -> Iterator[Violation]:
    text = recipe.checkpointing.checkpoint_must_save_by
    if text is None:
        return
    key = ("checkpointing.checkpoint_must_save_by",)
    match = re.fullmatch(r"(\d+):(\d\d):(\d\d):(\d\d)", text)
    if match is None or int(match[2]) > 23 or int(match[3]) > 59 or int(match[4]) > 59:
        yield Violation(
            key, f"{text!r} is no time; expected days, hours, minutes and seconds, DD:HH:MM:SS, such as '00:03:45:00'"
        )
    elif not any(int(part) for part in match.groups()):
        yield Violation(key, f"{text!r} is over when the run starts; expected a time after its start, or null")


RULES: tuple[Rule, ...] = (_validation, _best, _off, _deadline)
