"""An engine's side of a sync: only the next version is taken, whole or not at all as far as anybody can see.

It is made in the process that owns the engine's parameters. What it yields is checked: with the offer's checksums,
bytes that differ from the policy's raise before the engine changes anything where all bytes are there at once, and
with the parameter they belong to where they come in buckets.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from gymloop.errors import InfraError
from gymloop.weights.checksum import verified
from gymloop.weights.ipc import CudaDriver, DeviceMemory
from gymloop.weights.layout import Entry
from gymloop.weights.offer import Offer
from gymloop.weights.snapshot import WeightSnapshot
from gymloop.weights.source import Piece, WeightSource, whole_tensors

if TYPE_CHECKING:
    import torch

    from gymloop.weights.broadcast import Channel


class WeightReceiver:
    """Takes one sync after the other.

    Args:
        device: of the engine's parameters, as torch names it.

    Attributes:
        device: as given.
        version: of the last weights that were taken completely; None before the first.
        channel: a broadcast's end here, kept from sync to sync.
    """

    def __init__(self, device: str) -> None:
        self.device = device
        self.version: int | None = None
        self.channel: Channel | None = None
        self._memory: DeviceMemory | None = None

    @contextmanager
    def opened(self, offer: Offer | WeightSnapshot, version: int, rank: int = 1) -> Iterator[WeightSource]:
        """The offered weights; when the context ends without an error they count as taken.

        Args:
            offer: of the policy; a snapshot is taken as it is.
            version: that the driver asked for.
            rank: of this process among the receivers, from 1.

        Raises:
            InfraError: the version is not the next, the policy cannot be reached, or the bytes are not the policy's.
        """
        require_next(self.version, version)
        if isinstance(offer, WeightSnapshot):
            yield offer
            self.version = version
            return
        if offer.version != version:
            raise InfraError(f"weights of version {offer.version} were offered in the sync to version {version}")
        what = f"weight sync to version {version}"
        with offer.carrier.opened(offer, self, rank) as source:
            if offer.checksums is None:
                yield source
            elif offer.carrier.whole:
                for _ in verified(source.pieces(), offer.manifest, offer.checksums, what):
                    pass
                yield source
            else:
                yield _Verified(source, offer.checksums, what)
        self.version = version

    def device_memory(self) -> DeviceMemory:
        """The CUDA driver of this process."""
        if self._memory is None:
            self._memory = CudaDriver()
        return self._memory

    def close(self) -> None:
        """Leave a broadcast's group. Safe to call twice."""
        channel, self.channel = self.channel, None
        if channel is not None:
            channel.close()


def require_next(last: int | None, version: int) -> None:
    """Check a version's number.

    Args:
        last: that was taken; None before the first.
        version: on offer.

    Raises:
        InfraError: it does not follow the last one: a replay, or one was left out.
    """
    if last is not None and version != last + 1:
        raise InfraError(
            f"weights of version {version} were offered to an engine that has version {last}; {last + 1} was expected"
        )


class _Verified:
    """A source whose pieces are compared with the sender's checksums as they go by."""

    def __init__(self, source: WeightSource, expected: tuple[int, ...], what: str) -> None:
        self._source = source
        self._expected = expected
        self._what = what

    @property
    def manifest(self) -> tuple[Entry, ...]:
        return self._source.manifest

    @property
    def nbytes(self) -> int:
        return self._source.nbytes

    def pieces(self) -> Iterator[Piece]:
        return verified(self._source.pieces(), self.manifest, self._expected, self._what)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        return whole_tensors(self.manifest, self.pieces())
