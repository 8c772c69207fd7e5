"""Tasks that find the folders of model and tokenizer, fetched where they are not there yet."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from gymloop.config.plan import Plan
from gymloop.errors import ConfigError
from gymloop.lifeline import tied
from gymloop.models.identity import model_identity
from gymloop.models.resolve import resolve_model
from gymloop.startup import Context
from gymloop.training.checkpoint import Checkpoint
from gymloop.training.saving import check_model

SAID_BYTES = 8192


@dataclass(frozen=True, slots=True)
class Folders:
    """Where model and tokenizer lie on this machine, mostly the same folder; and what the model is."""

    model: Path
    tokenizer: Path
    identity: Mapping[str, str]


async def find(plan: Plan, checkpoint: Checkpoint | None, ctx: Context) -> Folders:
    """Find the folders of model and tokenizer, and refuse a checkpoint of another model."""
    policy = plan.recipe.policy
    model = await _fetched(policy.model_name, "policy.model_name", ctx)
    identity = {"name": policy.model_name, **await ctx.in_thread(model_identity, model)}
    if checkpoint is not None:
        check_model(checkpoint, identity)
    tokenizer = (
        model if policy.tokenizer.name is None else await _fetched(policy.tokenizer.name, "policy.tokenizer.name", ctx)
    )
    return Folders(model, tokenizer, identity)


async def _fetched(name: str, key: str, ctx: Context) -> Path:
    """Find the folder of the model that ``key`` names.

    In a process of its own: a download or conversion can then be ended at once.
    """
    if await ctx.in_thread(os.path.isdir, name):
        return await ctx.in_thread(partial(resolve_model, name, key=key))
    ctx.progress(f"model {name}")
    process = await asyncio.create_subprocess_exec(
        *tied([sys.executable, "-m", "gymloop.cli.main", "models", "fetch", name]),
        stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        # bounded: by the task's deadline; cancelling the task kills the process
        output, said = await asyncio.gather(_read(process.stdout), _read(process.stderr, ctx, name))
        await process.wait()  # bounded: by the task's deadline; cancelling the task kills the process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()  # bounded: it was killed
    if process.returncode:
        lines = said.strip().splitlines()
        why = lines[-1].removeprefix("gymloop: ") if lines else f"model {name} could not be fetched"
        raise ConfigError(f"{key}: {why}")
    return Path(output.strip().splitlines()[-1])


async def _read(stream: asyncio.StreamReader | None, ctx: Context | None = None, name: str = "") -> str:
    """The end of what a process writes; with ``ctx`` each piece of it extends the task's deadline."""
    said = b""
    while stream is not None and (piece := await stream.read(4096)):
        said = (said + piece)[-SAID_BYTES:]
        if ctx is not None and (words := said.decode(errors="replace").split()):
            ctx.progress(f"model {name}: {' '.join(words[-8:])}")
    return said.decode(errors="replace")
