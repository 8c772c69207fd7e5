"""Waiting that ends on time whatever the work does."""

from __future__ import annotations

import asyncio
from typing import Any


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
