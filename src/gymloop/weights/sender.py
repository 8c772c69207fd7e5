"""The policy's side of a sync: offer the weights, keep them as they are until every engine is done, let go.

One offer is out at a time. Between ``offer`` and ``release`` the parameters must not change: transports may read them
until then.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Protocol

from gymloop.weights.broadcast import BroadcastSender
from gymloop.weights.checksum import checksums
from gymloop.weights.copy_limit import copy_rate
from gymloop.weights.ipc import CudaDriver, IpcSender
from gymloop.weights.offer import Offer, SyncRequest
from gymloop.weights.shared import SharedSender
from gymloop.weights.stored import StoredSender
from gymloop.weights.transport import Transport

if TYPE_CHECKING:
    import torch


class TransportSender(Protocol):
    """One transport's sender; it may keep memory and connections from sync to sync."""

    def offer(
        self, named: list[tuple[str, torch.Tensor]], request: SyncRequest, checksums: tuple[int, ...] | None
    ) -> Offer:
        """Make the weights reachable; see ``WeightSender.offer``."""

    def release(self, complete: bool, timeout: float) -> None:
        """Every engine is done, or the sync was given up; see ``WeightSender.release``."""

    def close(self) -> None:
        """Let go of everything. Safe to call twice."""


MAKERS: dict[Transport, Callable[[], TransportSender]] = {
    "shared_memory": SharedSender,
    "object_store": StoredSender,
    "cuda_ipc": lambda: IpcSender(CudaDriver()),
    "broadcast": BroadcastSender,
}


class WeightSender:
    """Sends the parameters of one model, by whichever transport a request names.

    Args:
        parameters: gives what the engines are to have, (name, tensor), tied ones once: ``models.tensors``'
            ``checkpoint_tensors``; asked at every sync.
        device: where they are.
    """

    def __init__(self, parameters: Callable[[], Iterable[tuple[str, torch.Tensor]]], device: str) -> None:
        self._parameters = parameters
        self._device = device
        self._transport: Transport | None = None
        self._sender: TransportSender | None = None
        self._copy_rate: float | None = None
        self._nbytes = 0

    def offer(self, request: SyncRequest) -> Offer:
        """Make the present weights reachable for engines.

        Raises:
            InfraError: there is no memory or socket for it.
        """
        if self._sender is None or self._transport != request.transport:
            self.close()
            self._sender, self._transport = MAKERS[request.transport](), request.transport
        named = list(self._parameters())
        sums = checksums(named) if request.checksums else None
        offer = self._sender.offer(named, request, sums)
        self._nbytes = sum(entry.nbytes for entry in offer.manifest)
        return offer

    def release(self, complete: bool, timeout: float = 5.0) -> dict[str, float]:
        """The sync is over: the parameters may change again.

        Args:
            complete: whether every engine has the weights.
            timeout: seconds to wait for what is still being sent.

        Returns:
            ``bytes`` of the parameters, and ``copy_bytes_per_s`` of this process's memory (measured once).

        Raises:
            SyncAborted: ``complete`` is said of weights that were not all sent.
        """
        if self._sender is not None:
            self._sender.release(complete, timeout)
        if self._copy_rate is None and complete:
            self._copy_rate = copy_rate(self._device)
        return {"bytes": float(self._nbytes), "copy_bytes_per_s": self._copy_rate or math.nan}

    def close(self) -> None:
        """Let go of memory and connections. Safe to call twice."""
        if self._sender is not None:
            self._sender.close()
        self._sender = self._transport = None
