"""Which checkpoints stay: the newest, and the best by one metric. A pure decision; the store carries it out.

Kept is the union of the ``keep_latest_k`` newest and the ``keep_top_k`` best. The one just written always stays. Equal
values rank by recency; a checkpoint whose step has no value of the metric ranks below all that have one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from gymloop.config.schema import Checkpointing
from gymloop.errors import ConfigError
from gymloop.observe.metrics import METRICS


@dataclass(frozen=True, slots=True)
class Saved:
    """A complete checkpoint: its step and its value of the metric, None where that step has none."""

    step: int
    value: float | None = None


@dataclass(frozen=True, slots=True)
class Retention:
    """What to keep.

    Attributes:
        keep_latest_k: at least 1.
        metric_name: as in ``metrics.jsonl``; None ranks nothing.
        higher_is_better: direction of the metric.
        keep_top_k: at least 1 where there is a metric; None keeps no best.
    """

    keep_latest_k: int
    metric_name: str | None = None
    higher_is_better: bool = True
    keep_top_k: int | None = None

    def __post_init__(self) -> None:
        if self.keep_latest_k < 1:
            raise ConfigError(f"checkpointing.keep_latest_k is {self.keep_latest_k}, expected at least 1")
        if self.metric_name is not None:
            try:
                METRICS[self.metric_name]
            except KeyError as error:
                raise ConfigError(f"checkpointing.metric_name: {error.args[0]}") from error

    @classmethod
    def of(cls, settings: Checkpointing) -> Retention:
        """From a recipe.

        Raises:
            ConfigError: the metric is not one that a run records.
        """
        return cls(settings.keep_latest_k, settings.metric_name, settings.higher_is_better, settings.keep_top_k)

    def kept(self, saved: Iterable[Saved], newest: int) -> set[int]:
        """Steps that stay.

        Args:
            saved: the complete checkpoints.
            newest: the step that was written last; not always the highest number.
        """
        by_step = sorted(saved, key=lambda one: (one.step == newest, one.step), reverse=True)
        steps = {one.step for one in by_step[: self.keep_latest_k]}
        if self.keep_top_k is not None:
            ranked = sorted(by_step, key=self._rank, reverse=True)  # stable: of equal ones the newer comes first
            steps |= {one.step for one in ranked[: self.keep_top_k]}
        return steps

    def _rank(self, one: Saved) -> float:
        if one.value is None:
            return -math.inf
        return one.value if self.higher_is_better else -one.value
