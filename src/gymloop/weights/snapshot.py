"""A weight snapshot is one flat byte buffer and a manifest: all parameters of a model at one moment, in host memory.

Bytes, not tensors, because Ray's object store maps an integer-typed array without a copy and pickles a bf16 tensor
element by element (measured ten times slower). Tied parameters appear once, under the name the model lists first.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from gymloop.weights.layout import Entry, lay_out, read_range, total_bytes
from gymloop.weights.source import Piece

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class WeightSnapshot:
    """All parameters of a model; a ``WeightSource`` that may be read any number of times.

    Attributes:
        manifest: one entry per parameter, offsets ascending and aligned to 64 bytes.
        buffer: uint8 array of shape [bytes]; read-only where it is mapped from shared memory.
    """

    manifest: tuple[Entry, ...]
    buffer: np.ndarray

    @property
    def nbytes(self) -> int:
        """Size of the buffer."""
        return self.buffer.nbytes

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, tensor) views into the buffer, without a copy. Never write to them."""
        import torch

        buffer = self.buffer if self.buffer.flags.writeable else np.asarray(_Writeable(self.buffer))
        flat = torch.from_numpy(buffer)
        for entry in self.manifest:
            piece = flat[entry.offset : entry.offset + entry.nbytes]
            yield entry.name, piece.view(getattr(torch, entry.dtype)).view(entry.shape)

    def pieces(self) -> Iterator[Piece]:
        """Every parameter in one piece, a view into the buffer."""
        for entry, (_, tensor) in zip(self.manifest, self.tensors(), strict=True):
            yield Piece(entry, 0, tensor.view(-1))


class _Writeable:
    """A view torch accepts without warning: torch has no read-only tensors, and ``tensors`` is documented read-only."""

    def __init__(self, array: np.ndarray) -> None:
        interface = dict(array.__array_interface__)
        interface["data"] = (interface["data"][0], False)
        self.__array_interface__ = interface
        self._array = array  # lives as long as the view


def take(parameters: Iterable[tuple[str, torch.Tensor]]) -> WeightSnapshot:
    """Copy parameters, in order, into one new buffer on the host."""
    named = list(parameters)
    manifest = lay_out(named)
    buffer = np.zeros(total_bytes(manifest), dtype=np.uint8)  # equal weights, equal buffers: the gaps are bytes too
    fill(buffer, named, manifest)
    return WeightSnapshot(manifest, buffer)


def fill(buffer: np.ndarray, named: list[tuple[str, torch.Tensor]], manifest: tuple[Entry, ...]) -> None:
    """Copy parameters to where the manifest puts them in a buffer on the host; done when it returns."""
    import torch

    read_range(dict(named), manifest, 0, buffer.nbytes, torch.from_numpy(buffer))
    if any(tensor.is_cuda for _, tensor in named):
        torch.cuda.synchronize()
