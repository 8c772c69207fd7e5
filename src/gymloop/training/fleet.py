"""The engine replicas of a run. Rollouts are routed to exactly those that weights reach.

    serving ── its process dies or hangs, or a sync finds it dead ──> lost: no rollouts, no weights, killed
       │
       └── the last one, or ``on_replica_death: stop`` ──> the run ends under its name

A lost replica's rollouts are repeated on the others (``gym.replicas``), and a sync that it cut short is repeated with
the others, under the same version: no token is sampled between the two.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Literal

from gymloop.cluster.health import Health
from gymloop.cluster.remote import Remote
from gymloop.errors import GymloopError, InfraError
from gymloop.gym.replicas import Replicas
from gymloop.training.sync import DEFAULTS, SyncSettings, sync_weights

CHECK_S = 10.0
"""A replica that has not answered by then is not known to be dead; ``Health`` has more patience."""


class Fleet:
    """The replicas that are left.

    Args:
        remotes: their workers, at least one; their names are those of ``models``.
        models: their clients.
        health: watches the workers already.
        on_death: what the loss of one of several means.
        say: where a loss is told.
    """

    def __init__(
        self,
        remotes: Sequence[Remote],
        models: Replicas,
        health: Health,
        on_death: Literal["continue", "stop"],
        say: Callable[[str], object],
    ) -> None:
        self.models = models
        self._remotes = list(remotes)
        self._asked_for = len(remotes)
        self._health = health
        self._on_death = on_death
        self._say = say
        for remote in remotes:
            health.excuse(remote, lambda error, remote=remote: self._lost(remote, error))  # type: ignore[misc]

    @property
    def engines(self) -> tuple[Remote, ...]:
        """The workers of the replicas that serve."""
        return tuple(self._remotes)

    async def sync(
        self, policy: Remote, version: int, timeout: float, settings: SyncSettings = DEFAULTS
    ) -> dict[str, float]:
        """Bring all replicas that are left to this version; see ``sync_weights``.

        Returns:
            The sync's metrics.

        Raises:
            InfraError: the policy failed, the last replica did, or one whose loss ends the run.
            ConfigError: the weights do not fit the engines' model.
        """
        while True:  # bounded: every turn but the last loses a replica
            engines = self.engines
            try:
                return await sync_weights(policy, engines, version, timeout, settings)
            except InfraError:
                await self._bury_the_dead()
                if len(self.engines) == len(engines):
                    raise

    async def _bury_the_dead(self) -> None:
        """Find out which replicas are dead without waiting for the next look at them."""
        engines = self.engines
        checks = [asyncio.ensure_future(remote.check()) for remote in engines]
        done, late = await asyncio.wait(checks, timeout=CHECK_S)
        for check in late:
            check.cancel()
        for remote, check in zip(engines, checks, strict=True):
            error = check.exception() if check in done else None
            if isinstance(error, GymloopError) and (failure := self._lost(remote, error)) is not None:
                raise failure

    def _lost(self, remote: Remote, error: GymloopError) -> GymloopError | None:
        """Go on without the replica, or say what ends the run."""
        if remote not in self._remotes:
            return None
        if self._on_death == "stop" or len(self._remotes) == 1:
            lost_before = self._asked_for > len(self._remotes)
            last = f"; it was the last of {self._asked_for} engine replicas" if lost_before else ""
            return InfraError(f"{error}{last}", cause=error.cause)
        self._remotes.remove(remote)
        self._health.forget(remote)
        remote.kill()
        self.models.bury(remote.name, str(error))
        self._say(f"{error}\nthe run goes on with {len(self._remotes)} of {self._asked_for} engine replicas")
        return None
