"""Whether an engine lives: it is dead of a named cause, or closed. What waits for its processes ends with it.

``die`` and ``unless_dead`` run on the engine's loop; the rest may be asked from any thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from gymloop.errors import InfraError

T = TypeVar("T")


class Life:
    """Of one engine.

    Args:
        on_death: called once, on the engine's loop.

    Attributes:
        closed: somebody ended it.
    """

    def __init__(self, on_death: Callable[[], None]) -> None:
        self.closed = False
        self._cause: str | None = None
        self._gone = asyncio.Event()
        self._on_death = on_death

    @property
    def dead(self) -> bool:
        """A process of vLLM is gone, or what the engine would say is no longer true."""
        return self._cause is not None

    @property
    def over(self) -> bool:
        """Dead or closed."""
        return self.dead or self.closed

    @property
    def _why(self) -> str:
        return f"the engine is dead: {self._cause}" if self.dead else "the engine was closed"

    def require(self) -> None:
        """Raise InfraError, with the cause, where it is over."""
        if self.over:
            raise InfraError(self._why)

    def loss(self, request_id: str) -> InfraError:
        """What a request is told that its end cost."""
        return InfraError(f"request {request_id!r} was lost: {self._why}")

    def die(self, cause: str) -> None:
        """It is dead; the first cause counts."""
        if self._cause is None:
            self._cause = cause
            self._gone.set()
            self._on_death()

    async def told(self, seconds: float) -> None:
        """Wait for a death that is about to be known, at most ``seconds``."""
        gone = asyncio.ensure_future(self._gone.wait())  # bounded: by ``seconds``
        await asyncio.wait({gone}, timeout=seconds)
        gone.cancel()

    async def unless_dead(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of a call to vLLM's processes.

        Raises:
            InfraError: they died meanwhile.
        """
        # bounded: by the caller's time, or by the engine's death
        task, gone = asyncio.ensure_future(work), asyncio.ensure_future(self._gone.wait())
        try:
            # bounded: by the caller's time, or by the engine's death
            await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                self.require()
            return task.result()  # bounded: it is done
        finally:
            task.cancel()
            gone.cancel()
