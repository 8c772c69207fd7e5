"""A turn that is wrong in form has an advantage of its own, whatever became of its rollout.

As in NeMo RL: the value of the recipe replaces the advantage of the sampled tokens of the flagged turn, after the
advantages of the group were computed and normalised, and it is neither normalised nor scaled itself. So

* the other turns of the rollout, and the group's baseline, are as without it;
* it holds in a zero-signal group too, whose advantages are 0 otherwise;
* a rollout that carries no loss (failed, in a short group, filtered as overlong) carries none here either;
* an invalid tool call wins over malformed thinking where a turn has both and both have a value.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gymloop.config.schema import Grpo
from gymloop.rollouts.trajectory import Trajectory


def turn_penalties(trajectory: Trajectory, grpo: Grpo) -> tuple[float | None, ...]:
    """What takes the place of the advantage of each turn; None for a turn that keeps its rollout's.

    Args:
        trajectory: flagged or not.
        grpo: ``invalid_tool_call_advantage`` and ``malformed_thinking_advantage``, None where a flag costs nothing.
    """
    if not trajectory.flags:
        return (None,) * len(trajectory.turns)
    return tuple(_penalty(each.invalid_tool_call, each.malformed_thinking, grpo) for each in trajectory.flags)


def _penalty(invalid_tool_call: bool, malformed_thinking: bool, grpo: Grpo) -> float | None:
    if invalid_tool_call and grpo.invalid_tool_call_advantage is not None:
        return grpo.invalid_tool_call_advantage
    return grpo.malformed_thinking_advantage if malformed_thinking else None


def token_advantages(advantage: float, penalties: Sequence[float | None], sampled: Sequence[int]) -> np.ndarray:
    """The advantages of the sampled tokens of some turns, in order.

    Args:
        advantage: of the rollout, normalised where the recipe asks for that.
        penalties: of the turns.
        sampled: sampled tokens of each turn.

    Returns:
        float32 [sum(sampled)]
    """
    by_turn = [advantage if penalty is None else penalty for penalty in penalties]
    return np.repeat(np.asarray(by_turn, dtype=np.float32), sampled)
