"""Advantages against hand-computed numbers, exact fractions, and the properties a learning signal must have."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gymloop.algorithms.advantages import group_advantages, is_zero_signal
from gymloop.errors import DataError

from . import oracle

MODES = [(loo, norm) for loo in (False, True) for norm in (False, True)]
rewards_of_a_group = st.lists(st.floats(-100, 100, allow_subnormal=False, width=32), min_size=2, max_size=24)
either = st.booleans()


def test_group_mean_baseline():
    assert group_advantages([6, 3], leave_one_out=False, normalize=False).tolist() == [1.5, -1.5]
    assert group_advantages([9, 12], leave_one_out=False, normalize=False).tolist() == [-1.5, 1.5]


def test_leave_one_out_baseline():
    assert group_advantages([6, 3], leave_one_out=True, normalize=False).tolist() == [3, -3]
    # peers of 4: mean (1 + 1) / 2; peers of 1: mean (1 + 4) / 2
    assert group_advantages([1, 4, 1], leave_one_out=True, normalize=False).tolist() == [-1.5, 3, -1.5]


def test_normalised_group_mean():
    # mean 2, sample std sqrt((1 + 0 + 1) / 2) = 1
    result = group_advantages([1, 2, 3], leave_one_out=False, normalize=True)
    np.testing.assert_allclose(result, [-1, 0, 1], atol=2e-6)


def test_normalised_leave_one_out():
    # peers of 0: (2, 4), mean 3, std sqrt(2); of 2: (0, 4), mean 2; of 4: (0, 2), mean 1, std sqrt(2)
    result = group_advantages([0, 2, 4], leave_one_out=True, normalize=True)
    np.testing.assert_allclose(result, [-3 / math.sqrt(2), 0, 3 / math.sqrt(2)], atol=4e-6)


def test_result_is_float32():
    assert group_advantages([0.0, 1.0], leave_one_out=True, normalize=True).dtype == np.float32


@pytest.mark.parametrize(("leave_one_out", "normalize"), MODES)
@pytest.mark.parametrize("rewards", [[], [0.7]])
def test_too_few_to_compare_is_no_signal(rewards, leave_one_out, normalize):
    result = group_advantages(rewards, leave_one_out=leave_one_out, normalize=normalize)
    assert result.tolist() == [0.0] * len(rewards)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e31])
def test_a_reward_that_is_no_number_is_named(bad):
    with pytest.raises(DataError, match=r"reward 1 of the group is .*finite"):
        group_advantages([0.0, bad], leave_one_out=True, normalize=True)


def test_the_largest_rewards_stay_finite():
    for leave_one_out, normalize in MODES:
        result = group_advantages([1e30, -1e30, 0.0], leave_one_out=leave_one_out, normalize=normalize)
        assert np.isfinite(result).all()


def test_F10_1_leave_one_out_does_not_divide_by_peers_that_agree():
    rewards = np.array([0.7] * 7 + [0.1], dtype=np.float32)
    result = group_advantages(rewards, leave_one_out=True, normalize=True)
    np.testing.assert_allclose(result[:7], 0.377961, atol=1e-4)  # 0.085714 / 0.226779
    np.testing.assert_allclose(result[7], -0.6, atol=1e-6)


def test_F10_2_group_std_is_the_sample_std():
    rewards = np.array([0.7] * 7 + [0.1], dtype=np.float32)
    result = group_advantages(rewards, leave_one_out=False, normalize=True)
    np.testing.assert_allclose(result[:7], 0.353552, atol=1e-6)
    np.testing.assert_allclose(result[7], -2.474862, atol=2e-6)


@pytest.mark.parametrize(("leave_one_out", "normalize"), MODES)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_F10_3_equal_rewards_are_exactly_no_signal(leave_one_out, normalize, dtype):
    rewards = np.full(16, 0.3, dtype=dtype)
    assert is_zero_signal(rewards)
    assert group_advantages(rewards, leave_one_out=leave_one_out, normalize=normalize).tolist() == [0.0] * 16


@pytest.mark.parametrize(("leave_one_out", "normalize"), MODES)
def test_F10_4_a_lone_success_has_the_largest_advantage_and_every_row_is_kept(leave_one_out, normalize):
    assert not is_zero_signal([1, 0, 0, 0])
    result = group_advantages([1, 0, 0, 0], leave_one_out=leave_one_out, normalize=normalize)
    assert result.argmax() == 0
    assert (result != 0).all()
    if leave_one_out and normalize:
        # the failures' peers (1, 0, 0): mean 1/3, std 1/sqrt(3)
        np.testing.assert_allclose(result, [1] + [-1 / math.sqrt(3)] * 3, atol=2e-6)


@pytest.mark.parametrize("noise", [1e-16, 1e-12, 1e-9, 1e-6, 1e-3, 1e-2])
def test_F10_peers_that_nearly_agree_do_not_blow_up_the_odd_one(noise):
    rewards = [0.7, 0.7, 0.7, 0.7, 0.7, 0.7, 0.7 + noise, 0.1]
    result = group_advantages(rewards, leave_one_out=True, normalize=True)
    np.testing.assert_allclose(result[7], -0.6, atol=noise + 1e-6)
    assert np.abs(result).max() < 10


def test_rewards_that_differ_in_the_last_bit_are_almost_no_signal():
    rewards = [0.3, 0.1 + 0.2]
    assert not is_zero_signal(rewards)
    for leave_one_out, normalize in MODES:
        assert np.abs(group_advantages(rewards, leave_one_out=leave_one_out, normalize=normalize)).max() < 1e-9


@given(rewards_of_a_group, either, either)
def test_matches_the_exact_oracle(rewards, leave_one_out, normalize):
    result = group_advantages(rewards, leave_one_out=leave_one_out, normalize=normalize)
    np.testing.assert_allclose(result, oracle.advantages(rewards, leave_one_out, normalize), rtol=1e-5, atol=1e-6)


@given(st.floats(-1e6, 1e6), st.integers(1, 200), either, either)
def test_a_constant_group_of_any_float_and_size_is_exactly_zero(reward, size, leave_one_out, normalize):
    result = group_advantages([reward] * size, leave_one_out=leave_one_out, normalize=normalize)
    assert result.tolist() == [0.0] * size


@given(rewards_of_a_group, st.randoms(use_true_random=False), either, either)
def test_order_does_not_matter_to_the_last_bit(rewards, random, leave_one_out, normalize):
    order = list(range(len(rewards)))
    random.shuffle(order)
    straight = group_advantages(rewards, leave_one_out=leave_one_out, normalize=normalize)
    shuffled = group_advantages([rewards[i] for i in order], leave_one_out=leave_one_out, normalize=normalize)
    assert shuffled.tolist() == straight[order].tolist()


@given(
    st.lists(st.integers(-64, 64), min_size=2, max_size=16), st.integers(-1000, 1000), either, either
)  # dyadic rewards: the shift itself rounds nothing
def test_a_shift_of_all_rewards_changes_nothing(quarters, shift, leave_one_out, normalize):
    rewards = [quarter / 4 for quarter in quarters]
    plain = group_advantages(rewards, leave_one_out=leave_one_out, normalize=normalize)
    shifted = group_advantages([r + shift for r in rewards], leave_one_out=leave_one_out, normalize=normalize)
    np.testing.assert_allclose(shifted, plain, rtol=1e-5, atol=1e-6)


@given(rewards_of_a_group, either)
def test_a_baseline_mean_makes_advantages_sum_to_zero(rewards, leave_one_out):
    result = group_advantages(rewards, leave_one_out=leave_one_out, normalize=False)
    assert abs(result.sum(dtype=np.float64)) < 1e-3


@given(rewards_of_a_group, either)
def test_a_better_rollout_never_has_the_smaller_advantage(rewards, normalize):
    result = group_advantages(rewards, leave_one_out=False, normalize=normalize)
    ranked = result[np.argsort(rewards, kind="stable")]
    assert (np.diff(ranked) >= 0).all()


@given(rewards_of_a_group)
def test_normalised_group_advantages_are_bounded_by_the_group_size(rewards):
    size = len(rewards)
    result = group_advantages(rewards, leave_one_out=False, normalize=True)
    assert np.abs(result).max() <= (size - 1) / math.sqrt(size) + 1e-5


@given(st.lists(st.floats(0, 1, width=32), min_size=2, max_size=24))
def test_normalised_leave_one_out_advantages_of_rewards_in_0_1_stay_below_ten(rewards):
    assert np.abs(group_advantages(rewards, leave_one_out=True, normalize=True)).max() < 10
