"""A weight snapshot is one flat byte buffer and a manifest: what moves between policy and engine, whatever carries it.

Bytes, not tensors, because Ray's object store maps an integer-typed array without a copy and pickles a bf16 tensor
element by element (measured ten times slower). Tied parameters appear once, under the name the model lists first.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch

ALIGN = 64


@dataclass(frozen=True, slots=True)
class Entry:
    """Where one parameter lies: dtype as torch names it (``float32``), byte offset into the buffer."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class WeightSnapshot:
    """All parameters of a model.

    Attributes:
        manifest: one entry per parameter, offsets ascending and aligned to 64 bytes.
        buffer: uint8 array of shape [bytes]; read-only where it is mapped from shared memory.
    """

    manifest: tuple[Entry, ...]
    buffer: np.ndarray

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, tensor) views into the buffer, without a copy. Never write to them."""
        import torch

        buffer = self.buffer if self.buffer.flags.writeable else _as_writeable(self.buffer)
        flat = torch.from_numpy(buffer)
        for entry in self.manifest:
            piece = flat[entry.offset : entry.offset + entry.nbytes]
            yield entry.name, piece.view(getattr(torch, entry.dtype)).view(entry.shape)


def _as_writeable(array: np.ndarray) -> np.ndarray:
    """A view torch accepts without warning: torch has no read-only tensors, and ``tensors`` is documented read-only."""
    interface = dict(array.__array_interface__)
    interface["data"] = (interface["data"][0], False)

    class Holder:
        __array_interface__ = interface
        base = array

    return np.asarray(Holder())


def take(parameters: Iterable[tuple[str, torch.Tensor]]) -> WeightSnapshot:
    """Copy parameters, in order, into one new buffer on the host."""
    import torch

    named = list(parameters)
    manifest: list[Entry] = []
    end = 0
    for name, tensor in named:
        nbytes = tensor.numel() * tensor.element_size()
        manifest.append(Entry(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), end, nbytes))
        end += math.ceil(nbytes / ALIGN) * ALIGN
    buffer = np.zeros(end, dtype=np.uint8)  # the gaps between entries are bytes too: equal weights, equal buffers
    flat = torch.from_numpy(buffer)
    for entry, (_, tensor) in zip(manifest, named, strict=True):
        piece = flat[entry.offset : entry.offset + entry.nbytes].view(tensor.dtype).view(tensor.shape)
        piece.copy_(tensor.detach())
    return WeightSnapshot(tuple(manifest), buffer)
