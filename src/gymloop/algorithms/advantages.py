"""An advantage compares a rollout with the other rollouts of its group, and a group of equal rewards teaches nothing.

Equal means ``max == min`` exactly, never a standard deviation near zero: in float arithmetic a constant group easily
has a spread of 1e-9, and dividing by it turns rounding noise into the strongest signal of the batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from gymloop.errors import DataError

EPSILON = 1e-6
"""Added to the standard deviation, as GRPO implementations do."""

MAX_DEVIATIONS = 10.0
"""A leave-one-out advantage is divided only while the result stays below this."""

MAX_REWARD = 1e30
"""Magnitude of the largest reward; float32 ends at 3e38."""


def group_advantages(rewards: Sequence[float] | np.ndarray, *, leave_one_out: bool, normalize: bool) -> np.ndarray:
    """Advantage of each rollout of one group.

    With ``S_i`` the rewards a rollout is compared with, ``A_i = r_i - mean(S_i)``, divided by ``std(S_i) + 1e-6`` where
    ``normalize``. ``std`` is the sample standard deviation (``len(S_i) - 1`` degrees of freedom), in two passes.

    * GRPO (arXiv 2402.03300): ``S_i`` is the whole group. A normalised advantage is at most ``(k - 1) / sqrt(k)``.
    * ``leave_one_out`` (RLOO, arXiv 2402.14740): ``S_i`` is the peers, all rollouts but this one, which makes the
      baseline independent of the rollout. But peers that agree have no spread to divide by. Where they agree exactly,
      or so closely that the quotient would reach ``MAX_DEVIATIONS``, the row keeps its plain difference: whether seven
      rewards of 0.7 agree to the last bit must not decide between an advantage of 0.6 and one of 600000.

    Equal rewards get bitwise equal advantages, whatever the order of the group.

    Args:
        rewards: float [k], the finished rollouts of one group.
        leave_one_out: compare with the peers instead of the group.
        normalize: divide by the standard deviation.

    Returns:
        float32 [k]; exactly 0 everywhere when all rewards are equal (so also for ``k`` of 1).

    Raises:
        DataError: a reward is not finite, or its magnitude exceeds 1e30.
    """
    values = [float(reward) for reward in rewards]
    for index, value in enumerate(values):
        if not abs(value) <= MAX_REWARD:
            raise DataError(f"reward {index} of the group is {value}; a finite number within 1e30 of 0 was expected")
    if is_zero_signal(values):
        return np.zeros(len(values), dtype=np.float32)
    if leave_one_out:
        by_reward = {value: _against_peers(value, values, normalize) for value in set(values)}
    else:
        mean, std = _moments(values)
        divisor = std + EPSILON if normalize else 1.0
        by_reward = {value: (value - mean) / divisor for value in set(values)}
    return np.array([by_reward[value] for value in values], dtype=np.float32)


def is_zero_signal(rewards: Sequence[float]) -> bool:
    """Whether all rewards of a group are exactly equal, so that no rollout is better than another."""
    return len(rewards) == 0 or max(rewards) == min(rewards)


def _against_peers(value: float, group: Sequence[float], normalize: bool) -> float:
    peers = sorted(group)
    peers.remove(value)
    if peers[0] == peers[-1]:  # the mean of equal numbers may be off by a rounding error; the number itself is not
        return value - peers[0]
    mean, std = _moments(peers)
    difference = value - mean
    if not normalize or abs(difference) >= MAX_DEVIATIONS * (std + EPSILON):
        return difference
    return difference / (std + EPSILON)


def _moments(values: Sequence[float]) -> tuple[float, float]:
    """Mean and sample standard deviation, in two passes: E[x^2] - E[x]^2 cancels."""
    mean = math.fsum(values) / len(values)
    squares = math.fsum((value - mean) * (value - mean) for value in values)
    return mean, math.sqrt(squares / (len(values) - 1))
