"""Saving a run: a save that fails is told and counted, and costs nothing but itself.

The weights on the disk are older then, not wrong: earlier checkpoints are untouched, training goes on, and the next
save is another attempt. A run whose last save failed does not end with 0.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Any

from gymloop.errors import ConfigError
from gymloop.files import UnwritableError, fsync
from gymloop.training.checkpoint import Checkpoint
from gymloop.training.run import Run

POLICY = "policy"
"""The part that the policy's worker writes."""


async def save(run: Run) -> None:
    """Write a checkpoint of the last finished step, unless there is one.

    Raises:
        InfraError: a worker died or took too long. That the disk refuses is no error, see the module.
    """
    saves = run.saves
    if saves.step == run.step:
        return
    began = time.monotonic()
    try:
        await _write(run)
    except UnwritableError as error:
        saves.failure = str(error)
        run.progress.say(f"WARNING: {error}; the run goes on and tries again at its next save")
    else:
        saves.step, saves.failure = run.step, None
    seconds = time.monotonic() - began
    saves.longest_s = max(saves.longest_s, seconds)
    saves.news |= {"time/save": seconds, "checkpoint/failed": float(saves.failure is not None)}


async def _write(run: Run) -> None:
    store = run.saves.store
    aside = store.begin(run.step)
    try:
        timeout = run.plan.recipe.policy.call_timeout_s
        await run.watched(run.policy.call("save", str(aside / POLICY), timeout=timeout))
        await asyncio.to_thread(_commit, run, aside)
    except BaseException:
        await asyncio.to_thread(store.discard, aside)  # it waits for a commit in progress
        raise


def _commit(run: Run, aside: Any) -> None:
    """The metrics of the step are on the disk before the checkpoint that a resume takes their end from."""
    try:
        fsync(run.plan.run_dir / "metrics.jsonl")
    except OSError as error:
        raise UnwritableError(f"metrics of step {run.step} did not reach the disk: {error.strerror}") from error
    state = {
        "step": run.step,
        "version": run.version,
        "skipped_in_a_row": run.skipped_in_a_row,
        "loader": run.loader.state_dict(),
    }
    run.saves.store.commit(aside, state, model=run.saves.model, metrics=run.recorded)


def check_model(checkpoint: Checkpoint, model: Mapping[str, Any]) -> None:
    """Refuse to put weights into a model that they do not come from.

    Args:
        checkpoint: to be resumed.
        model: identity of this run's model: ``name``, and ``architecture`` and ``weights`` as ``model_identity`` says.

    Raises:
        ConfigError: it is another model.
    """
    for key, what in (("architecture", "another architecture"), ("weights", "other weights to start from")):
        if checkpoint.model.get(key) != model[key]:
            raise ConfigError(
                f"checkpoint {checkpoint.folder} belongs to model {checkpoint.model.get('name')!r}, and this run's "
                f"policy.model_name {model['name']!r} has {what}; resume with the model it was trained from, or choose "
                "another --run"
            )
