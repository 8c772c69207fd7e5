"""A worker is a plain class; a ``Remote`` runs it elsewhere, and every wait on it is bounded and names it.

``RayRemote`` (in ``actor``) puts the worker in an actor process, ``InlineRemote`` keeps it in this one (tests,
debugging). Values that need not be looked at travel between workers as opaque references, so weights never pass through
the driver.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

from gymloop.errors import GymloopError, InfraError


class Remote(Protocol):
    """A worker reachable by method name. It is also ``health.Checked``."""

    @property
    def name(self) -> str:
        """As errors and the startup table call it."""

    async def call(self, method: str, *args: Any, timeout: float) -> Any:
        """Run ``method`` and return its value.

        Raises:
            InfraError: the worker died, or did not finish within ``timeout`` seconds.
            GymloopError: whatever the method itself raised on purpose.
        """

    def refer(self, method: str, *args: Any) -> Any:
        """Start ``method`` and return a reference to its value, to be passed as an argument to another worker."""

    async def check(self) -> None:
        """Return once the worker's process has answered a heartbeat, which no busy call holds up.

        A worker that has a method ``check`` is asked with each: one that has lost what it works with cannot go on.

        Raises:
            InfraError: the process is gone, or what the worker's ``check`` raised.
        """

    def symptoms(self) -> str:
        """What can be seen from outside of a worker that does not answer: clauses and log lines, or nothing."""

    def kill(self) -> None:
        """End the worker at once; calls in flight raise InfraError. Safe to call twice."""


def ask(worker: Any) -> None:
    """The worker's part in ``Remote.check``."""
    check = getattr(worker, "check", None)
    if check is not None:
        check()


def named(name: str, error: GymloopError) -> str:
    """What a worker says of itself, with its name."""
    return str(error) if name in str(error) else f"{name}: {error}"


class InlineRemote:
    """Runs the worker in this process, each call in a thread of its own."""

    def __init__(self, name: str, build: Callable[[], Any]) -> None:
        self._name = name
        self._worker = build()
        self._pool = ThreadPoolExecutor(max_workers=8, thread_name_prefix=name)
        self._killed = False

    @property
    def name(self) -> str:
        """As errors call it."""
        return self._name

    async def call(self, method: str, *args: Any, timeout: float) -> Any:
        """Run ``method`` in a thread; see ``Remote.call``."""
        future = self.refer(method, *args)
        done, _ = await asyncio.wait({asyncio.wrap_future(future)}, timeout=timeout)
        if not done:
            raise InfraError(f"{self.name} did not finish {method} within {timeout:.0f} s")
        return done.pop().result()  # bounded: it is done

    def refer(self, method: str, *args: Any) -> Future[Any]:
        """Start ``method``; the reference is a future."""
        if self._killed:
            raise InfraError(f"{self.name} was ended before {method}")

        def work() -> Any:
            # bounded: another worker's call made the reference, and whoever awaits that call bounds it
            values = [arg.result() if isinstance(arg, Future) else arg for arg in args]
            return getattr(self._worker, method)(*values)

        return self._pool.submit(work)

    async def check(self) -> None:
        """Threads of this process do not die by themselves: fails after ``kill``, or as the worker says."""
        if self._killed:
            raise InfraError(f"{self.name} was ended")
        try:
            ask(self._worker)
        except GymloopError as error:
            raise InfraError(named(self.name, error), cause=error.cause) from error

    def symptoms(self) -> str:
        """Nothing: it answers whenever this process does."""
        return ""

    def kill(self) -> None:
        """Close the worker; see ``Remote.kill``."""
        if not self._killed:
            self._killed = True
            self._worker.close()
            self._pool.shutdown(wait=False, cancel_futures=True)
