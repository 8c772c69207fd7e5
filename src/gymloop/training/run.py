"""One training run owns every process, socket, actor and file it uses, and gives them back in reverse order.

    train() ── start_run() ── the startup graph ── Run ── loop.train(run) ── Run closed ── summary
                                                     │
                                     stop signal, death of a worker: both end the loop, by name

The first SIGINT or SIGTERM asks the loop to stop: rollouts are abandoned, an update in progress is finished, the last
finished step is saved, and the run exits with 130 or 143. A second signal ends it without saving.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import yaml

from gymloop.cluster.remote import Remote, first_failure
from gymloop.config.plan import Plan
from gymloop.errors import GymloopError, InfraError
from gymloop.gym.contract import Row
from gymloop.gym.loader import GroupLoader
from gymloop.observe.curve import draw_png, draw_text, read_curve
from gymloop.observe.progress import Progress
from gymloop.observe.sinks import JsonlSink, Sink, TensorBoardSink
from gymloop.rollouts.collector import Collector
from gymloop.startup.timeline import Timeline
from gymloop.training.checkpoint import Checkpoint, CheckpointStore

TEARDOWN_S = 15.0


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
        """Handle both signals on the running loop, for as long as the loop lives."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self.request, 128 + number, task)

    def request(self, exit_code: int, task: asyncio.Task[Any] | None = None) -> None:
        """Ask the run to stop."""
        if self._event.is_set() and task is not None:
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
    skipped_in_a_row: int = field(default=0)

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


async def train(plan: Plan, *, resume: bool = False, sequential: bool = False) -> int:
    """Run a plan from its start to its summary.

    Args:
        plan: see ``compile_plan``.
        resume: go on from the newest complete checkpoint of the run's folder, if there is one.
        sequential: start one task after another, for comparison.

    Returns:
        The exit code: 0, or 128 plus the signal's number when the run was asked to stop.

    Raises:
        GymloopError: what ended the run, by name; everything it held was given back.
    """
    from gymloop.training import loop
    from gymloop.training.start import start_run

    stop = StopSignal()
    task = asyncio.current_task()
    if task is not None:
        stop.install(task)
    with Progress() as progress, ExitStack() as files:
        store = CheckpointStore(
            plan.run_dir / "checkpoints",
            plan.recipe.checkpointing.keep_latest_k,
            model={"name": plan.recipe.policy.model_name},
        )
        checkpoint = store.latest() if resume else None
        if checkpoint is None and (plan.run_dir / "metrics.jsonl").exists() and not resume:
            raise InfraError(f"{plan.run_dir} holds a run already; continue it with --resume or choose another --run")
        total = plan.recipe.grpo.max_num_steps
        if checkpoint is not None and checkpoint.step >= total:
            progress.say(f"the run in {plan.run_dir} finished its {total} steps; nothing is left to do")
            return 0
        sinks = open_files(plan, checkpoint, files)
        try:
            started, run = await first_failure(
                start_run(plan, checkpoint, store, sinks, progress, stop, sequential=sequential), stop.watch()
            )
        except Stopped as stopped:
            progress.say("stopped while starting; nothing was trained")
            return stopped.exit_code
        exit_code = 0
        try:
            await loop.train(run)
        except Stopped as stopped:
            exit_code = stopped.exit_code
            progress.say(f"stopping: saving step {run.step}")
            if plan.recipe.checkpointing.enabled and run.step:
                await run.save()
        finally:
            await started.close(TEARDOWN_S)
        summarise(plan, progress)
        return exit_code


def open_files(plan: Plan, checkpoint: Checkpoint | None, files: ExitStack) -> list[Sink]:
    """Make the run's folder, write its resolved recipe, open its metric files."""
    step = None if checkpoint is None else checkpoint.step
    try:
        (plan.run_dir / "logs").mkdir(parents=True, exist_ok=True)
        text = yaml.safe_dump(plan.recipe.model_dump(mode="json"), sort_keys=False)
        (plan.run_dir / "recipe.yaml").write_text(text, encoding="utf-8")
    except OSError as error:
        raise InfraError(f"cannot write the run's folder {plan.run_dir}: {error.strerror}") from error
    sinks: list[Sink] = [JsonlSink(plan.run_dir / "metrics.jsonl", step)]
    if plan.recipe.logger.tensorboard_enabled:
        sinks.append(TensorBoardSink(plan.run_dir / "tensorboard", step))
    for sink in sinks:
        files.callback(sink.close)
    return sinks


def write_timeline(plan: Plan, timeline: Timeline) -> None:
    """Keep the startup's timeline beside the metrics."""
    (plan.run_dir / "startup.json").write_text(timeline.to_json(), encoding="utf-8")


def summarise(plan: Plan, progress: Progress) -> None:
    """Draw the reward curve and say where everything is."""
    points = read_curve(plan.run_dir / "metrics.jsonl", "reward/mean")
    if points:
        draw_png(points, "reward/mean", plan.run_dir / "reward.png")
        encoding = (progress.console.encoding or "").lower()
        progress.say(draw_text(points, "reward/mean", ascii_only="utf" not in encoding))
    progress.say(f"results: {plan.run_dir}")
    for name, what in (
        ("metrics.jsonl", "every metric of every step"),
        ("reward.png", "the reward curve"),
        ("trajectories", "what the model and the tools said"),
        ("checkpoints", "weights that transformers opens, optimizer, position"),
        ("tensorboard", "tensorboard --logdir shows the same metrics"),
    ):
        if (plan.run_dir / name).exists():
            progress.say(f"  {name:<14} {what}")
