"""Weights are checked against a model by their manifest, before one byte of the model changes."""

from __future__ import annotations

from typing import Protocol

import torch

from gymloop.errors import ConfigError
from gymloop.weights.layout import Entry


class Described(Protocol):
    """What is said of weights before their first byte: by a source, and by an offer."""

    @property
    def manifest(self) -> tuple[Entry, ...]:
        """One entry per parameter."""

    @property
    def nbytes(self) -> int:
        """Of the flat space."""


def check_fits(source: Described, model: torch.nn.Module) -> None:
    """Check that these are exactly the model's parameters, each once and whole.

    Raises:
        ConfigError: a parameter is missing, unknown, twice there, tied, of another shape or not of a floating type.
    """
    parameters = dict(model.named_parameters())
    seen: set[str] = set()
    every = dict(model.named_parameters(remove_duplicate=False))
    for entry in source.manifest:
        parameter = parameters.get(entry.name)
        if parameter is None:
            alias = every.get(entry.name)
            first = next((name for name, other in parameters.items() if other is alias), None)
            why = f"it is tied to {first!r} and must not be sent" if first else "the model has no such parameter"
            raise ConfigError(f"the weight snapshot holds {entry.name!r}, but {why}")
        if entry.name in seen:
            raise ConfigError(f"the weight snapshot holds {entry.name!r} twice")
        seen.add(entry.name)
        if tuple(entry.shape) != tuple(parameter.shape):
            raise ConfigError(
                f"the weight snapshot holds {entry.name!r} with shape {list(entry.shape)}; "
                f"the model has {list(parameter.shape)}"
            )
        dtype = getattr(torch, entry.dtype, None)
        if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
            raise ConfigError(f"the weight snapshot holds {entry.name!r} as {entry.dtype}; a floating type is needed")
        if entry.nbytes != parameter.numel() * dtype.itemsize or entry.offset + entry.nbytes > source.nbytes:
            raise ConfigError(
                f"the weight snapshot holds {entry.nbytes} bytes of {entry.name!r} at offset {entry.offset} of "
                f"{source.nbytes}; {parameter.numel() * dtype.itemsize} were expected within the buffer"
            )
    missing = [name for name in parameters if name not in seen]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ConfigError(f"the weight snapshot lacks {missing[0]!r}{more}")
