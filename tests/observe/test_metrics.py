"""Reductions against numbers computed by hand; names that were never declared."""

import math
from fractions import Fraction

import numpy as np
import pytest

from gymloop.observe.metrics import METRICS, Metric, Registry, StepMetrics

REDUCTIONS = ("mean", "sum", "min", "max", "last", "p95")


def step_metrics(clock=None):
    registry = Registry([*(Metric(f"a/{name}", name, "") for name in REDUCTIONS), Metric("time/*", "sum", "")])
    return StepMetrics(registry, clock) if clock else StepMetrics(registry)


def test_each_reduction_is_applied_once_to_the_raw_values():
    metrics = step_metrics()
    for name in REDUCTIONS:
        metrics.extend(f"a/{name}", [4.0, 1.0])
        metrics.add(f"a/{name}", 10.0)
    assert metrics.reduce() == {
        "a/mean": 5.0,  # not 6.25, the mean of a mean and a value
        "a/sum": 15.0,
        "a/min": 1.0,
        "a/max": 10.0,
        "a/last": 10.0,
        "a/p95": 10.0,
        "metrics/nonfinite": 0.0,
    }


@pytest.mark.parametrize(("count", "expected"), [(1, 1), (19, 19), (20, 19), (21, 20), (100, 95)])
def test_p95_is_the_nearest_rank(count, expected):
    metrics = step_metrics()
    metrics.extend("a/p95", range(count, 0, -1))
    assert metrics.reduce()["a/p95"] == expected


def test_sums_do_not_depend_on_order():
    metrics, reversed_metrics = step_metrics(), step_metrics()
    values = [1e16, 1.0, -1e16, 0.1] * 5
    metrics.extend("a/sum", values)
    reversed_metrics.extend("a/sum", values[::-1])
    assert metrics.reduce() == reversed_metrics.reduce()
    assert metrics.reduce()["a/sum"] == pytest.approx(5.5)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, np.float32("nan")])
def test_a_value_that_is_not_finite_makes_its_metric_null_and_is_counted(bad):
    metrics = step_metrics()
    metrics.extend("a/mean", [1.0, bad, bad])
    metrics.add("a/max", 2.0)
    assert metrics.reduce() == {"a/mean": None, "a/max": 2.0, "metrics/nonfinite": 2.0}


def test_no_values_leave_no_metric():
    metrics = step_metrics()
    metrics.extend("a/mean", [])
    assert metrics.reduce() == {"metrics/nonfinite": 0.0}


@pytest.mark.parametrize("value", [np.float32(0.5), np.array(0.5), np.float64(0.5), Fraction(1, 2)])
def test_any_real_number_is_taken(value):
    metrics = step_metrics()
    metrics.add("a/last", value)
    assert metrics.reduce()["a/last"] == 0.5
    assert type(metrics.reduce()["a/last"]) is float


@pytest.mark.parametrize("value", ["0.5", None, [1]])
def test_anything_else_is_refused(value):
    with pytest.raises(TypeError, match="metric 'a/last' takes numbers"):
        step_metrics().add("a/last", value)


def test_an_undeclared_name_is_refused_with_the_nearest():
    with pytest.raises(KeyError, match=r"metric 'a/maen' is not declared; the nearest is 'a/mean'"):
        step_metrics().add("a/maen", 1.0)


def test_an_exact_name_wins_over_a_family_and_a_longer_family_over_a_shorter():
    registry = Registry(
        [
            Metric("x/*", "last", ""),
            Metric("x/y/*/mean", "mean", ""),
            Metric("x/y", "max", ""),
        ]
    )
    assert registry["x/y"].reduction == "max"
    assert registry["x/y/part/mean"].reduction == "mean"
    assert registry["x/other"].reduction == "last"
    with pytest.raises(KeyError):
        registry["x/"]


def test_declaring_a_metric_twice_is_refused():
    with pytest.raises(ValueError, match="'x' is declared twice"):
        Registry([Metric("x", "last", ""), Metric("x", "mean", "")])


def test_timed_adds_the_seconds_of_every_block_of_the_phase_also_of_one_that_raises():
    ticks = iter([0.0, 1.5, 10.0, 10.25])
    metrics = step_metrics(lambda: next(ticks))
    with metrics.timed("rollout"):
        pass
    with pytest.raises(OSError, match="gone"), metrics.timed("rollout"):
        raise OSError("gone")
    assert metrics.reduce()["time/rollout"] == 1.75


def test_every_metric_of_the_product_is_explained():
    assert [metric.name for metric in METRICS if not metric.help] == []
    assert METRICS["mismatch/kl"].healthy == "below 1e-3"
    assert METRICS["time/rollout"].reduction == "sum"
    assert METRICS["reward/components/format/mean"].reduction == "last"
