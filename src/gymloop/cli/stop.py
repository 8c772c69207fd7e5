"""How a command that serves is asked to end: the first SIGINT or SIGTERM asks, a second one ends the process at once.

The handler takes no lock, which a ``threading.Event`` has: one that is waited for and set by the handler waits for
itself, for good.
"""

from __future__ import annotations

import os
import time
from multiprocessing.connection import wait
from types import FrameType, TracebackType

from gymloop.wakeup import Signals


class Stop:
    """Handles both signals from when it is made until it is left; on the main thread.

    Attributes:
        number: of the first signal; 0 until then.
    """

    def __init__(self) -> None:
        self.number = 0
        self._signals = Signals(self._ask)

    def _ask(self, number: int, _frame: FrameType | None) -> None:
        if self.number:
            os._exit(128 + number)
        self.number = number

    def wait(self, seconds: float) -> bool:
        """Whether a signal has come, or comes within this time."""
        until = time.monotonic() + seconds
        while not self.number and (left := until - time.monotonic()) > 0:
            if wait([self._signals.fileno()], timeout=left):
                self._signals.drain()
        return self.number != 0

    @property
    def exit_code(self) -> int:
        """128 plus the signal's number."""
        return 128 + self.number

    def __enter__(self) -> Stop:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._signals.close()
