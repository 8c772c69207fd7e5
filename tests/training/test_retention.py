"""Which checkpoints stay, decided on numbers alone."""

import pytest

from gymloop.config.schema import Checkpointing
from gymloop.errors import ConfigError
from gymloop.training.retention import Retention, Saved

REWARD = "validation/reward/mean"


def kept(retention, newest, **values):
    saved = [Saved(int(name.removeprefix("s")), value) for name, value in values.items()]
    assert retention.kept(reversed(saved), newest) == retention.kept(saved, newest), "order has no effect"
    return sorted(retention.kept(saved, newest))


def test_the_newest_by_number():
    assert kept(Retention(2), 11, s8=None, s9=None, s10=None, s11=None) == [10, 11]


def test_the_one_just_written_stays_even_when_others_have_higher_numbers():
    assert kept(Retention(1), 3, s9=None, s3=None) == [3]


def test_the_union_of_newest_and_best():
    both = Retention(2, REWARD, keep_top_k=2)
    assert kept(both, 5, s1=0.9, s2=0.1, s3=0.8, s4=0.2, s5=0.3) == [1, 3, 4, 5]
    assert kept(both, 5, s1=0.1, s2=0.1, s3=0.2, s4=0.8, s5=0.9) == [4, 5], "the newest may be the best"


def test_lower_may_be_better():
    lowest = Retention(1, "policy/loss", higher_is_better=False, keep_top_k=1)
    assert kept(lowest, 3, s1=0.5, s2=-0.5, s3=0.9) == [2, 3]


def test_of_equal_values_the_newer_stays():
    assert kept(Retention(1, REWARD, keep_top_k=1), 4, s1=0.5, s2=0.5, s3=0.5, s4=0.1) == [3, 4]


def test_without_a_value_ranks_below_the_worst():
    assert kept(Retention(1, REWARD, keep_top_k=2), 4, s1=-9.0, s2=None, s3=None, s4=None) == [1, 4]


def test_a_metric_that_no_run_records_is_refused_before_anything_starts():
    with pytest.raises(ConfigError, match=r"metric_name: metric 'reward/meen' .* nearest is 'reward/mean'"):
        Retention.of(Checkpointing(metric_name="reward/meen", keep_top_k=2))


def test_keep_latest_k_of_zero_is_refused():
    with pytest.raises(ConfigError, match=r"checkpointing\.keep_latest_k is 0"):
        Retention(0)
