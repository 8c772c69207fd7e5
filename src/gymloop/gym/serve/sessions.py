"""Who is playing: sessions by the token in their cookie, bounded in number, each ended by its verdict or by silence.

One request of a session runs at a time. A session that is judged or closed is gone, whatever its environment raised;
one that nobody asked anything of for ``idle_s`` is closed by the sweep. At the bound a new session is refused, never an
old one ended: those who play must not lose what they did.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field

from gymloop.errors import GymloopError, InfraError
from gymloop.gym.contract import Row
from gymloop.gym.deadline import within
from gymloop.gym.serve.refusal import NO_SESSION, Refusal, busy
from gymloop.gym.session import InProcessSession, InProcessSource

CLOSE_S = 10.0

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Held:
    session: InProcessSession
    used: float
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)


class Sessions:
    """The open sessions of one environment, for one event loop.

    Args:
        source: opens them.
        most: open at once.
        idle_s: silence after which one is closed; seconds.
        call_timeout_s: wall time of one call of the environment; seconds.
        clock: seconds, never going back.
    """

    def __init__(
        self,
        source: InProcessSource,
        *,
        most: int,
        idle_s: float,
        call_timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._source = source
        self._most = most
        self._idle_s = idle_s
        self._call_timeout_s = call_timeout_s
        self._clock = clock
        self._held: OrderedDict[str, _Held] = OrderedDict()  # the longest unused first
        self._opening = 0

    def __len__(self) -> int:
        return len(self._held)

    async def open(self, row: Row, token: str | None) -> str:
        """Start a session and return its token.

        Args:
            row: its task.
            token: of the client's cookie; a session that is open under it ends, as the client starts anew.

        Raises:
            Refusal: 429, there are as many as there may be.
            GymloopError: the environment does not take the row, or failed.
        """
        if token in self._held:
            await self.close(token)
        else:
            token = None  # a token that was not given out here is nobody's
        if len(self._held) + self._opening >= self._most:
            await self.sweep()
            if len(self._held) + self._opening >= self._most:
                raise busy(f"{self._most} sessions are open, as many as this server keeps; close some, or try again")
        self._opening += 1
        try:
            where = f"environment {self._source.name}, seed_session"
            session = await within(self._call_timeout_s, where, self._source.seed_session(row))
        finally:
            self._opening -= 1
        token = token or uuid.uuid4().hex
        self._held[token] = _Held(session, self._clock())
        return token

    @contextlib.asynccontextmanager
    async def playing(self, token: str | None) -> AsyncGenerator[InProcessSession, None]:
        """The session under a token, for one call.

        Raises:
            Refusal: 400, there is none.
            InfraError: an earlier call of the session did not end in time.
        """
        token = token or ""
        held = self._held.get(token)
        if held is None:
            raise Refusal(400, NO_SESSION)
        try:
            async with asyncio.timeout(self._call_timeout_s):
                await held.turn.acquire()  # bounded: by the scope
        except TimeoutError:
            message = f"environment {self._source.name}: an earlier call of this session has not ended"
            raise InfraError(message, cause="timeout") from None
        try:
            if self._held.get(token) is not held:  # judged or closed meanwhile
                raise Refusal(400, NO_SESSION)
            yield held.session
        finally:
            held.turn.release()
            held.used = self._clock()
            if token in self._held:
                self._held.move_to_end(token)

    async def close(self, token: str | None) -> None:
        """End a session; one that is not there has ended already."""
        held = self._held.pop(token or "", None)
        if held is not None:
            await self._end(held)

    async def sweep(self) -> None:
        """Close what has been silent for too long."""
        until = self._clock() - self._idle_s
        for token, held in list(self._held.items()):
            if held.used > until:
                break
            if not held.turn.locked():
                log.warning("a session was silent for %g s and is closed; clients should end theirs", self._idle_s)
                await self.close(token)

    async def close_all(self) -> None:
        """End every session."""
        held, self._held = list(self._held.values()), OrderedDict()
        await asyncio.gather(*map(self._end, held))  # bounded: each by its own time

    async def _end(self, held: _Held) -> None:
        where = f"environment {self._source.name}, close"
        try:
            await within(CLOSE_S, where, held.session.close())
        except GymloopError as error:  # the session is over either way
            log.warning("%s", error)
