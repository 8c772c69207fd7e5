"""What a step trains and what each token weighs: identities, masks, denominators, and case F08 through the loss."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gymloop.algorithms.batch import TrainBatch, TrainSequence
from gymloop.algorithms.losses import policy_loss
from gymloop.algorithms.step import prepare_batch, rollout_metrics, split
from gymloop.algorithms.weighting import weigh
from gymloop.config.schema import Grpo, Loss, Rollouts
from gymloop.errors import DataError
from gymloop.rollouts.trajectory import Failure, Group, Trajectory, Turn

from . import oracle

TOKEN_LEVEL, SEQUENCE_LEVEL = Loss(token_level_loss=True), Loss(token_level_loss=False)


def grpo(**more) -> Grpo:
    keys = {"num_prompts_per_step": 1, "num_generations_per_prompt": 2, "max_num_steps": 1}
    return Grpo(**keys | {"normalize_rewards": False, "use_leave_one_out_baseline": False} | more)


def turn(prompt=(1, 2), sampled=(3,), logprobs=None) -> Turn:
    logprobs = (-0.5,) * len(sampled) if logprobs is None else logprobs
    return Turn(tuple(prompt), tuple(sampled), tuple(logprobs), "stop", 0, 0)


def rollout(group_id, sample_id, reward, turns=None, **more) -> Trajectory:
    turns = (turn(),) if turns is None else turns
    return Trajectory(group_id, sample_id, 0, tuple(turns), reward, **more)


def failed(group_id, sample_id, kind="infra") -> Failure:
    return Failure(group_id, sample_id, 0, kind, "no reply within 5 s", "environment toy, verify")


def group(group_id, *rewards, failures=(), **more) -> Group:
    return Group(group_id, tuple(rollout(group_id, i, reward, **more) for i, reward in enumerate(rewards)), failures)


def prepare(*groups, loss_fn=TOKEN_LEVEL, min_group_size=2, **more):
    return prepare_batch(groups, grpo(**more), loss_fn, Rollouts(min_group_size=min_group_size))


def signal(prepared) -> dict[tuple[str, int], float]:
    return {(s.group_id, s.sample_id): s.advantages[0].item() for s in prepared.batch.sequences}


def total_weight(batch: TrainBatch) -> float:
    return sum(sequence.weights.sum(dtype=np.float64) for sequence in batch.sequences)


def lengths(batch: TrainBatch) -> list[int]:
    return [len(sequence.sampled) for sequence in batch.sequences]


# Sequences


def test_a_rollout_becomes_exact_tokens_with_its_advantage_and_logprobs():
    first = turn((1, 2), (3, 4), (-0.1, -0.2))
    second = turn((1, 2, 3, 4, 9), (5,), (-0.3,))
    prepared = prepare(Group("g", (rollout("g", 0, 1.0, (first, second)), rollout("g", 1, 0.0))))
    sequence, other = prepared.batch.sequences
    assert sequence.ids.tolist() == [1, 2, 3, 4, 9, 5]
    assert sequence.sampled.tolist() == [2, 3, 5]
    assert sequence.advantages.tolist() == [0.5, 0.5, 0.5]
    assert sequence.weights.tolist() == [0.25] * 3
    np.testing.assert_allclose(sequence.engine_logprobs, [-0.1, -0.2, -0.3], rtol=1e-6)
    assert (sequence.ids.dtype, sequence.sampled.dtype) == (np.int64, np.int64)
    assert {a.dtype for a in (sequence.advantages, sequence.weights, sequence.engine_logprobs)} == {np.dtype("float32")}
    assert other.advantages.tolist() == [-0.5]
    assert prepared.empty_reason is None


def test_a_rewritten_history_trains_as_two_segments_of_one_rollout():
    turns = (turn((1, 2), (3, 4)), turn((1, 7), (5, 6)))
    groups = Group("g", (rollout("g", 0, 1.0, turns), rollout("g", 1, 0.0)))
    token = prepare(groups)
    assert [s.ids.tolist() for s in token.batch.sequences] == [[1, 2, 3, 4], [1, 7, 5, 6], [1, 2, 3]]
    assert [s.weights.tolist() for s in token.batch.sequences] == [[pytest.approx(0.2)] * n for n in (2, 2, 1)]
    assert token.metrics["segments/per_rollout"] == 1.5
    sequence = prepare(groups, loss_fn=SEQUENCE_LEVEL)  # rollout 0 has four tokens in its two segments
    assert [s.weights.tolist() for s in sequence.batch.sequences] == [[0.125] * 2, [0.125] * 2, [0.5]]


def test_batches_are_ordered_by_group_and_sample_never_by_arrival():
    a, b = group("a", 1.0, 0.0), group("b", 0.0, 1.0)
    shuffled = prepare(b, dataclasses.replace(a, trajectories=a.trajectories[::-1]))
    straight = prepare(a, b)
    assert [(s.group_id, s.sample_id) for s in shuffled.batch.sequences] == [("a", 0), ("a", 1), ("b", 0), ("b", 1)]
    assert shuffled.metrics == straight.metrics
    for left, right in zip(shuffled.batch.sequences, straight.batch.sequences, strict=True):
        for name in ("ids", "sampled", "advantages", "weights", "engine_logprobs"):
            assert getattr(left, name).tobytes() == getattr(right, name).tobytes()


# Who is in which denominator


def test_F13_failures_are_in_no_baseline_and_no_denominator():
    x = group("x", 1.0, 0.0, failures=(failed("x", 2), failed("x", 3, "data")))
    y = Group("y", (rollout("y", 2, 1.0), rollout("y", 3, 1.0)), (failed("y", 0), failed("y", 1)))
    prepared = prepare(x, y, num_generations_per_prompt=4)
    # as reward 0 the failures would make 0.75 and -0.25 of x
    assert signal(prepared) == {("x", 0): 0.5, ("x", 1): -0.5, ("y", 2): 0.0, ("y", 3): 0.0}
    assert [s.weights.tolist() for s in prepared.batch.sequences] == [[0.25]] * 4
    metrics = prepared.metrics
    assert metrics["reward/mean"] == 0.75
    assert (metrics["rollouts/finished"], metrics["rollouts/failed"], metrics["rollouts/missing"]) == (4, 4, 0)
    assert [metrics[f"failures/{kind}"] for kind in ("infra", "data", "policy")] == [3, 1, 0]
    assert (metrics["groups/kept"], metrics["signal/zero_groups"]) == (2, 1)


def test_a_group_short_of_its_minimum_is_dropped_whole_and_says_why():
    short = group("short", 1.0, 0.0, failures=(failed("short", 2), failed("short", 3, "data")))
    prepared = prepare(short, group("whole", 1.0, 0.0, 0.0), min_group_size=3)
    assert {s.group_id for s in prepared.batch.sequences} == {"whole"}
    assert total_weight(prepared.batch) == pytest.approx(1, abs=1e-6)
    (dropped,) = prepared.dropped
    assert dropped.group_id == "short"
    assert dropped.reason == (
        "2 finished rollouts of at least 3 needed; failed: 1 data, 1 infra; "
        "first: environment toy, verify: no reply within 5 s"
    )
    assert (prepared.metrics["groups/dropped"], prepared.metrics["groups/kept"]) == (1, 1)
    assert prepared.metrics["rollouts/finished"] == 5


def test_A18_a_zero_signal_group_is_counted_and_stays_in_the_denominator():
    prepared = prepare(group("flat", 0.3, 0.3, 0.3), group("live", 1.0, 0.0), normalize_rewards=True)
    assert [a for (g, _), a in signal(prepared).items() if g == "flat"] == [0.0] * 3
    assert prepared.metrics["signal/zero_groups"] == 1
    assert [s.weights.tolist() for s in prepared.batch.sequences] == [[pytest.approx(0.2)]] * 5


def test_overlong_filtering_keeps_truncated_rollouts_in_the_baseline_only():
    long = rollout("g", 0, 0.0, (turn(sampled=(3,) * 7),), truncated=True)
    groups = Group("g", (long, rollout("g", 1, 1.0), rollout("g", 2, 0.5)))
    filtered = prepare(groups, overlong_filtering=True)
    assert signal(filtered) == {("g", 1): 0.5, ("g", 2): 0.0}  # mean 0.5 of all three
    assert [s.weights.tolist() for s in filtered.batch.sequences] == [[0.5], [0.5]]
    kept = prepare(groups, overlong_filtering=False)
    assert signal(kept) == {("g", 0): -0.5, ("g", 1): 0.5, ("g", 2): 0.0}
    assert lengths(kept.batch) == [7, 1, 1]
    assert filtered.metrics["rollouts/truncated"] == kept.metrics["rollouts/truncated"] == 1
    assert (filtered.metrics["tokens/sampled"], filtered.metrics["tokens/trained"]) == (9, 2)


def test_a_rollout_without_a_sampled_token_counts_in_the_baseline_only():
    empty = rollout("g", 0, 0.0, (turn(sampled=()),))
    prepared = prepare(Group("g", (empty, rollout("g", 1, 1.0))), loss_fn=SEQUENCE_LEVEL)
    assert signal(prepared) == {("g", 1): 0.5}
    assert prepared.batch.sequences[0].weights.tolist() == [1.0]


def test_A17_duplicate_prompts_do_not_merge_and_rollout_specific_prompts_do_not_split():
    same = (turn((1, 2), (3,)),)
    twice = [group("a", 1.0, 0.0, turns=same), group("b", 1.0, 1.0, turns=same)]
    assert signal(prepare(*twice)) == {("a", 0): 0.5, ("a", 1): -0.5, ("b", 0): 0.0, ("b", 1): 0.0}
    own = Group("g", tuple(rollout("g", i, float(i), (turn((1, 50 + i), (3,)),)) for i in range(2)))
    assert signal(prepare(own)) == {("g", 0): -0.5, ("g", 1): 0.5}


@pytest.mark.parametrize(
    ("leave_one_out", "normalize", "expected"),
    [
        (False, False, [0.75, -0.25]),
        (True, False, [1.0, -1 / 3]),
        (False, True, [1.5, -0.5]),
        (True, True, [1.0, -1 / math.sqrt(3)]),
    ],
)
def test_the_recipe_chooses_the_advantage(leave_one_out, normalize, expected):
    prepared = prepare(
        group("g", 1.0, 0.0, 0.0, 0.0), use_leave_one_out_baseline=leave_one_out, normalize_rewards=normalize
    )
    assert [signal(prepared)["g", i] for i in range(2)] == pytest.approx(expected, abs=5e-6)
    assert prepared.metrics["advantages/max"] == pytest.approx(expected[0], abs=5e-6)
    assert prepared.metrics["advantages/min"] == pytest.approx(expected[1], abs=5e-6)


# Nothing to train


def test_a_step_in_which_everything_failed_trains_nothing_and_says_why():
    prepared = prepare(Group("g", (), (failed("g", 0), failed("g", 1))))
    assert prepared.batch.sequences == ()
    assert prepared.empty_reason == (
        "all 1 groups were dropped; group 'g': 0 finished rollouts of at least 2 needed; failed: 2 infra; "
        "first: environment toy, verify: no reply within 5 s"
    )
    assert not [name for name in prepared.metrics if name.startswith("reward/")]
    assert prepared.metrics["rollouts/failed"] == 2
    assert split(prepared.batch, 4, TOKEN_LEVEL) == ()


def test_a_step_without_groups_or_tokens_says_so():
    assert prepare().empty_reason == "the step has no groups"
    silent = prepare(group("g", 1.0, 0.0, truncated=True), overlong_filtering=True)
    assert silent.batch.sequences == ()
    assert "empty or filtered as overlong" in silent.empty_reason


# Errors


def test_A14_a_group_id_that_occurs_twice_is_an_error():
    with pytest.raises(DataError, match="group 'g' occurs 2 times"):
        prepare(group("g", 1.0, 0.0), group("g", 1.0, 0.0))


@pytest.mark.parametrize("twin", [rollout("g", 1, 0.0), failed("g", 1)])
def test_A14_a_sample_id_that_occurs_twice_is_an_error(twin):
    whole = group("g", 1.0, 0.0)
    field = "failures" if isinstance(twin, Failure) else "trajectories"
    with pytest.raises(DataError, match="sample 1 occurs 2 times in group 'g'"):
        prepare(dataclasses.replace(whole, **{field: (*getattr(whole, field), twin)}))


def test_a_rollout_in_the_wrong_group_is_an_error():
    with pytest.raises(DataError, match="sample 0 of group 'b' lies in group 'a'"):
        prepare(Group("a", (rollout("b", 0, 1.0), rollout("a", 1, 0.0))))


def test_A14_rollouts_that_neither_finished_nor_failed_are_counted():
    prepared = prepare(group("g", 1.0, 0.0, failures=(failed("g", 2),)), num_generations_per_prompt=8)
    assert prepared.metrics["rollouts/missing"] == 5


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 0.1, None])
def test_A7_a_bad_engine_logprob_of_a_trained_token_is_an_error_naming_it(bad):
    turns = (turn(), turn((1, 2, 3, 9), (5, 6), (-0.1, bad)))
    with pytest.raises(DataError, match=r"group 'g', sample 1, turn 1: .* sampled token 1 is .*finite number"):
        prepare(Group("g", (rollout("g", 0, 1.0), rollout("g", 1, 0.0, turns))))


def test_a_bad_engine_logprob_that_is_not_trained_has_no_effect():
    bad = rollout("g", 0, 1.0, (turn(logprobs=(math.nan,)),), truncated=True)
    assert signal(prepare(Group("g", (bad, rollout("g", 1, 0.0))), overlong_filtering=True)) == {("g", 1): -0.5}


@pytest.mark.parametrize("bad", [math.nan, math.inf, 1e31])
@pytest.mark.parametrize("min_group_size", [2, 3])
def test_a_reward_that_is_no_number_is_an_error_even_in_a_dropped_group(bad, min_group_size):
    with pytest.raises(DataError, match="group 'g', sample 1: the reward is"):
        prepare(group("g", 1.0, bad), min_group_size=min_group_size)


def test_a_token_without_context_is_an_error():
    with pytest.raises(DataError, match="group 'g', sample 0: a turn sampled from an empty prompt"):
        prepare(group("g", 1.0, 0.0, turns=(turn(()),)))


# Metrics


def test_metrics_describe_the_finished_rollouts():
    calls = rollout("g", 0, 3.0, (turn(), turn((1, 2, 3, 9), (4, 5))), tool_calls=3, components={"right": 2, "form": 1})
    prepared = prepare(
        Group(
            "g",
            (
                calls,
                rollout("g", 1, -1.0, bad_tool_calls=1, truncated=True, components={"right": -1}),
                rollout("g", 2, 1.0),
            ),
        ),
        num_generations_per_prompt=3,
    )
    assert prepared.metrics == {
        "reward/mean": 1.0,
        "reward/std": pytest.approx(math.sqrt(8 / 3)),
        "reward/min": -1.0,
        "reward/max": 3.0,
        "reward/components/right/mean": 0.5,
        "reward/components/form/mean": 1.0,
        "rollouts/finished": 3,
        "rollouts/failed": 0,
        "rollouts/truncated": 1,
        "rollouts/missing": 0,
        "rollouts/penalised": 0,
        "failures/infra": 0,
        "failures/data": 0,
        "failures/policy": 0,
        "failures/attempts": 0,
        "groups/kept": 1,
        "groups/short": 0,
        "groups/dropped": 0,
        "signal/zero_groups": 0,
        "signal/penalised_turns": 0,
        "rollouts/invalid_tool_call_rate": 0.0,
        "rollouts/malformed_thinking_rate": 0.0,
        "tools/calls_per_rollout": 1.0,
        "tools/rollouts_with_calls": pytest.approx(1 / 3),
        "tools/bad_call_rate": 0.25,
        "turns/mean": pytest.approx(4 / 3),
        "tokens/sampled": 5,
        "tokens/trained": 5,
        "tokens/batch": 6 + 3 + 3,
        "segments/per_rollout": 1.0,
        "advantages/min": -2.0,
        "advantages/max": 2.0,
    }
    assert all(type(value) is float for value in prepared.metrics.values())


def test_rollouts_that_are_not_trained_are_described_alike():
    single = group("val", 1.0)
    assert prepare(single).batch.sequences == ()
    metrics = rollout_metrics([single], group_size=1)
    assert (metrics["reward/mean"], metrics["rollouts/finished"], metrics["rollouts/missing"]) == (1, 1, 0)
    trained = prepare(group("g", 1.0, 0.0)).metrics
    assert metrics.keys() <= trained.keys()
    with pytest.raises(DataError, match="group 'val' occurs 2 times"):
        rollout_metrics([single, single], group_size=1)


# F08: four sequences with 2, 4, 1, 3 trained tokens and advantages 1, -0.5, 2, -1

F08_LENGTHS, F08_ADVANTAGES = (2, 4, 1, 3), (1.0, -0.5, 2.0, -1.0)


def sequence_of(group_id, sample_id, count, advantage) -> TrainSequence:
    return TrainSequence(
        group_id=group_id,
        sample_id=sample_id,
        ids=np.arange(count + 1, dtype=np.int64),
        sampled=np.arange(1, count + 1, dtype=np.int64),
        advantages=np.full(count, advantage, dtype=np.float32),
        weights=np.zeros(count, dtype=np.float32),
        engine_logprobs=np.full(count, -0.5, dtype=np.float32),
    )


def f08_batch(settings) -> TrainBatch:
    rows = zip(F08_LENGTHS, F08_ADVANTAGES, strict=True)
    sequences = [sequence_of("g", index, *row) for index, row in enumerate(rows)]
    return TrainBatch(weigh(sequences, token_level=settings.token_level_loss))


def train(sequences, settings) -> tuple[float, list[float], float]:
    """Loss, gradient by each trained token's logprob, and reported loss of one microbatch at ratio 1."""

    def flat(name):
        return torch.from_numpy(np.concatenate([getattr(sequence, name) for sequence in sequences]))

    current = flat("engine_logprobs").requires_grad_()
    loss, metrics = policy_loss(current, current.detach(), flat("advantages"), flat("weights"), settings=settings)
    loss.backward()
    return loss.item(), current.grad.tolist(), metrics["loss"].item()


