"""Buckets: every byte once, in order, whatever the bucket's size; and a bucket out of turn is refused."""

import pytest
import torch

from gymloop.errors import InfraError
from gymloop.weights.broadcast import bucket_buffers, check_header, pack
from gymloop.weights.layout import ALIGN, bucket_ranges, lay_out, overlaps, total_bytes
from gymloop.weights.offer import Offer
from gymloop.weights.source import Piece, whole_tensors


def parameters():
    return {
        "large": torch.randn(50, 41),
        "half": torch.randn(33).bfloat16(),
        "nothing": torch.empty(0, 4),
        "scalar": torch.tensor(3.0, dtype=torch.float64),
    }


def through(named, bucket_bytes):
    manifest = lay_out(named.items())
    offer = Offer(5, manifest, total_bytes(manifest), None, 1.0, None)
    ranges = bucket_ranges(offer.nbytes, bucket_bytes)
    buffers = bucket_buffers(ranges, "cpu")
    for index, (begin, end) in enumerate(ranges):
        buffer = buffers[index % 2][: ALIGN + end - begin]
        assert buffer.numel() <= ALIGN + max(bucket_bytes, ALIGN)
        pack(buffer, named, offer, index, begin, end)
        check_header(buffer, 5, index, begin, end)
        for entry, low, high in overlaps(manifest, begin, end):
            at = ALIGN + entry.offset + low - begin
            values = buffer[at : at + high - low].view(getattr(torch, entry.dtype))
            yield Piece(entry, low // values.element_size(), values)


@pytest.mark.parametrize("bucket_bytes", [1, 64, 100, 1000, 8192, 10**6])
def test_any_size_of_bucket_carries_every_tensor_to_the_last_bit(bucket_bytes):
    named = parameters()
    found = {name: value.clone() for name, value in whole_tensors(lay_out(named.items()), through(named, bucket_bytes))}
    assert found.keys() == named.keys()
    for name, value in named.items():
        assert torch.equal(found[name], value)


def test_a_tensor_larger_than_a_bucket_comes_in_pieces_in_order():
    named = parameters()
    begins = [piece.begin for piece in through(named, 1024) if piece.entry.name == "large"]
    assert begins == list(range(0, 50 * 41, 256))


@pytest.mark.parametrize(("version", "index"), [(4, 0), (5, 1)])
def test_a_bucket_of_another_version_or_number_is_refused(version, index):
    named = parameters()
    manifest = lay_out(named.items())
    offer = Offer(5, manifest, total_bytes(manifest), None, 1.0, None)
    buffer = bucket_buffers([(0, 128)], "cpu")[0]
    pack(buffer, named, offer, 0, 0, 128)
    with pytest.raises(InfraError, match=f"arrived: version 5, number 0; version {version}, number {index} was due"):
        check_header(buffer, version, index, 0, 128)
