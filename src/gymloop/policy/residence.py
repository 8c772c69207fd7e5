"""Where a policy's memory is: all tensors of models and optimizer move together, and stay the objects they are.

Parameters keep their identity, so whoever holds one (the optimizer, hooks, tied layers) goes on with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from gymloop.policy.optimizer import MasterAdamW


def move(models: Iterable[torch.nn.Module], optimizer: MasterAdamW, to: Callable[[Tensor], Tensor]) -> None:
    """Put every tensor elsewhere: parameters, buffers, float32 masters, the optimizer's moments and step counts.

    Args:
        models: the policy, and the reference where there is one.
        optimizer: its masters may be the policy's own parameters.
        to: gives the tensor in its new place; called once for each.
    """
    held: dict[int, Tensor] = {}
    for model in models:
        held |= {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    held |= {id(master): master for master in optimizer.masters.values()}
    for tensor in held.values():
        tensor.grad = None
        tensor.data = to(tensor.data)
    for state in optimizer.adamw.state.values():
        for name, value in state.items():
            if isinstance(value, Tensor):
                state[name] = to(value)