@pytest.mark.parametrize(
    ("settings", "loss", "gradients"),
    [
        (TOKEN_LEVEL, 0.1, (-0.1, 0.05, -0.2, 0.1)),
        (SEQUENCE_LEVEL, -0.375, (-0.125, 0.03125, -0.5, 1 / 12)),
    ],
)
@pytest.mark.parametrize(
    "parts",
    [[(0, 4)], [(0, 2), (2, 4)], [(0, 1), (1, 2), (2, 3), (3, 4)], [(0, 3), (3, 4)]],
    ids=["one microbatch or packed row", "microbatches of 2, or two ranks", "microbatches of 1", "uneven"],
)
def test_F08_every_split_has_the_same_loss_and_gradient(settings, loss, gradients, parts):
    sequences = f08_batch(settings).sequences
    results = [train(sequences[begin:end], settings) for begin, end in parts]
    expected = [g for count, g in zip(F08_LENGTHS, gradients, strict=True) for _ in range(count)]
    assert sum(result[0] for result in results) == pytest.approx(loss, abs=1e-6)
    assert sum(result[2] for result in results) == pytest.approx(loss, abs=1e-6)
    assert [g for result in results for g in result[1]] == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    ("settings", "losses", "gradients"),
    [
        (TOKEN_LEVEL, (0.0, 0.25), (-1 / 6, 1 / 12, -0.5, 0.25)),
        (SEQUENCE_LEVEL, (-0.25, -0.5), (-0.25, 0.0625, -1.0, 1 / 6)),
    ],
)
def test_F08_two_optimizer_steps_each_divide_by_their_own(settings, losses, gradients):
    steps = split(f08_batch(settings), 2, settings)
    results = [train(step.sequences, settings) for step in steps]
    expected = [g for count, g in zip(F08_LENGTHS, gradients, strict=True) for _ in range(count)]
    assert [result[0] for result in results] == pytest.approx(losses, abs=1e-6)
    assert [g for result in results for g in result[1]] == pytest.approx(expected, abs=1e-6)


