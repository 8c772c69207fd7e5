"""The learning signal from its definitions: scalar loops, sharing no code with gymloop."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction


def advantages(rewards: Sequence[float], leave_one_out: bool, normalize: bool) -> list[float]:
    """Means and variances in exact fractions; only the square root rounds."""
    exact = [Fraction(reward) for reward in rewards]
    result = []
    for row, reward in enumerate(exact):
        compared = [r for index, r in enumerate(exact) if index != row] if leave_one_out else exact
        if len(set(exact)) == 1:
            result.append(0.0)
            continue
        mean = sum(compared) / len(compared)
        difference = float(reward - mean)
        if normalize and len(set(compared)) > 1:
            variance = sum((r - mean) ** 2 for r in compared) / (len(compared) - 1)
            divided = difference / (math.sqrt(variance) + 1e-6)
            if not leave_one_out or abs(divided) < 10:
                difference = divided
        result.append(difference)
    return result


def penalised(
    advantage: float, turns: Sequence[tuple[int, bool, bool]], invalid: float | None, malformed: float | None
) -> list[float]:
    """The advantage of every sampled token of a rollout, whose turns are (tokens, invalid call, malformed thinking)."""
    result = []
    for tokens, is_invalid, is_malformed in turns:
        for _ in range(tokens):
            if is_invalid and invalid is not None:
                result.append(invalid)
            elif is_malformed and malformed is not None:
                result.append(malformed)
            else:
                result.append(advantage)
    return result


def policy_loss(
    tokens: Sequence[dict[str, float]],
    *,
    low: float,
    high: float,
    dual: float | None = None,
    beta: float = 0.0,
    kl_type: str = "k3",
    input_clamp: float | None = None,
    output_clamp: float | None = None,
    correct: bool = False,
    cap: float | None = None,
) -> tuple[float, list[float]]:
    """Loss and its derivative by each token's current logprob, by cases.

    Args:
        tokens: current, old, advantage, weight, engine, reference of each trained token.
    """
    loss = 0.0
    gradient = []
    for t in tokens:
        advantage, ratio = t["advantage"], math.exp(t["current"] - t["old"])
        if advantage >= 0 and ratio > 1 + high:
            value, slope = -advantage * (1 + high), 0.0
        elif advantage < 0 and ratio < 1 - low:
            value, slope = -advantage * (1 - low), 0.0
        elif advantage < 0 and dual is not None and ratio > dual and dual > 1 - low:
            value, slope = -advantage * dual, 0.0
        else:
            value, slope = -advantage * ratio, -advantage * ratio
        if correct:
            factor = math.exp(t["old"] - t["engine"])
            if cap is not None and factor > cap:
                factor = cap
            value, slope = value * factor, slope * factor
        if beta:
            difference = t["reference"] - t["current"]  # falls by one as current rises by one
            moves = True
            if input_clamp is not None and abs(difference) > input_clamp:
                difference, moves = math.copysign(input_clamp, difference), False
            if kl_type == "k1":
                kl, kl_slope = -difference, 1.0
            elif kl_type == "k2":
                kl, kl_slope = difference**2 / 2, -difference
            else:
                kl, kl_slope = math.exp(difference) - 1 - difference, 1 - math.exp(difference)
            if output_clamp is not None and abs(kl) > output_clamp:
                kl, moves = math.copysign(output_clamp, kl), False
            value += beta * kl
            slope += beta * kl_slope if moves else 0.0
        loss += t["weight"] * value
        gradient.append(t["weight"] * slope)
    return loss, gradient


def weights(rollout_of_token: Sequence[object], token_level: bool) -> list[float]:
    """Weight of each trained token, given which rollout it belongs to."""
    total = len(rollout_of_token)
    rollouts = []
    for rollout in rollout_of_token:
        if rollout not in rollouts:
            rollouts.append(rollout)
    result = []
    for rollout in rollout_of_token:
        own = 0
        for other in rollout_of_token:
            if other == rollout:
                own += 1
        result.append(1 / total if token_level else 1 / len(rollouts) / own)
    return result
