"""The whole algorithm, read from top to bottom.

    loader ─ prompts ─> collector ─ trajectories ─> prepare_batch ─ advantages ─> policy ─ weights ─> engine
                            ^                                                                          │
                            └────────────────────────── the next tokens ───────────────────────────────┘

| phase    | waits for                | abandoned by a stop request | then                                |
| -------- | ------------------------ | --------------------------- | ----------------------------------- |
| rollouts | engine and environments  | yes                         | the step's prompts come again       |
| update   | policy                   | no: it is finished first    | the step counts                     |
| sync     | policy, then engine      | no                          | engine has version n + 1            |
| validate | engine and environments  | yes                         | its numbers are missing             |
| save     | policy, disk             | no                          | a complete checkpoint, or none      |

When to validate, save and end is ``schedule``'s to say; what a checkpoint holds, ``saving``'s.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

from gymloop.algorithms.step import Prepared, prepare_batch, rollout_metrics
from gymloop.algorithms.warmup import demonstration_batch
from gymloop.errors import InfraError
from gymloop.observe.metrics import METRICS, StepMetrics
from gymloop.rollouts.collector import expand
from gymloop.rollouts.refill import gather_step
from gymloop.training.run import Run
from gymloop.training.saving import save
from gymloop.training.schedule import EXIT_OUT_OF_TIME, Schedule
from gymloop.training.stop import Stopped
from gymloop.training.sync import SyncSettings


async def train(run: Run) -> None:
    """Train until the last step, or until the run is asked to stop.

    Raises:
        Stopped: the run was asked to stop, or its time is used up; ``run.step`` is the last finished step.
        InfraError: a worker died, or too many steps in a row had nothing to train on.
    """
    schedule = Schedule.of(run.plan.recipe, run.loader.num_steps)
    longest_step_s = 0.0
    if run.step == 0:
        await _before_first_step(run)
    while run.step < schedule.total:
        began = time.monotonic()
        position = run.loader.state_dict()
        metrics = StepMetrics(METRICS)
        metrics.update(run.saves.take_news())
        with metrics.timed("step"):
            try:
                prepared = await _rollouts(run, metrics)
            except Stopped:
                run.loader.load_state_dict(position)
                raise
            await _update(run, prepared, metrics)
        run.step += 1
        try:
            if schedule.validates_after(run.step):
                await _validate(run, metrics)
        finally:  # the step counts, whatever became of its validation
            reduced = metrics.reduce()
            run.record(reduced)
        run.progress.step(run.step, schedule.total, reduced)
        longest_step_s = max(longest_step_s, time.monotonic() - began)
        if schedule.saves_after(run.step):
            run.progress.phase(f"step {run.step}: saving")
            await save(run)
        if run.stop.requested:
            raise Stopped(run.stop.exit_code)
        elapsed_s = time.monotonic() - run.began
        if run.step < schedule.total and schedule.must_end(elapsed_s, longest_step_s, run.saves.longest_s):
            run.progress.say(f"no time for step {run.step + 1}: checkpointing.checkpoint_must_save_by is too near")
            raise Stopped(EXIT_OUT_OF_TIME)


async def _before_first_step(run: Run) -> None:
    """Warm up on demonstrations and measure where the policy stands; recorded as step 0."""
    recipe = run.plan.recipe
    metrics = StepMetrics(METRICS)
    metrics.update(run.startup_metrics)
    with metrics.timed("warmup"):
        if recipe.sft_warmup.steps:
            await run.watched(run.turns.before_update(run.fleet.engines))
        for number in range(recipe.sft_warmup.steps):
            first = number * recipe.sft_warmup.batch_size
            batch = demonstration_batch(run.demonstrations[first : first + recipe.sft_warmup.batch_size])
            run.progress.phase(f"warm-up {number + 1}/{recipe.sft_warmup.steps}")
            update = await run.watched(
                run.policy.call("sft", batch, recipe.sft_warmup.lr, timeout=recipe.policy.call_timeout_s)
            )
            metrics.update(_named("sft", update))
            run.progress.say(
                f"warm-up {number + 1}/{recipe.sft_warmup.steps}  loss {update['loss']:.3f}  "
                f"{len(batch.sequences)} demonstrations"
            )
            if run.stop.requested:
                raise Stopped(run.stop.exit_code)
    if recipe.sft_warmup.steps:
        await _sync(run, metrics)
    if recipe.grpo.val_at_start:
        await _validate(run, metrics)
    run.record(metrics.reduce())


async def _rollouts(run: Run, metrics: StepMetrics) -> Prepared:
    """Sample whole groups of the next prompts with the current weights, and see what of them is to be trained."""
    recipe = run.plan.recipe
    step, size = f"step {run.step + 1}", recipe.grpo.num_generations_per_prompt

    def show(finished: int, asked: int) -> None:
        run.progress.phase(f"{step}: rollouts {finished}/{asked}")

    began = time.perf_counter()
    with metrics.timed("rollouts"):
        gathered = await run.interruptible(
            gather_step(run.collector, next(run.loader), run.loader.take, size, step, show)
        )
    seconds = time.perf_counter() - began
    groups = gathered.groups
    run.transcripts.write("step", run.step + 1, groups)
    prepared = prepare_batch(groups, recipe.grpo, recipe.loss_fn, recipe.rollouts)
    metrics.update(prepared.metrics)
    metrics.add("groups/refilled", gathered.refilled)
    metrics.add("perf/tokens_per_s", prepared.metrics["tokens/sampled"] / seconds)
    return prepared


async def _update(run: Run, prepared: Prepared, metrics: StepMetrics) -> None:
    """One policy update, and the engine brought up to date; neither where the step has nothing to train."""
    recipe = run.plan.recipe
    if prepared.empty_reason is not None:
        run.skipped_in_a_row += 1
        run.progress.say(f"step {run.step + 1} trains nothing: {prepared.empty_reason}")
        if run.skipped_in_a_row > recipe.rollouts.max_skipped_steps:
            raise InfraError(
                f"{run.skipped_in_a_row} steps in a row had nothing to train on "
                f"(rollouts.max_skipped_steps is {recipe.rollouts.max_skipped_steps}): {prepared.empty_reason}"
            )
        return
    run.skipped_in_a_row = 0
    run.progress.phase(f"step {run.step + 1}: update on {prepared.batch.num_trained} tokens")
    with metrics.timed("update"):
        await run.watched(run.turns.before_update(run.fleet.engines))
        update = await run.watched(run.policy.call("train", prepared.batch, timeout=recipe.policy.call_timeout_s))
    metrics.update(_named("policy", update))
    await _sync(run, metrics)


async def _sync(run: Run, metrics: StepMetrics) -> None:
    """Give the engines the policy's weights under the next version number."""
    recipe = run.plan.recipe
    run.progress.phase(f"step {run.step + 1}: weight sync")
    with metrics.timed("weight_sync"):
        await run.watched(run.turns.before_sync(run.fleet.engines))
        sync = run.fleet.sync(run.policy, run.version + 1, recipe.policy.call_timeout_s, SyncSettings.of(recipe))
        metrics.update(await run.watched(sync))
        await run.watched(run.turns.after_sync(run.fleet.engines))
    run.version += 1
    metrics.add("weights/version", run.version)
    metrics.add("weights/engines", len(run.fleet.engines))


async def _validate(run: Run, metrics: StepMetrics) -> None:
    """One rollout of each validation row, under the validation profile; nothing of it is trained."""
    if run.validator is None:
        return
    tasks = expand(((f"val-r{index:05d}", row) for index, row in enumerate(run.validation_rows)), 1)
    run.progress.phase(f"validation on {len(tasks)} rows")
    with metrics.timed("validation"):
        groups = await run.interruptible(run.validator.gather(tasks))
    run.transcripts.write("validation", run.step, groups)
    measured = rollout_metrics(groups, group_size=1)
    metrics.update({f"validation/{name}": value for name, value in measured.items()})
    if "reward/mean" in measured:
        run.progress.say(f"validation  reward {measured['reward/mean']:.3f} on {len(tasks)} rows")


def _named(section: str, update: Mapping[str, float]) -> dict[str, float]:
    """The worker's metrics under the run's names: what has no family of its own belongs to the section."""
    own = ("mismatch/", "tokens/")
    named = {}
    for name, value in update.items():
        if name.startswith("timing/"):
            named[f"time/{section}_{name.removeprefix('timing/').removesuffix('_s')}"] = value
        else:
            named[name if name.startswith(own) else f"{section}/{name}"] = value
    return named
