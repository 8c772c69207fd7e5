"""Every metric has one declared reduction, applied once, to raw values: nothing is ever a mean of medians.

Whoever measures adds raw values; the end of the step reduces them. A name that was never declared is an error, so a
number in ``metrics.jsonl`` always has a meaning that can be looked up.

A value that is not finite makes its metric null for that step and is counted in ``metrics/nonfinite``: leaving it out
would hide a broken step behind the healthy values, and raising would end a run for the sake of its display.
"""

from __future__ import annotations

import difflib
import math
import numbers
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

Reduction = Literal["mean", "sum", "min", "max", "last", "p95"]

NONFINITE = "metrics/nonfinite"


@dataclass(frozen=True, slots=True)
class Metric:
    """A declared metric, or a family of them.

    Attributes:
        name: slash-separated; one ``*`` stands for any text, which declares a family.
        reduction: how the raw values of a step become one number. ``last`` also marks a value that its source has
            already reduced; ``p95`` is the nearest-rank percentile, always one of the values.
        help: what it measures, with its unit.
        healthy: what to expect of a good run, in words; None where any value is fine.
    """

    name: str
    reduction: Reduction
    help: str
    healthy: str | None = None


class Registry:
    """The declared metrics by name; an exact declaration wins over a family, a longer family over a shorter one."""

    def __init__(self, metrics: Iterable[Metric]) -> None:
        self._exact: dict[str, Metric] = {}
        self._families: list[tuple[str, str, Metric]] = []
        for metric in metrics:
            if metric.name in self._exact or any(metric.name == family.name for _, _, family in self._families):
                raise ValueError(f"metric {metric.name!r} is declared twice")
            if "*" in metric.name:
                before, _, after = metric.name.partition("*")
                self._families.append((before, after, metric))
            else:
                self._exact[metric.name] = metric
        self._families.sort(key=lambda family: -len(family[2].name))

    def __iter__(self) -> Iterator[Metric]:
        yield from self._exact.values()
        yield from (metric for _, _, metric in self._families)

    def __getitem__(self, name: str) -> Metric:
        """The declaration of a metric.

        Raises:
            KeyError: it was never declared; the message has the nearest name.
        """
        if name in self._exact:
            return self._exact[name]
        for before, after, metric in self._families:
            if len(name) > len(before) + len(after) and name.startswith(before) and name.endswith(after):
                return metric
        nearest = difflib.get_close_matches(name, [metric.name for metric in self], n=1)
        raise KeyError(f"metric {name!r} is not declared{f'; the nearest is {nearest[0]!r}' if nearest else ''}")


