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
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence

from gymloop.algorithms.step import prepare_batch, rollout_metrics
from gymloop.algorithms.warmup import demonstration_batch
from gymloop.errors import InfraError
from gymloop.observe.metrics import METRICS, StepMetrics
from gymloop.rollouts.collector import expand
from gymloop.rollouts.trajectory import Group, Rollout, as_record
from gymloop.training.run import Run, Stopped
from gymloop.training.sync import sync_weights


async def train(run: Run) -> None:
    """Train until the last step, or until the run is asked to stop.

    Raises:
        Stopped: the run was asked to stop; ``run.step`` is the last finished step.
        InfraError: a worker died, or too many steps in a row had nothing to train on.
    """
    grpo = run.plan.recipe.grpo
    total = min(grpo.max_num_steps, run.loader.num_steps)
    if run.step == 0:
        await _before_first_step(run)
    while run.step < total:
        position = run.loader.state_dict()
        metrics = StepMetrics(METRICS)
        with metrics.timed("step"):
            try:
                groups = await _rollouts(run, metrics)
            except Stopped:
                run.loader.load_state_dict(position)
                raise
            trained = await _update(run, groups, metrics)
        run.step += 1
        if (grpo.val_at_end and run.step == total) or (grpo.val_period and run.step % grpo.val_period == 0):
            await _validate(run, metrics)
        reduced = metrics.reduce()
        run.record(reduced)
        run.progress.step(run.step, total, reduced)
        if trained and _save_now(run, total):
            run.progress.phase(f"step {run.step}: saving")
            await run.save()
        if run.stop.requested:
            raise Stopped(run.stop.exit_code)


async def _before_first_step(run: Run) -> None:
    """Warm up on demonstrations and measure where the policy stands; recorded as step 0."""
    recipe = run.plan.recipe
    metrics = StepMetrics(METRICS)
    metrics.update(run.startup_metrics)
    with metrics.timed("warmup"):
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


async def _rollouts(run: Run, metrics: StepMetrics) -> list[Group]:
    """Sample whole groups of the next prompts with the current weights."""
    grpo = run.plan.recipe.grpo
    tasks = expand(next(run.loader), grpo.num_generations_per_prompt)

    def show(_: Rollout, finished: int) -> None:
        run.progress.phase(f"step {run.step + 1}: rollouts {finished}/{len(tasks)}")

    began = time.perf_counter()
    with metrics.timed("rollouts"):
        groups = await run.interruptible(run.collector.gather(tasks, show))
    sampled = sum(len(turn.sampled_ids) for group in groups for one in group.trajectories for turn in one.turns)
    metrics.add("perf/tokens_per_s", sampled / (time.perf_counter() - began))
    _keep(run, f"step_{run.step + 1:05d}.jsonl", groups)
    return groups


async def _update(run: Run, groups: Sequence[Group], metrics: StepMetrics) -> bool:
    """Turn groups into one policy update and bring the engine up to date; False when there was nothing to train."""
    recipe = run.plan.recipe
    prepared = prepare_batch(groups, recipe.grpo, recipe.loss_fn, recipe.rollouts)
    metrics.update(prepared.metrics)
    if prepared.empty_reason is not None:
        run.skipped_in_a_row += 1
        run.progress.say(f"step {run.step + 1} trains nothing: {prepared.empty_reason}")
        if run.skipped_in_a_row > recipe.rollouts.max_skipped_steps:
            raise InfraError(
                f"{run.skipped_in_a_row} steps in a row had nothing to train on "
                f"(rollouts.max_skipped_steps is {recipe.rollouts.max_skipped_steps}): {prepared.empty_reason}"
            )
        return False
    run.skipped_in_a_row = 0
    run.progress.phase(f"step {run.step + 1}: update on {prepared.batch.num_trained} tokens")
    with metrics.timed("update"):
        update = await run.watched(run.policy.call("train", prepared.batch, timeout=recipe.policy.call_timeout_s))
    metrics.update(_named("policy", update))
    await _sync(run, metrics)
    return True


async def _sync(run: Run, metrics: StepMetrics) -> None:
    """Give the engine the policy's weights under the next version number."""
    run.progress.phase(f"step {run.step + 1}: weight sync")
    with metrics.timed("weight_sync"):
        await run.watched(sync_weights(run.policy, run.engine, run.version + 1, run.plan.recipe.policy.call_timeout_s))
    run.version += 1
    metrics.add("weights/version", run.version)


async def _validate(run: Run, metrics: StepMetrics) -> None:
    """One rollout of each validation row, under the validation profile; nothing of it is trained."""
    if run.validator is None:
        return
    tasks = expand(((f"val-r{index:05d}", row) for index, row in enumerate(run.validation_rows)), 1)
    run.progress.phase(f"validation on {len(tasks)} rows")
    with metrics.timed("validation"):
        groups = await run.interruptible(run.validator.gather(tasks))
    _keep(run, f"validation_{run.step:05d}.jsonl", groups)
    measured = rollout_metrics(groups, group_size=1)
    metrics.update({f"validation/{name}": value for name, value in measured.items()})
    if "reward/mean" in measured:
        run.progress.say(f"validation  reward {measured['reward/mean']:.3f} on {len(tasks)} rows")


def _save_now(run: Run, total: int) -> bool:
    settings = run.plan.recipe.checkpointing
    return settings.enabled and (run.step % settings.save_period == 0 or run.step == total)


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


def _keep(run: Run, name: str, groups: Sequence[Group]) -> None:
    """Write what was said, one rollout a line, without token ids."""
    folder = run.plan.run_dir / "trajectories"
    folder.mkdir(exist_ok=True)
    rollouts: list[Rollout] = []
    for group in groups:
        rollouts += group.trajectories + group.failures
    lines = [json.dumps(as_record(rollout), ensure_ascii=False) for rollout in rollouts]
    (folder / name).write_text("".join(line + "\n" for line in lines), encoding="utf-8")
