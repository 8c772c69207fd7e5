"""A trajectory holds exactly the tokens that were sampled, and says of every token where it came from.

A turn is one model call. A turn whose prompt begins with the prompt and sampled ids of the turn before it continues
that turn's segment; any other turn begins a new segment, which says where it departs. Only ``sampled`` tokens are ever
trained; ``template`` and ``environment`` tokens are context (see ``tokens.provenance``). A rollout that failed is a
``Failure`` and has no reward: it is never reward 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from gymloop.errors import Cause
from gymloop.rollouts.flags import Flags
from gymloop.tokens.divergence import Divergence, diverge
from gymloop.tokens.provenance import Run, join_runs, last_tokens

FinishReason = Literal["stop", "length", "tool_calls", "abort"]
FailureKind = Literal["infra", "data", "policy"]


@dataclass(frozen=True, slots=True)
class Turn:
    """One model call.

    Attributes:
        prompt_ids: every token the engine was given, in order.
        sampled_ids: the tokens it sampled, end token included when one was sampled.
        logprobs: natural-log probability of each sampled token under the distribution it was drawn from.
        finish_reason: why sampling ended; ``length`` also when the context limit cut it.
        first_version: weight version that sampled the first token; None where the server has no versions.
        last_version: weight version that sampled the last token.
        divergence: why the prompt does not continue the turn before; None where it does, and for a first turn.
        provenance: of the last so many prompt tokens, at least those behind the turn before; None where the server was
            not asked or could not tell.
        malformed_calls: tool calls in it that the server's parser could not read.
    """

    prompt_ids: tuple[int, ...]
    sampled_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: FinishReason
    first_version: int | None
    last_version: int | None
    divergence: Divergence | None = None
    provenance: tuple[Run, ...] | None = None
    malformed_calls: int = 0

    def __post_init__(self) -> None:
        if len(self.sampled_ids) != len(self.logprobs):
            raise ValueError(
                f"a turn needs one logprob per sampled token, got {len(self.sampled_ids)} tokens "
                f"and {len(self.logprobs)} logprobs"
            )

    @property
    def has_tokens(self) -> bool:
        """Whether the server gave token ids; one that speaks plain OpenAI does not, and nothing of it is trained."""
        return bool(self.prompt_ids)


@dataclass(frozen=True, slots=True)
class Segment:
    """A contiguous token sequence with the positions that were sampled.

    Attributes:
        ids: all tokens, prompts and samples of its turns in order.
        sampled: for each sampled token, its index in ``ids``; ascending.
        logprobs: engine logprob of each sampled token, aligned with ``sampled``.
        first_turn: index of its first turn.
        began: why it does not continue the turn before; None for a rollout's first segment.
        provenance: of every token, run-length encoded; ``sampled`` runs are exactly the positions in ``sampled``.
    """

    ids: tuple[int, ...]
    sampled: tuple[int, ...]
    logprobs: tuple[float, ...]
    first_turn: int = 0
    began: Divergence | None = None
    provenance: tuple[Run, ...] = ()


@dataclass(frozen=True, slots=True)
class Trajectory:
    """The record of one finished rollout.

    Attributes:
        group_id: identifies the prompt; given by the data loader, never derived from text or tokens.
        sample_id: index of the rollout within its group.
        attempt: 0 for the first try, counting retries after infra failures.
        turns: the model calls, in order.
        reward: what the environment's ``verify`` said, or 0 with ``penalties``; finite.
        components: named parts of the reward, as ``verify`` gave them; they sum to what it said.
        details: what else the environment said of the reward.
        truncated: some turn ended by ``length``, or the agent hit its turn limit.
        cut: the first of these, so that the last turn is not whole.
        tool_calls: tool calls the agent ran; ``bad_tool_calls`` those it could not read or route.
        output: the items of the conversation as an agent server would return them (NeMo Gym's ``response.output``).
        seconds: wall time of the rollout.
        flags: of each turn, what it did wrong in form (see ``flags``); empty where nobody looked.
        penalties: names of those that took the reward; see ``penalties``.
    """

    group_id: str
    sample_id: int
    attempt: int
    turns: tuple[Turn, ...]
    reward: float
    components: Mapping[str, float] = field(default_factory=dict)
    details: Mapping[str, Any] = field(default_factory=dict)
    truncated: bool = False
    cut: bool = False
    tool_calls: int = 0
    bad_tool_calls: int = 0
    output: tuple[Mapping[str, Any], ...] = ()
    seconds: float = 0.0
    flags: tuple[Flags, ...] = ()
    penalties: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Failure:
    """A rollout that did not finish: excluded from every mean and denominator, and counted by kind.

    Attributes:
        attempt: the last one, from 0; an infra failure has used up all of them.
        kind: which part of the taxonomy in ``gymloop.errors`` it belongs to; a ``config`` error ends the run instead.
        reason: one sentence.
        where: the party that failed and its route, e.g. ``environment calculator, verify``.
        cause: what the party did; tells failures of one kind apart.
    """

    group_id: str
    sample_id: int
    attempt: int
    kind: FailureKind
    reason: str
    where: str
    cause: Cause = "other"

    @property
    def party(self) -> str:
        """``where`` without the route: ``environment calculator``, or ``model http://...``."""
        return self.where.partition(", ")[0]

    def __str__(self) -> str:
        """The reason, with the party in front unless the reason names it."""
        return self.reason if self.where.removeprefix("model ") in self.reason else f"{self.where}: {self.reason}"


Rollout = Trajectory | Failure


@dataclass(frozen=True, slots=True)
class Group:
    """All rollouts of one prompt, ordered by ``sample_id``."""

    group_id: str
    trajectories: tuple[Trajectory, ...]
    failures: tuple[Failure, ...] = ()


def as_record(rollout: Rollout) -> dict[str, Any]:
    """A rollout as JSON values for reading: what was said and how it was judged, without its sequences of token ids.

    ``segments`` says of each token sequence where it begins, how long it is and, beyond the first, why it does not
    continue the turn before: the first differing index, and both sides' ids and text around it.
    """
    shared = {"group_id": rollout.group_id, "sample_id": rollout.sample_id, "attempt": rollout.attempt}
    if isinstance(rollout, Failure):
        return shared | {
            "failure": rollout.kind,
            "cause": rollout.cause,
            "reason": rollout.reason,
            "where": rollout.where,
        }
    bundle = ("prompt_token_ids", "generation_token_ids", "generation_log_probs")
    return shared | {
        "reward": rollout.reward,
        "components": dict(rollout.components),
        "details": dict(rollout.details),
        "penalties": list(rollout.penalties),
        "truncated": rollout.truncated,
        "turns": len(rollout.turns),
        "sampled_tokens": sum(len(turn.sampled_ids) for turn in rollout.turns),
        "tool_calls": rollout.tool_calls,
        "bad_tool_calls": rollout.bad_tool_calls,
        "invalid_tool_call_turns": [turn for turn, flags in enumerate(rollout.flags) if flags.invalid_tool_call],
        "malformed_thinking_turns": [turn for turn, flags in enumerate(rollout.flags) if flags.malformed_thinking],
        "weight_versions": [rollout.turns[0].first_version, rollout.turns[-1].last_version] if rollout.turns else [],
        "segments": [_segment_record(segment) for segment in all_segments(rollout.turns)],
        "output": [{key: value for key, value in item.items() if key not in bundle} for item in rollout.output],
        "seconds": rollout.seconds,
    }


def _segment_record(segment: Segment) -> dict[str, Any]:
    return {
        "first_turn": segment.first_turn,
        "tokens": len(segment.ids),
        "sampled": len(segment.sampled),
        "began": segment.began and segment.began.as_record(),
        "provenance": [list(run) for run in segment.provenance],
    }


def segments(turns: Sequence[Turn]) -> tuple[Segment, ...]:
    """Join turns into segments: one as long as each prompt extends the turn before it, a new one where it does not.

    A turn with no sampled token trains nothing; it still carries its prompt into the sequence when it extends it. A
    segment without any sampled token is left out.
    """
    return tuple(segment for segment in all_segments(turns) if segment.sampled)


def all_segments(turns: Sequence[Turn]) -> tuple[Segment, ...]:
    """As ``segments``, those without a sampled token included."""
    result: list[Segment] = []
    start = 0
    while start < len(turns):
        start = _join(turns, start, result)
    return tuple(result)


def _join(turns: Sequence[Turn], start: int, result: list[Segment]) -> int:
    """Append the segment that begins with turn ``start``; the index of the first turn that does not continue it."""
    sampled: list[int] = []
    logprobs: list[float] = []
    runs: list[Run] = []
    length = 0  # tokens before the prompt's new ones
    last: Turn | None = None
    for index in range(start, len(turns) + 1):
        if index == len(turns) or (last is not None and not _continues(turns[index].prompt_ids, last)):
            break
        last = turn = turns[index]
        end = len(turn.prompt_ids)
        runs += last_tokens(turn.provenance or (), end - length)
        runs.append(("sampled", len(turn.sampled_ids)))
        length = end + len(turn.sampled_ids)
        sampled.extend(range(end, length))
        logprobs.extend(turn.logprobs)
    ids = () if last is None else last.prompt_ids + last.sampled_ids
    result.append(Segment(ids, tuple(sampled), tuple(logprobs), start, _began(turns, start), join_runs(runs)))
    return index


def _continues(prompt: tuple[int, ...], before: Turn) -> bool:
    """Whether a prompt begins with all tokens of a turn."""
    middle = len(before.prompt_ids)
    end = middle + len(before.sampled_ids)
    return prompt[:middle] == before.prompt_ids and prompt[middle:end] == before.sampled_ids


def _began(turns: Sequence[Turn], start: int) -> Divergence | None:
    if start == 0:
        return None
    if (told := turns[start].divergence) is not None:
        return told
    before = turns[start - 1]
    reason = f"the prompt of turn {start} does not begin with the tokens of the turn before"
    return diverge(reason, before.prompt_ids + before.sampled_ids, turns[start].prompt_ids)
