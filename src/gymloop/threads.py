"""Blocking work beside the event loop."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


async def in_thread(work: Callable[[], T], name: str = "blocking", undo: Callable[[T], object] | None = None) -> T:
    """Await ``work`` in a daemon thread of its own.

    Unlike in ``asyncio.to_thread`` a call that never returns neither takes a place in a pool nor holds up the exit of
    the process. Cancelling the wait leaves the thread to finish on its own.

    Args:
        work: may block. It sees the caller's context variables.
        name: of the thread.
        undo: gets the result if whoever awaited it was cancelled meanwhile.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()
    context = contextvars.copy_context()

    def deliver(result: T | None, error: BaseException | None) -> None:
        if future.done():
            if error is None and undo is not None:
                threading.Thread(target=undo, args=(result,), name=f"{name}-undo", daemon=True).start()
        elif error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        result: T | None = None
        error: BaseException | None = None
        try:
            result = context.run(work)
        except StopIteration as raised:  # a future refuses it
            error = RuntimeError(f"{name} raised {raised!r}")
        except BaseException as raised:  # noqa: BLE001  (not swallowed: it travels to whoever awaits)
            error = raised
        try:
            loop.call_soon_threadsafe(deliver, result, error)
        except RuntimeError:  # the loop has closed, so nobody awaits any more
            if error is None and undo is not None:
                undo(result)  # type: ignore[arg-type]

    threading.Thread(target=run, name=name, daemon=True).start()
    return await future  # bounded: by the deadline or teardown, or ``deadline.within``, that its caller runs under
