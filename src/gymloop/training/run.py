"""What a training run holds once it has started, and the two things that end it early: a stop request, a dead worker.

The first SIGINT or SIGTERM asks the loop to stop: rollouts are abandoned, an update in progress is finished, the last
finished step is saved, and the run exits with 130 or 143. A second signal ends it without saving.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gymloop.cluster.remote import Remote, first_failure
from gymloop.config.plan import Plan
from gymloop.errors import GymloopError
from gymloop.gym.contract import Row
from gymloop.gym.loader import GroupLoader
from gymloop.observe.progress import Progress
from gymloop.observe.sinks import Sink
from gymloop.rollouts.collector import Collector
from gymloop.training.checkpoint import CheckpointStore


class Stopped(GymloopError):
    """The user asked the run to end."""

    kind = "stopped"

    def __init__(self, exit_code: int) -> None:
        super().__init__("the run was asked to stop")
        self.exit_code = exit_code


class StopSignal:
    """Set by the first SIGINT or SIGTERM; the second cancels the run's task."""

    def __init__(self) -> None:
        self.exit_code = 0
        self._event = asyncio.Event()

    def install(self, task: asyncio.Task[Any]) -> None:
        """Handle both signals on the running loop.

        Ray puts its own handlers in place when a process connects; call this again then.
        """
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)
            loop.add_signal_handler(number, self.request, 128 + number, task)

    def request(self, exit_code: int, task: asyncio.Task[Any]) -> None:
        """Ask the run to stop; asking twice cancels its task."""
        if self._event.is_set():
            task.cancel()
        self.exit_code = self.exit_code or exit_code
        self._event.set()

    @property
    def requested(self) -> bool:
        """Whether the run was asked to stop."""
        return self._event.is_set()

    async def watch(self) -> None:
        """Raises Stopped once the run was asked to stop."""
        await self._event.wait()
        raise Stopped(self.exit_code)


@dataclass(slots=True)
class Run:
    """Everything a training run holds once it has started.

    Attributes:
        engine: the engine's worker, with its server.
        policy: the policy's worker.
        collector: runs training rollouts.
        validator: runs validation rollouts; None without validation rows.
        loader: says which prompts a step takes.
        demonstrations: (token ids, indices of trained tokens), for the warm-up.
        step: training steps finished.
        version: number of the weights that the engine has.
        saved_step: the step of the newest checkpoint; None when there is none.
    """

    plan: Plan
    engine: Remote
    policy: Remote
    collector: Collector
    validator: Collector | None
    validation_rows: Sequence[Row]
    loader: GroupLoader
    demonstrations: Sequence[tuple[tuple[int, ...], tuple[int, ...]]]
    store: CheckpointStore
    sinks: Sequence[Sink]
    progress: Progress
    stop: StopSignal
    startup_metrics: Mapping[str, float]
    step: int = 0
    version: int = 0
    saved_step: int | None = None
    skipped_in_a_row: int = 0

    async def watched(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Await ``work``; the death of a worker ends it with an error that names the worker."""
        return await first_failure(work, self.engine.died(), self.policy.died())

    async def interruptible(self, work: Coroutine[Any, Any, Any]) -> Any:
        """As ``watched``, and a stop request ends it with Stopped: for work that may be abandoned."""
        return await first_failure(work, self.engine.died(), self.policy.died(), self.stop.watch())

    def record(self, metrics: Mapping[str, float | None]) -> None:
        """Write the metrics of the current step."""
        for sink in self.sinks:
            sink.write(self.step, metrics)

    async def save(self) -> None:
        """Write a checkpoint of the last finished step, unless there is one.

        Raises:
            InfraError: it cannot be written; earlier ones are untouched.
        """
        if self.saved_step == self.step:
            return
        timeout = self.plan.recipe.policy.call_timeout_s
        aside = self.store.begin(self.step)
        try:
            await self.watched(self.policy.call("save", str(aside / "policy"), timeout=timeout))
            state = {"step": self.step, "version": self.version, "loader": self.loader.state_dict()}
            await asyncio.to_thread(self.store.commit, aside, state)
        except BaseException:
            self.store.discard(aside)
            raise
        self.saved_step = self.step
