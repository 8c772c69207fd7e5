"""Where a policy's memory is: all tensors of models and optimizer move together, and stay the objects they are.

Parameters keep their identity, so whoever holds one (the optimizer, hooks, tied layers) goes on with it. On either side
they lie in one block. On the host it is page-locked and kept, so that a GPU copies at the bus's full rate; on the GPU
it is one allocation, which another process maps by one handle.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gymloop.policy.optimizer import MasterAdamW
from gymloop.weights.layout import lay_out, total_bytes

logger = logging.getLogger(__name__)

FLOAT32_BYTES = 4


@dataclass(frozen=True, slots=True)
class Slot:
    """A tensor, and how another takes its place."""

    tensor: Tensor
    replace: Callable[[Tensor], None]


def slots(models: Iterable[torch.nn.Module], optimizer: MasterAdamW) -> list[Slot]:
    """Every tensor once: parameters, buffers, float32 masters, the optimizer's moments and step counts.

    Args:
        models: the policy, and the reference where there is one.
        optimizer: its masters may be the policy's own parameters.
    """
    held: dict[int, Tensor] = {}
    for model in models:
        held |= {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    held |= {id(master): master for master in optimizer.masters.values()}
    found = [Slot(tensor, _data_of(tensor)) for tensor in held.values()]
    for state in optimizer.adamw.state.values():
        found += [Slot(value, _item_of(state, name)) for name, value in state.items() if isinstance(value, Tensor)]
    return found


def _data_of(tensor: Tensor) -> Callable[[Tensor], None]:
    def replace(other: Tensor) -> None:
        tensor.grad = None
        tensor.data = other

    return replace


def _item_of(state: dict[str, Tensor], name: str) -> Callable[[Tensor], None]:
    def replace(other: Tensor) -> None:
        state[name] = other

    return replace


@torch.no_grad()
def pack(held: list[Slot], block: Callable[[int], Tensor]) -> None:
    """Copy every tensor into one block, and let the copies take their places; done when it returns.

    Args:
        held: none of them lies in the block.
        block: gives uint8 [at least the bytes it is asked for].
    """
    manifest = lay_out((str(index), slot.tensor) for index, slot in enumerate(held))
    memory = block(total_bytes(manifest))
    for slot, entry in zip(held, manifest, strict=True):
        copy = memory[entry.offset : entry.offset + entry.nbytes].view(slot.tensor.dtype).view(entry.shape)
        copy.copy_(slot.tensor.detach(), non_blocking=True)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    for slot, entry in zip(held, manifest, strict=True):
        slot.replace(memory[entry.offset : entry.offset + entry.nbytes].view(slot.tensor.dtype).view(entry.shape))


class Residence:
    """Of one policy.

    Args:
        device: where it computes, as torch names it. On a CPU nothing ever moves.
    """

    def __init__(self, device: str) -> None:
        self._device = torch.device(device)
        self._host: PinnedMemory | None = None

    def to_device(self, models: Iterable[torch.nn.Module], optimizer: MasterAdamW) -> None:
        """Move everything to where it computes; nothing changes where it is there."""
        held = slots(models, optimizer)
        if any(slot.tensor.device.type != self._device.type for slot in held):
            pack(held, lambda nbytes: torch.empty(nbytes, dtype=torch.uint8, device=self._device))

    def to_host(self, models: Iterable[torch.nn.Module], optimizer: MasterAdamW) -> None:
        """Leave the device to others.

        There is room for the optimizer's moments from the beginning: page-locking takes seconds, which the startup has
        beside its other tasks and a step has not.
        """
        held = slots(models, optimizer)
        if self._device.type == "cpu" or (self._host and all(slot.tensor.device.type == "cpu" for slot in held)):
            return
        moments = 0 if optimizer.adamw.state else 2 * sum(one.numel() for one in optimizer.masters.values())
        pack(held, lambda nbytes: self._reserved(nbytes, room=moments * FLOAT32_BYTES + len(held) * 1024))
        torch.cuda.empty_cache()

    def close(self) -> None:
        """Give the host's block back; whatever lies in it must not be used any more. Safe to call twice."""
        if self._host is not None:
            self._host.close()
            self._host = None

    def _reserved(self, nbytes: int, room: int) -> Tensor:
        if self._host is None or self._host.block.numel() < nbytes:
            self.close()
            self._host = PinnedMemory(nbytes + room)
        return self._host.block


class PinnedMemory:
    """Page-locked memory of exactly the size asked for; torch's own allocator rounds it up to a power of two.

    Where it cannot be locked it is ordinary memory.

    Args:
        nbytes: its size.
        runtime: CUDA's, as torch gives it; None takes it from there.
        launch: runs any kernel.

    Attributes:
        block: uint8 [nbytes].
        locked: whether it is.
    """

    def __init__(self, nbytes: int, runtime: Any = None, launch: Callable[[], object] | None = None) -> None:
        self.block = torch.empty(nbytes, dtype=torch.uint8)
        self._runtime = torch.cuda.cudart() if runtime is None else runtime
        status = self._runtime.cudaHostRegister(self.block.data_ptr(), nbytes, 0)
        self.locked = bool(status == self._runtime.cudaError.success)
        if not self.locked:
            _forget_last_error(launch or _launch)
            logger.warning(
                "%.1f GB of the policy's memory could not be page-locked (CUDA's error %d); it moves more slowly",
                nbytes / 1e9,
                int(status),
            )

    def close(self) -> None:
        """Unlock it. Safe to call twice."""
        if self.locked:
            self._runtime.cudaHostUnregister(self.block.data_ptr())
            self.locked = False


def _forget_last_error(launch: Callable[[], object]) -> None:
    """Let no later call report an error of CUDA's that was handled.

    CUDA keeps it until somebody asks for it, as torch does after each kernel, which then fails of what it had no part
    in. torch offers no ``cudaGetLastError`` itself, so a kernel is run to that end. An error that stays comes again.
    """
    with contextlib.suppress(RuntimeError):
        launch()


def _launch() -> object:
    return torch.ones(1, device="cuda")
