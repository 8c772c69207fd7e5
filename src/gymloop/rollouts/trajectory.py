"""A trajectory holds exactly the tokens that were sampled, and says of every token where it came from.

A turn is one model call. A turn whose prompt begins with the prompt and sampled ids of the turn before it continues
that turn's segment; any other turn begins a new segment. Only ``SAMPLED`` tokens are ever trained. A rollout that
failed is a ``Failure`` and has no reward: it is never reward 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

FinishReason = Literal["stop", "length", "tool_calls", "abort"]
FailureKind = Literal["infra", "data", "policy", "config"]


@dataclass(frozen=True, slots=True)
class Turn:
    """One model call.

    Attributes:
        prompt_ids: every token the engine was given, in order.
        sampled_ids: the tokens it sampled, end token included when one was sampled.
        logprobs: natural-log probability of each sampled token under the distribution it was drawn from.
        finish_reason: why sampling ended; ``length`` also when the context limit cut it.
        first_version: weight version that sampled the first token.
        last_version: weight version that sampled the last token.
    """

    prompt_ids: tuple[int, ...]
    sampled_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: FinishReason
    first_version: int
    last_version: int

    def __post_init__(self) -> None:
        if len(self.sampled_ids) != len(self.logprobs):
            raise ValueError(
                f"a turn needs one logprob per sampled token, got {len(self.sampled_ids)} tokens "
                f"and {len(self.logprobs)} logprobs"
            )


@dataclass(frozen=True, slots=True)
class Segment:
    """A contiguous token sequence with the positions that were sampled.

    Attributes:
        ids: all tokens, prompts and samples of its turns in order.
        sampled: for each sampled token, its index in ``ids``; ascending.
        logprobs: engine logprob of each sampled token, aligned with ``sampled``.
    """

    ids: tuple[int, ...]
    sampled: tuple[int, ...]
    logprobs: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Trajectory:
    """The record of one finished rollout.

    Attributes:
        group_id: identifies the prompt; given by the data loader, never derived from text or tokens.
        sample_id: index of the rollout within its group.
        attempt: 0 for the first try, counting retries after infra failures.
        turns: the model calls, in order.
        reward: what the environment's ``verify`` said; finite.
        components: named parts of the reward; they sum to it.
        truncated: some turn ended by ``length``, or the agent hit its turn limit.
        tool_calls: tool calls the agent ran; ``bad_tool_calls`` those it could not read or route.
        output: the items of the conversation as an agent server would return them (NeMo Gym's ``response.output``).
        seconds: wall time of the rollout.
    """

    group_id: str
    sample_id: int
    attempt: int
    turns: tuple[Turn, ...]
    reward: float
    components: Mapping[str, float] = field(default_factory=dict)
    truncated: bool = False
    tool_calls: int = 0
    bad_tool_calls: int = 0
    output: tuple[Mapping[str, Any], ...] = ()
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Failure:
    """A rollout that did not finish: excluded from every mean and denominator, and counted by kind.

    Attributes:
        kind: which part of the taxonomy in ``gymloop.errors`` it belongs to.
        reason: one sentence.
        where: the party that failed, e.g. ``environment calculator, verify``.
    """

    group_id: str
    sample_id: int
    attempt: int
    kind: FailureKind
    reason: str
    where: str


Rollout = Trajectory | Failure


@dataclass(frozen=True, slots=True)
class Group:
    """All rollouts of one prompt, ordered by ``sample_id``."""

    group_id: str
    trajectories: tuple[Trajectory, ...]
    failures: tuple[Failure, ...] = ()


def as_record(rollout: Rollout) -> dict[str, Any]:
    """A rollout as JSON values for reading: what was said and how it was judged, without token ids."""
    shared = {"group_id": rollout.group_id, "sample_id": rollout.sample_id, "attempt": rollout.attempt}
    if isinstance(rollout, Failure):
        return shared | {"failure": rollout.kind, "reason": rollout.reason, "where": rollout.where}
    bundle = ("prompt_token_ids", "generation_token_ids", "generation_log_probs")
    return shared | {
        "reward": rollout.reward,
        "components": dict(rollout.components),
        "truncated": rollout.truncated,
        "turns": len(rollout.turns),
        "sampled_tokens": sum(len(turn.sampled_ids) for turn in rollout.turns),
        "weight_versions": [rollout.turns[0].first_version, rollout.turns[-1].last_version] if rollout.turns else [],
        "output": [{key: value for key, value in item.items() if key not in bundle} for item in rollout.output],
        "seconds": rollout.seconds,
    }


def segments(turns: Sequence[Turn]) -> tuple[Segment, ...]:
    """Join turns into segments: one as long as each prompt extends the turn before it, a new one where it does not.

    A turn with no sampled token trains nothing; it still carries its prompt into the sequence when it extends it.
    """
    result: list[Segment] = []
    ids: list[int] = []
    sampled: list[int] = []
    logprobs: list[float] = []

    def close() -> None:
        if sampled:
            result.append(Segment(tuple(ids), tuple(sampled), tuple(logprobs)))

    for turn in turns:
        if list(turn.prompt_ids[: len(ids)]) != ids:
            close()
            ids, sampled, logprobs = [], [], []
        ids.extend(turn.prompt_ids[len(ids) :])
        sampled.extend(range(len(ids), len(ids) + len(turn.sampled_ids)))
        ids.extend(turn.sampled_ids)
        logprobs.extend(turn.logprobs)
    close()
    return tuple(result)
