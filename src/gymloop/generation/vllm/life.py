"""Whether an engine lives: it is dead of a named cause, or closed. What waits for its processes ends with it.

An engine may also live without weights to sample from: it then refuses requests, and takes weights. ``die``,
``lose_weights``, ``have_weights`` and ``unless_dead`` run on the engine's loop; the rest may be asked from any thread.
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
        on_loss: called on the engine's loop where requests in flight cannot be ended as they should: it died, or its
            weights are gone.

    Attributes:
        closed: somebody ended it.
    """

    def __init__(self, on_loss: Callable[[], None]) -> None:
        self.closed = False
        self._cause: str | None = None
        self._weightless: str | None = None
        self._gone = asyncio.Event()
        self._on_loss = on_loss

    @property
    def dead(self) -> bool:
        """A process of vLLM is gone, or what the engine would say is no longer true."""
        return self._cause is not None

    @property
    def over(self) -> bool:
        """Dead or closed."""
        return self.dead or self.closed

    @property
    def refuses(self) -> bool:
        """It takes no requests: it is over, or has no weights to sample from."""
        return self.over or self._weightless is not None

    @property
    def _why(self) -> str:
        if self.dead:
            return f"the engine is dead: {self._cause}"
        if self.closed:
            return "the engine was closed"
        return f"the engine has no weights to sample from: {self._weightless}"

    def require(self) -> None:
        """Raise InfraError, with the cause, where it is over."""
        if self.over:
            raise InfraError(self._why)

    def require_serving(self) -> None:
        """Raise InfraError, with the cause, where it takes no requests."""
        if self.refuses:
            raise InfraError(self._why)

    def loss(self, request_id: str) -> InfraError:
        """What a request is told that its end cost."""
        return InfraError(f"request {request_id!r} was lost: {self._why}")

    def die(self, cause: str) -> None:
        """It is dead; the first cause counts."""
        if self._cause is None:
            self._cause = cause
            self._gone.set()
            self._on_loss()

    def lose_weights(self, cause: str) -> None:
        """There is nothing to sample from, until ``have_weights``."""
        self._weightless = cause
        self._on_loss()

    def have_weights(self) -> None:
        """An update is complete."""
        self._weightless = None

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
