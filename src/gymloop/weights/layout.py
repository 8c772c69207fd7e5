"""All parameters of a model lie one behind the other in one flat space of bytes; whatever carries weights moves
ranges of it. Buffers that a checkpoint holds lie behind them, and count as parameters here: see ``models.tensors``.

A bucket is a range, so a tensor larger than a bucket is split without being a special case. Every offset and every
bucket border is a multiple of 64, so no element and no 8-byte word is ever cut.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

ALIGN = 64


@dataclass(frozen=True, slots=True)
class Entry:
    """Where one parameter lies: dtype as torch names it (``float32``), byte offset into the flat space."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


def lay_out(parameters: Iterable[tuple[str, torch.Tensor]]) -> tuple[Entry, ...]:
    """One entry per parameter, in order; offsets ascend and are aligned."""
    manifest: list[Entry] = []
    end = 0
    for name, tensor in parameters:
        nbytes = tensor.numel() * tensor.element_size()
        manifest.append(Entry(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), end, nbytes))
        end += math.ceil(nbytes / ALIGN) * ALIGN
    return tuple(manifest)


def total_bytes(manifest: Sequence[Entry]) -> int:
    """Size of the flat space."""
    return max((math.ceil((entry.offset + entry.nbytes) / ALIGN) * ALIGN for entry in manifest), default=0)


def bucket_ranges(nbytes: int, bucket_bytes: int) -> list[tuple[int, int]]:
    """Cut ``nbytes`` into (begin, end) of at most ``bucket_bytes`` each, rounded down to the alignment."""
    step = max(ALIGN, bucket_bytes // ALIGN * ALIGN)
    return [(begin, min(begin + step, nbytes)) for begin in range(0, nbytes, step)]


def overlaps(manifest: Sequence[Entry], begin: int, end: int) -> Iterator[tuple[Entry, int, int]]:
    """What of each entry lies in [begin, end): the entry and its first and last byte, counted from its own start."""
    first = bisect.bisect_right(manifest, begin, key=lambda entry: entry.offset) - 1
    for entry in manifest[max(first, 0) :]:
        if entry.offset >= end:
            return
        low, high = max(begin - entry.offset, 0), min(end - entry.offset, entry.nbytes)
        if low < high:
            yield entry, low, high


def read_range(
    tensors: dict[str, torch.Tensor], manifest: Sequence[Entry], begin: int, end: int, out: torch.Tensor
) -> None:
    """Copy the range [begin, end) of the flat space into ``out``, uint8 [end - begin]; gaps are left as they are."""
    import torch

    for entry, low, high in overlaps(manifest, begin, end):
        tensor = tensors[entry.name].detach()
        size = tensor.element_size()
        values = tensor.reshape(-1)[low // size : high // size]
        at = entry.offset + low - begin
        out[at : at + high - low].view(getattr(torch, entry.dtype)).copy_(values, non_blocking=True)
