"""Who has the GPU: engine and policy take turns on it where the recipe lets them share it.

    rollouts          engines: weights, KV cache        policy: on the host
    update            engines: asleep                   policy: weights, gradients, moments, activations
    sync              engines: weights                  policy: weights, moments
    next rollouts     engines: weights, KV cache        policy: on the host

The KV cache and the policy are never there together, so the cache may have all that the engine's weights leave. The
weights of both are, for the time of the sync: they go from one to the other without leaving the device. Where nothing
is shared, and on a CPU, nobody moves.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from gymloop.cluster.remote import Remote
from gymloop.config.placement import Placement


@dataclass(frozen=True, slots=True)
class Move:
    """One step of an order: a method of every engine's worker, or of the policy's."""

    who: Literal["engines", "policy"]
    method: str
    args: tuple[Any, ...] = ()


BEFORE_UPDATE = (
    Move("engines", "sleep", (2,)),  # level 2 keeps nothing: the weights that it would bring back are never used
    Move("policy", "to_device"),
)
BEFORE_SYNC = (Move("engines", "wake_up", (("weights",),)),)
AFTER_SYNC = (
    Move("policy", "to_host"),
    Move("engines", "wake_up", (("kv_cache",),)),
)


class Turns:
    """Moves workers on and off the GPU, or nobody.

    Args:
        placement: of the run.
        policy: its worker.
        timeout: seconds for each move.
    """

    def __init__(self, placement: Placement, policy: Remote, timeout: float) -> None:
        self._shared = placement.takes_turns_on_gpu
        self._policy = policy
        self._timeout = timeout

    async def before_update(self, engines: Sequence[Remote]) -> None:
        """The policy's turn begins.

        Raises:
            InfraError: a worker died, or did not move in time.
        """
        await self._take(BEFORE_UPDATE, engines)

    async def before_sync(self, engines: Sequence[Remote]) -> None:
        """Room for the weights that are to arrive; raises as ``before_update``."""
        await self._take(BEFORE_SYNC, engines)

    async def after_sync(self, engines: Sequence[Remote]) -> None:
        """The engines' turn begins; raises as ``before_update``."""
        await self._take(AFTER_SYNC, engines)

    async def _take(self, moves: Sequence[Move], engines: Sequence[Remote]) -> None:
        for move in moves if self._shared else ():
            workers = engines if move.who == "engines" else (self._policy,)
            calls = (worker.call(move.method, *move.args, timeout=self._timeout) for worker in workers)
            await asyncio.gather(*calls)  # bounded: each call by its timeout
