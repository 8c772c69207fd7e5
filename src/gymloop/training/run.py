"""What a training run holds once it has started, and what ends it early: a stop request, a worker dead or stuck."""

from __future__ import annotations

from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gymloop.cluster.health import Health, first_failure
from gymloop.cluster.remote import Remote
from gymloop.config.plan import Plan
from gymloop.gym.contract import Row
from gymloop.gym.loader import GroupLoader
from gymloop.observe.progress import Progress
from gymloop.observe.sinks import Sink
from gymloop.observe.watchdog import LoopWatchdog
from gymloop.rollouts.collector import Collector
from gymloop.training.checkpoint import CheckpointStore
from gymloop.training.first_tokens import FirstTokens
from gymloop.training.fleet import Fleet
from gymloop.training.stop import StopSignal
from gymloop.training.transcripts import Transcripts
from gymloop.training.turns import Turns


@dataclass(slots=True)
class Saves:
    """The run's checkpoints as it knows them.

    Attributes:
        store: where they are.
        model: identity of the model that the weights belong to.
        step: of the newest complete one; None where there is none.
        failure: why the last attempt failed; None after one that succeeded.
        longest_s: of the attempts so far, seconds.
        news: metrics of the attempts since the last step was recorded.
    """

    store: CheckpointStore
    model: Mapping[str, Any]
    step: int | None = None
    failure: str | None = None
    longest_s: float = 0.0
    news: dict[str, float] = field(default_factory=dict)

    def take_news(self) -> dict[str, float]:
        """The metrics of the attempts since the last call; they belong to the step that follows them."""
        news, self.news = self.news, {}
        return news


@dataclass(slots=True)
class Run:
    """Everything a training run holds once it has started.

    Attributes:
        health: watches every worker and environment from its start to its end.
        watchdog: of the driver's event loop.
        fleet: the engines' workers, with their servers.
        policy: the policy's worker.
        turns: of engine and policy on a GPU that they share.
        collector: runs training rollouts.
        validator: runs validation rollouts; None without validation rows.
        loader: says which prompts a step takes.
        demonstrations: (token ids, indices of trained tokens), for the warm-up.
        step: training steps finished.
        version: number of the weights that the engine has.
        skipped_in_a_row: steps that trained nothing, up to now.
        saves: the run's checkpoints; see ``saving``.
        transcripts: what was said, by step.
        began: when the run was asked for, ``time.monotonic`` seconds.
        first_tokens: how long it then took until something was sampled.
        recorded: the metrics of the last finished step.
    """

    plan: Plan
    health: Health
    watchdog: LoopWatchdog
    fleet: Fleet
    policy: Remote
    turns: Turns
    collector: Collector
    validator: Collector | None
    validation_rows: Sequence[Row]
    loader: GroupLoader
    demonstrations: Sequence[tuple[tuple[int, ...], tuple[int, ...]]]
    saves: Saves
    transcripts: Transcripts
    sinks: Sequence[Sink]
    progress: Progress
    stop: StopSignal
    startup_metrics: Mapping[str, float]
    began: float
    first_tokens: FirstTokens
    step: int = 0
    version: int = 0
    skipped_in_a_row: int = 0
    recorded: Mapping[str, float | None] = field(default_factory=dict)

    async def watched(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Await ``work``; a worker or environment that dies or hangs ends it with an error that names the part."""
        return await first_failure(work, self.health.failed())

    async def interruptible(self, work: Coroutine[Any, Any, Any]) -> Any:
        """As ``watched``, and a stop request ends it with Stopped: for work that may be abandoned."""
        return await first_failure(work, self.health.failed(), self.stop.watch())

    def record(self, metrics: Mapping[str, float | None]) -> None:
        """Write the metrics of the current step."""
        metrics = {
            **metrics,
            **self.first_tokens.take_news(),
            "health/loop_lag_s": self.watchdog.take_worst(),
            "health/server_restarts": float(self.health.take_revived()),
        }
        for sink in self.sinks:
            sink.write(self.step, metrics)
        self.recorded = metrics
