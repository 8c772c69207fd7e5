"""What rollouts need, whoever wants them: engines with their servers, environments, rows; and the collector on top.

Training adds the policy and its weights to these tasks (``training.start``); a collection is done with them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from gymloop.cluster.health import Health
from gymloop.config.plan import Plan
from gymloop.gym.model_client import Profile
from gymloop.rollouts.collector import Collector
from gymloop.rollouts.flags import patterns_of
from gymloop.startup import Context, Task
from gymloop.training.checkpoint import Checkpoint
from gymloop.training.stop import StopSignal
from gymloop.training.tasks import data, engine, environments, model, nemo_gym

RENDERING = ("environments", "data", "engine", "server")
"""What a task needs that renders the run's rows."""


def tasks(
    plan: Plan,
    checkpoint: Checkpoint | None,
    health: Health,
    stop: StopSignal,
    hosting: nemo_gym.Hosting | None,
    rows: Callable[[Context], Any],
    *,
    syncs: bool,
) -> list[Task[Any]]:
    """The part of the graph that ends in rollouts; the order is that of a sequential start.

    Args:
        plan: of the run.
        checkpoint: whose weights the model is asked to be of; None for the model's own.
        health: watches each part from its start.
        stop: of the run.
        hosting: servers of NeMo Gym's that the run starts.
        rows: the task ``data``; its result has ``rows`` and ``validation``.
        syncs: whether a policy brings the engines its weights before the first rollout.
    """
    task = partial(Task, deadline_s=plan.recipe.startup.deadline_s)
    return [
        task("ray", partial(engine.ray, plan, stop)),
        task("placement", partial(engine.placement, plan), ("ray",)),
        task("server", partial(engine.server, plan, health, syncs), ("ray", "placement")),
        task("model", partial(model.find, plan, checkpoint)),
        task("engine", partial(engine.load, plan), ("server", "model")),
        *environment_tasks(plan, health, hosting),
        task("data", rows, ("environments",)),
        task("lengths", partial(data.lengths, plan), ("data", "engine", "server")),
        task("tools", partial(environments.check_tools, plan), RENDERING),
        task("client", partial(engine.client, plan), ("server",), teardown=lambda client: client.close()),
    ]


def environment_tasks(plan: Plan, health: Health, hosting: nemo_gym.Hosting | None) -> list[Task[Any]]:
    """The environments and the servers they live in; some of these need ``server`` or ``ray``."""
    task = partial(Task, deadline_s=plan.recipe.startup.deadline_s)
    start = partial(environments.start, plan, health, hosting)
    if hosting is None:
        return [task("environments", start)]
    servers = nemo_gym.tasks(plan, health, hosting, task)
    return [*servers, task("environments", start, (nemo_gym.PORTS,))]


def collector(plan: Plan, results: Mapping[str, Any], profile: Profile = "train") -> Collector:
    """Runs rollouts of the recipe, from the results of a graph with these tasks."""
    recipe = plan.recipe
    return Collector(
        sources=environments.agents(plan, results["environments"], results["client"]),
        model=results["client"],
        limits=recipe.rollouts,
        max_turns=recipe.grpo.max_rollout_turns,
        max_tokens=recipe.policy.generation.max_new_tokens,
        profile=profile,
        seed=recipe.grpo.seed,
        patterns=patterns_of(recipe),
        penalties=recipe.reward_penalties,
    )
