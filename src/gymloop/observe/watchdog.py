"""An event loop that stands still is noticed from a thread beside it, which shows the stack of whatever blocks it.

While a loop is blocked nothing that runs on it can say so: requests time out elsewhere, signals wait, and the run looks
like one that hangs without a reason. The watchdog only looks and tells; it never ends anything.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import time
import traceback
from collections.abc import Callable
from types import TracebackType

logger = logging.getLogger(__name__)

_LOOK_S = 0.5
_FRAMES = 24


class LoopWatchdog:
    """Watches the running event loop while its block is entered.

    Args:
        name: of the loop, as the warning calls it.
        lag_s: a callback that waits this long to be run is reported, once for each time the loop stands still.
        warn: gets the warning, in the watchdog's thread.
    """

    def __init__(self, name: str, lag_s: float, warn: Callable[[str], None] = logger.warning) -> None:
        self.name = name
        self._lag_s = lag_s
        self._warn = warn
        self._worst = 0.0
        self._lock = threading.Lock()
        self._leave = threading.Event()

    def __enter__(self) -> LoopWatchdog:
        loop, blocked = asyncio.get_running_loop(), threading.get_ident()
        threading.Thread(target=self._watch, args=(loop, blocked), name="loop-watchdog", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leave.set()

    def take_worst(self) -> float:
        """Longest time a callback waited to be run since the last call, seconds."""
        with self._lock:
            worst, self._worst = self._worst, 0.0
        return worst

    def _watch(self, loop: asyncio.AbstractEventLoop, blocked: int) -> None:
        look_s = min(_LOOK_S, self._lag_s / 4)
        while not self._leave.wait(look_s):
            ran = threading.Event()
            asked = time.monotonic()
            try:
                loop.call_soon_threadsafe(ran.set)
            except RuntimeError:  # the loop has closed
                return
            told = False
            while not ran.wait(look_s) and not self._leave.is_set():
                lag = self._note(time.monotonic() - asked)
                if lag >= self._lag_s and not told:
                    told = True
                    self._warn(f"{self.name} has stood still for {lag:.1f} s; it is in\n{_stack(blocked)}")
            lag = self._note(time.monotonic() - asked)
            if told:
                self._warn(f"{self.name} runs again after {lag:.1f} s")

    def _note(self, lag: float) -> float:
        with self._lock:
            self._worst = max(self._worst, lag)
        return lag


def _stack(thread: int) -> str:
    frame = sys._current_frames().get(thread)
    return "a thread that has ended" if frame is None else "".join(traceback.format_stack(frame)[-_FRAMES:]).rstrip()
