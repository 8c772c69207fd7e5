"""A snapshot is exact, lists tied weights once, and is read without a copy."""

from __future__ import annotations

import warnings

import numpy as np
import torch

from gymloop.weights.layout import ALIGN
from gymloop.weights.snapshot import take


def some_parameters() -> list[tuple[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [
        ("a.weight", torch.randn(3, 5, generator=generator)),
        ("a.bias", torch.randn(7, generator=generator).to(torch.bfloat16)),
        ("scale", torch.tensor(2.5)),
        ("b.weight", torch.randn(5, 3, generator=generator).T.to(torch.bfloat16)),
    ]


def test_tensors_come_back_exactly_in_order():
    parameters = some_parameters()
    snapshot = take(parameters)
    got = list(snapshot.tensors())
    assert [name for name, _ in got] == [name for name, _ in parameters]
    for (_, tensor), (_, expected) in zip(got, parameters, strict=True):
        assert tensor.dtype == expected.dtype
        assert tensor.shape == expected.shape
        assert torch.equal(tensor, expected)


def test_entries_are_aligned_and_do_not_overlap():
    snapshot = take(some_parameters())
    end = 0
    for entry in snapshot.manifest:
        assert entry.offset % ALIGN == 0
        assert entry.offset >= end
        end = entry.offset + entry.nbytes
    assert end <= len(snapshot.buffer)
    assert [entry.nbytes for entry in snapshot.manifest] == [60, 14, 4, 30]
    assert snapshot.manifest[1].dtype == "bfloat16"


def test_equal_weights_make_equal_buffers():
    assert take(some_parameters()).buffer.tobytes() == take(some_parameters()).buffer.tobytes()


def test_a_snapshot_does_not_follow_the_model():
    parameters = some_parameters()
    snapshot = take(parameters)
    before = parameters[0][1].clone()
    parameters[0][1].zero_()
    assert torch.equal(next(snapshot.tensors())[1], before)


def test_tied_parameters_appear_once_under_their_first_name():
    class Tied(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = torch.nn.Embedding(4, 2)
            self.head = torch.nn.Linear(2, 4, bias=False)
            self.head.weight = self.embed.weight

    snapshot = take(Tied().named_parameters())
    assert [entry.name for entry in snapshot.manifest] == ["embed.weight"]


def test_a_read_only_buffer_is_viewed_without_copy_or_warning():
    snapshot = take(some_parameters())
    snapshot.buffer.flags.writeable = False
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tensors = dict(snapshot.tensors())
    first = snapshot.manifest[0]
    address = snapshot.buffer.__array_interface__["data"][0]
    assert tensors["a.weight"].data_ptr() == address + first.offset
    np.testing.assert_array_equal(tensors["a.weight"].numpy().ravel().view(np.uint8), snapshot.buffer[: first.nbytes])


def test_no_parameters_make_an_empty_snapshot():
    snapshot = take([])
    assert snapshot.manifest == ()
    assert list(snapshot.tensors()) == []