class StepMetrics:
    """The raw values of one step.

    Args:
        registry: what may be measured.
        clock: seconds; monotonic.
    """

    def __init__(self, registry: Registry, clock: Callable[[], float] = time.perf_counter) -> None:
        self._registry = registry
        self._clock = clock
        self._values: defaultdict[str, list[float]] = defaultdict(list)

    def add(self, name: str, value: float) -> None:
        """Record one raw value; any real number, numpy's included.

        Raises:
            KeyError: the metric was never declared.
            TypeError: the value is no number.
        """
        self.extend(name, (value,))

    def extend(self, name: str, values: Iterable[float]) -> None:
        """Record many raw values, e.g. one per token; none at all leaves the metric absent."""
        self._registry[name]  # an unknown name fails where it is used, not at the end of the step
        checked = [_number(name, value) for value in values]
        if checked:
            self._values[name].extend(checked)

    def update(self, values: Mapping[str, float]) -> None:
        """Record one value each, as ``add`` does."""
        for name, value in values.items():
            self.add(name, value)

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Add the wall time of the block to ``time/<phase>``, seconds, also when the block raises."""
        began = self._clock()
        try:
            yield
        finally:
            self.add(f"time/{phase}", self._clock() - began)

    def reduce(self) -> dict[str, float | None]:
        """One number per metric that has values, by name in order of first use, and ``metrics/nonfinite``."""
        reduced: dict[str, float | None] = {}
        nonfinite = 0
        for name, values in self._values.items():
            bad = sum(not math.isfinite(value) for value in values)
            nonfinite += bad
            reduced[name] = None if bad else _REDUCE[self._registry[name].reduction](values)
        return reduced | {NONFINITE: float(nonfinite)}


def _number(name: str, value: object) -> float:
    if not isinstance(value, numbers.Real) and not hasattr(value, "__float__"):
        raise TypeError(f"metric {name!r} takes numbers, got {value!r}")
    return float(value)


def _p95(values: Sequence[float]) -> float:
    return sorted(values)[math.ceil(0.95 * len(values)) - 1]


# fsum, so that the order of arrival does not move the last bits.
_REDUCE: Mapping[Reduction, Callable[[Sequence[float]], float]] = {
    "mean": lambda values: math.fsum(values) / len(values),
    "sum": math.fsum,
    "min": min,
    "max": max,
    "last": lambda values: values[-1],
    "p95": _p95,
}

METRICS = Registry(
    (
        Metric("reward/mean", "last", "mean reward of the finished rollouts", "rises over the run"),
        Metric("reward/std", "last", "population standard deviation of the rewards", "above 0, or nothing is learnt"),
        Metric("reward/min", "last", "lowest reward"),
        Metric("reward/max", "last", "highest reward"),
        Metric("reward/components/*/mean", "last", "mean of one named part of the reward"),
        Metric("rollouts/finished", "last", "rollouts that ended with a reward"),
        Metric("rollouts/failed", "last", "rollouts that ended with a failure; they train nothing", "0"),
        Metric("rollouts/truncated", "last", "rollouts cut by a token or turn limit", "a small share, not growing"),
        Metric("rollouts/invalid_tool_call_rate", "last", "share of turns with a call that could not be run", "falls"),
        Metric("rollouts/malformed_thinking_rate", "last", "share of turns with thinking in the answer", "falls"),
        Metric("rollouts/penalised", "last", "finished rollouts whose reward a penalty took", "falls"),
        Metric("penalties/*", "last", "finished rollouts with one of the faults of reward_penalties", "falls"),
        Metric("rollouts/missing", "last", "rollouts neither finished nor failed", "0"),
        Metric("failures/infra", "last", "rollouts that a party failed, in every attempt they had", "0"),
        Metric("failures/data", "last", "rollouts whose row could not be used", "0"),
        Metric("failures/policy", "last", "rollouts that the model brought to an end without a verdict", "0"),
        Metric("failures/attempts", "last", "failed attempts, those that a later attempt made good included", "0"),
        Metric("groups/kept", "last", "groups that train", "grpo.num_prompts_per_step"),
        Metric("groups/dropped", "last", "groups that train nothing", "0"),
        Metric("groups/short", "last", "groups with fewer finished rollouts than rollouts.min_group_size", "0"),
        Metric("groups/refilled", "last", "further groups sampled in place of short ones", "0"),
        Metric("signal/zero_groups", "last", "kept groups whose rewards are all equal", "below half of the groups"),
        Metric("signal/penalised_turns", "last", "turns trained with the advantage of a penalty", "falls"),
        Metric("advantages/*", "last", "extremes of the advantages over kept rollouts, before penalties"),
        Metric("tools/calls_per_rollout", "last", "tool calls that ran, per finished rollout"),
        Metric("tools/rollouts_with_calls", "last", "tool-call rate: share of finished rollouts with a tool call"),
        Metric("tools/bad_call_rate", "last", "share of tool calls that could not be read or routed", "falls"),
        Metric("turns/mean", "last", "model calls per finished rollout"),
        Metric(
            "segments/per_rollout", "last", "token segments per trained rollout", "1 unless histories are rewritten"
        ),
        Metric("tokens/*", "last", "tokens sampled, trained (carrying loss), and in the batch"),
        Metric("mismatch/kl", "last", "KL(engine, trainer) on trained tokens, nats per token", "below 1e-3"),
        Metric(
            "mismatch/max_abs_logprob_diff", "last", "largest |engine - trainer logprob|, nats", "below 1e-4 in float32"
        ),
        Metric("mismatch/mean_abs_logprob_diff", "last", "mean |engine - trainer logprob|, nats", "below 5e-3"),
        Metric("mismatch/*", "last", "engine against trainer on trained tokens"),
        Metric("policy/*", "last", "the policy's update: loss, clipping, gradient norm, learning rate"),
        Metric("sft/*", "last", "the supervised warm-up", "the loss falls"),
        Metric("validation/*", "last", "the same quantities on the validation rows"),
        Metric("weights/*", "last", "weight sync"),
        Metric("weights/version", "last", "number of the weights that the next step samples from"),
        Metric("weights/sync_s", "last", "wall time from the request until every engine has the weights, seconds"),
        Metric("weights/bytes", "last", "bytes of the policy's parameters"),
        Metric("weights/gb_per_s", "last", "bytes of one engine's weights over the sync's time, 1e9 bytes per second"),
        Metric(
            "weights/copy_limit_share",
            "last",
            "that rate over the rate at which the policy's process copies memory on its device",
            "0.25 or more in shared memory, where the weights are copied twice",
        ),
        Metric("weights/engines", "last", "engine replicas that the sync reached", "all that the run started with"),
        Metric("perf/*", "last", "throughput"),
        Metric("perf/tokens_per_s", "last", "tokens sampled per second of the rollout phase"),
        Metric("env/*", "mean", "what one environment reports, per rollout"),
        Metric("time/*", "sum", "wall time of one phase of the step, seconds"),
        Metric("checkpoint/failed", "last", "whether the save before this step failed, 1 or 0", "0"),
        Metric("startup/*", "last", "wall time of one startup task, or of the whole startup, seconds"),
        Metric(
            "startup/first_tokens_s",
            "last",
            "from the run's request to the first reply with sampled tokens, a warm-up before it included, seconds",
        ),
        Metric(
            "health/loop_lag_s",
            "last",
            "longest time the driver's event loop stood still since the last step, seconds",
            "below 1; a blocking environment holds up every rollout",
        ),
        Metric(
            "health/server_restarts",
            "last",
            "servers of NeMo Gym that died and were started again since the last step",
            "0; at most health.max_server_restarts for each over the run",
        ),
        Metric(NONFINITE, "last", "raw values of this step that were NaN or infinite; their metrics are null", "0"),
    )
)
"""Every metric that a run records."""
