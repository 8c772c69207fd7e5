"""What was built is undone in reverse order of completion, all of it, whatever raises or hangs on the way."""

from __future__ import annotations

import asyncio
import inspect
import logging

from gymloop.errors import GymloopError
from gymloop.startup.settling import settle
from gymloop.startup.task import Undo
from gymloop.threads import in_thread

logger = logging.getLogger(__name__)

HURRY_S = 1.0
"""What is left of a wait once the caller was cancelled."""


class Teardown:
    """The undoing of everything built so far, in order of completion: a need always lies below its users."""

    def __init__(self) -> None:
        self._undos: list[tuple[str, Undo]] = []

    def push(self, name: str, undo: Undo) -> None:
        """Add the undoing of something that the task ``name`` has built; may be called from any thread."""
        self._undos.append((name, undo))

    async def run(self, timeout: float) -> tuple[tuple[str, ...], bool]:
        """Call every undo, newest first. What was called once is not called again.

        Args:
            timeout: seconds for each; one that takes longer is left behind.

        Returns:
            One sentence per undo that failed, each logged as a warning; whether a cancellation came meanwhile.
        """
        troubles: list[str] = []
        interrupted = False
        while self._undos:
            name, undo = self._undos.pop()
            work = asyncio.ensure_future(_call(undo, f"teardown-{name}"))
            hurried = await settle({work}, min(timeout, HURRY_S) if interrupted else timeout, HURRY_S)
            interrupted = interrupted or hurried
            if not work.done():
                work.cancel()
                troubles.append(f"teardown of startup task {name!r} did not end and was abandoned")
            elif work.cancelled() or work.exception() is not None:
                reason = "it was cancelled" if work.cancelled() else sentence(work.exception())
                troubles.append(f"teardown of startup task {name!r} failed: {reason}")
            else:
                continue
            logger.warning(troubles[-1])
        return tuple(troubles), interrupted


async def _call(undo: Undo, name: str) -> None:
    result = undo() if inspect.iscoroutinefunction(undo) else await in_thread(undo, name)
    if inspect.isawaitable(result):
        await result  # bounded: ``Teardown.run`` leaves it behind after its time


def sentence(error: BaseException | None) -> str:
    """An error as the end of a sentence; gymloop's own already read as one, others need their type."""
    if isinstance(error, GymloopError) and str(error):
        return str(error)
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
