"""Every part of a run is asked for a sign of life, as long as it exists, in every phase; the first failure is kept.

Two things can be wrong with a part. It is gone: its check raises, which is told at once. Or it is there and does not
answer: that is told after a while, with what can be seen from outside. A part that has not yet answered once is still
starting, and its start has a deadline of its own. Time during which this process itself stood still counts for nothing.
A part whose work can begin anew elsewhere may come with a way to revive it; then only the end of that is a failure.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, NoReturn, Protocol, TypeAlias

from gymloop.errors import GymloopError, InfraError

_TICK_S = 1.0
Revive: TypeAlias = Callable[[GymloopError], Awaitable[None]]


class Checked(Protocol):
    """A worker, an environment's server: whatever may die or hang while a run needs it."""

    @property
    def name(self) -> str:
        """As errors call it."""

    async def check(self) -> None:
        """Return once it has answered; need not bound itself.

        Raises:
            GymloopError: it cannot work any more; the message names it and has the tail of its log.
        """

    def symptoms(self) -> str:
        """What can be seen from outside when it does not answer, to follow a sentence; may be empty."""


class Health:
    """Watches the parts of one run.

    Args:
        period_s: seconds between two checks of a part.
        unresponsive_after_s: a part that answers no check for this long has failed.
        on_failure: told of the first failure the moment it is found; whoever waits for it may have to clean up first.
    """

    def __init__(
        self,
        period_s: float,
        unresponsive_after_s: float,
        on_failure: Callable[[GymloopError], object] | None = None,
    ) -> None:
        self._on_failure = on_failure
        self._period_s = period_s
        self._patience_s = unresponsive_after_s
        self._watches: dict[Checked, asyncio.Task[None]] = {}
        self._excuses: dict[Checked, Callable[[GymloopError], GymloopError | None]] = {}
        self._revived = 0
        self._failed = asyncio.Event()
        self._failure: GymloopError | None = None

    def watch(self, part: Checked, revive: Revive | None = None) -> None:
        """Check the part from now on.

        Args:
            part: what is watched.
            revive: given what is wrong with the part; returns once it answers again, and raises if it cannot.
        """
        self._watches[part] = asyncio.create_task(self._watch(part, revive), name=f"health {part.name}")

    def take_revived(self) -> int:
        """How many times a part was revived since the last call."""
        revived, self._revived = self._revived, 0
        return revived

    def excuse(self, part: Checked, on_failure: Callable[[GymloopError], GymloopError | None]) -> None:
        """Let ``on_failure`` decide what the part's failure means from now on.

        Args:
            part: one that is watched.
            on_failure: told of it once; returns None where the run goes on without the part, else what has failed.
        """
        self._excuses[part] = on_failure

    def forget(self, part: Checked) -> None:
        """Stop checking it: it is about to be ended on purpose. May be called from any thread."""
        if watch := self._watches.pop(part, None):
            watch.get_loop().call_soon_threadsafe(watch.cancel)

    async def failed(self) -> NoReturn:
        """Never returns; raises what was wrong with the first part that failed, also when that was long ago."""
        await self._failed.wait()  # bounded: by whatever it runs beside; it is cancelled when that ends
        raise self._failure or InfraError("a part failed")

    async def _watch(self, part: Checked, revive: Revive | None) -> None:
        patience = float("inf")
        try:
            while True:  # bounded: until ``forget``
                try:
                    await _answered(part, patience)
                except GymloopError as error:
                    if revive is None:
                        raise
                    await revive(error)
                    self._revived += 1
                patience = self._patience_s
                await asyncio.sleep(self._period_s)
        except GymloopError as error:
            excuse = self._excuses.get(part)
            if (failure := error if excuse is None else excuse(error)) is not None:
                self._fail(failure)
        except Exception as error:  # noqa: BLE001  (not swallowed: it ends the run under the part's name)
            self._fail(InfraError(f"{part.name} could not be checked: {type(error).__name__}: {error}"))

    def _fail(self, error: GymloopError) -> None:
        if self._failure is None:
            self._failure = error
            self._failed.set()
            if self._on_failure is not None:
                self._on_failure(error)


async def _answered(part: Checked, patience_s: float) -> None:
    """Return when the part has answered a check.

    Raises:
        InfraError: it has not within ``patience_s``.
        GymloopError: what the check raised.
    """
    check = asyncio.ensure_future(part.check())
    tick = min(_TICK_S, patience_s / 4)
    silent = 0.0
    try:
        while not (await asyncio.wait({check}, timeout=tick))[0]:
            silent += tick  # a tick counts once, however long this process took over it
            if silent >= patience_s:
                raise InfraError(
                    f"{part.name} does not respond: no answer to a heartbeat for {silent:.0f} s{part.symptoms()}"
                )
        check.result()
    finally:
        check.cancel()


async def first_failure(work: Coroutine[Any, Any, Any], *watches: Coroutine[Any, Any, Any]) -> Any:
    """Await ``work`` while ``watches`` run beside it; the first of them to raise cancels the work.

    Args:
        work: what is wanted.
        watches: never return, and raise when the work can no longer succeed.
    """
    main = asyncio.ensure_future(work)
    guards = [asyncio.ensure_future(watch) for watch in watches]
    try:
        # bounded: the work bounds itself, and the watches end it
        await asyncio.wait({main, *guards}, return_when=asyncio.FIRST_COMPLETED)
        if not main.done():
            for guard in guards:
                if guard.done():
                    guard.result()
        return await main  # bounded: as above
    finally:
        for task in (main, *guards):
            task.cancel()
        await asyncio.gather(main, *guards, return_exceptions=True)  # bounded: all of them were cancelled
