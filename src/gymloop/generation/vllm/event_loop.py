"""An event loop in a thread of its own, for an engine that lives on one loop and is called from any thread."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from gymloop.errors import InfraError

T = TypeVar("T")


class LoopThread:
    """Runs until ``stop``; whatever is then still on the loop is cancelled."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        left = asyncio.all_tasks(self._loop)
        for task in left:
            task.cancel()
        if left:
            self._loop.run_until_complete(asyncio.wait(left, timeout=5.0))
        self._loop.close()

    def submit(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Run a coroutine on the loop.

        Raises:
            InfraError: the loop has ended.
        """
        try:
            return asyncio.run_coroutine_threadsafe(work, self._loop)
        except RuntimeError as error:
            work.close()
            raise InfraError("the engine was closed") from error

    def soon(self, callback: Callable[..., object], *args: Any) -> None:
        """Call something on the loop; after ``stop`` this does nothing."""
        try:
            self._loop.call_soon_threadsafe(callback, *args)
        except RuntimeError:  # closed: nothing is left that the call could change
            return

    def stop(self, timeout: float) -> None:
        """End the loop and wait for its thread. Safe to call twice."""
        self.soon(self._loop.stop)
        self._thread.join(timeout)
