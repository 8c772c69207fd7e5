"""Penalties replace the advantages of flagged turns and of nothing else: by hand, and against the scalar oracle."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gymloop.algorithms.step import prepare_batch, rollout_metrics
from gymloop.config.schema import Grpo, Loss, Rollouts
from gymloop.rollouts.flags import Flags
from gymloop.rollouts.trajectory import Failure, Group, Trajectory, Turn

from . import oracle

CALL, THINKING, BOTH, NONE = Flags(True, False), Flags(False, True), Flags(True, True), Flags()


def turns(*sampled, restart=()):
    """Turns of so many sampled tokens; those in ``restart`` begin a new segment."""
    made, ids = [], ()
    for index, count in enumerate(sampled):
        ids = (100 + index,) if index in restart else (*ids, 7)
        made.append(Turn(ids, (9,) * count, (-0.5,) * count, "stop", 0, 0))
        ids += (9,) * count
    return tuple(made)


def prepare(*rollouts, failures=(), invalid=-5.0, malformed=-3.0, **more):
    keys = {"num_prompts_per_step": 1, "num_generations_per_prompt": 2, "max_num_steps": 1}
    keys |= {"normalize_rewards": False, "use_leave_one_out_baseline": False}
    grpo = Grpo(**keys | {"invalid_tool_call_advantage": invalid, "malformed_thinking_advantage": malformed} | more)
    group = Group("g", tuple(rollouts), tuple(failures))
    return prepare_batch([group], grpo, Loss(), Rollouts())


def rollout(sample, reward, *flags, sampled=None, restart=(), **more):
    sampled = sampled or (2,) * len(flags)
    return Trajectory("g", sample, 0, turns(*sampled, restart=restart), reward, flags=flags, **more)


def signal(prepared):
    """By rollout, the advantages of all its sampled tokens."""
    found = {}
    for sequence in prepared.batch.sequences:
        found.setdefault(sequence.sample_id, []).extend(sequence.advantages.tolist())
    return found


def test_the_sampled_tokens_of_a_flagged_turn_get_the_value_and_the_others_keep_the_rollouts():
    prepared = prepare(rollout(0, 1.0, NONE, CALL, THINKING, sampled=(1, 2, 3)), rollout(1, 0.0, NONE))
    assert signal(prepared) == {0: [0.5, -5.0, -5.0, -3.0, -3.0, -3.0], 1: [-0.5, -0.5]}
    assert prepared.metrics["signal/penalised_turns"] == 2


def test_an_invalid_call_wins_where_both_have_a_value_and_only_there():
    assert signal(prepare(rollout(0, 1.0, BOTH), rollout(1, 0.0, NONE)))[0] == [-5.0, -5.0]
    assert signal(prepare(rollout(0, 1.0, BOTH), rollout(1, 0.0, NONE), invalid=None))[0] == [-3.0, -3.0]
    assert signal(prepare(rollout(0, 1.0, BOTH), rollout(1, 0.0, NONE), malformed=None))[0] == [-5.0, -5.0]
    unpunished = prepare(rollout(0, 1.0, BOTH), rollout(1, 0.0, NONE), invalid=None, malformed=None)
    assert signal(unpunished)[0] == [0.5, 0.5]
    assert unpunished.metrics["signal/penalised_turns"] == 0


def test_the_value_is_set_after_normalisation_and_is_not_normalised():
    prepared = prepare(rollout(0, 1.0, CALL), rollout(1, 0.0, NONE), normalize_rewards=True)
    # mean 0.5, sample deviation sqrt(0.5)
    assert signal(prepared)[0] == [-5.0, -5.0]
    np.testing.assert_allclose(signal(prepared)[1], [-0.5 / (math.sqrt(0.5) + 1e-6)] * 2, rtol=1e-6)
    assert prepared.metrics["advantages/max"] > 0, "the extremes are those before penalties"


def test_baseline_and_reward_metrics_are_as_without_the_penalty():
    with_it, without = (
        prepare(rollout(0, 1.0, flags), rollout(1, 0.0, NONE), rollout(2, 0.5, NONE)) for flags in (CALL, NONE)
    )
    assert signal(with_it)[1] == signal(without)[1]
    assert with_it.metrics["reward/mean"] == without.metrics["reward/mean"] == 0.5


def test_it_holds_in_a_zero_signal_group_too():
    prepared = prepare(rollout(0, 1.0, CALL), rollout(1, 1.0, NONE))
    assert signal(prepared) == {0: [-5.0, -5.0], 1: [0.0, 0.0]}
    assert prepared.metrics["signal/zero_groups"] == 1


def test_a_value_of_zero_takes_a_flagged_turn_out_of_the_signal():
    assert signal(prepare(rollout(0, 1.0, CALL), rollout(1, 0.0, NONE), invalid=0.0))[0] == [0.0, 0.0]


def test_what_carries_no_loss_carries_no_penalty():
    cut = prepare(
        rollout(0, 1.0, CALL, truncated=True), rollout(1, 0.0, NONE), rollout(2, 0.0, NONE), overlong_filtering=True
    )
    assert set(signal(cut)) == {1, 2}
    assert cut.metrics["signal/penalised_turns"] == 0
    short = prepare(rollout(0, 1.0, CALL), failures=[Failure("g", 1, 0, "infra", "gone", "model x")])
    assert signal(short) == {}
    assert short.metrics["rollouts/invalid_tool_call_rate"] == 1.0, "it was said all the same"


def test_a_flag_finds_its_turn_in_a_later_segment_and_behind_empty_turns():
    first = rollout(0, 1.0, NONE, NONE, CALL, NONE, THINKING, sampled=(1, 0, 2, 1, 2), restart=(2, 4))
    prepared = prepare(first, rollout(1, 0.0, NONE))
    assert [len(s.sampled) for s in prepared.batch.sequences if s.sample_id == 0] == [1, 3, 2]
    assert signal(prepared)[0] == [0.5, -5.0, -5.0, 0.5, -3.0, -3.0]


def test_a_turn_without_a_sampled_token_is_not_counted_as_trained():
    prepared = prepare(rollout(0, 1.0, NONE, CALL, sampled=(1, 0)), rollout(1, 0.0, NONE))
    assert signal(prepared)[0] == [0.5]
    assert prepared.metrics["signal/penalised_turns"] == 0


def test_rates_are_shares_of_the_turns_of_finished_rollouts():
    group = Group("g", (rollout(0, 1.0, CALL, NONE, BOTH), rollout(1, 0.0, THINKING)))
    metrics = rollout_metrics([group], group_size=2)
    assert metrics["rollouts/invalid_tool_call_rate"] == 2 / 4
    assert metrics["rollouts/malformed_thinking_rate"] == 2 / 4


ANY_FLAGS = st.builds(Flags, st.booleans(), st.booleans())
ROLLOUTS = st.lists(
    st.tuples(
        st.sampled_from([0.0, 0.5, 1.0]), st.lists(st.tuples(st.integers(0, 3), ANY_FLAGS), min_size=1, max_size=4)
    ),
    min_size=2,
    max_size=4,
)
VALUE = st.one_of(st.none(), st.sampled_from([0.0, -0.5, -5.0]))


@given(ROLLOUTS, VALUE, VALUE, st.booleans(), st.booleans(), st.booleans())
def test_tokens_weigh_what_the_definitions_say(rollouts, invalid, malformed, leave_one_out, normalize, restarted):
    group = [
        rollout(i, r, *(f for _, f in said), sampled=[n for n, _ in said], restart=range(1, 9) if restarted else ())
        for i, (r, said) in enumerate(rollouts)
    ]
    prepared = prepare(
        *group,
        invalid=invalid,
        malformed=malformed,
        use_leave_one_out_baseline=leave_one_out,
        normalize_rewards=normalize,
    )
    advantages = oracle.advantages([r for r, _ in rollouts], leave_one_out, normalize)
    expected = {
        i: oracle.penalised(
            advantage, [(n, f.invalid_tool_call, f.malformed_thinking) for n, f in said], invalid, malformed
        )
        for i, (advantage, (_, said)) in enumerate(zip(advantages, rollouts, strict=True))
    }
    got = signal(prepared)
    assert set(got) == {i for i, values in expected.items() if values}
    for i, values in got.items():
        np.testing.assert_allclose(values, expected[i], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("flags", [(), (NONE, NONE)])
def test_a_rollout_that_nobody_looked_at_is_one_without_flags(flags):
    one = Trajectory("g", 0, 0, turns(1, 1), 1.0, flags=flags)
    assert signal(prepare(one, rollout(1, 0.0, NONE)))[0] == [0.5, 0.5]