# Splitting and weighing in general


def test_split_into_one_step_is_the_batch_itself():
    batch = f08_batch(TOKEN_LEVEL)
    for rollouts_per_step in (None, 4, 100):
        (step,) = split(batch, rollouts_per_step, TOKEN_LEVEL)
        assert [s.weights.tolist() for s in step.sequences] == [s.weights.tolist() for s in batch.sequences]


def test_split_never_leaves_a_last_step_of_few_rollouts():
    batch = TrainBatch(weigh([sequence_of("g", i, 1, 1.0) for i in range(9)], token_level=True))
    assert [len(step.sequences) for step in split(batch, 4, TOKEN_LEVEL)] == [3, 3, 3]
    assert [len(step.sequences) for step in split(batch, 2, TOKEN_LEVEL)] == [1, 2, 2, 2, 2]


rollout_segments = st.lists(st.lists(st.integers(1, 6), min_size=1, max_size=3), min_size=1, max_size=12)


def batch_of(rollouts, *, token_level) -> TrainBatch:
    sequences = [
        sequence_of(f"g{index // 3}", index % 3, count, 1.0)
        for index, counts in enumerate(rollouts)
        for count in counts
    ]
    return TrainBatch(weigh(sequences, token_level=token_level))


@given(rollout_segments, st.booleans())
def test_weights_match_the_oracle_and_sum_to_one(rollouts, token_level):
    batch = batch_of(rollouts, token_level=token_level)
    owner = [index for index, counts in enumerate(rollouts) for count in counts for _ in range(count)]
    weights = np.concatenate([sequence.weights for sequence in batch.sequences])
    np.testing.assert_allclose(weights, oracle.weights(owner, token_level), rtol=1e-6)
    assert total_weight(batch) == pytest.approx(1, abs=1e-6)


