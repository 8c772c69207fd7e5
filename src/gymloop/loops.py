"""The event loop of processes that make or answer many requests."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable


def fast_loop() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop's loop, for ``asyncio.Runner``; None, which is asyncio's own, where there is no uvloop."""
    if sys.platform == "win32":
        return None
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop
