"""Rewards that are withheld: a rollout with one of these faults has reward 0, whatever ``verify`` said.

NeMo RL's ``reward_penalties``, by the same names, for training and validation alike. The trajectory says which of them
took its reward; the components stay as ``verify`` gave them. A reward of 0 is a reward: the rollout counts in the
baseline and in every mean. (A fault that only costs the turn it is in: ``algorithms.penalties``.)

| penalty                  | fault                                                                                |
| ------------------------ | ------------------------------------------------------------------------------------ |
| ``duplicated_reasoning`` | the text of a reasoning item is that of the item behind it                           |
| ``empty_final_answer``   | the last message is empty or missing, and the conversation does not end in a call    |
| ``unwanted_token``       | a turn sampled one of ``token_ids.unwanted``                                         |
| ``malformed_think_tag``  | a turn's thinking is flagged, or its think tokens are not those its prompt asks for  |

A prompt that closes every block it opens asks for no think token; one that leaves a block open asks for its end, once.
Both are counted in what the turn added, which is NeMo RL's way; without both token ids only the flags decide.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from gymloop.config.schema import RewardPenalties
from gymloop.rollouts.flags import texts
from gymloop.rollouts.trajectory import Trajectory, Turn


def penalised(trajectory: Trajectory, settings: RewardPenalties) -> Trajectory:
    """The trajectory with the reward that is left of it, and the names of what took it."""
    faults = tuple(_faults(trajectory, settings))
    return replace(trajectory, reward=0.0, penalties=faults) if faults else trajectory


def _faults(trajectory: Trajectory, settings: RewardPenalties) -> Iterator[str]:
    ids = settings.token_ids
    if settings.penalize_duplicated_reasoning and _repeats_its_reasoning(trajectory):
        yield "duplicated_reasoning"
    if settings.penalize_empty_final_answer and _has_no_answer(trajectory):
        yield "empty_final_answer"
    if settings.penalize_unwanted_tokens and ids is not None:
        unwanted = set(ids.unwanted or ())
        if any(unwanted.intersection(turn.sampled_ids) for turn in trajectory.turns):
            yield "unwanted_token"
    if settings.penalize_malformed_think_tag:
        tokens = None if ids is None or ids.think_open is None or ids.think_close is None else ids
        thinks_wrong = any(flags.malformed_thinking for flags in trajectory.flags)
        if thinks_wrong or (tokens and not _thinks_as_asked(trajectory.turns, tokens.think_open, tokens.think_close)):
            yield "malformed_think_tag"


def _repeats_its_reasoning(trajectory: Trajectory) -> bool:
    for item, behind in zip(trajectory.output, trajectory.output[1:], strict=False):
        if item.get("type") == "reasoning":
            thought = "".join(texts(item.get("content") or item.get("summary"))).strip()
            if thought and thought == "".join(texts(behind.get("content"))).strip():
                return True
    return False


def _has_no_answer(trajectory: Trajectory) -> bool:
    output = trajectory.output
    if output and output[-1].get("type") == "function_call":
        return False
    for item in reversed(output):
        if item.get("type", "message") == "message" and item.get("role", "assistant") == "assistant":
            return not "".join(texts(item.get("content"))).strip()
    return True


def _thinks_as_asked(turns: Sequence[Turn], opener: int | None, closer: int | None) -> bool:
    before: tuple[int, ...] = ()
    for turn in turns:
        continues = turn.prompt_ids[: len(before)] == before
        new = turn.prompt_ids[len(before) :] if continues else turn.prompt_ids
        left_open = new.count(opener) - new.count(closer)
        if left_open not in (0, 1):
            return False
        if turn.sampled_ids.count(opener) != 0 or turn.sampled_ids.count(closer) != left_open:
            return False
        before = turn.prompt_ids + turn.sampled_ids
    return True
