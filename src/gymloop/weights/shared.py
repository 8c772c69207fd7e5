"""Shared memory on one host: the policy copies its weights once, every engine maps that copy.

The memory is anonymous (``memfd_create``): it has no name that could stay in ``/dev/shm``, needs no space there, and
the kernel frees it with the last process that holds it, however that one ends. Engines open it through the policy's
``/proc/<pid>/fd`` and check that what they opened is what was offered.

The buffer is written again for the next version only if every engine has said that it is done with this one.
Otherwise it is dropped and a new one made: an engine that was stuck and wakes up later reads old weights, never a
mixture.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from gymloop.errors import InfraError
from gymloop.weights.layout import lay_out, total_bytes
from gymloop.weights.offer import Offer, SyncAborted, SyncRequest
from gymloop.weights.snapshot import WeightSnapshot, fill
from gymloop.weights.source import WeightSource

if TYPE_CHECKING:
    import torch

    from gymloop.weights.receiver import WeightReceiver


@dataclass(frozen=True, slots=True)
class SharedCarrier:
    """A file descriptor of the policy's process.

    Attributes:
        pid: of the policy.
        fd: in that process.
        inode: of the memory behind it: pids and descriptors are used again.
    """

    pid: int
    fd: int
    inode: int
    whole = True
    light = True

    @contextmanager
    def opened(self, offer: Offer, receiver: WeightReceiver, rank: int) -> Iterator[WeightSnapshot]:
        """Map the policy's copy, read-only; see ``Carrier.opened``."""
        gone = f"process {self.pid} of the policy, which offered its weights in shared memory, is gone"
        try:
            fd = os.open(f"/proc/{self.pid}/fd/{self.fd}", os.O_RDONLY)
        except (FileNotFoundError, ProcessLookupError) as error:
            raise SyncAborted(gone) from error
        except OSError as error:
            raise InfraError(f"the shared memory of process {self.pid} cannot be opened: {error}") from error
        try:
            if os.fstat(fd).st_ino != self.inode:
                raise SyncAborted(gone)
            buffer = np.empty(0, dtype=np.uint8)
            if offer.nbytes:
                memory = mmap.mmap(fd, offer.nbytes, mmap.MAP_SHARED, mmap.PROT_READ)
                buffer = np.frombuffer(memory, dtype=np.uint8)
        finally:
            os.close(fd)
        # Unmapped when the last view of it goes: whoever reads a snapshot holds its buffer.
        yield WeightSnapshot(offer.manifest, buffer)


class SharedSender:
    """The policy's side: one buffer, kept from sync to sync."""

    def __init__(self) -> None:
        self._fd: int | None = None
        self._memory: mmap.mmap | None = None

    def offer(
        self, named: list[tuple[str, torch.Tensor]], request: SyncRequest, checksums: tuple[int, ...] | None
    ) -> Offer:
        """Copy the parameters into the buffer.

        Raises:
            InfraError: the machine has no memory for it.
        """
        manifest = lay_out(named)
        nbytes = total_bytes(manifest)
        fill(self._reserved(nbytes), named, manifest)
        return Offer(request.version, manifest, nbytes, checksums, request.stall_s, self._carrier())

    def copied(self, source: WeightSource, version: int, stall_s: float) -> Offer:
        """Offer a copy of weights that this process received, to other processes of this host.

        Args:
            source: read to its end, once.
            version: number of the weights.
            stall_s: see ``Offer``.

        Raises:
            InfraError: the machine has no memory for it, or the source ended early.
        """
        import torch

        buffer = self._reserved(source.nbytes)
        for piece in source.pieces():
            data = piece.values.detach().cpu().contiguous().view(torch.uint8).numpy()
            begin = piece.entry.offset + piece.first_byte
            buffer[begin : begin + data.nbytes] = data
        return Offer(version, source.manifest, source.nbytes, None, stall_s, self._carrier())

    def release(self, complete: bool, timeout: float) -> None:
        """The sync is over; where not every engine has taken it, one may still read the buffer: drop it."""
        if not complete:
            self.close()

    def close(self) -> None:
        """Let go of the buffer. Safe to call twice."""
        self._memory = None
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _reserved(self, nbytes: int) -> np.ndarray:
        """The buffer, uint8 [nbytes]; the one before where it has the size."""
        if self._memory is None or len(self._memory) != nbytes:
            self._renew(nbytes)
        return np.empty(0, dtype=np.uint8) if self._memory is None else np.frombuffer(self._memory, dtype=np.uint8)

    def _carrier(self) -> SharedCarrier:
        if self._fd is None:
            raise InfraError("the shared memory was closed")
        return SharedCarrier(os.getpid(), self._fd, os.fstat(self._fd).st_ino)

    def _renew(self, nbytes: int) -> None:
        self.close()
        self._fd = os.memfd_create("gymloop-weights", os.MFD_CLOEXEC)
        if not nbytes:
            return
        try:
            # All of it now: what the machine has no room for is an error here and not SIGBUS at some later write.
            os.posix_fallocate(self._fd, 0, nbytes)
            self._memory = mmap.mmap(self._fd, nbytes)
        except OSError as error:
            self.close()
            raise InfraError(f"no shared memory for {nbytes / 1e6:.0f} MB of weights: {error}") from error
