"""Which engine replica a rollout is played on: the one with the least to do that is not known to be in trouble.

Pure: time comes as an argument, and nothing here knows of sockets. A replica is

    good ── a connection to it was refused or lost ──> suspect ── SUSPECT_S without another ──> good
     │                                                    │
     └────────────── its process is dead ─────────────────┴──> gone, for good

A dead replica has the least to do of all, since every rollout on it fails at once: until its death is known, suspicion
keeps new rollouts from it. Suspects still serve where there is nobody else.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from gymloop.errors import InfraError

SUSPECT_S = 5.0
"""Longer than a health check takes to find out that a process is dead."""


@dataclass(slots=True)
class _Replica:
    load: int = 0
    suspect_until: float = 0.0
    gone: str | None = None


class Routing:
    """Rollouts in flight by replica.

    Args:
        names: of the replicas, each once; of equals the first is taken first.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._replicas = {name: _Replica() for name in names}

    def take(self, now: float, avoid: Collection[str] = ()) -> str:
        """The replica that a rollout is played on from now until ``give_back``.

        Args:
            now: seconds on the clock of ``suspect``.
            avoid: replicas on which earlier attempts of this rollout failed; taken only where there is no other.

        Raises:
            InfraError: every replica is gone.
        """
        living = self.living
        if not living:
            causes = "; ".join(f"{name}: {replica.gone}" for name, replica in self._replicas.items())
            raise InfraError(f"no engine replica is left: {causes}", cause="disconnect")

        def preference(name: str) -> tuple[bool, bool, int]:
            replica = self._replicas[name]
            return replica.suspect_until > now, name in avoid, replica.load

        taken = min(living, key=preference)
        self._replicas[taken].load += 1
        return taken

    def give_back(self, name: str) -> None:
        """The rollout on this replica has ended."""
        self._replicas[name].load -= 1

    def suspect(self, name: str, now: float) -> None:
        """A connection to this replica was refused or lost."""
        self._replicas[name].suspect_until = now + SUSPECT_S

    def bury(self, name: str, why: str) -> None:
        """This replica is gone, and never taken again."""
        self._replicas[name].gone = why

    @property
    def living(self) -> tuple[str, ...]:
        """Replicas that are not gone."""
        return tuple(name for name, replica in self._replicas.items() if replica.gone is None)

    @property
    def load(self) -> dict[str, int]:
        """Rollouts in flight."""
        return {name: replica.load for name, replica in self._replicas.items()}
