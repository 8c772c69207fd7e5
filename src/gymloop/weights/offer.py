"""What the policy hands to every engine at a sync: small and picklable, enough to reach the weights and to check them.

A carrier is one transport's way to the bytes. It is made by the policy's ``WeightSender``, travels inside the offer
and is opened in the process that owns the engine's parameters, which may be a child of the engine's.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from gymloop.errors import InfraError
from gymloop.weights.layout import Entry
from gymloop.weights.transport import Transport

if TYPE_CHECKING:
    from gymloop.weights.receiver import WeightReceiver
    from gymloop.weights.source import WeightSource

MAX_REASON = 300


class SyncAborted(InfraError):
    """A sync ended because another process of it did, or stalled: a consequence, whose cause has to be sought there."""


@dataclass(frozen=True, slots=True)
class SyncRequest:
    """What the driver asks the policy for.

    Attributes:
        transport: how the weights go.
        version: their number.
        receivers: processes that will take them, each once.
        bucket_bytes: of one bucket, where the transport has buckets; it holds two.
        checksums: whether every parameter's checksum is part of the offer.
        stall_s: seconds without progress after which a party gives up on the others.
        address: under which the engines reach the policy's sockets.
        device: of every engine's parameters, ``cpu`` or ``cuda``.
    """

    transport: Transport
    version: int
    receivers: int
    bucket_bytes: int
    checksums: bool
    stall_s: float
    address: str = "127.0.0.1"
    device: str = "cpu"


class Carrier(Protocol):
    """One transport's way from an offer to the bytes."""

    whole: bool
    """True where all bytes are there at once, so that they can be checked before the engine changes anything."""
    light: bool
    """True where it holds only the way to the bytes; one that holds the bytes themselves is not handed on further."""

    def opened(self, offer: Offer, receiver: WeightReceiver, rank: int) -> AbstractContextManager[WeightSource]:
        """Reach the bytes.

        Args:
            offer: this carrier's.
            receiver: of this process; what is kept between two syncs is kept there.
            rank: of this process among the receivers, from 1.

        Raises:
            SyncAborted: the policy or another engine died or stalled.
            InfraError: this process cannot reach them.
        """


@dataclass(frozen=True, slots=True)
class Offer:
    """The weights of one version, to be taken once by each engine.

    Attributes:
        version: number of the weights.
        manifest: what they are.
        nbytes: of the flat space.
        checksums: one per entry of the manifest; None where they were not asked for.
        stall_s: seconds without progress after which a receiver gives up.
        carrier: the way to the bytes.
    """

    version: int
    manifest: tuple[Entry, ...]
    nbytes: int
    checksums: tuple[int, ...] | None
    stall_s: float
    carrier: Carrier
