"""What a cluster has, what of that is free, and whether a placement fits: pure, so every sentence of it is tested."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gymloop.config.placement import Placement


@dataclass(frozen=True, slots=True)
class Supply:
    """One resource of a cluster at one moment.

    Attributes:
        total: units of each living node, by a name that people know.
        free: units that nobody holds, on all nodes together.
    """

    total: Mapping[str, float]
    free: float

    def told(self, resource: str) -> str:
        """The supply as errors say it."""
        total = sum(self.total.values())
        where = f" on {len(self.total)} nodes ({_by_node(self.total)})" if len(self.total) > 1 else ""
        return f"the cluster has {total:g} {resource}{'' if total == 1 else 's'}{where}, {self.free:g} free"


def impossible(placement: Placement, supply: Supply) -> str | None:
    """Why the placement can never fit, however long one waits; None where it can."""
    told = f"{placement.needs()}; {supply.told(placement.resource)}"
    if placement.demand > sum(supply.total.values()):
        return told
    # The largest demand on the largest node, and so on: a node may carry several of them where it is large enough.
    nodes = sorted(supply.total.values())
    for units in sorted(placement.by_node, reverse=True):
        if nodes[-1] < units:
            return f"{told}, but no node has {units} together"
        nodes[-1] -= units
        nodes.sort()
    return None


def short(placement: Placement, supply: Supply) -> str | None:
    """Why the placement does not fit now; None where enough is free."""
    if placement.demand <= supply.free:
        return None
    return f"{placement.needs()}; {supply.told(placement.resource)}"


def scattered(placement: Placement, supply: Supply) -> str:
    """Why it does not fit although enough is free."""
    together = " and ".join(str(units) for units in placement.by_node)
    nodes = "on one node" if len(placement.by_node) == 1 else "on as many nodes"
    return f"{placement.needs()}; {supply.told(placement.resource)}, but not {together} together {nodes}"


def _by_node(total: Mapping[str, float]) -> str:
    listed = [f"{name} {units:g}" for name, units in total.items()]
    return ", ".join(listed if len(listed) <= 8 else [*listed[:8], f"{len(listed) - 8} more"])
