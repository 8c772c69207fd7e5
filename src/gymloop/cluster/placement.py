"""Reserves what a run needs of the cluster, all of it or nothing, before any worker starts; gives it back at the end.

Ray would let an actor that does not fit wait for good. Here what the cluster does not have is refused at once, what
others hold is waited for within a bound, and both say what is needed and what is there. A cluster that grows on demand
must have grown before.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gymloop.cluster.supply import Supply, impossible, scattered, short
from gymloop.config.placement import Placement, Share
from gymloop.errors import InfraError

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup

POLL_S = 0.5
_SETTLE_S = 5.0
"""What is free is known a moment late: a reservation that should fit is given so long, even where nobody waits."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where an actor goes and what it holds there, as Ray takes it."""

    num_cpus: float = 0
    num_gpus: float = 0
    strategy: Any = None


class Reservation:
    """The placement groups of one run; one for each node, since only those are kept together."""

    def __init__(self, placement: Placement) -> None:
        self._placement = placement
        self._lock = threading.Lock()
        self._groups: list[PlacementGroup] = []
        self._released = False

    def add(self, group: PlacementGroup) -> None:
        """Hold a group, the next node's.

        Raises:
            InfraError: everything was released meanwhile, and so is this.
        """
        with self._lock:
            if not self._released:
                self._groups.append(group)
                return
        _remove(group)
        raise InfraError("the reservation was released while it was made")

    def place(self, share: Share) -> Place:
        """Where the worker goes that has this share."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        node = self._placement.nodes[share.bundle]
        strategy = PlacementGroupSchedulingStrategy(
            placement_group=self._groups[node],
            placement_group_bundle_index=self._placement.nodes[: share.bundle].count(node),
        )
        if self._placement.resource == "GPU":
            return Place(num_gpus=share.amount, strategy=strategy)
        return Place(num_cpus=share.amount, strategy=strategy)

    def release(self) -> None:
        """Give everything back; workers that still live in it are killed. Safe to call twice, and from any thread."""
        with self._lock:
            self._released = True
            groups, self._groups = self._groups, []
        for group in groups:
            _remove(group)


def reserve(
    placement: Placement, timeout_s: float, progress: Callable[[str], object], undo: Callable[[Reservation], object]
) -> Reservation:
    """Reserve the placement's bundles. Blocks.

    Args:
        placement: what is needed.
        timeout_s: how long others are waited for that hold some of it.
        progress: told what is waited for, whenever that changes.
        undo: gets the reservation as soon as there is something to release.

    Raises:
        InfraError: the cluster has not enough, or it did not become free in time; nothing is held.
    """
    deadline = time.monotonic() + timeout_s
    while True:  # bounded: by the deadline
        supply = supply_of(placement.resource)
        if (why := impossible(placement, supply)) is not None:
            raise InfraError(why)
        if (why := short(placement, supply)) is None:
            break
        if time.monotonic() >= deadline:
            raise InfraError(f"{why}, and none became free within {timeout_s:g} s (cluster.placement_timeout_s)")
        progress(why)
        time.sleep(POLL_S)
    reservation = Reservation(placement)
    undo(reservation)
    try:
        groups = [_group(placement, node, reservation) for node in sorted(set(placement.nodes))]
        for group in groups:
            if not group.wait(max(deadline - time.monotonic(), _SETTLE_S)):
                raise InfraError(scattered(placement, supply_of(placement.resource)))
    except BaseException:
        reservation.release()
        raise
    return reservation


def supply_of(resource: str) -> Supply:
    """What the connected cluster has now."""
    import ray

    living = [node for node in ray.nodes() if node["Alive"]]
    total = {node["NodeManagerHostname"]: float(node["Resources"].get(resource, 0)) for node in living}
    if len(total) < len(living):  # several nodes of one machine, as in tests
        total = {node["NodeID"][:8]: float(node["Resources"].get(resource, 0)) for node in living}
    return Supply(total, float(ray.available_resources().get(resource, 0)))


def _group(placement: Placement, node: int, reservation: Reservation) -> PlacementGroup:
    from ray.util.placement_group import placement_group

    bundles = [
        {placement.resource: float(units)}
        for on, units in zip(placement.nodes, placement.bundles, strict=True)
        if on == node
    ]
    group = placement_group(bundles, strategy="STRICT_PACK")
    reservation.add(group)
    return group


def _remove(group: PlacementGroup) -> None:
    import ray
    from ray.util.placement_group import remove_placement_group

    if ray.is_initialized():  # else it went with the connection
        remove_placement_group(group)
