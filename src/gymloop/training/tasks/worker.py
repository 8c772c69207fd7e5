"""A worker in a process of its own: placed, watched until its teardown, and loaded under a deadline that its progress
extends."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

from gymloop.cluster.actor import RayRemote
from gymloop.cluster.health import Health
from gymloop.cluster.placement import Place
from gymloop.cluster.remote import Remote
from gymloop.config.placement import Share
from gymloop.config.plan import ActorThreads, Plan
from gymloop.errors import InfraError
from gymloop.startup import Context

LOAD_LIMIT_S = 86400.0
"""Of one load. Its task's deadline, which progress extends, ends one that is stuck long before."""
POLL_S = 1.0


def worker_process(plan: Plan, health: Health, ctx: Context, share: Share, build: Any, threads: ActorThreads) -> Remote:
    """A worker's process, watched until it is torn down."""
    name = share.worker
    log_file = plan.run_dir / "logs" / f"{name}.log"
    place: Place = ctx.results["placement"].place(share)
    try:
        remote: Remote = RayRemote(
            name,
            build,
            env=threads.env,
            log_file=log_file,
            num_cpus=place.num_cpus,
            num_gpus=place.num_gpus,
            strategy=place.strategy,
            further_env=plan.recipe.cluster.worker_env,
        )
    except ValueError as error:
        raise InfraError(f"could not place the {name} actor: {error}") from error
    ctx.on_teardown(remote.kill)
    health.watch(remote)
    ctx.on_teardown(partial(health.forget, remote))
    return remote


async def loaded(ctx: Context, remote: Remote, *args: Any) -> Any:
    """The worker's ``load``; whatever changes in its ``load_progress`` extends the task's deadline."""
    ctx.progress(f"the {remote.name}'s process")
    loading = asyncio.ensure_future(remote.call("load", *args, timeout=LOAD_LIMIT_S))
    seen = None
    try:
        while not (await asyncio.wait({loading}, timeout=POLL_S))[0]:
            what, done, total = now = await remote.call("load_progress", timeout=LOAD_LIMIT_S)
            if now != seen:
                seen = now
                share = f", {done / 1e6:.0f} of {total / 1e6:.0f} MB" if total else ""
                ctx.progress(f"the {remote.name}: {what}{share}")
        return loading.result()
    finally:
        loading.cancel()
