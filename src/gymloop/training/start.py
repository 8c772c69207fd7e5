"""What a training run starts, and what waits for what.

ray ──> server ──────────────┐
  │                          ├──> engine ──┐
  │     model ───────────────┤             ├──> weights
  └──────────────────────────┴──> policy ──┘
environments ──> data          (an environment needs the server's URL at most, which exists before any model loads)
"""

from __future__ import annotations

from functools import partial
from typing import Any

from gymloop.cluster.health import Health
from gymloop.config.plan import Plan
from gymloop.observe.progress import Progress
from gymloop.observe.sinks import Sink
from gymloop.observe.watchdog import LoopWatchdog
from gymloop.rollouts.collector import Collector
from gymloop.startup import Started, Task, run_graph
from gymloop.training.checkpoint import Checkpoint, CheckpointStore
from gymloop.training.run import Run, Saves
from gymloop.training.stop import StopSignal
from gymloop.training.tasks import data, engine, environments, model, policy
from gymloop.training.transcripts import Transcripts


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
    *,
    sequential: bool,
    began: float,
) -> tuple[Started, Run]:
    """Start everything at once and hand it over as a Run.

    Args:
        health: watches each part from its start.
        watchdog: of the running loop.
        began: when the run was asked for, ``time.monotonic`` seconds.

    Raises:
        StartupError: a task failed; whatever had started was torn down.
    """
    started = await run_graph(
        startup_tasks(plan, checkpoint, health, stop), progress.startup_event, max_parallel=1 if sequential else None
    )
    progress.startup_done(started.timeline)
    (plan.run_dir / "startup.json").write_text(started.timeline.to_json(), encoding="utf-8")
    results = started.results
    recipe = plan.recipe
    collector = Collector(
        sources=environments.agents(plan, results["environments"], results["client"]),
        model=results["client"],
        limits=recipe.rollouts,
        max_turns=recipe.grpo.max_rollout_turns,
        max_tokens=recipe.policy.generation.max_new_tokens,
        seed=recipe.grpo.seed,
    )
    rows = results["data"]["validation"]
    validator = Collector(
        sources=collector.sources,
        model=collector.model,
        limits=collector.limits,
        max_turns=collector.max_turns,
        max_tokens=collector.max_tokens,
        profile="validation",
        seed=collector.seed,
    )
    run = Run(
        plan=plan,
        health=health,
        watchdog=watchdog,
        engine=results["server"]["remote"],
        policy=results["policy"],
        collector=collector,
        validator=validator if rows else None,
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
        step=0 if checkpoint is None else int(checkpoint.state["step"]),
        version=results["weights"],
        skipped_in_a_row=0 if checkpoint is None else int(checkpoint.state["skipped_in_a_row"]),
    )
    return started, run


def startup_tasks(plan: Plan, checkpoint: Checkpoint | None, health: Health, stop: StopSignal) -> list[Task[Any]]:
    """The graph of a training run; the order is that of a sequential start."""
    deadline = plan.recipe.startup.deadline_s
    task = partial(Task, deadline_s=deadline)
    rendering = ("environments", "data", "engine", "server")
    return [
        task("ray", partial(engine.ray, plan, stop)),
        task("server", partial(engine.server, plan, health), ("ray",)),
        task("model", partial(model.find, plan, checkpoint)),
        task("engine", partial(engine.load, plan), ("server", "model")),
        task("policy", partial(policy.load, plan, checkpoint, health), ("ray", "model")),
        task("environments", partial(environments.start, plan, health)),
        task("data", partial(data.rows, plan, checkpoint), ("environments",)),
        task("lengths", partial(data.lengths, plan), ("data", "engine", "server")),
        task("tools", partial(environments.check_tools, plan), rendering),
        task("client", partial(engine.client, plan), ("server",), teardown=lambda client: client.close()),
        task("demonstrations", partial(data.demonstrations, plan, checkpoint), rendering),
        task("weights", partial(policy.first_sync, plan, checkpoint), ("server", "engine", "policy")),
    ]
