"""Every wait has a bound, and the error says who was waited for."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from gymloop.errors import InfraError

_T = TypeVar("_T")


async def within(seconds: float, where: str, work: Awaitable[_T]) -> _T:
    """Await ``work`` for at most ``seconds``.

    Raises:
        InfraError: it took longer; the message begins with ``where``. Work that never yielded to the event loop cannot
            be interrupted: it is reported once it returns.
    """
    start = time.monotonic()
    try:
        async with asyncio.timeout(seconds) as scope:
            result = await work  # bounded: by the scope
    except TimeoutError as error:
        if not scope.expired():
            raise
        raise InfraError(f"{where}: no answer within {seconds:g} s", cause="timeout") from error
    taken = time.monotonic() - start
    if taken > seconds:
        raise InfraError(
            f"{where}: held the event loop for {taken:.1f} s, more than its {seconds:g} s; "
            "make it async, or set blocking = True on the environment",
            cause="timeout",
        )
    return result


async def in_thread(function: Callable[..., _T], *args: Any, **kwargs: Any) -> _T:
    """Run a blocking function in a daemon thread of its own.

    Unlike ``asyncio.to_thread`` a call that never returns neither takes a place in a pool nor holds up the exit of the
    process.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[_T] = loop.create_future()

    def settle(result: _T | None, error: BaseException | None) -> None:
        if future.done():  # the caller gave up
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        result: _T | None = None
        error: BaseException | None = None
        try:
            result = function(*args, **kwargs)
        except StopIteration as raised:  # a future refuses it
            error = RuntimeError(f"{function.__qualname__} raised {raised!r}")
        except BaseException as raised:  # noqa: BLE001 - handed to the awaiting task, which raises it
            error = raised
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=run, name=f"blocking-{function.__qualname__}", daemon=True).start()
    return await future  # bounded: its callers are run by ``within``
