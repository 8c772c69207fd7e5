"""SIGINT and SIGTERM go to a handler, and end whatever wait watches for them.

That holds also for a signal that came a moment before the wait began, or that another thread received. A signal
interrupts the system call that its thread is in. One that comes just before that call begins, or to another thread,
interrupts nothing, and Python's handler, which is the main thread's, runs only once that call returns for another
reason. Python writes each signal to a descriptor as well; a wait that watches it always ends.
"""

from __future__ import annotations

import contextlib
import signal
import socket
from collections.abc import Callable
from types import FrameType, TracebackType

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Signals:
    """Both signals, from when it is made until it is closed; on the main thread.

    Meanwhile it takes the place of whatever handled signals before, or was told of them.

    Args:
        handler: as ``signal.signal`` takes it. It runs between two instructions of the main thread, which may hold any
            lock that it uses itself, so it takes none.
    """

    def __init__(self, handler: Callable[[int, FrameType | None], None]) -> None:
        self._handler = handler
        self._read, self._write = socket.socketpair()
        self._read.setblocking(False)
        self._write.setblocking(False)
        self._told_before = signal.set_wakeup_fd(self._write.fileno(), warn_on_full_buffer=False)
        self._before = {number: signal.getsignal(number) for number in SIGNALS}
        self.claim()

    def claim(self) -> None:
        """Handle them again where somebody else has come to handle them."""
        for number in SIGNALS:
            signal.signal(number, self._handler)

    def fileno(self) -> int:
        """The descriptor to watch: readable once any signal has come that has a handler in Python."""
        return self._read.fileno()

    def drain(self) -> None:
        """It is readable again only once a further signal comes."""
        with contextlib.suppress(BlockingIOError):
            self._read.recv(4096)

    def close(self) -> None:
        """Signals are handled and told as before."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._told_before)
        self._read.close()
        self._write.close()

    def __enter__(self) -> Signals:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
