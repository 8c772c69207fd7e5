"""What a training run starts, and what waits for what.

ray ──> placement ──> server ──────────────┐
            │                              ├──> engine ──┐
            │         model ───────────────┤             ├──> weights
            └──────────────────────────────┴──> policy ──┘
environments ──> data          (an environment needs the server's URL at most, which exists before any model loads)
gym ──> gym.NAME, for each server of NeMo Gym's that the run starts; environments need only the ports that ``gym`` holds
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from gymloop.cluster.health import Health
from gymloop.config.plan import Plan
from gymloop.observe.progress import Progress
from gymloop.observe.sinks import Sink
from gymloop.observe.watchdog import LoopWatchdog
from gymloop.startup import Started, Task, run_graph
from gymloop.training.checkpoint import Checkpoint, CheckpointStore
from gymloop.training.first_tokens import FirstTokens
from gymloop.training.fleet import Fleet
from gymloop.training.run import Run, Saves
from gymloop.training.stop import StopSignal
from gymloop.training.tasks import data, nemo_gym, policy, rollouts
from gymloop.training.transcripts import Transcripts
from gymloop.training.turns import Turns


async def start_run(
    plan: Plan,
    checkpoint: Checkpoint | None,
    store: CheckpointStore,
    transcripts: Transcripts,
    sinks: list[Sink],
    progress: Progress,
    stop: StopSignal,
    health: Health,
    watchdog: LoopWatchdog,
    hosting: nemo_gym.Hosting | None = None,
    *,
    sequential: bool,
    began: float,
) -> tuple[Started, Run]:
    """Start everything at once and hand it over as a Run.

    Args:
        health: watches each part from its start.
        watchdog: of the running loop.
        hosting: servers of NeMo Gym's that the run starts.
        began: when the run was asked for, ``time.monotonic`` seconds.

    Raises:
        StartupError: a task failed; whatever had started was torn down.
    """
    started = await run_graph(
        startup_tasks(plan, checkpoint, health, stop, hosting),
        progress.startup_event,
        max_parallel=1 if sequential else None,
    )
    progress.startup_done(started.timeline)
    (plan.run_dir / "startup.json").write_text(started.timeline.to_json(), encoding="utf-8")
    results = started.results
    recipe = plan.recipe
    collector = rollouts.collector(plan, results)
    rows = results["data"]["validation"]
    first_tokens = FirstTokens(began, progress.say)
    results["client"].on_sampled(first_tokens.seen)
    run = Run(
        plan=plan,
        health=health,
        watchdog=watchdog,
        fleet=Fleet(
            results["server"]["remotes"],
            results["client"],
            health,
            recipe.policy.generation.on_replica_death,
            progress.say,
        ),
        policy=results["policy"],
        turns=Turns(plan.placement, results["policy"], recipe.policy.call_timeout_s),
        collector=collector,
        validator=replace(collector, profile="validation") if rows else None,
        validation_rows=rows,
        loader=results["data"]["loader"],
        demonstrations=results["demonstrations"],
        saves=Saves(store, results["model"].identity, None if checkpoint is None else checkpoint.step),
        transcripts=transcripts,
        sinks=sinks,
        progress=progress,
        stop=stop,
        startup_metrics=started.timeline.metrics(),
        began=began,
        first_tokens=first_tokens,
        step=0 if checkpoint is None else int(checkpoint.state["step"]),
        version=results["weights"],
        skipped_in_a_row=0 if checkpoint is None else int(checkpoint.state["skipped_in_a_row"]),
    )
    return started, run


def startup_tasks(
    plan: Plan,
    checkpoint: Checkpoint | None,
    health: Health,
    stop: StopSignal,
    hosting: nemo_gym.Hosting | None = None,
) -> list[Task[Any]]:
    """The graph of a training run; the order is that of a sequential start."""
    task = partial(Task, deadline_s=plan.recipe.startup.deadline_s)
    return [
        *rollouts.tasks(plan, checkpoint, health, stop, hosting, partial(data.rows, plan, checkpoint), syncs=True),
        task("policy", partial(policy.load, plan, checkpoint, health), ("placement", "model")),
        task("demonstrations", partial(data.demonstrations, plan, checkpoint), rollouts.RENDERING),
        task("weights", partial(policy.first_sync, plan, checkpoint), ("server", "engine", "policy")),
    ]
