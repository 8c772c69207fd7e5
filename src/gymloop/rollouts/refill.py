"""The groups of one step: those of its prompts and, where the recipe asks for it, others in place of the short ones.

    prompts ─> a round: every group to its end ─> how many are short? ─> so many further prompts ─> the next round ...

A round is over when each of its groups is, so what is asked for next depends on the records alone and never on the
order in which they arrived: a resumed run asks for the same prompts. A step takes at most as many further prompts as it
began with. A short group is kept as a record, trains nothing (see ``algorithms.step``) and its prompt comes again with
the next epoch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gymloop.config.schema import Rollouts
from gymloop.gym.contract import Row
from gymloop.rollouts.budget import FailureBudget
from gymloop.rollouts.collector import Collector, expand
from gymloop.rollouts.trajectory import Group, Rollout

Prompts = Sequence[tuple[str, Row]]
"""Group ids and rows."""


@dataclass(frozen=True, slots=True)
class StepGroups:
    """What one step sampled.

    Attributes:
        groups: short ones included, ordered by id.
        refilled: groups that were sampled in place of short ones.
    """

    groups: tuple[Group, ...]
    refilled: int


async def gather_step(
    collector: Collector,
    prompts: Prompts,
    more: Callable[[int], Prompts],
    num_generations: int,
    step: str,
    on_progress: Callable[[int, int], None] | None = None,
) -> StepGroups:
    """Run whole groups until none is short, or the step has taken twice its prompts.

    Args:
        collector: its ``limits`` say what a short group leads to and how many failures a step may have.
        prompts: of the step.
        more: takes so many further prompts from the loader.
        num_generations: rollouts per group.
        step: as messages call it, such as ``step 3``.
        on_progress: called with the rollouts that are finished and those asked for.

    Raises:
        InfraError: more rollouts failed than ``max_failed_rollouts_per_step`` allows.
        GymloopError: see ``Collector.collect``.
    """
    limits = collector.limits
    budget = FailureBudget(limits.max_failed_rollouts_per_step, step)
    groups: list[Group] = []
    refilled = done = asked = 0

    def note(rollout: Rollout, _: int) -> None:
        nonlocal done
        done += 1
        if on_progress is not None:
            on_progress(done, asked)
        budget.spend(rollout)

    wanted: Prompts = prompts
    while wanted:
        tasks = expand(wanted, num_generations)
        asked += len(tasks)
        sampled = await collector.gather(tasks, note)
        groups += sampled
        count = further(sampled, limits, len(prompts) - refilled)
        wanted = more(count) if count else ()
        refilled += count
    return StepGroups(tuple(sorted(groups, key=lambda group: group.group_id)), refilled)


def further(groups: Sequence[Group], limits: Rollouts, allowance: int) -> int:
    """How many further prompts a finished round asks for, of those that the step may still take."""
    if limits.on_short_group != "refill":
        return 0
    return min(allowance, sum(len(group.trajectories) < limits.min_group_size for group in groups))
