"""When a run validates, saves and ends: decisions on step numbers and seconds alone, without a clock of their own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gymloop.config.schema import Recipe

EXIT_OUT_OF_TIME = 75
"""Exit code of a run that saved and ended before ``checkpoint_must_save_by`` (EX_TEMPFAIL: run it again)."""

_UNITS_S = (86400, 3600, 60, 1)


@dataclass(frozen=True, slots=True)
class Schedule:
    """The run's timetable.

    Attributes:
        total: training steps.
        val_period: validate every so many steps; 0 never.
        val_at_end: validate after the last step.
        save_period: save every so many steps; None never saves.
        must_save_by_s: seconds after the start of the run by which it has saved and ended; None sets no limit.
    """

    total: int
    val_period: int
    val_at_end: bool
    save_period: int | None
    must_save_by_s: float | None

    @classmethod
    def of(cls, recipe: Recipe, loader_steps: int) -> Schedule:
        """From a recipe and the steps that its data hold."""
        saving = recipe.checkpointing
        return cls(
            total=min(recipe.grpo.max_num_steps, loader_steps),
            val_period=recipe.grpo.val_period,
            val_at_end=recipe.grpo.val_at_end,
            save_period=saving.save_period if saving.enabled else None,
            must_save_by_s=None
            if saving.checkpoint_must_save_by is None or not saving.enabled
            else seconds_of(saving.checkpoint_must_save_by),
        )

    def validates_after(self, step: int) -> bool:
        """Whether the step is followed by a validation."""
        return (self.val_at_end and step == self.total) or (self.val_period > 0 and step % self.val_period == 0)

    def saves_after(self, step: int) -> bool:
        """Whether the step is followed by a save; the last one always is."""
        return self.save_period is not None and (step % self.save_period == 0 or step == self.total)

    def must_end(self, elapsed_s: float, longest_step_s: float, longest_save_s: float) -> bool:
        """Whether one more step and its save could end too late; then this is the moment to save.

        Args:
            elapsed_s: since the start of the run.
            longest_step_s: of those seen, validation included.
            longest_save_s: of those seen; 0 before the first, which is then taken to last as long as a step.
        """
        if self.must_save_by_s is None:
            return False
        return elapsed_s + longest_step_s + (longest_save_s or longest_step_s) > self.must_save_by_s


def finished(recipe: Recipe, step: int, loader_state: Mapping[str, Any]) -> bool:
    """Whether a checkpoint's step is the last one of the run, told before anything is started.

    Args:
        recipe: of the run as it is asked to go on.
        step: of the checkpoint.
        loader_state: the loader's part of it. Steps that its epochs hold count only while the data are the same.
    """
    if step >= recipe.grpo.max_num_steps:
        return True
    same_data = not recipe.checkpointing.accept_changed_data
    per_epoch = int(loader_state["rows"]) // recipe.grpo.num_prompts_per_step
    later = int(loader_state["first_epoch"]), int(loader_state["first_step"])
    return same_data and step >= later[1] + per_epoch * (recipe.grpo.max_num_epochs - later[0])


def seconds_of(text: str) -> float:
    """Seconds of ``DD:HH:MM:SS``, the form that a recipe's rules hold ``checkpoint_must_save_by`` to."""
    return float(sum(int(part) * unit for part, unit in zip(text.split(":"), _UNITS_S, strict=True)))
