"""What a checkpoint holds of a model: its parameters, and the buffers that are saved with them.

Such buffers are part of what a model computes, though no gradient reaches them: ``layer_scalar`` of Gemma 4,
``e_score_correction_bias`` of GLM's and Nemotron-H's routers, the constants of Apertus's activation. Whatever copies a
model copies them too.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def persistent_buffers(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Buffers that ``model.state_dict()`` holds, by name, in the model's order; one under two names is there twice."""
    buffers = dict(model.named_buffers(remove_duplicate=False))
    return {name: buffers[name] for name in model.state_dict() if name in buffers}


def checkpoint_tensors(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """All parameters, tied ones once and under their first name, then the persistent buffers."""
    yield from model.named_parameters()
    yield from persistent_buffers(model).items()
