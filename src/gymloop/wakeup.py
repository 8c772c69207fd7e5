"""A wait that every signal ends: also one that came a moment before it began, or that another thread received.

A signal interrupts the system call that its thread is in. One that comes just before that call begins, or to another
thread, interrupts nothing, and Python's handler, which is the main thread's, runs only once that call returns for
another reason. Python writes each signal to a descriptor as well; a wait that watches it always ends.
"""

from __future__ import annotations

import contextlib
import signal
import socket
from types import TracebackType


class Wakeup:
    """Readable once a signal has come that has a handler in Python. Made and closed on the main thread.

    While it is open it takes the place of whatever was told of signals before, which is told again afterwards.
    """

    def __init__(self) -> None:
        self._read, self._write = socket.socketpair()
        self._read.setblocking(False)
        self._write.setblocking(False)
        self._before = signal.set_wakeup_fd(self._write.fileno(), warn_on_full_buffer=False)

    def fileno(self) -> int:
        """The descriptor to watch."""
        return self._read.fileno()

    def drain(self) -> None:
        """It is readable again only once a further signal comes."""
        with contextlib.suppress(BlockingIOError):
            self._read.recv(4096)

    def close(self) -> None:
        """Signals are told as before."""
        signal.set_wakeup_fd(self._before)
        self._read.close()
        self._write.close()

    def __enter__(self) -> Wakeup:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
