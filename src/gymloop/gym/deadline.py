"""Every wait has a bound, and the error says who was waited for."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable
from email.utils import parsedate_to_datetime
from typing import TypeVar

from gymloop.errors import InfraError

_T = TypeVar("_T")
_SHORTEST_WAIT_S = 0.05


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


def retry_after_s(header: str | None) -> float | None:
    """Value of a ``Retry-After`` header, seconds or a date, in seconds from now, at least 0.05; None without one."""
    if header is None:
        return None
    try:
        value = float(header)
    except ValueError:
        try:
            value = parsedate_to_datetime(header).timestamp() - time.time()
        except (ValueError, OverflowError):
            return None
    return max(_SHORTEST_WAIT_S, value) if math.isfinite(value) else None
