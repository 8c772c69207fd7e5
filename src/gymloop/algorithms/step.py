"""The one step function: what of the finished rollouts is trained, and how much each token counts.

A failed rollout has no reward: it is in no baseline and no denominator. Groups are what the data loader says they are,
kept or dropped whole. The result depends on the rollouts alone, never on the order in which they arrived.

| rollout                                  | reward metrics | baseline | loss and its denominator |
| ---------------------------------------- | -------------- | -------- | ------------------------ |
| failed                                   | no             | no       | no                       |
| finished, group short of its minimum     | yes            | no       | no                       |
| truncated, with ``overlong_filtering``   | yes            | yes      | no                       |
| without a sampled token                  | yes            | yes      | no                       |
| of a zero-signal group                   | yes            | yes      | yes, with advantage 0    |
| any other                                | yes            | yes      | yes                      |

A turn that is wrong in form may have an advantage of its own, see ``penalties``; its rollout counts as any other.

Zero-signal rollouts stay in the denominator so that a token weighs the same whether its neighbours' group was solved by
all or by some: the step shrinks as the task is mastered. They also feel the KL penalty.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import get_args

import numpy as np

from gymloop.algorithms.advantages import MAX_REWARD, group_advantages, is_zero_signal
from gymloop.algorithms.batch import TrainBatch, TrainSequence
from gymloop.algorithms.penalties import token_advantages, turn_penalties
from gymloop.algorithms.weighting import weigh
from gymloop.config.schema import Grpo, Loss, Rollouts
from gymloop.errors import DataError
from gymloop.rollouts.trajectory import Failure, FailureKind, Group, Rollout, Trajectory, segments


@dataclass(frozen=True, slots=True)
class DroppedGroup:
    """A group that trains nothing, and why, in one sentence."""

    group_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class Prepared:
    """What one step trains.

    Attributes:
        batch: ordered by group and sample; its weights sum to 1 unless it is empty.
        metrics: see ``prepare_batch``.
        dropped: groups short of their minimum, ordered by id.
        empty_reason: one sentence when the batch has no sequence, else None.
    """

    batch: TrainBatch
    metrics: dict[str, float]
    dropped: tuple[DroppedGroup, ...]
    empty_reason: str | None


def prepare_batch(groups: Sequence[Group], grpo: Grpo, loss_fn: Loss, rollouts: Rollouts) -> Prepared:
    """Turn the groups of one step into a training batch.

    Its metrics are those of ``rollout_metrics`` and

    * ``groups/kept``, ``groups/short`` (of finished rollouts; they are dropped), ``groups/dropped``,
      ``signal/zero_groups`` (kept, all rewards equal): counts
    * ``tokens/trained`` (carry loss), ``tokens/batch`` (forward and backward): counts; ``segments/per_rollout`` over
      trained rollouts, above 1 where histories were rewritten
    * ``advantages/min``, ``advantages/max`` over kept rollouts, before penalties
    * ``signal/penalised_turns``: turns that are trained with the advantage of a penalty; a count

    Args:
        groups: in any order; each prompt once.
        grpo: baseline, normalisation, overlong filtering, penalties.
        loss_fn: token or sequence level.
        rollouts: ``min_group_size``.

    Raises:
        DataError: a group id or a sample id occurs twice, a rollout carries another group's id, a reward is not finite,
            or a token to be trained has no context or no engine logprob that is finite and at most 0.
    """
    groups = _checked(groups)

    kept: list[Group] = []
    dropped: list[DroppedGroup] = []
    for group in groups:
        if len(group.trajectories) >= rollouts.min_group_size:
            kept.append(group)
        else:
            dropped.append(DroppedGroup(group.group_id, _shortage(group, rollouts.min_group_size)))

    sequences: list[TrainSequence] = []
    advantages: list[float] = []
    penalised = 0
    for group in kept:
        group_signal = group_advantages(
            [trajectory.reward for trajectory in group.trajectories],
            leave_one_out=grpo.use_leave_one_out_baseline,
            normalize=grpo.normalize_rewards,
        )
        for trajectory, advantage in zip(group.trajectories, group_signal, strict=True):
            advantages.append(float(advantage))
            if not (grpo.overlong_filtering and trajectory.truncated):
                penalties = turn_penalties(trajectory, grpo)
                sequences.extend(_sequences(trajectory, float(advantage), penalties))
                penalised += sum(
                    penalty is not None and bool(turn.sampled_ids)
                    for penalty, turn in zip(penalties, trajectory.turns, strict=True)
                )
    batch = TrainBatch(weigh(sequences, token_level=loss_fn.token_level_loss))

    metrics = _rollout_metrics(groups, grpo.num_generations_per_prompt)
    metrics |= {
        "groups/kept": float(len(kept)),
        "groups/short": float(len(dropped)),
        "groups/dropped": float(len(dropped)),
        "signal/zero_groups": float(sum(is_zero_signal([t.reward for t in group.trajectories]) for group in kept)),
        "signal/penalised_turns": float(penalised),
        "tokens/trained": float(batch.num_trained),
        "tokens/batch": float(batch.num_tokens),
    }
    if advantages:
        metrics |= {"advantages/min": min(advantages), "advantages/max": max(advantages)}
    if sequences:
        metrics["segments/per_rollout"] = len(sequences) / len({_rollout_of(sequence) for sequence in sequences})
    empty_reason = None if sequences else _why_empty(groups, kept, dropped)
    return Prepared(batch, metrics, tuple(dropped), empty_reason)


def split(batch: TrainBatch, rollouts_per_step: int | None, loss_fn: Loss) -> tuple[TrainBatch, ...]:
    """Cut a batch into one batch per optimizer step, in order and in whole rollouts.

    The steps are as few as ``rollouts_per_step`` allows and differ by at most one rollout, so that failed rollouts
    never leave a last step of one or two. The weights of each sum to 1 again: an optimizer step divides by its own
    tokens or rollouts.

    Args:
        batch: from ``prepare_batch``.
        rollouts_per_step: at most this many rollouts in one optimizer step, at least 1; None for all.
        loss_fn: token or sequence level.
    """
    by_rollout: dict[tuple[str, int], list[TrainSequence]] = {}
    for sequence in batch.sequences:
        by_rollout.setdefault(_rollout_of(sequence), []).append(sequence)
    rollouts = list(by_rollout.values())
    if not rollouts:
        return ()
    steps = 1 if rollouts_per_step is None else math.ceil(len(rollouts) / rollouts_per_step)
    borders = [len(rollouts) * step // steps for step in range(steps + 1)]
    return tuple(
        TrainBatch(weigh([s for rollout in rollouts[begin:end] for s in rollout], token_level=loss_fn.token_level_loss))
        for begin, end in pairwise(borders)
    )


def rollout_metrics(groups: Sequence[Group], *, group_size: int) -> dict[str, float]:
    """Describe rollouts, trained or not.

    Means are over all finished rollouts; those of ``reward``, ``turns`` and ``tools`` are absent when there is none.

    * ``reward/mean``, ``reward/std`` (population), ``reward/min``, ``reward/max``;
      ``reward/components/<name>/mean`` over the rollouts that report the component
    * ``rollouts/finished``, ``rollouts/failed``, ``rollouts/truncated``, ``rollouts/missing`` (neither finished nor
      failed), ``rollouts/penalised`` (finished with a reward that a penalty took), ``penalties/<name>``,
      ``failures/<kind>``: counts
    * ``tools/calls_per_rollout``, ``tools/rollouts_with_calls`` (fraction), ``tools/bad_call_rate`` (bad calls over all
      calls, 0 without any), ``turns/mean``
    * ``rollouts/invalid_tool_call_rate``, ``rollouts/malformed_thinking_rate``: share of the turns that carry the flag
    * ``tokens/sampled``: count

    Args:
        groups: in any order; each prompt once.
        group_size: rollouts that were asked for of each prompt.

    Raises:
        DataError: a group id or a sample id occurs twice, a rollout carries another group's id, or a reward is not
            finite.
    """
    return _rollout_metrics(_checked(groups), group_size)


def _checked(groups: Iterable[Group]) -> list[Group]:
    """The groups by id with their rollouts by sample id, each of them once."""
    result = [
        replace(
            group,
            trajectories=tuple(sorted(group.trajectories, key=lambda trajectory: trajectory.sample_id)),
            failures=tuple(sorted(group.failures, key=lambda failure: failure.sample_id)),
        )
        for group in sorted(groups, key=lambda group: group.group_id)
    ]
    _check(result)
    return result


def _check(groups: Sequence[Group]) -> None:
    for group_id, count in Counter(group.group_id for group in groups).items():
        if count > 1:
            raise DataError(f"group {group_id!r} occurs {count} times in one step; every prompt has its own group id")
    for group in groups:
        members: list[Rollout] = [*group.trajectories, *group.failures]
        for member in members:
            if member.group_id != group.group_id:
                raise DataError(
                    f"sample {member.sample_id} of group {member.group_id!r} lies in group {group.group_id!r}"
                )
        for sample_id, count in Counter(member.sample_id for member in members).items():
            if count > 1:
                raise DataError(
                    f"sample {sample_id} occurs {count} times in group {group.group_id!r}; "
                    "every rollout finishes or fails once"
                )
        for trajectory in group.trajectories:
            if not abs(trajectory.reward) <= MAX_REWARD:
                raise DataError(
                    f"group {group.group_id!r}, sample {trajectory.sample_id}: the reward is {trajectory.reward}; "
                    "a finite number within 1e30 of 0 was expected"
                )


def _shortage(group: Group, minimum: int) -> str:
    reason = f"{len(group.trajectories)} finished rollouts of at least {minimum} needed"
    if group.failures:
        kinds = Counter(failure.kind for failure in group.failures)
        counts = ", ".join(f"{kinds[kind]} {kind}" for kind in sorted(kinds))
        reason += f"; failed: {counts}; first: {group.failures[0]}"
    return reason


def _why_empty(groups: Sequence[Group], kept: Sequence[Group], dropped: Sequence[DroppedGroup]) -> str:
    if not groups:
        return "the step has no groups"
    if not kept:
        return f"all {len(groups)} groups were dropped; group {dropped[0].group_id!r}: {dropped[0].reason}"
    return f"no rollout of {len(kept)} kept groups has a token to train: every one is empty or filtered as overlong"


def _sequences(trajectory: Trajectory, advantage: float, penalties: Sequence[float | None]) -> Iterable[TrainSequence]:
    """The segments of one rollout, every sampled token with its advantage; weights are not set yet."""
    _check_logprobs(trajectory)
    sampled = [len(turn.sampled_ids) for turn in trajectory.turns]
    for segment in segments(trajectory.turns):
        count, first = len(segment.sampled), segment.first_turn
        if segment.sampled[0] == 0:
            raise DataError(
                f"group {trajectory.group_id!r}, sample {trajectory.sample_id}: "
                "a turn sampled from an empty prompt; its first token has no context to be trained on"
            )
        yield TrainSequence(
            group_id=trajectory.group_id,
            sample_id=trajectory.sample_id,
            ids=np.asarray(segment.ids, dtype=np.int64),
            sampled=np.asarray(segment.sampled, dtype=np.int64),
            advantages=token_advantages(advantage, penalties[first:], sampled[first:])[:count],
            weights=np.zeros(count, dtype=np.float32),
            engine_logprobs=np.asarray(segment.logprobs, dtype=np.float32),
        )


def _check_logprobs(trajectory: Trajectory) -> None:
    for index, turn in enumerate(trajectory.turns):
        logprobs = np.asarray(turn.logprobs, dtype=np.float64)  # None becomes NaN
        bad = np.flatnonzero(~(np.isfinite(logprobs) & (logprobs <= 0)))
        if len(bad):
            position = int(bad[0])
            raise DataError(
                f"group {trajectory.group_id!r}, sample {trajectory.sample_id}, turn {index}: "
                f"the engine logprob of sampled token {position} is {turn.logprobs[position]}; "
                "a finite number of at most 0 was expected"
            )


def _rollout_metrics(groups: Sequence[Group], group_size: int) -> dict[str, float]:
    finished = [trajectory for group in groups for trajectory in group.trajectories]
    failures = [failure for group in groups for failure in group.failures]
    kinds = Counter(failure.kind for failure in failures)
    penalties = Counter(name for trajectory in finished for name in trajectory.penalties)
    missing = sum(max(0, group_size - len(group.trajectories) - len(group.failures)) for group in groups)
    metrics = {
        "rollouts/finished": float(len(finished)),
        "rollouts/failed": float(len(failures)),
        "rollouts/truncated": float(sum(trajectory.truncated for trajectory in finished)),
        "rollouts/missing": float(missing),
        "rollouts/penalised": float(sum(bool(trajectory.penalties) for trajectory in finished)),
        **{f"penalties/{name}": float(count) for name, count in sorted(penalties.items())},
        **{f"failures/{kind}": float(kinds[kind]) for kind in get_args(FailureKind)},
        "failures/attempts": float(_failed_attempts(finished, failures)),
        "tokens/sampled": float(sum(len(turn.sampled_ids) for trajectory in finished for turn in trajectory.turns)),
    }
    if not finished:
        return metrics

    def mean(values: Iterable[float]) -> float:
        return float(np.mean(np.fromiter(values, dtype=np.float64)))

    rewards = np.array([trajectory.reward for trajectory in finished], dtype=np.float64)
    names = sorted({name for trajectory in finished for name in trajectory.components})
    good = sum(trajectory.tool_calls for trajectory in finished)
    bad = sum(trajectory.bad_tool_calls for trajectory in finished)
    flags = [each for trajectory in finished for each in trajectory.flags]
    return metrics | {
        "reward/mean": float(rewards.mean()),
        "reward/std": float(rewards.std()),
        "reward/min": float(rewards.min()),
        "reward/max": float(rewards.max()),
        **{
            f"reward/components/{name}/mean": mean(t.components[name] for t in finished if name in t.components)
            for name in names
        },
        "tools/calls_per_rollout": good / len(finished),
        "tools/bad_call_rate": bad / (good + bad) if good + bad else 0.0,
        "tools/rollouts_with_calls": sum(trajectory.tool_calls > 0 for trajectory in finished) / len(finished),
        "rollouts/invalid_tool_call_rate": sum(each.invalid_tool_call for each in flags) / max(1, len(flags)),
        "rollouts/malformed_thinking_rate": sum(each.malformed_thinking for each in flags) / max(1, len(flags)),
        "turns/mean": mean(len(trajectory.turns) for trajectory in finished),
    }


def _failed_attempts(finished: Sequence[Trajectory], failures: Sequence[Failure]) -> int:
    """Attempts that ended without a verdict, those before a verdict included."""
    return sum(trajectory.attempt for trajectory in finished) + sum(failure.attempt + 1 for failure in failures)


def _rollout_of(sequence: TrainSequence) -> tuple[str, int]:
    return sequence.group_id, sequence.sample_id
