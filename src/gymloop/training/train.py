"""One training run from its first process to its summary; it owns everything it uses and gives it back in reverse.

train() ── start_run: the startup graph ──> Run ── loop.train ──> teardown ──> summary
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

from gymloop.cluster.health import Health, first_failure
from gymloop.config.dump import as_yaml
from gymloop.config.plan import Plan
from gymloop.errors import ConfigError, GymloopError, InfraError
from gymloop.files import held
from gymloop.gym.nemo.recipe import load_gym, settle_rows
from gymloop.gym.nemo.restarts import Restarts
from gymloop.lifeline import reaped
from gymloop.observe.curve import draw_png, draw_text, read_curve
from gymloop.observe.progress import Progress
from gymloop.observe.sinks import JsonlSink, Sink, TensorBoardSink
from gymloop.observe.watchdog import LoopWatchdog
from gymloop.startup import Started
from gymloop.training import loop
from gymloop.training.checkpoint import Checkpoint, CheckpointStore
from gymloop.training.retention import Retention
from gymloop.training.run import Run
from gymloop.training.saving import save
from gymloop.training.schedule import finished
from gymloop.training.start import start_run
from gymloop.training.stop import Stopped, StopSignal
from gymloop.training.tasks.nemo_gym import Hosting
from gymloop.training.transcripts import Transcripts

TEARDOWN_S = 15.0
HURRIED_TEARDOWN_S = 1.0
"""For each teardown, once the user has asked a second time."""


async def train(plan: Plan, *, resume: bool = False, sequential: bool = False) -> int:
    """Run a plan from its start to its summary.

    Args:
        plan: see ``compile_plan``.
        resume: go on from the newest complete checkpoint of the run's folder, if there is one.
        sequential: start one task after another, for comparison.

    Returns:
        The exit code: 0, 128 plus the signal's number when the run was asked to stop, 75 when it saved and ended
        before ``checkpointing.checkpoint_must_save_by``, or 1 when its last save failed.

    Raises:
        GymloopError: what ended the run, by name; everything it held was given back.
    """
    began = time.monotonic()
    stop = StopSignal()
    task = asyncio.current_task()
    if task is None:
        raise RuntimeError("train runs as a task of an event loop")
    watchdog = LoopWatchdog("the run's event loop", plan.recipe.health.loop_lag_s)
    with reaped(), stop.installed(task), watchdog, Progress() as progress, ExitStack() as files:
        try:
            return await _train(plan, resume, sequential, began, stop, watchdog, progress, files)
        except (Stopped, asyncio.CancelledError):
            if not stop.requested:
                raise
            progress.say("stopped while starting; nothing was trained")
            return stop.exit_code


async def _train(
    plan: Plan,
    resume: bool,
    sequential: bool,
    began: float,
    stop: StopSignal,
    watchdog: LoopWatchdog,
    progress: Progress,
    files: ExitStack,
) -> int:
    """Start, train, give back.

    Raises:
        Stopped: the run was asked to stop before it trained.
        asyncio.CancelledError: it was asked a second time before it trained.
    """
    limits = plan.recipe.health
    health = Health(limits.check_period_s, limits.unresponsive_after_s, progress.failed)
    store = CheckpointStore(plan.run_dir / "checkpoints", Retention.of(plan.recipe.checkpointing))
    transcripts = Transcripts(plan.run_dir / "trajectories")
    hold_folder(plan, files)
    checkpoint = None
    if resume:
        checkpoint = await stop.unless_asked(store.latest, "checkpoint")  # it hashes every byte
    elif (plan.run_dir / "metrics.jsonl").exists():
        raise ConfigError(f"{plan.run_dir} holds a run already; continue it with --resume or choose another --run")
    if checkpoint is not None and finished(plan.recipe, checkpoint.step, checkpoint.state["loader"]):
        progress.say(f"the run in {plan.run_dir} finished its {checkpoint.step} steps; nothing is left to do")
        return 0
    hosting = await stop.unless_asked(partial(hosting_of, plan, progress), "nemo-gym")
    plan = settle_rows(plan, hosting.gym if hosting else None)
    sinks = open_files(plan, checkpoint, progress, files)
    transcripts.drop_after(None if checkpoint is None else checkpoint.step)
    with reported(progress):
        started, run = await first_failure(
            start_run(
                plan,
                checkpoint,
                store,
                transcripts,
                sinks,
                progress,
                stop,
                health,
                watchdog,
                hosting,
                sequential=sequential,
                began=began,
            ),
            health.failed(),
            stop.watch(),
        )
    try:
        with reported(progress):
            exit_code = await until_stopped(run)
    finally:
        await give_back(started, stop)
    summarise(plan, progress)
    return exit_code


@contextmanager
def reported(progress: Progress) -> Iterator[None]:
    """What ends a run within the block is told before the run is torn down; that it was asked to end is no failure."""
    try:
        yield
    except Stopped:
        raise
    except GymloopError as error:
        progress.failed(error)
        raise


def hosting_of(plan: Plan, progress: Progress) -> Hosting | None:
    """What the run starts of NeMo Gym.

    Raises:
        ConfigError: it cannot; see ``load_gym``.
    """
    gym = load_gym(plan.recipe, plan.recipe_path.parent)
    return None if gym is None else Hosting(gym, Restarts(plan.recipe.health.max_server_restarts, progress.say))


async def give_back(started: Started, stop: StopSignal) -> None:
    """Tear the run down; a second signal hurries that, also when it comes meanwhile."""
    try:
        await started.close(HURRIED_TEARDOWN_S if stop.insisted else TEARDOWN_S)
    except asyncio.CancelledError:  # raised once everything was torn down
        if not stop.insisted:
            raise


async def until_stopped(run: Run) -> int:
    """Train; a stop request saves the last finished step, a second one ends without. Returns the exit code."""
    exit_code = 0
    try:
        try:
            await loop.train(run)
        except Stopped as stopped:
            exit_code = stopped.exit_code
            if run.plan.recipe.checkpointing.enabled and run.step:
                run.progress.say(f"stopping: saving step {run.step}")
                await save(run)
            else:
                run.progress.say("stopped; there is nothing to save" if not run.step else "stopped; saving is off")
    except asyncio.CancelledError:
        if not run.stop.insisted:
            raise
        run.progress.say("asked to stop a second time: ending without saving")
        return run.stop.exit_code
    if run.saves.failure is not None:
        run.progress.say(f"the run ends at step {run.step} without a checkpoint of it: {run.saves.failure}")
        return 1
    return exit_code


def hold_folder(plan: Plan, files: ExitStack) -> None:
    """Two runs in one folder would take each other's checkpoints apart."""
    try:
        files.enter_context(held(plan.run_dir))
    except ConfigError as error:
        raise ConfigError(f"{error}, another run; wait for its end or choose another --run") from None
    except OSError as error:
        raise InfraError(f"cannot write the run's folder {plan.run_dir}: {error.strerror}") from error


def open_files(plan: Plan, checkpoint: Checkpoint | None, progress: Progress, files: ExitStack) -> list[Sink]:
    """Make the run's folder, write its resolved recipe, open its metric files."""
    step = None if checkpoint is None else checkpoint.step
    try:
        (plan.run_dir / "logs").mkdir(parents=True, exist_ok=True)
        text = as_yaml(plan.recipe, plan.recipe_path.parent)
        progress.log_to(plan.run_dir / "logs" / "run.log")
        (plan.run_dir / "recipe.yaml").write_text(text, encoding="utf-8")
    except OSError as error:
        raise InfraError(f"cannot write the run's folder {plan.run_dir}: {error.strerror}") from error
    sinks: list[Sink] = [JsonlSink(plan.run_dir / "metrics.jsonl", step)]
    if plan.recipe.logger.tensorboard_enabled:
        sinks.append(TensorBoardSink(plan.run_dir / "tensorboard", step))
    for sink in sinks:
        files.callback(sink.close)
    return sinks


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
