"""Where compiled graphs are kept between runs: one folder for whatever would compile alike.

Its name follows from the model's shape, the engine's arguments, the versions and the device, so that a second start
with the same finds what the first left, and one with others can find nothing wrong. A folder that the user chose
(``VLLM_CACHE_ROOT``) serves all starts, and gymloop writes nothing there; the marks of starts tell a hit from a miss.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from gymloop.gpu import gpu_of
from gymloop.models.store import cache_root

_ROOT = "VLLM_CACHE_ROOT"
_DONE = "started"
_MATTERS_NOT = frozenset(
    {
        "model", "seed", "load_format", "worker_extension_cls", "disable_log_stats", "kv_cache_memory_bytes",
        "gpu_memory_utilization",
    }
)  # fmt: skip
"""Arguments that change nothing of what is compiled."""
_MODEL_FACTS = "modelinfos"
"""vLLM's folder of what it found out about its model classes, which takes a process of its own; it checks each by the
hash of the class's source, so all caches share one."""

_KERNELS = "triton"
"""Triton's cache knows each kernel by what it was compiled from and for, so all caches share one."""


@dataclass(frozen=True, slots=True)
class CompileCache:
    """One folder.

    Attributes:
        folder: given to vLLM as its cache root.
        own: gymloop's of the same key, which marks that a start came to its end; the same one, unless the user chose.
        found: ``hit`` where a start with the same key came to its end before, so that what it compiled is there, be it
            kernels alone; ``miss`` where none did; ``off`` with ``enforce_eager``.
    """

    folder: Path
    own: Path
    found: Literal["hit", "miss", "off"]

    @property
    def environment(self) -> dict[str, str]:
        """Variables that lead vLLM to it."""
        return {_ROOT: str(self.folder), "TRITON_CACHE_DIR": str(self.own.parent / _KERNELS)}

    def prepare(self) -> None:
        """Make the folder, before vLLM starts."""
        facts = self.own.parent / _MODEL_FACTS
        facts.mkdir(parents=True, exist_ok=True)
        self.own.mkdir(exist_ok=True)
        link = self.own / _MODEL_FACTS
        if self.folder == self.own and not link.exists():
            with contextlib.suppress(FileExistsError):  # another engine that starts now was faster
                link.symlink_to(facts, target_is_directory=True)

    def mark(self) -> None:
        """The start came to its end: the next one will find all it needs."""
        if self.found == "miss":
            (self.own / _DONE).touch()


def compile_cache(folder: Path, arguments: Mapping[str, Any], version: str, device: str) -> CompileCache:
    """The cache of one engine.

    Args:
        folder: of the model.
        arguments: of vLLM's engine, all of them.
        version: vLLM's.
        device: as torch names it.
    """
    config = (folder / "config.json").read_bytes()
    kept = {name: value for name, value in sorted(arguments.items()) if name not in _MATTERS_NOT}
    chosen = os.environ.get(_ROOT, "")
    parts = (chosen, hashlib.sha256(config).hexdigest(), json.dumps(kept, default=str), version, *_machine(device))
    own = cache_root() / "vllm" / hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]
    root = Path(chosen).expanduser() if chosen else own
    if arguments.get("enforce_eager"):
        return CompileCache(root, own, "off")
    return CompileCache(root, own, "hit" if (own / _DONE).is_file() and root.is_dir() else "miss")


def _machine(device: str) -> tuple[str, ...]:
    versions = (metadata.version("torch"), platform.python_version(), platform.machine())
    if not device.startswith("cuda"):
        return (*versions, "cpu")
    from torch.version import cuda

    return (*versions, gpu_of(device).name, str(cuda))
