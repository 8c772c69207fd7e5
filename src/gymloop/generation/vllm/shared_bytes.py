"""Bytes that another process of this machine can read by a path, and that no death of ours leaves behind.

The memory has no name in any file system: it is a descriptor of this process, which others open under ``/proc``. When
the last process that maps it ends, however it ends, the kernel takes it back.
"""

from __future__ import annotations

import mmap
import os

import numpy as np


class SharedBytes:
    """One growing piece of shared memory; a second sync of the same size writes over the pages of the first."""

    def __init__(self, name: str) -> None:
        self._descriptor = os.memfd_create(name)
        self._map: mmap.mmap | None = None

    @property
    def path(self) -> str:
        """Where another process of this user opens it, as long as this process lives."""
        return f"/proc/{os.getpid()}/fd/{self._descriptor}"

    def reserve(self, nbytes: int) -> None:
        """Have room for that many bytes; what was written before may be lost."""
        if self._map is None or len(self._map) < nbytes:
            self._unmap()
            os.ftruncate(self._descriptor, nbytes)
            self._map = mmap.mmap(self._descriptor, max(nbytes, 1))

    def write(self, offset: int, data: np.ndarray) -> None:
        """Copy a uint8 array [bytes] to a place within what was reserved."""
        if self._map is None:
            raise ValueError("nothing is reserved")
        np.copyto(np.frombuffer(self._map, np.uint8, data.nbytes, offset), data)

    def read_text(self) -> str:
        """All of it as text; what is no UTF-8 is replaced."""
        size = os.fstat(self._descriptor).st_size
        return os.pread(self._descriptor, size, 0).decode("utf-8", "replace")

    def close(self) -> None:
        """Give it up. Safe to call twice."""
        self._unmap()
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _unmap(self) -> None:
        if self._map is not None:
            self._map.close()
            self._map = None
