"""Tasks of a collection: the rollouts of a recipe without its training, with its engine or with a model elsewhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from gymloop.cluster.health import Health
from gymloop.config.plan import Plan, RowSource, SamplingProfile
from gymloop.gym.contract import Row
from gymloop.gym.foreign import ForeignModel
from gymloop.gym.sources import load_source_rows
from gymloop.startup import Context, Task
from gymloop.training.collection import Request, sampling_of
from gymloop.training.stop import StopSignal
from gymloop.training.tasks import engine, nemo_gym, rollouts

_ROWS = {"train": "rows", "validation": "validation"}
"""What the task ``data`` calls the rows of each part."""


def collection_tasks(
    plan: Plan,
    request: Request,
    health: Health,
    stop: StopSignal,
    hosting: nemo_gym.Hosting | None,
    source: RowSource,
    rows: Sequence[Row] | None,
) -> list[Task[Any]]:
    """Everything that the rollouts of a collection need.

    Args:
        plan: of the recipe.
        request: what is collected.
        health: watches each part from its start.
        stop: of the collection.
        hosting: servers of NeMo Gym's that it starts.
        source: where the rows come from.
        rows: all of them; None reads them when the environments are there.
    """
    read = partial(_rows, plan, request, source, rows)
    if request.model_url is None:
        return rollouts.tasks(plan, None, health, stop, hosting, read, syncs=False)
    task = partial(Task, deadline_s=plan.recipe.startup.deadline_s)
    joins = hosting is not None and any(hosting.gym.needs_ray(name) for name in hosting.gym.blocks.servers)
    ray = [task("ray", partial(engine.ray, plan, stop))] if joins else []
    return [
        *ray,
        *rollouts.environment_tasks(plan, health, hosting),
        task("data", read, ("environments",)),
        task("client", partial(_client, plan, request), teardown=lambda client: client.close()),
    ]


def collected_rows(request: Request, results: Mapping[str, Any]) -> Sequence[Row]:
    """The rows, from the results of the graph."""
    rows: Sequence[Row] = results["data"][_ROWS[request.part]]
    return rows


async def _rows(
    plan: Plan, request: Request, source: RowSource, rows: Sequence[Row] | None, ctx: Context
) -> dict[str, Sequence[Row]]:
    if rows is None:
        ctx.progress(f"the rows of data.{request.part}")
        rows = await ctx.in_thread(load_source_rows, source, ctx.results["environments"], plan.recipe_path.parent)
    return {"rows": (), "validation": (), _ROWS[request.part]: rows}


async def _client(plan: Plan, request: Request, ctx: Context) -> ForeignModel:
    """A client of the server at ``--model-url``, once that has answered."""
    limits = plan.recipe.rollouts
    client = ForeignModel(
        str(request.model_url),
        request.model or plan.recipe.policy.model_name,
        sampling=_fields(sampling_of(plan, request)),
        api_key=request.api_key,
        max_concurrency=limits.max_concurrency,
        call_timeout_s=limits.call_timeout_s,
        ready_timeout_s=plan.recipe.startup.deadline_s,
    )
    await client.__aenter__()
    ctx.on_teardown(client.close)
    ctx.progress(f"an answer of {client.url}")
    await client.ready()
    return client


def _fields(sampling: SamplingProfile) -> dict[str, Any]:
    """A profile as fields of a chat request; ``top_k`` is no field of OpenAI's and goes along only where it limits."""
    fields: dict[str, Any] = {"temperature": sampling.temperature, "top_p": sampling.top_p}
    return fields if sampling.top_k is None else fields | {"top_k": sampling.top_k}
