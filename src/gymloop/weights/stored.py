"""Ray's object store: the snapshot is the offer, and Ray brings it to every node that asks for it.

On the policy's own node engines map it without a copy; it costs one copy more than ``shared`` and reaches other hosts
without sockets of ours.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from gymloop.weights.offer import Offer, SyncRequest
from gymloop.weights.snapshot import WeightSnapshot, take

if TYPE_CHECKING:
    import torch

    from gymloop.weights.receiver import WeightReceiver


@dataclass(frozen=True, slots=True)
class StoredCarrier:
    """The bytes themselves, uint8: the store keeps them outside the pickle and maps them read-only."""

    buffer: np.ndarray
    whole = True
    light = False

    @contextmanager
    def opened(self, offer: Offer, receiver: WeightReceiver, rank: int) -> Iterator[WeightSnapshot]:
        """The bytes are here already; see ``Carrier.opened``."""
        yield WeightSnapshot(offer.manifest, self.buffer)


class StoredSender:
    """The policy's side; it keeps nothing, the store frees the snapshot with its last reference."""

    def offer(
        self, named: list[tuple[str, torch.Tensor]], request: SyncRequest, checksums: tuple[int, ...] | None
    ) -> Offer:
        """Copy the parameters into a new buffer."""
        snapshot = take(named)
        carrier = StoredCarrier(snapshot.buffer)
        return Offer(request.version, snapshot.manifest, snapshot.nbytes, checksums, request.stall_s, carrier)

    def release(self, complete: bool, timeout: float) -> None:
        """Nothing is held."""

    def close(self) -> None:
        """Nothing is held."""
