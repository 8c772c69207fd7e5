"""One training run from its first process to its summary; it owns everything it uses and gives it back in reverse.

train() ── start_run: the startup graph ──> Run ── loop.train ──> teardown ──> summary
"""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from functools import partial

import yaml

from gymloop.cluster.remote import first_failure
from gymloop.config.plan import Plan
from gymloop.errors import ConfigError, InfraError
from gymloop.observe.curve import draw_png, draw_text, read_curve
from gymloop.observe.progress import Progress
from gymloop.observe.sinks import JsonlSink, Sink, TensorBoardSink
from gymloop.training import loop
from gymloop.training.checkpoint import Checkpoint, CheckpointStore
from gymloop.training.run import Run, Stopped, StopSignal
from gymloop.training.start import start_run

TEARDOWN_S = 15.0


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
    stop = StopSignal()
    task = asyncio.current_task()
    if task is None:
        raise RuntimeError("train runs as a task of an event loop")
    stop.install(task)
    with Progress() as progress, ExitStack() as files:
        store = CheckpointStore(
            plan.run_dir / "checkpoints",
            plan.recipe.checkpointing.keep_latest_k,
            model={"name": plan.recipe.policy.model_name},
        )
        checkpoint = store.latest() if resume else None
        if not resume and (plan.run_dir / "metrics.jsonl").exists():
            raise ConfigError(f"{plan.run_dir} holds a run already; continue it with --resume or choose another --run")
        total = plan.recipe.grpo.max_num_steps
        if checkpoint is not None and checkpoint.step >= total:
            progress.say(f"the run in {plan.run_dir} finished its {total} steps; nothing is left to do")
            return 0
        sinks = open_files(plan, checkpoint, files)
        try:
            started, run = await first_failure(
                start_run(
                    plan,
                    checkpoint,
                    store,
                    sinks,
                    progress,
                    stop,
                    sequential=sequential,
                    on_ray=partial(stop.install, task),
                ),
                stop.watch(),
            )
        except Stopped as stopped:
            progress.say("stopped while starting; nothing was trained")
            return stopped.exit_code
        try:
            exit_code = await until_stopped(run)
        finally:
            await started.close(TEARDOWN_S)
        summarise(plan, progress)
        return exit_code


async def until_stopped(run: Run) -> int:
    """Train; a stop request saves the last finished step, a second one ends without. Returns the exit code."""
    try:
        try:
            await loop.train(run)
        except Stopped:
            if run.plan.recipe.checkpointing.enabled and run.step:
                run.progress.say(f"stopping: saving step {run.step}")
                await run.save()
    except asyncio.CancelledError:
        if not run.stop.requested:
            raise
        run.progress.say("asked to stop a second time: ending without saving")
    return run.stop.exit_code


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
