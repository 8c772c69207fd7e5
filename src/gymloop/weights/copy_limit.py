"""How fast this process copies memory: what a sync's rate is a share of, so that its figure means something
anywhere."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

SIZE_BYTES = 64 * 2**20
"""Larger than any cache."""
ROUNDS = 3


def copy_rate(device: str, size_bytes: int = SIZE_BYTES) -> float:
    """Bytes copied per second from one buffer to another on the device, the best of a few rounds."""
    import torch

    source = torch.ones(size_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    best = float("inf")
    for _ in range(ROUNDS + 1):  # the first also faults the target's pages in
        _wait(source)
        begin = time.perf_counter()
        target.copy_(source)
        _wait(source)
        best = min(best, time.perf_counter() - begin)
    return size_bytes / best


def _wait(tensor: torch.Tensor) -> None:
    import torch

    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)
