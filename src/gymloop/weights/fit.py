"""Weights are checked against a model by their manifest, before one byte of the model changes."""

from __future__ import annotations

from typing import Protocol

import torch

from gymloop.errors import ConfigError
from gymloop.models.tensors import checkpoint_tensors
from gymloop.weights.layout import Entry


class Described(Protocol):
    """What is said of weights before their first byte: by a source, and by an offer."""

    @property
    def manifest(self) -> tuple[Entry, ...]:
        """One entry per tensor."""

    @property
    def nbytes(self) -> int:
        """Of the flat space."""


def check_fits(source: Described, model: torch.nn.Module) -> None:
    """Check that these are exactly the model's parameters and persistent buffers, each once and whole.

    Raises:
        ConfigError: one is missing, unknown, twice there, tied, of another shape, or of a type that is not floating
            where the model's is, or not the model's own where that is not floating.
    """
    tensors = dict(checkpoint_tensors(model))
    seen: set[str] = set()
    every = dict(model.named_parameters(remove_duplicate=False))
    for entry in source.manifest:
        tensor = tensors.get(entry.name)
        if tensor is None:
            alias = every.get(entry.name)
            first = next((name for name, other in tensors.items() if other is alias), None)
            why = (
                f"it is tied to {first!r} and must not be sent"
                if first
                else "the model has no such parameter or buffer"
            )
            raise ConfigError(f"the weight snapshot holds {entry.name!r}, but {why}")
        if entry.name in seen:
            raise ConfigError(f"the weight snapshot holds {entry.name!r} twice")
        seen.add(entry.name)
        if tuple(entry.shape) != tuple(tensor.shape):
            raise ConfigError(
                f"the weight snapshot holds {entry.name!r} with shape {list(entry.shape)}; "
                f"the model has {list(tensor.shape)}"
            )
        dtype = getattr(torch, entry.dtype, None)
        floating = tensor.is_floating_point()
        if not isinstance(dtype, torch.dtype) or not (dtype.is_floating_point if floating else dtype == tensor.dtype):
            needed = "a floating type" if floating else str(tensor.dtype).removeprefix("torch.")
            raise ConfigError(f"the weight snapshot holds {entry.name!r} as {entry.dtype}; {needed} is needed")
        if entry.nbytes != tensor.numel() * dtype.itemsize or entry.offset + entry.nbytes > source.nbytes:
            raise ConfigError(
                f"the weight snapshot holds {entry.nbytes} bytes of {entry.name!r} at offset {entry.offset} of "
                f"{source.nbytes}; {tensor.numel() * dtype.itemsize} were expected within the buffer"
            )
    missing = [name for name in tensors if name not in seen]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ConfigError(f"the weight snapshot lacks {missing[0]!r}{more}")
