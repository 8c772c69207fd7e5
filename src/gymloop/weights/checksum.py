"""A 64-bit checksum of a tensor's bytes that CPU and GPU compute alike, piece by piece, in integer arithmetic only.

The bytes are read as little-endian 64-bit words, the last one padded with zeros. Word ``w`` at index ``i`` becomes

    x = (w xor i * A) * B;    x = (x xor (x >> 32)) * C        (mod 2^64, the shift filling with zeros)

and the checksum is the sum of all ``x`` mod 2^64. Each step is a bijection of ``w`` for a given ``i``, so a change
within one word always changes the sum; the index makes words that changed places, or came from elsewhere, differ but
for one chance in 2^64. A sum needs no order, so pieces are added as they come. It finds errors; it is no defence
against intent. A, B and C are odd constants with well-spread bits (the golden ratio and MurmurHash3's finaliser).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from gymloop.errors import InfraError
from gymloop.weights.layout import Entry
from gymloop.weights.source import Piece

if TYPE_CHECKING:
    import torch

_SPREAD = 0x9E3779B97F4A7C15 - 2**64
_MIX = 0xFF51AFD7ED558CCD - 2**64
_FINISH = 0xC4CEB9FE1A85EC53 - 2**64
_LOW = 0xFFFFFFFF
_CHUNK_WORDS = {"cpu": 1 << 15, "cuda": 1 << 23}
"""What stays in a core's cache, and what fills a GPU with 64 MB of temporaries each."""


def checksum(tensor: torch.Tensor, first_byte: int = 0) -> int:
    """Checksum of a tensor, or what a piece of one adds to it.

    Args:
        tensor: contiguous, of any dtype.
        first_byte: where the piece begins in its tensor, a multiple of 8.

    Returns:
        0 to 2^64 - 1; those of the pieces add up, mod 2^64, to that of the whole.
    """
    import torch

    data = tensor.detach().contiguous().view(-1).view(torch.uint8)
    chunk = _CHUNK_WORDS.get(data.device.type, 1 << 20)
    whole = data.numel() // 8
    index = torch.arange(min(chunk, whole + 1), dtype=torch.int64, device=data.device) * _SPREAD
    sums = [
        _sum(data[8 * begin : 8 * min(begin + chunk, whole)], index, first_byte // 8 + begin)
        for begin in range(0, whole, chunk)
    ]
    if data.numel() % 8:
        tail = torch.zeros(8, dtype=torch.uint8, device=data.device)
        tail[: data.numel() % 8] = data[8 * whole :]
        sums.append(_sum(tail, index, first_byte // 8 + whole))
    return int(torch.stack(sums).sum()) % 2**64 if sums else 0


def _sum(data: torch.Tensor, index: torch.Tensor, first_word: int) -> torch.Tensor:
    import torch

    if data.storage_offset() % 8:
        data = data.clone()
    words = data.view(torch.int64)
    # (first + j) * A = first * A + j * A, mod 2^64
    mixed = index[: words.numel()] + _signed(first_word * _SPREAD)
    mixed.bitwise_xor_(words).mul_(_MIX)
    mixed.bitwise_xor_((mixed >> 32).bitwise_and_(_LOW)).mul_(_FINISH)
    return mixed.sum()


def _signed(value: int) -> int:
    return (value + 2**63) % 2**64 - 2**63


def checksums(named: Iterable[tuple[str, torch.Tensor]]) -> tuple[int, ...]:
    """Of every tensor, in order."""
    return tuple(checksum(tensor) for _, tensor in named)


def verified(pieces: Iterable[Piece], manifest: Sequence[Entry], expected: Sequence[int], what: str) -> Iterator[Piece]:
    """Pass pieces on, and compare each parameter's sum with the sender's when its last piece has gone by.

    Args:
        pieces: of the parameters in the manifest.
        expected: the sender's sums, in the manifest's order.
        what: the sync, as the error calls it.

    Raises:
        InfraError: a sum differs: the parameter is not, to the last bit, what the sender has.
    """
    sums = {entry.name: value for entry, value in zip(manifest, expected, strict=True) if entry.nbytes}
    so_far = 0
    for piece in pieces:
        so_far = (so_far + checksum(piece.values, piece.first_byte)) % 2**64
        if piece.ends_parameter:
            if so_far != sums.pop(piece.entry.name, None):
                raise InfraError(f"{what}: the bytes of {piece.entry.name!r} that arrived are not those of the policy")
            so_far = 0
        yield piece
    if sums:
        raise InfraError(f"{what}: {next(iter(sums))!r} did not arrive")
