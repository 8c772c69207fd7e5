"""Text that other processes of this machine write by a path, and that no death, theirs or ours, leaves behind.

The memory has no name in any file system: it is a descriptor of this process, which others open under ``/proc``. When
the last process that holds it ends, however it ends, the kernel takes it back.
"""

from __future__ import annotations

import os


class SharedBytes:
    """One file in memory."""

    def __init__(self, name: str) -> None:
        self._descriptor = os.memfd_create(name)

    @property
    def path(self) -> str:
        """Where another process of this user opens it, as long as this process lives."""
        return f"/proc/{os.getpid()}/fd/{self._descriptor}"

    def read_text(self) -> str:
        """All of it as text; what is no UTF-8 is replaced."""
        size = os.fstat(self._descriptor).st_size
        return os.pread(self._descriptor, size, 0).decode("utf-8", "replace")

    def close(self) -> None:
        """Give it up. Safe to call twice."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
