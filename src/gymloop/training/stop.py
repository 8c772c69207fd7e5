"""How a run is asked to end: each signal is more urgent than the one before.

| SIGINT or SIGTERM | what follows                                                                    |
| ----------------- | ------------------------------------------------------------------------------- |
| first             | the loop ends at its next safe point and saves; see ``training.loop``           |
| second            | the run's task is cancelled, nothing is saved; after 5 s the process just ends  |
| third             | the process ends here and now                                                   |

A process that just ends leaves nothing behind all the same: the kernel kills what is tied to it (``gymloop.lifeline``).
The handlers run between two instructions of the main thread, so the second and third also work while an environment
blocks the event loop. A loop that waits is woken for them (``gymloop.wakeup``).
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NoReturn, TypeVar

from gymloop.cluster.health import first_failure
from gymloop.errors import GymloopError
from gymloop.threads import in_thread
from gymloop.wakeup import Signals

T = TypeVar("T")

HURRY_S = 5.0
"""After a second signal the process ends within this, whatever its teardown does."""
CLAIM_S = 0.05
"""For so long at most does ``keep`` leave a signal to somebody else."""


class Stopped(GymloopError):
    """The user asked the run to end."""

    kind = "stopped"

    def __init__(self, exit_code: int) -> None:
        super().__init__("the run was asked to stop")
        self.exit_code = exit_code


class StopSignal:
    """Set by the first SIGINT or SIGTERM.

    Attributes:
        exit_code: 128 plus the number of the first signal; 0 until then.
        insisted: whether a second one came.
    """

    def __init__(self) -> None:
        self.exit_code = 0
        self.insisted = False
        self._event = asyncio.Event()
        self._signals: Signals | None = None

    @contextmanager
    def installed(self, task: asyncio.Task[Any]) -> Iterator[None]:
        """Handle both signals for ``task``, from the main thread, until the block ends."""
        loop = asyncio.get_running_loop()

        def handle(number: int, frame: FrameType | None) -> None:
            if self.insisted:
                os._exit(self.exit_code)
            if self.exit_code:
                self.insisted = True
                loop.call_soon_threadsafe(task.cancel)
                timer = threading.Timer(HURRY_S, os._exit, (self.exit_code,))
                timer.daemon = True
                timer.start()
            else:
                self.exit_code = 128 + number
                loop.call_soon_threadsafe(self._event.set)

        with Signals(handle) as signals:
            loop.add_reader(signals, signals.drain)
            self._signals = signals
            try:
                yield
            finally:
                self._signals = None
                loop.remove_reader(signals)

    def claim(self) -> None:
        """Handle both signals again, within ``installed`` and from the main thread.

        Ray's C++ core puts a handler of its own for SIGTERM in place when a process connects, and the system's, which
        ends the process, a second before it has disconnected. Python is told of neither.
        """
        if self._signals is not None:
            self._signals.claim()

    @property
    def requested(self) -> bool:
        """Whether the run was asked to stop."""
        return self._event.is_set()

    async def keep(self) -> NoReturn:
        """Claim both signals over and over, until cancelled."""
        while True:  # bounded: by the work that it runs beside; it is cancelled when that ends
            self.claim()
            await asyncio.sleep(CLAIM_S)

    async def watch(self) -> NoReturn:
        """Raises Stopped once the run was asked to stop."""
        await self._event.wait()  # bounded: by the work it runs beside; it is cancelled when that ends
        raise Stopped(self.exit_code)

    async def unless_asked(self, work: Callable[[], T], name: str) -> T:
        """The result of blocking work, in a thread of its own.

        Raises:
            Stopped: the run was asked to stop first; the thread finishes on its own.
        """
        result: T = await first_failure(in_thread(work, name), self.watch())
        return result
