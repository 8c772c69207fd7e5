"""What a GPU is, asked of its driver: no CUDA context is made.

A context takes seconds to make and hundreds of megabytes of the GPU for as long as its process lives. A process that
computes nothing itself, as one whose engine is vLLM, has no use for it.
"""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU.

    Attributes:
        name: as its driver has it.
        memory: bytes that programs may take together.
        capability: CUDA's compute capability, major and minor.
    """

    name: str
    memory: int
    capability: tuple[int, int]


def is_there() -> bool:
    """Whether this process may use a GPU, for all that its driver says: whether CUDA runs there is another question."""
    import torch

    return torch.cuda.device_count() > 0


@functools.cache
def gpu_of(device: str) -> Gpu:
    """The GPU behind a name of torch's, ``cuda`` or ``cuda:1``.

    NVML is asked; torch is where NVML is not installed or cannot tell (ROCm, some virtual GPUs), or where a number may
    mean something else to it than to CUDA: among GPUs of different kinds, or of one that is cut in slices. Asked once.
    """
    index = int(device.partition(":")[2] or 0)
    return _by_nvml(named(index, os.environ.get("CUDA_VISIBLE_DEVICES"))) or _by_torch(index)


def named(index: int, visible: str | None) -> str:
    """The name outside this process, a number or a UUID, of the GPU that CUDA calls ``index`` in it.

    Args:
        index: from 0.
        visible: ``CUDA_VISIBLE_DEVICES``; None where it is not set.

    Returns:
        An empty name where there is no such GPU.
    """
    if visible is None:
        return str(index)
    names = [name.strip() for name in visible.split(",")]
    return names[index] if index < len(names) else ""


def _by_nvml(name: str) -> Gpu | None:
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
        try:
            if name.isdecimal():
                if _order_is_open(pynvml):
                    return None
                handle = pynvml.nvmlDeviceGetHandleByIndex(int(name))
                if _is_sliced(pynvml, handle):
                    return None
            else:
                handle = pynvml.nvmlDeviceGetHandleByUUID(name)
            memory = pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2)
            capability = pynvml.nvmlDeviceGetCudaComputeCapability(handle)
            return Gpu(pynvml.nvmlDeviceGetName(handle), memory.total - memory.reserved, tuple(capability))
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError:
        return None


def _is_sliced(pynvml: Any, handle: Any) -> bool:
    """By its number CUDA means the first slice of a GPU in MIG mode, and NVML the whole of it."""
    try:
        return bool(pynvml.nvmlDeviceGetMigMode(handle)[0] == pynvml.NVML_DEVICE_MIG_ENABLE)
    except pynvml.NVMLError:  # it has no such mode
        return False


def _order_is_open(pynvml: Any) -> bool:
    """CUDA numbers the fastest GPU first unless told otherwise, NVML goes by the bus."""
    if os.environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID":
        return False
    count = pynvml.nvmlDeviceGetCount()
    handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(count)]
    return len({pynvml.nvmlDeviceGetName(handle) for handle in handles}) > 1


def _by_torch(index: int) -> Gpu:
    import torch

    found = torch.cuda.get_device_properties(index)
    return Gpu(found.name, found.total_memory, (found.major, found.minor))
