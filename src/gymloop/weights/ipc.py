"""CUDA IPC: engines on the policy's GPU read its parameters where they lie, so nothing is copied but into the engine.

The only module that talks to the CUDA driver, by five calls of its C interface; everything else here is arithmetic on
what they return. torch's own sharing (``torch.multiprocessing.reductions``) is not used: it counts references in a
file in ``/dev/shm`` that a killed process leaves behind.

Memory from ``cuMemMap`` (``PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True``) has no such handle: the policy then
says so. A process cannot open handles of its own. The policy must not change its weights before every engine is done,
which is what ``release`` says; both sides wait for the device before they hand over.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from gymloop.errors import InfraError
from gymloop.weights.layout import Entry, lay_out, total_bytes
from gymloop.weights.offer import Offer, SyncRequest
from gymloop.weights.source import Piece, whole_tensors

if TYPE_CHECKING:
    import torch

    from gymloop.weights.receiver import WeightReceiver


class DeviceMemory(Protocol):
    """What of the CUDA driver is needed."""

    def block_of(self, pointer: int) -> tuple[int, int]:
        """Address and size of the allocation that an address lies in."""

    def export(self, block: int) -> bytes:
        """Handle of an allocation, for other processes."""

    def map(self, handle: bytes) -> int:
        """Map another process's allocation; its address here."""

    def unmap(self, block: int) -> None:
        """Undo ``map``."""

    def synchronize(self) -> None:
        """Return when the device has done what it was told."""


class CudaDriver:
    """``DeviceMemory`` of this process's current CUDA context, by ``libcuda``.

    Raises:
        InfraError: by any call that the driver refuses, with its error number.
    """

    def __init__(self) -> None:
        try:
            self._cuda = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise InfraError(f"CUDA's driver library cannot be loaded: {error}") from error

    def block_of(self, pointer: int) -> tuple[int, int]:
        """See ``DeviceMemory``."""
        base, size = ctypes.c_uint64(), ctypes.c_size_t()
        self._call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(pointer))
        return base.value, size.value

    def export(self, block: int) -> bytes:
        """See ``DeviceMemory``."""
        handle = _Handle()
        self._call(
            "cuIpcGetMemHandle",
            ctypes.byref(handle),
            ctypes.c_uint64(block),
            hint="; memory of expandable segments (PYTORCH_CUDA_ALLOC_CONF) cannot be shared",
        )
        return bytes(handle)

    def map(self, handle: bytes) -> int:
        """See ``DeviceMemory``."""
        block = ctypes.c_uint64()
        lazy_peer_access = ctypes.c_uint(1)
        self._call("cuIpcOpenMemHandle_v2", ctypes.byref(block), _Handle.from_buffer_copy(handle), lazy_peer_access)
        return block.value

    def unmap(self, block: int) -> None:
        """See ``DeviceMemory``."""
        self._call("cuIpcCloseMemHandle", ctypes.c_uint64(block))

    def synchronize(self) -> None:
        """See ``DeviceMemory``."""
        import torch

        torch.cuda.synchronize()

    def _call(self, name: str, *args: Any, hint: str = "") -> None:
        status = getattr(self._cuda, name)(*args)
        if status != 0:
            raise InfraError(f"CUDA's driver refused {name} with error {status}{hint}")


class _Handle(ctypes.Structure):
    """``CUipcMemHandle``, passed by value."""

    _fields_ = (("reserved", ctypes.c_byte * 64),)


@dataclass(frozen=True, slots=True)
class IpcCarrier:
    """Where every parameter lies.

    Attributes:
        handles: one per allocation.
        lies_in: per entry of the manifest: index of its allocation, and its offset there in bytes.
    """

    handles: tuple[bytes, ...]
    lies_in: tuple[tuple[int, int], ...]
    whole = True
    light = True

    @contextmanager
    def opened(self, offer: Offer, receiver: WeightReceiver, rank: int) -> Iterator[IpcSource]:
        """Map the policy's allocations; see ``Carrier.opened``. What was read is copied when the context ends."""
        memory = receiver.device_memory()
        blocks: list[int] = []
        memory.synchronize()  # also gives this thread the device's context, if it never had it
        try:
            for handle in self.handles:
                blocks.append(memory.map(handle))
            addresses = tuple(blocks[block] + offset for block, offset in self.lies_in)
            yield IpcSource(offer.manifest, offer.nbytes, addresses, receiver.device)
            memory.synchronize()
        finally:
            for block in blocks:
                memory.unmap(block)


@dataclass(frozen=True, slots=True)
class IpcSource:
    """The policy's parameters, at addresses of this process; a ``WeightSource``."""

    manifest: tuple[Entry, ...]
    nbytes: int
    addresses: tuple[int, ...]
    device: str

    def pieces(self) -> Iterator[Piece]:
        """Every parameter in one piece, where the policy has it."""
        import torch

        for entry, address in zip(self.manifest, self.addresses, strict=True):
            if entry.nbytes:
                raw = torch.as_tensor(_Bytes(address, entry.nbytes), device=self.device)
                yield Piece(entry, 0, raw.view(getattr(torch, entry.dtype)))

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every parameter, where the policy has it."""
        return whole_tensors(self.manifest, self.pieces())


class _Bytes:
    """Device memory as torch takes it without a copy: CUDA array interface, version 3."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 3,
        }


class IpcSender:
    """The policy's side: handles of its parameters' allocations, made anew for each sync (parameters may move)."""

    def __init__(self, memory: DeviceMemory) -> None:
        self._memory = memory

    def offer(
        self, named: list[tuple[str, torch.Tensor]], request: SyncRequest, checksums: tuple[int, ...] | None
    ) -> Offer:
        """Describe where the parameters lie, once the device has finished writing them.

        Raises:
            InfraError: a parameter is not contiguous, or its memory cannot be shared.
        """
        loose = next((name for name, tensor in named if not tensor.is_contiguous()), None)
        if loose is not None:
            raise InfraError(f"parameter {loose!r} is not contiguous, so its memory cannot be read by another process")
        manifest = lay_out(named)
        self._memory.synchronize()  # also gives this thread the device's context, if it never had it
        carrier = self._carrier([tensor.data_ptr() for _, tensor in named if tensor.numel()], manifest)
        return Offer(request.version, manifest, total_bytes(manifest), checksums, request.stall_s, carrier)

    def _carrier(self, pointers: Sequence[int], manifest: Sequence[Entry]) -> IpcCarrier:
        blocks: dict[int, int] = {}
        lies_in: list[tuple[int, int]] = []
        remaining = iter(pointers)
        for entry in manifest:
            if not entry.nbytes:
                lies_in.append((0, 0))
                continue
            pointer = next(remaining)
            block, size = self._memory.block_of(pointer)
            if pointer + entry.nbytes > block + size:
                raise InfraError(f"parameter {entry.name!r} is not within one allocation of the device")
            lies_in.append((blocks.setdefault(block, len(blocks)), pointer - block))
        return IpcCarrier(tuple(self._memory.export(block) for block in blocks), tuple(lies_in))

    def release(self, complete: bool, timeout: float) -> None:
        """Nothing is held: the memory is the parameters' own."""

    def close(self) -> None:
        """Nothing is held."""