@given(rollout_segments, st.integers(1, 15), st.booleans())
def test_split_keeps_every_rollout_whole_in_order_and_renormalises(rollouts, per_step, token_level):
    settings = Loss(token_level_loss=token_level)
    batch = batch_of(rollouts, token_level=token_level)
    steps = split(batch, per_step, settings)
    assert len(steps) == math.ceil(len(rollouts) / per_step)
    assert [s.ids is t.ids for s, t in zip(batch.sequences, (s for p in steps for s in p.sequences), strict=True)]
    owners = [{(s.group_id, s.sample_id) for s in step.sequences} for step in steps]
    assert len(set().union(*owners)) == sum(map(len, owners)) == len(rollouts)
    assert max(map(len, owners)) <= per_step
    assert max(map(len, owners)) - min(map(len, owners)) <= 1
    for step in steps:
        assert total_weight(step) == pytest.approx(1, abs=1e-6)


@given(
    st.lists(st.lists(st.sampled_from([0.0, 0.3, 1.0]), min_size=1, max_size=5), min_size=1, max_size=5),
    st.randoms(use_true_random=False),
    st.booleans(),
)
def test_arrival_order_never_changes_the_step(rewards, random, token_level):
    groups = [group(f"g{i}", *row) for i, row in enumerate(rewards)]
    settings = Loss(token_level_loss=token_level)
    expected = prepare(*groups, loss_fn=settings, use_leave_one_out_baseline=True, normalize_rewards=True)
    shuffled = []
    for whole in groups:
        trajectories = list(whole.trajectories)
        random.shuffle(trajectories)
        shuffled.append(dataclasses.replace(whole, trajectories=tuple(trajectories)))
    random.shuffle(shuffled)
    result = prepare(*shuffled, loss_fn=settings, use_leave_one_out_baseline=True, normalize_rewards=True)
    assert result.dropped == expected.dropped
    assert result.empty_reason == expected.empty_reason
    assert signal(result) == signal(expected)
    assert result.metrics == expected.metrics
    assert [s.weights.tolist() for s in result.batch.sequences] == [
        s.weights.tolist() for s in expected.batch.sequences
    ]
