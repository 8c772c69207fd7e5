"""The checksum: exact by its own definition, the same by pieces, and blind to none of the ways a sync goes wrong."""

import random

import pytest
import torch

from gymloop.errors import InfraError
from gymloop.weights.checksum import checksum, verified
from gymloop.weights.layout import lay_out
from gymloop.weights.snapshot import take
from gymloop.weights.source import Piece

A, B, C = 0x9E3779B97F4A7C15, 0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53


def by_definition(data: bytes) -> int:
    """The module's formula in Python's own integers."""
    total = 0
    for index in range(0, len(data), 8):
        word = int.from_bytes(data[index : index + 8].ljust(8, b"\0"), "little")
        x = ((word ^ (index // 8 * A % 2**64)) * B) % 2**64
        total += (x ^ (x >> 32)) * C
    return total % 2**64


def some_bytes(count: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(count)


def tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


@pytest.mark.parametrize("count", [0, 1, 7, 8, 9, 64, 1001, 8 * 32768, 8 * 32768 + 5])
def test_it_is_what_its_definition_says(count):
    data = some_bytes(count)
    assert checksum(tensor(data)) == by_definition(data)


def test_pieces_add_up_to_the_whole():
    data = some_bytes(1000)
    parts = [checksum(tensor(data[begin : begin + 192]), begin) for begin in range(0, 1000, 192)]
    assert sum(parts) % 2**64 == checksum(tensor(data))


def test_every_flipped_bit_is_seen():
    data = some_bytes(48)
    whole = checksum(tensor(data))
    for bit in range(8 * len(data)):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        assert checksum(tensor(bytes(flipped))) != whole


def test_words_that_changed_places_are_seen_in_sparse_data_too():
    data = bytearray(800)
    data[80] = 1
    sums = set()
    for place in range(100):
        moved = bytearray(800)
        moved[8 * place] = 1
        sums.add(checksum(tensor(bytes(moved))))
    assert len(sums) == 100


def test_a_view_that_begins_anywhere_has_the_checksum_of_its_values():
    values = torch.arange(100, dtype=torch.bfloat16)
    for begin in range(8):
        assert checksum(values[begin:]) == checksum(values[begin:].clone())


def named(seed: int) -> list[tuple[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [(name, torch.randn(10, 7, generator=generator)) for name in ("first", "second", "third")]


def verify(pieces, parameters):
    expected = [checksum(value) for _, value in parameters]
    return list(verified(pieces, lay_out(parameters), expected, "weight sync to version 4"))


def test_what_was_sent_passes():
    assert len(verify(take(named(1)).pieces(), named(1))) == 3


def test_a_flipped_bit_names_the_sync_and_the_parameter_before_it_is_handed_on():
    snapshot = take(named(1))
    snapshot.buffer[snapshot.manifest[1].offset + 3] ^= 0x10
    sums = [checksum(value) for _, value in named(1)]
    pieces = verified(snapshot.pieces(), snapshot.manifest, sums, "weight sync to version 4")
    assert next(pieces).entry.name == "first"
    with pytest.raises(InfraError, match="weight sync to version 4: the bytes of 'second' that arrived are not those"):
        next(pieces)


def test_a_swapped_pair_of_tensors_is_seen():
    parameters = named(1)
    swapped = [
        (name, dict(parameters)[{"first": "second", "second": "first"}.get(name, name)]) for name, _ in parameters
    ]
    with pytest.raises(InfraError, match="'first'"):
        verify(take(swapped).pieces(), parameters)


def test_a_bucket_of_the_version_before_is_seen():
    old, new = take(named(1)), take(named(2))
    new.buffer[64:128] = old.buffer[64:128]
    with pytest.raises(InfraError, match="'first'"):
        verify(new.pieces(), named(2))


def test_a_parameter_that_did_not_arrive_is_named():
    pieces = list(take(named(1)).pieces())[:2]
    with pytest.raises(InfraError, match="'third' did not arrive"):
        verify(pieces, named(1))


def test_a_piece_that_is_lost_is_seen():
    entry = lay_out(named(1))[0]
    values = named(1)[0][1].view(-1)
    with pytest.raises(InfraError, match="'first'"):
        verify([Piece(entry, 0, values[:32]), Piece(entry, 48, values[48:])], named(1))
