"""Where a policy's memory is: all tensors of models and optimizer move together, and stay the objects they are.

Parameters keep their identity, so whoever holds one (the optimizer, hooks, tied layers) goes on with it. On either side
they lie in one block. On the host it is page-locked and kept, so that a GPU copies at the bus's full rate; on the GPU
it is one allocation, which another process maps by one handle.

Page-locking takes as long as reading the weights, so it may begin before there is anything to move. What is reserved
then is an estimate: memory that turns out too small is given back, and made anew.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gymloop.policy.optimizer import MasterAdamW
from gymloop.weights.layout import lay_out, total_bytes

logger = logging.getLogger(__name__)

FLOAT32_BYTES = 4
TENSOR_ROOM = 1024
"""Bytes per tensor beside its own: what aligns it and its moments, and the optimizer's count of its steps."""


def estimated_bytes(elements: Mapping[str, int], config: Any, precision: str, *, reference: bool) -> int:
    """Bytes that ``Residence.to_host`` will ask for, told from the checkpoint before there is a model.

    A little too much: every tensor's room counts twice, for the buffers of a model that no checkpoint holds.

    Args:
        elements: by name, as ``models.load.tensor_elements`` counts them.
        config: the model's configuration.
        precision: of the compute copy: ``float32`` or ``bfloat16``.
        reference: whether there is one.
    """
    text = config.get_text_config(decoder=True)
    # Some checkpoints hold a tied head beside the embeddings, a fifth of a small model.
    tied = getattr(text, "tie_word_embeddings", False)
    owned = [count for name, count in elements.items() if not (tied and name.endswith("lm_head.weight"))]
    compute = getattr(torch, precision).itemsize
    kept = [compute] * (2 if reference else 1)
    if precision != "float32":
        kept.append(FLOAT32_BYTES)  # the masters, which in float32 are the parameters
    return sum(owned) * (sum(kept) + 2 * FLOAT32_BYTES) + len(owned) * len(kept) * 2 * TENSOR_ROOM


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
        memory: makes the host's block of so many bytes; None makes it page-locked.
    """

    def __init__(self, device: str, memory: Callable[[int], PinnedMemory] | None = None) -> None:
        self._device = torch.device(device)
        self._memory = memory or PinnedMemory
        self._host: PinnedMemory | None = None
        self._begun: Future[PinnedMemory] | None = None

    def reserve(self, nbytes: int) -> None:
        """Begin to page-lock the host's block in a thread; on a CPU nothing. Once, before the first ``to_host``.

        Args:
            nbytes: what ``to_host`` will ask for, rather too much than too little; see ``estimated_bytes``.
        """
        if self._device.type == "cpu":
            return
        begun: Future[PinnedMemory] = Future()
        self._begun = begun

        def make() -> None:
            try:
                begun.set_result(self._memory(nbytes))
            except BaseException as error:  # noqa: BLE001  (whoever asks for the memory makes it anew)
                begun.set_exception(error)

        threading.Thread(target=make, name="page-locking", daemon=True).start()

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
        pack(held, lambda nbytes: self._reserved(nbytes, room=moments * FLOAT32_BYTES + len(held) * TENSOR_ROOM))
        torch.cuda.empty_cache()

    def close(self) -> None:
        """Give the host's block back; whatever lies in it must not be used any more. Safe to call twice.

        Memory that is still being locked is not waited for: its thread gives it back.
        """
        begun, self._begun = self._begun, None
        if begun is not None:
            begun.add_done_callback(_give_back)
        if self._host is not None:
            self._host.close()
            self._host = None

    def _reserved(self, nbytes: int, room: int) -> Tensor:
        least = nbytes
        if self._begun is not None:
            least += room  # else the moments would not fit, and a step would page-lock
            begun, self._begun = self._begun, None
            if begun.exception() is None:  # else it was too much, perhaps: what is needed is asked for once more
                # bounded: by the thread's own work; the startup task's deadline ends one that is stuck
                self._host = begun.result()
        if self._host is None or self._host.block.numel() < least:
            self.close()
            self._host = self._memory(nbytes + room)
        return self._host.block


def _give_back(done: Future[PinnedMemory]) -> None:
    if done.exception() is None:
        done.result().close()  # bounded: it is done


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
