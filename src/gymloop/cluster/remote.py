"""A worker is a plain class; a ``Remote`` runs it elsewhere, and every wait on it is bounded and names it.

``RayRemote`` puts the worker in an actor process, ``InlineRemote`` keeps it in this one (tests, debugging). Values that
need not be looked at travel between workers as opaque references, so weights never pass through the driver.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

from gymloop.errors import GymloopError, InfraError

LOG_TAIL_LINES = 12


class Remote(Protocol):
    """A worker reachable by method name."""

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

    async def died(self) -> None:
        """Never returns; raises InfraError as soon as the worker's process is gone."""

    def kill(self) -> None:
        """End the worker at once; calls in flight raise InfraError. Safe to call twice."""


class InlineRemote:
    """Runs the worker in this process, each call in a thread of its own."""

    def __init__(self, name: str, build: Callable[[], Any]) -> None:
        self._name = name
        self._worker = build()
        self._pool = ThreadPoolExecutor(max_workers=8, thread_name_prefix=name)
        self._killed = asyncio.Event()

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
        return done.pop().result()

    def refer(self, method: str, *args: Any) -> Future[Any]:
        """Start ``method``; the reference is a future."""
        if self._killed.is_set():
            raise InfraError(f"{self.name} was ended before {method}")

        def work() -> Any:
            # A reference was produced by another worker's call, which that worker bounds itself.
            values = [arg.result() if isinstance(arg, Future) else arg for arg in args]
            return getattr(self._worker, method)(*values)

        return self._pool.submit(work)

    async def died(self) -> None:
        """Threads of this process do not die by themselves: waits until ``kill``."""
        await self._killed.wait()
        raise InfraError(f"{self.name} was ended")

    def kill(self) -> None:
        """Close the worker; see ``Remote.kill``."""
        if not self._killed.is_set():
            self._killed.set()
            self._worker.close()
            self._pool.shutdown(wait=False, cancel_futures=True)


class RayRemote:
    """Runs the worker in a Ray actor with an environment and a log file of its own.

    Args:
        name: as errors call it.
        build: the worker class or a picklable function that makes the worker.
        env: environment variables of the actor, among them its thread counts (Ray's default is one thread).
        log_file: receives the actor's standard output and error; its tail is shown when the actor dies.
        num_cpus: Ray CPUs the actor holds.
        num_gpus: Ray GPUs the actor holds.
    """

    def __init__(
        self,
        name: str,
        build: Callable[[], Any],
        *,
        env: Mapping[str, str],
        log_file: Path,
        num_cpus: float = 0,
        num_gpus: float = 0,
    ) -> None:
        import ray

        self._name = name
        self._log_file = log_file
        self._killed = False
        self._hold: Any = None
        options = {
            "num_cpus": num_cpus,
            "num_gpus": num_gpus,
            "max_concurrency": 8,
            "max_restarts": 0,
            "runtime_env": {"env_vars": dict(env)},
        }
        self._actor = ray.remote(_Host).options(**options).remote(build, str(log_file))

    @property
    def name(self) -> str:
        """As errors call it."""
        return self._name

    async def call(self, method: str, *args: Any, timeout: float) -> Any:
        """Run ``method`` in the actor; see ``Remote.call``."""
        reference = self.refer(method, *args)
        try:
            return await asyncio.wait_for(asyncio.wrap_future(reference.future()), timeout)
        except TimeoutError as error:
            raise InfraError(f"{self.name} did not finish {method} within {timeout:.0f} s{self._log_tail()}") from error
        except Exception as error:
            raise self._translated(error, method) from error

    def refer(self, method: str, *args: Any) -> Any:
        """Start ``method``; the reference is an ``ObjectRef`` that Ray resolves in the worker it is passed to."""
        return self._actor.run.remote(method, *args)

    async def died(self) -> None:
        """Raises InfraError as soon as Ray sees the actor's process end."""
        if self._hold is None:
            self._hold = self._actor.hold.remote()  # once: each call in flight takes one of the actor's threads
        try:
            # The actor's death ends this wait: Ray fails every call of a dead actor.
            await asyncio.wrap_future(self._hold.future())
        except Exception as error:
            raise self._translated(error, "its work") from error
        raise InfraError(f"{self.name} was ended")

    def kill(self) -> None:
        """Kill the actor's process; see ``Remote.kill``."""
        import ray

        if not self._killed:
            self._killed = True
            # Ray raises where the actor never started or the cluster is already gone: nothing is left to kill then.
            with contextlib.suppress(ValueError, RuntimeError, ray.exceptions.RayError):
                ray.kill(self._actor)

    def _translated(self, error: Exception, method: str) -> GymloopError:
        import ray

        if isinstance(error, ray.exceptions.RayTaskError):
            cause = error.cause
            if isinstance(cause, GymloopError):
                return cause
            return InfraError(f"{self.name} failed in {method}: {type(cause).__name__}: {cause}{self._log_tail()}")
        if isinstance(error, ray.exceptions.RayActorError):
            return InfraError(f"{self.name} died during {method}{self._log_tail()}")
        return InfraError(f"{self.name} could not run {method}: {type(error).__name__}: {error}")

    def _log_tail(self) -> str:
        try:
            lines = self._log_file.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:]
        except OSError:
            return ""
        return "".join(f"\n  {self._log_file.name}: {line}" for line in lines)


class _Host:
    """The actor: holds the worker and forwards calls to it, in threads."""

    def __init__(self, build: Callable[[], Any], log_file: str) -> None:
        _redirect_output(log_file)
        self._closed = threading.Event()
        self._worker = build()

    def run(self, method: str, *args: Any) -> Any:
        return getattr(self._worker, method)(*args)

    def hold(self) -> None:
        while not self._closed.wait(timeout=3600):
            pass


def _redirect_output(log_file: str) -> None:
    import os

    fd = os.open(log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)


async def first_failure(work: Coroutine[Any, Any, Any], *watches: Coroutine[Any, Any, None]) -> Any:
    """Await ``work`` while ``watches`` run beside it; the first of them to raise cancels the work.

    Args:
        work: what is wanted.
        watches: never return, and raise when the work can no longer succeed.
    """
    main = asyncio.ensure_future(work)
    guards = [asyncio.ensure_future(watch) for watch in watches]
    try:
        await asyncio.wait({main, *guards}, return_when=asyncio.FIRST_COMPLETED)
        if not main.done():
            for guard in guards:
                if guard.done():
                    await guard
        return await main
    finally:
        for task in (main, *guards):
            task.cancel()
        await asyncio.gather(main, *guards, return_exceptions=True)
