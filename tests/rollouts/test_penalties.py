"""Which faults take a rollout its reward, each on and off, and what is left of the trajectory."""

from dataclasses import replace

import pytest

from gymloop.algorithms.step import rollout_metrics
from gymloop.config.schema import PenaltyTokens, RewardPenalties
from gymloop.observe.metrics import METRICS
from gymloop.rollouts.flags import Flags
from gymloop.rollouts.penalties import penalised
from gymloop.rollouts.trajectory import Group, Trajectory, Turn, as_record

OPEN, CLOSE, BAD = 12, 13, 2


def message(*texts, role="assistant"):
    return {"type": "message", "role": role, "content": [{"type": "output_text", "text": text} for text in texts]}


def reasoning(*texts):
    return {"type": "reasoning", "summary": [{"type": "summary_text", "text": text} for text in texts]}


CALLED = {"type": "function_call", "call_id": "c", "name": "wx", "arguments": "{}"}
RESULT = {"type": "function_call_output", "call_id": "c", "output": ""}


def turn(prompt, sampled):
    return Turn(tuple(prompt), tuple(sampled), (-0.5,) * len(sampled), "stop", 0, 0)


def rollout(*output, turns=None, reward=0.75, **more):
    turns = [turn((1,), (3,))] if turns is None else turns
    return Trajectory("g", 0, 0, tuple(turns), reward, {"right": reward}, output=output, **more)


def faults(trajectory, **on):
    return penalised(trajectory, RewardPenalties(**on)).penalties


@pytest.mark.parametrize(
    ("output", "repeats"),
    [
        ([reasoning("a b"), message("a b")], True),
        ([reasoning(" a b\n"), message("a b ")], True),
        ([reasoning("a", " b"), message("a b")], True),  # every part, joined
        ([reasoning("a b"), message("a b c")], False),
        ([reasoning(""), message("")], False),
        ([reasoning("a"), CALLED, RESULT, message("a")], False),
        ([message("a"), message("a")], False),
        ([reasoning("x"), CALLED, RESULT, reasoning("a"), message("a")], True),
    ],
)
def test_an_answer_that_repeats_its_reasoning(output, repeats):
    assert faults(rollout(*output), penalize_duplicated_reasoning=True) == (
        ("duplicated_reasoning",) if repeats else ()
    )


@pytest.mark.parametrize(
    ("output", "empty"),
    [
        ([message("fine")], False),
        ([message(" \n")], True),
        ([message("", "fine")], False),
        ([], True),
        ([reasoning("a")], True),
        ([message("fine"), CALLED, RESULT, message("")], True),
        ([message("fine"), CALLED, RESULT], False),
        ([reasoning("a"), CALLED], False),  # in the middle of its work
        ([message(""), message("said by the environment", role="user")], True),
    ],
)
def test_an_answer_that_is_empty(output, empty):
    assert faults(rollout(*output), penalize_empty_final_answer=True) == (("empty_final_answer",) if empty else ())


@pytest.mark.parametrize(("sampled", "found"), [((3, 4), False), ((3, BAD), True), ((BAD, 3), True)])
def test_a_token_that_nobody_wants_counts_wherever_it_is_sampled(sampled, found):
    one = rollout(message("a"), turns=(turn((BAD,), (3,)), turn((BAD, 3), sampled)))
    on = {"penalize_unwanted_tokens": True, "token_ids": PenaltyTokens(unwanted=(BAD, 99))}
    assert faults(one, **on) == (("unwanted_token",) if found else ())


@pytest.mark.parametrize(
    ("turns", "wrong"),
    [
        ([turn((1, OPEN), (3, CLOSE, 4))], False),  # thinking is asked for and ends once
        ([turn((1, OPEN), (3, 4))], True),  # it never ends
        ([turn((1, OPEN), (3, CLOSE, CLOSE))], True),
        ([turn((1, OPEN), (OPEN, CLOSE))], True),
        ([turn((1, OPEN, CLOSE), (3,))], False),  # thinking is off
        ([turn((1, OPEN, CLOSE), (3, CLOSE))], True),
        ([turn((1,), (3,))], False),
        ([turn((1,), (OPEN, 3, CLOSE))], True),
        ([turn((1, CLOSE), (3,))], True),
        # only what a turn adds counts: the first turn's thinking is in the second one's prompt
        ([turn((1, OPEN), (CLOSE, 4)), turn((1, OPEN, CLOSE, 4, 1, OPEN), (CLOSE, 5))], False),
        ([turn((1, OPEN), (CLOSE, 4)), turn((1, OPEN, CLOSE, 4, 1, OPEN), (5,))], True),
        ([turn((1, OPEN), (CLOSE, 4)), turn((9, OPEN), (CLOSE,))], False),  # a new segment counts whole
    ],
)
def test_think_tokens_are_those_that_the_prompt_asks_for(turns, wrong):
    on = {"penalize_malformed_think_tag": True, "token_ids": PenaltyTokens(think_open=OPEN, think_close=CLOSE)}
    assert faults(rollout(message("a"), turns=turns), **on) == (("malformed_think_tag",) if wrong else ())
    assert faults(rollout(message("a"), turns=turns), penalize_malformed_think_tag=True) == ()


def test_a_flag_is_enough_for_malformed_thinking():
    flagged = rollout(message("a"), flags=(Flags(), Flags(malformed_thinking=True)))
    assert faults(flagged, penalize_malformed_think_tag=True) == ("malformed_think_tag",)
    assert faults(rollout(message("a"), flags=(Flags(True),)), penalize_malformed_think_tag=True) == ()


@pytest.mark.parametrize("reward", [0.75, -1.0])
def test_the_reward_is_0_the_components_stay_and_the_record_says_why(reward):
    before = rollout(message(""), reward=reward)
    after = penalised(before, RewardPenalties(penalize_empty_final_answer=True, penalize_duplicated_reasoning=True))
    assert after == replace(before, reward=0.0, penalties=("empty_final_answer",))
    assert as_record(after)["penalties"] == ["empty_final_answer"]
    assert as_record(after)["components"] == {"right": reward}


def test_nothing_is_on_unless_it_is_asked_for():
    worst = rollout(reasoning("a"), message("a"), message(""), flags=(Flags(True, True),))
    assert penalised(worst, RewardPenalties()) is worst


def test_penalties_are_counted_by_name():
    first = penalised(rollout(message("")), RewardPenalties(penalize_empty_final_answer=True))
    metrics = rollout_metrics([Group("g", (first, replace(rollout(message("a")), sample_id=1)))], group_size=2)
    assert metrics["rollouts/penalised"] == metrics["penalties/empty_final_answer"] == 1
    assert metrics["reward/mean"] == 0.75 / 2
    assert METRICS["penalties/empty_final_answer"].help
