"""Where a worker runs, as far as it decides how weights reach it: plain facts, told by the worker itself."""

from __future__ import annotations

import os
import socket
import sys
from dataclasses import dataclass
from pathlib import Path

from gymloop.gpu import named


@dataclass(frozen=True, slots=True)
class Place:
    """One worker's place.

    Attributes:
        host: equal for two processes exactly when one can open what the other holds in memory (one kernel, one pid
            namespace); None where the system offers no anonymous shared memory.
        address: under which other workers reach its sockets.
        device: ``cpu`` or ``cuda``.
        gpu: which one of the host, as the driver numbers or names it; None on a CPU, or where there are several.
        processes: that take weights, each of them all it needs (an engine has one per tensor-parallel rank).
    """

    host: str | None
    address: str
    device: str
    gpu: str | None = None
    processes: int = 1


def here(device: str, processes: int = 1) -> Place:
    """The place of this process, and of ``processes`` others where these take the weights, each on a device of its own.

    Args:
        device: where it computes, as torch names it (``cpu``, ``cuda``, ``cuda:1``).
        processes: see ``Place``.
    """
    kind, _, index = device.partition(":")
    gpu = None
    if kind == "cuda" and processes == 1:
        gpu = named(int(index or 0), os.environ.get("CUDA_VISIBLE_DEVICES")) or index or "0"
    return Place(_host(), _address(), kind, gpu, processes)


def _host() -> str | None:
    if sys.platform != "linux":
        return None
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{boot}/{os.readlink('/proc/self/ns/pid')}"


def _address() -> str:
    """Ray's address of this node inside a Ray worker, else the loopback."""
    ray = sys.modules.get("ray")
    if ray is not None and ray.is_initialized():
        return str(socket.gethostbyname(ray.util.get_node_ip_address()))
    return "127.0.0.1"
