"""A collection from its first process to its summary: rollouts of a recipe's rows, written as they finish.

    output ── what is there ──> missing ──> graph ──> Collector ── each rollout, at once ──> output ──> summary
                                   └── nothing: say so, start nothing

The graph is that of a training run without policy and weights (``tasks.rollouts``), or, with a model elsewhere, without
engine and Ray too.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from gymloop.cluster.health import Health, first_failure
from gymloop.config.dump import as_yaml
from gymloop.config.plan import Plan
from gymloop.errors import ConfigError, InfraError
from gymloop.files import held
from gymloop.gym.contract import Row
from gymloop.gym.foreign import ForeignModel
from gymloop.gym.nemo.recipe import settle_rows
from gymloop.lifeline import reaped
from gymloop.observe.progress import Progress
from gymloop.observe.watchdog import LoopWatchdog
from gymloop.rollouts.collection import Found, Tally, as_result, missing, to_line
from gymloop.rollouts.collector import Collector, RolloutTask
from gymloop.rollouts.trajectory import Rollout
from gymloop.startup import Started, run_graph
from gymloop.training.collection import (
    Request,
    early_rows,
    identity,
    refuse_own_models,
    refuse_unreachable,
    source_of,
    tasks_of,
)
from gymloop.training.fleet import Fleet
from gymloop.training.output import Output, folder_of
from gymloop.training.stop import Stopped, StopSignal
from gymloop.training.tasks import rollouts
from gymloop.training.tasks.collection import collected_rows, collection_tasks
from gymloop.training.train import give_back, hosting_of, reported

TOLD = 10
"""Lines that a collection writes about its progress where there is no terminal."""


async def collect(plan: Plan, request: Request) -> int:
    """Collect what is missing.

    Returns:
        The exit code: 0, 1 when rollouts failed for good, or 128 plus the signal's number when asked to stop.

    Raises:
        ConfigError: the recipe or the command line is wrong, or the file is of another collection.
        GymloopError: what ended the collection, by name; the lines are in the file.
    """
    source_of(plan, request.part)  # a wrong part is refused before anything else
    refuse_unreachable(plan, request)
    plan = replace(plan, run_dir=folder_of(request.output))
    stop = StopSignal()
    task = asyncio.current_task()
    if task is None:
        raise RuntimeError("collect runs as a task of an event loop")
    watchdog = LoopWatchdog("the collection's event loop", plan.recipe.health.loop_lag_s)
    with reaped(), stop.installed(task), watchdog, Progress() as progress, ExitStack() as files:
        try:
            return await _collect(plan, request, stop, progress, files)
        except (Stopped, asyncio.CancelledError):
            if not stop.requested:
                raise
            progress.say("stopped while starting; nothing was collected")
            return stop.exit_code


async def _collect(plan: Plan, request: Request, stop: StopSignal, progress: Progress, files: ExitStack) -> int:
    """Start, collect, give back.

    Raises:
        Stopped: the collection was asked to stop before it began.
        asyncio.CancelledError: it was asked a second time before it began.
    """
    hold(request.output, files)
    output = Output(request.output)
    hosting = await stop.unless_asked(partial(hosting_of, plan, progress), "nemo-gym")
    refuse_own_models(hosting, request)
    plan = settle_rows(plan, hosting.gym if hosting else None)
    source = source_of(plan, request.part)
    found = await stop.unless_asked(output.read, "output")
    output.refuse_others(identity(plan, request))
    rows: Sequence[Row] | None = await stop.unless_asked(partial(early_rows, plan, source, hosting), "rows")
    if rows is not None:
        output.refuse_others(identity(plan, request, rows))
        tasks = tasks_of(plan, request, rows)
        # Not to be left half way: it takes failures out of the file.
        found = await asyncio.to_thread(retried, found, output, request, progress)
        if not missing(tasks, found.done):
            progress.say(f"{request.output} is finished: all {len(tasks)} rollouts are there")
            return summarise(found, tasks, progress)
    limits = plan.recipe.health
    health = Health(limits.check_period_s, limits.unresponsive_after_s, progress.failed)
    open_folder(plan, progress)
    graph = collection_tasks(plan, request, health, stop, hosting, source, rows)
    with reported(progress):
        started: Started = await first_failure(run_graph(graph, progress.startup_event), health.failed(), stop.watch())
    try:
        with reported(progress):
            progress.startup_done(started.timeline)
            rows = collected_rows(request, started.results)
            ours = identity(plan, request, rows, started.results.get("model"))
            output.refuse_others(ours)
            found = await asyncio.to_thread(retried, found, output, request, progress)
            if torn := output.open(ours, found):
                progress.say(f"{request.output}: the last line was torn; its {torn} bytes were cut off")
            files.callback(output.close)
            tasks = tasks_of(plan, request, rows)
            if request.model_url is None:  # the loss of one of several engines is no reason to end
                continued = plan.recipe.policy.generation.on_replica_death
                Fleet(started.results["server"]["remotes"], started.results["client"], health, continued, progress.say)
            run = _Collection(output, found.tally, progress, missing(tasks, found.done), len(tasks))
            try:
                collector = rollouts.collector(plan, started.results, request.part)
                await first_failure(run.collect(collector), health.failed(), stop.watch())
            except (Stopped, asyncio.CancelledError):
                if not stop.requested:
                    raise
                progress.say("stopped; the same command goes on with what is missing")
            output.close()
            run.say_speed(started.results["client"])
    finally:
        await give_back(started, stop)
    code = summarise(found, tasks, progress)
    return stop.exit_code or code


def retried(found: Found, output: Output, request: Request, progress: Progress) -> Found:
    """What the file holds once failures that are to be retried are out of it."""
    if not request.retry_failed or not found.failed:
        return found
    progress.say(f"{len(found.failed)} rollouts that failed are taken again")
    output.drop_failures()
    return output.read()


class _Collection:
    """The rollouts of one process."""

    def __init__(
        self, output: Output, tally: Tally, progress: Progress, todo: Sequence[RolloutTask], total: int
    ) -> None:
        self._output = output
        self._tally = tally
        self._progress = progress
        self._todo = todo
        self._total = total
        self._done = total - len(todo)
        self._tokens = tally.tokens
        self._began = time.monotonic()

    async def collect(self, collector: Collector) -> None:
        """Run them all, and hand them to the disk as they come."""
        every, told = max(1, len(self._todo) // TOLD), self._done
        if self._done:
            self._progress.say(f"{self._done} of {self._total} rollouts are there; {len(self._todo)} are missing")
        async with contextlib.aclosing(collector.collect(self._todo, self._write)) as records:
            async for _ in records:
                self._progress.phase(f"rollouts {self._done}/{self._total}")
                if self._done - told >= every and not self._progress.console.is_terminal:
                    told = self._done
                    self._progress.say(f"rollouts {self._done}/{self._total}")
                if self._output.due():
                    await asyncio.to_thread(self._output.sync)

    def _write(self, task: RolloutTask, rollout: Rollout) -> None:
        result = as_result(task, rollout)
        self._output.append(to_line(result))
        self._tally.add(result)
        self._done += 1

    def say_speed(self, client: Any) -> None:
        """Say how fast it was, in tokens of this process."""
        seconds = time.monotonic() - self._began
        tokens = client.sampled_tokens if isinstance(client, ForeignModel) else self._tally.tokens - self._tokens
        self._progress.say(f"{tokens} tokens in {seconds:.1f} s, {tokens / seconds:.0f} tokens/s")


def summarise(found: Found, tasks: Sequence[RolloutTask], progress: Progress) -> int:
    """Say what all lines add up to; returns the exit code."""
    groups = {group for group, _ in found.done} | {task.group_id for task in tasks}
    for sentence in found.tally.sentences(len(groups)):
        progress.say(sentence)
    if found.tally.failures:
        progress.say("rollouts that failed for good have lines without a reward; --retry-failed takes them again")
    return 1 if found.tally.failures else 0


def hold(path: Path, files: ExitStack) -> None:
    """Keep other collections out of the file until this one ends."""
    if path.is_dir():
        raise ConfigError(f"--output: {path} is a folder; expected a file")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        files.enter_context(held(folder_of(path)))
    except ConfigError as error:
        raise ConfigError(f"--output: {error}, another collection; wait for its end") from None
    except OSError as error:
        raise InfraError(f"--output: cannot write {folder_of(path)}: {error.strerror}") from error


def open_folder(plan: Plan, progress: Progress) -> None:
    """Make the folder beside the output, and write the resolved recipe there."""
    try:
        (plan.run_dir / "logs").mkdir(parents=True, exist_ok=True)
        progress.log_to(plan.run_dir / "logs" / "collect.log")
        text = as_yaml(plan.recipe, plan.recipe_path.parent)
        (plan.run_dir / "recipe.yaml").write_text(text, encoding="utf-8")
    except OSError as error:
        raise InfraError(f"cannot write {plan.run_dir}: {error.strerror}") from error
