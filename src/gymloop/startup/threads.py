"""Blocking work beside the event loop, and waiting that ends on time whatever the work does."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


async def in_thread(work: Callable[[], T], name: str, undo: Callable[[T], object] | None = None) -> T:
    """Await ``work`` in a daemon thread; asyncio's own pool would make the interpreter wait for a thread that hangs.

    Args:
        work: may block.
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
        result, error = None, None
        try:
            result = context.run(work)
        except BaseException as caught:  # noqa: BLE001  (not swallowed: it travels to whoever awaits)
            error = caught
        try:
            loop.call_soon_threadsafe(deliver, result, error)
        except RuntimeError:  # the loop has closed, so nobody awaits any more
            if error is None and undo is not None:
                undo(result)  # type: ignore[arg-type]

    threading.Thread(target=run, name=name, daemon=True).start()
    return await future  # bounded: by the deadline of the task, or the time of the teardown, that runs it


async def settle(futures: set[asyncio.Task[Any]], timeout: float, hurry_s: float) -> bool:
    """Wait until all have ended or the time is over; a cancellation cuts the wait to ``hurry_s`` instead of ending it.

    Returns whether that happened. Exceptions stay in the futures.
    """
    now = asyncio.get_running_loop().time
    interrupted = False
    until = now() + timeout
    while pending := {future for future in futures if not future.done()}:
        left = until - now()
        if left <= 0:
            break
        try:
            await asyncio.wait(pending, timeout=left)
        except asyncio.CancelledError:
            interrupted = True
            until = min(until, now() + hurry_s)
    return interrupted
