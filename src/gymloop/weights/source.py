"""What an engine takes weights from: the manifest first, then the bytes, in order, each of them once.

An engine that can write a part of a parameter reads ``pieces`` and holds at most a bucket beside its own weights; one
that needs whole tensors (vLLM's loaders fuse and shard them) reads ``tensors`` and holds at most a bucket and its
largest tensor. Either is read to its end, and only once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from gymloop.weights.layout import Entry

if TYPE_CHECKING:
    import torch


class Piece(NamedTuple):
    """Consecutive elements of one parameter.

    Attributes:
        entry: the parameter.
        begin: index of the first element in the flattened parameter.
        values: flat, of the entry's dtype; valid until the next piece is asked for, never to be written to.
    """

    entry: Entry
    begin: int
    values: torch.Tensor

    @property
    def first_byte(self) -> int:
        """Where it begins in its parameter."""
        return self.begin * self.values.element_size()

    @property
    def ends_parameter(self) -> bool:
        """Whether nothing of the parameter follows."""
        return self.first_byte + self.values.numel() * self.values.element_size() == self.entry.nbytes


class WeightSource(Protocol):
    """Weights on their way into an engine; ``WeightSnapshot`` is one that lies in memory as a whole."""

    @property
    def manifest(self) -> tuple[Entry, ...]:
        """One entry per parameter, known before the first byte."""

    @property
    def nbytes(self) -> int:
        """Bytes of the flat space that the manifest's offsets refer to."""

    def pieces(self) -> Iterator[Piece]:
        """Every parameter in the manifest's order, in one piece or several.

        Raises:
            InfraError: the sender died or stalled, or what arrived is not what was sent.
        """

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every parameter whole, (name, tensor); each is valid until the next is asked for.

        Raises:
            InfraError: as for ``pieces``.
        """


def whole_tensors(manifest: Sequence[Entry], pieces: Iterable[Piece]) -> Iterator[tuple[str, torch.Tensor]]:
    """Join pieces into whole tensors; a parameter in one piece is passed on without a copy."""
    import torch

    for entry in manifest:
        if entry.nbytes == 0:  # nothing of it ever arrives
            yield entry.name, torch.empty(entry.shape, dtype=getattr(torch, entry.dtype))
    joined: torch.Tensor | None = None
    for piece in pieces:
        if piece.begin == 0 and piece.ends_parameter:
            yield piece.entry.name, piece.values.view(piece.entry.shape)
            continue
        if joined is None:
            joined = torch.empty(piece.entry.shape, dtype=piece.values.dtype, device=piece.values.device)
        joined.view(-1)[piece.begin : piece.begin + piece.values.numel()].copy_(piece.values)
        if piece.ends_parameter:
            yield piece.entry.name, joined
            joined = None
