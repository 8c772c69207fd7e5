"""A run starts whole or not at all.

Every task begins the moment the tasks it needs have ended. The first failure, missed deadline or interruption cancels
the others, tears down whatever was built in reverse order of completion, and only then is raised, under its task's
name. Nothing is waited on without a bound: a task that ignores its cancellation and a teardown that hangs are named and
left behind. The graph knows nothing of what its tasks build.

    waiting ── needs ended ──> running ── result ──> done ── close() or a failure elsewhere ──> torn down
                                  │
                                  ├── exception, or no progress for deadline_s ──> failed: the graph unwinds
                                  └── cancelled ──> cancelled, or after CANCEL_S abandoned

A coroutine can be cancelled, a thread cannot. Blocking work belongs in a process or actor whose teardown, registered
with ``Context.on_teardown`` before the work begins, kills it; short blocking work goes through ``Context.in_thread``,
whose threads never keep the process alive.
"""

from __future__ import annotations

import asyncio
import contextvars
import difflib
import inspect
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, Literal, TypeVar

from gymloop.errors import ConfigError, GymloopError
from gymloop.startup.timeline import Outcome, Record, Timeline

logger = logging.getLogger(__name__)

T = TypeVar("T")
Undo = Callable[[], Awaitable[object] | object]

CANCEL_S = 1.0
"""A cancelled task has this long to end before it is abandoned."""
TEARDOWN_S = 10.0
"""Each teardown of a startup that failed has this long."""


class StartupError(GymloopError):
    """A task of the startup failed; everything else was cancelled and torn down before this was raised.

    Attributes:
        task: name of the task that failed first.
        kind: that of the cause when the cause is one of gymloop's errors, else ``infra``.
        timeline: what had happened until then.
    """

    def __init__(self, message: str, task: str, kind: str, timeline: Timeline) -> None:
        super().__init__(message)
        self.task = task
        self.kind = kind
        self.timeline = timeline


@dataclass(frozen=True, slots=True)
class Task(Generic[T]):
    """One thing to start.

    Attributes:
        name: unique in the graph; errors, metrics and the timeline use it.
        run: builds the thing. It must never block the event loop.
        needs: names of the tasks whose results it uses.
        deadline_s: seconds it may go without progress, measured from its start or its last ``Context.progress``.
        teardown: undoes a finished task, given its result. A coroutine function runs on the event loop, a plain
            function in a thread of its own, so that one that blocks cannot hold up the others.
    """

    name: str
    run: Callable[[Context], Awaitable[T]]
    needs: tuple[str, ...] = ()
    deadline_s: float = field(kw_only=True)
    teardown: Callable[[T], Awaitable[object] | object] | None = field(default=None, kw_only=True)


@dataclass(frozen=True, slots=True)
class Event:
    """Something a live view may show; delivered on the event loop, in order.

    Attributes:
        task: the task it is about.
        kind: what happened.
        at: seconds since the graph began.
        message: what it waits for (``progress``) or why it failed (``failed``), else empty.
    """

    task: str
    kind: Literal["started", "progress", "done", "failed", "cancelled", "abandoned"]
    at: float
    message: str = ""


class Context:
    """What a running task may ask of the graph. Every method may be called from any thread."""

    def __init__(self, state: _State, results: Mapping[str, Any], graph: _Graph) -> None:
        self._state = state
        self._graph = graph
        self.results: Mapping[str, Any] = _Needed(state.task.name, results)
        """Results of the tasks it needs, by name."""

    def progress(self, waits_for: str) -> None:
        """Extend the deadline by ``deadline_s`` from now, and say what the task waits for now."""
        self._graph.note(self._state, waits_for)

    def on_teardown(self, undo: Undo) -> None:
        """Register the undoing of something half built, before the task has ended.

        Called whether the task then succeeds, fails or is cancelled; after its ``teardown``, in reverse order.
        """
        self._graph.push(self._state.task.name, undo)

    async def in_thread(self, work: Callable[..., T], *args: Any, undo: Callable[[T], object] | None = None) -> T:
        """Run blocking work in a thread that never keeps the process alive.

        Cancelling the task leaves the thread to finish on its own; ``undo`` then gets the result that nobody took.
        The thread lives until the graph is torn down, because what the work started may live only as long: Linux sends
        a child's death signal (PR_SET_PDEATHSIG) when the thread that started it ends, and Ray's head uses that.
        """
        return await self._graph.in_thread(partial(work, *args), f"startup-{self._state.task.name}", undo)


class Started:
    """A startup that succeeded: the results, the timeline, and the way back."""

    def __init__(self, results: Mapping[str, Any], timeline: Timeline, graph: _Graph) -> None:
        self.results = results
        """What each task returned, by name."""
        self.timeline = timeline
        self._graph = graph

    async def close(self, timeout: float) -> tuple[str, ...]:
        """Tear everything down in reverse order of completion, however many teardowns fail.

        A cancellation meanwhile cuts the remaining waits to a second each, and is raised after the last of them. Safe
        to call again: what was torn down is not torn down twice.

        Args:
            timeout: seconds for each teardown; one that takes longer is left behind.

        Returns:
            One sentence per teardown that failed; each was logged as a warning.
        """
        troubles, interrupted = await self._graph.tear_down(timeout)
        if interrupted:
            raise asyncio.CancelledError
        return troubles


async def run_graph(
    tasks: Sequence[Task[Any]],
    on_event: Callable[[Event], None] | None = None,
    *,
    max_parallel: int | None = None,
    teardown_s: float = TEARDOWN_S,
) -> Started:
    """Start all tasks, each as soon as what it needs has ended.

    Args:
        tasks: the graph, in any order.
        on_event: told of every change, on the event loop; if it raises, that is logged and the startup goes on.
        max_parallel: tasks running at once; None sets no limit, 1 starts them one after another.
        teardown_s: seconds for each teardown when the startup fails.

    Raises:
        ConfigError: the graph names an unknown task, has a cycle, a duplicate name or a deadline that is not positive;
            nothing was started.
        StartupError: a task failed or missed its deadline; its ``__cause__`` is the original exception.
        asyncio.CancelledError: the caller was cancelled (Ctrl-C under ``asyncio.run``); all was torn down first.
    """
    graph = _Graph(dependency_order(tasks), on_event, max_parallel)
    try:
        await graph.run()
    except BaseException as error:
        for trouble in await graph.unwind(teardown_s):
            error.add_note(trouble)
        if isinstance(error, StartupError):
            error.timeline = graph.timeline()
        raise
    return Started(graph.results, graph.timeline(), graph)


def dependency_order(tasks: Sequence[Task[Any]]) -> tuple[Task[Any], ...]:
    """The tasks, each after those it needs, otherwise in the order given.

    Raises:
        ConfigError: unknown need, cycle, duplicate name or deadline that is not positive.
    """
    by_name: dict[str, Task[Any]] = {}
    for task in tasks:
        if task.name in by_name:
            raise ConfigError(f"two startup tasks are named {task.name!r}")
        if not task.deadline_s > 0:
            raise ConfigError(f"startup task {task.name!r} has deadline_s {task.deadline_s}, expected more than 0 s")
        by_name[task.name] = task
    for task in tasks:
        for need in task.needs:
            if need not in by_name:
                nearest = difflib.get_close_matches(need, by_name, n=1)
                hint = f"; the nearest is {nearest[0]!r}" if nearest else ""
                raise ConfigError(f"startup task {task.name!r} needs {need!r}, which is not a task{hint}")
    order: dict[str, Task[Any]] = {}
    while len(order) < len(by_name):
        waiting = (task for name, task in by_name.items() if name not in order)
        ready = next((task for task in waiting if order.keys() >= set(task.needs)), None)
        if ready is None:
            raise ConfigError(f"startup tasks wait for each other: {' -> '.join(_cycle(by_name, order))}")
        order[ready.name] = ready
    return tuple(order.values())


def _cycle(by_name: Mapping[str, Task[Any]], ended: Mapping[str, Task[Any]]) -> list[str]:
    """One cycle among the tasks that can never begin; each of them has a need that cannot begin either."""
    walk = [next(name for name in by_name if name not in ended)]
    while walk.count(walk[-1]) == 1:
        walk.append(next(need for need in by_name[walk[-1]].needs if need not in ended))
    return walk[walk.index(walk[-1]) :]


@dataclass(slots=True)
class _State:
    """One task while the graph runs. ``heard`` is when it last showed progress, all times on the graph's clock."""

    task: Task[Any]
    future: asyncio.Task[None] | None = None
    start: float | None = None
    end: float | None = None
    heard: float = 0.0
    notes: list[tuple[float, str]] = field(default_factory=list)
    outcome: Outcome = "not started"

    @property
    def running(self) -> bool:
        return self.start is not None and self.end is None


class _Needed(dict[str, Any]):
    def __init__(self, task: str, results: Mapping[str, Any]) -> None:
        super().__init__(results)
        self._task = task

    def __missing__(self, name: str) -> Any:
        raise KeyError(f"startup task {self._task!r} reads the result of {name!r} without naming it in needs")


class _Graph:
    def __init__(
        self, order: tuple[Task[Any], ...], on_event: Callable[[Event], None] | None, max_parallel: int | None
    ) -> None:
        self.results: dict[str, Any] = {}
        self._states = {task.name: _State(task) for task in order}
        self._on_event = on_event
        self._max_parallel = max_parallel or len(order)
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self._zero = time.monotonic()
        self._undos: list[tuple[str, Undo]] = []  # grows in order of completion, so a need always lies below its users
        self._failed: str | None = None
        self._unwound = False
        self._torn_down = threading.Event()
        self._late: set[asyncio.Task[Any]] = set()

    def timeline(self) -> Timeline:
        return Timeline(
            tuple(
                Record(name, state.start, state.end, state.task.needs, tuple(state.notes), state.outcome)
                for name, state in self._states.items()
            )
        )

    async def run(self) -> None:
        """Run every task, or raise for the first that fails; the caller unwinds."""
        self._begin_ready()
        while running := self._running():
            patience = min(state.heard + state.task.deadline_s for state in running) - self._now()
            futures = [state.future for state in running if state.future is not None]
            await asyncio.wait(futures, timeout=max(patience, 0), return_when=asyncio.FIRST_COMPLETED)
            self._raise_first_failure()
            self._raise_missed_deadline()
            self._begin_ready()

    async def unwind(self, teardown_s: float) -> tuple[str, ...]:
        """Cancel what runs, tear down what was built; returns a sentence for each thing that went wrong on the way."""
        futures = {name: state.future for name, state in self._states.items() if state.future is not None}
        for future in futures.values():
            future.cancel()
        await _settle(set(futures.values()), CANCEL_S)
        troubles = []
        for name, future in futures.items():
            if not future.done():
                self._end(self._states[name], "abandoned")
                future.add_done_callback(_retrieve)
                troubles.append(f"startup task {name!r} ignored its cancellation and was abandoned")
            elif (error := _retrieve(future)) is not None and name != self._failed:
                troubles.append(f"startup task {name!r} failed as well: {_sentence(error)}")
        for trouble in troubles:
            logger.warning(trouble)
        failures, _ = await self.tear_down(teardown_s)
        self._unwound = True
        return (*troubles, *failures)

    async def tear_down(self, timeout: float) -> tuple[tuple[str, ...], bool]:
        """Call every undo, newest first; returns what failed, and whether a cancellation came meanwhile."""
        troubles: list[str] = []
        interrupted = False
        while self._undos:
            name, undo = self._undos.pop()
            work = asyncio.ensure_future(_call(undo, f"teardown-{name}"))
            hurried = await _settle({work}, min(timeout, CANCEL_S) if interrupted else timeout)
            interrupted = interrupted or hurried
            if not work.done():
                work.cancel()
                troubles.append(f"teardown of startup task {name!r} did not end and was abandoned")
            elif work.cancelled() or work.exception() is not None:
                reason = "it was cancelled" if work.cancelled() else _sentence(work.exception())
                troubles.append(f"teardown of startup task {name!r} failed: {reason}")
            else:
                continue
            logger.warning(troubles[-1])
        self._torn_down.set()
        return tuple(troubles), interrupted

    async def in_thread(self, work: Callable[[], T], name: str, undo: Callable[[T], object] | None) -> T:
        return await _in_thread(work, name, undo, self._torn_down)

    def push(self, name: str, undo: Undo) -> None:
        self._undos.append((name, undo))
        if self._unwound:  # an abandoned task built something after all
            self._loop.call_soon_threadsafe(self._tear_down_late)

    def note(self, state: _State, waits_for: str) -> None:
        if state.end is not None:  # a thread that outlives its task has nothing left to say
            return
        state.heard = self._now()
        state.notes.append((state.heard, waits_for))
        self._emit(Event(state.task.name, "progress", state.heard, waits_for))

    def _begin_ready(self) -> None:
        free = self._max_parallel - len(self._running())
        waiting = [state for state in self._states.values() if state.start is None]
        ready = [state for state in waiting if self.results.keys() >= set(state.task.needs)]
        for state in ready[:free]:
            state.start = state.heard = self._now()
            needed = {need: self.results[need] for need in state.task.needs}
            context = Context(state, needed, self)
            state.future = asyncio.create_task(self._one(state, context), name=f"startup {state.task.name}")
            self._emit(Event(state.task.name, "started", state.start))

    async def _one(self, state: _State, context: Context) -> None:
        task = state.task
        try:
            result = await task.run(context)
        except asyncio.CancelledError:
            self._end(state, "cancelled")
            raise
        except BaseException as error:
            self._end(state, "failed", _sentence(error))
            raise
        # No await from here on: a task that ended with a result always has its teardown registered.
        self.results[task.name] = result
        if task.teardown is not None:
            self.push(task.name, partial(task.teardown, result))
        self._end(state, "done")

    def _raise_first_failure(self) -> None:
        ended = [state for state in self._states.values() if state.outcome in ("failed", "cancelled")]
        if not ended:
            return
        first = min(ended, key=lambda state: state.end or 0.0)
        self._failed = first.task.name
        cause = _retrieve(first.future) if first.future is not None else None
        kind = cause.kind if isinstance(cause, GymloopError) else "infra"
        seconds = (first.end or 0.0) - (first.start or 0.0)
        raise StartupError(
            f"startup task {first.task.name!r} failed after {seconds:.1f} s: "
            f"{'it cancelled itself' if cause is None else _sentence(cause)}",
            first.task.name,
            kind,
            self.timeline(),
        ) from cause

    def _raise_missed_deadline(self) -> None:
        now = self._now()
        for state in self._running():
            if now < state.heard + state.task.deadline_s:
                continue
            waits_for = state.notes[-1][1] if state.notes else "something it never named"
            message = (
                f"startup task {state.task.name!r} made no progress for {state.task.deadline_s:g} s; "
                f"it was waiting for {waits_for}"
            )
            self._failed = state.task.name
            self._end(state, "failed", message)
            raise StartupError(message, state.task.name, "infra", self.timeline())

    def _running(self) -> list[_State]:
        return [state for state in self._states.values() if state.running]

    def _end(self, state: _State, outcome: Literal["done", "failed", "cancelled", "abandoned"], why: str = "") -> None:
        if state.end is None:  # an abandoned task keeps the moment it was given up
            state.end, state.outcome = self._now(), outcome
            self._emit(Event(state.task.name, outcome, state.end, why))

    def _emit(self, event: Event) -> None:
        if threading.get_ident() == self._thread:
            self._deliver(event)
        else:
            self._loop.call_soon_threadsafe(self._deliver, event)

    def _deliver(self, event: Event) -> None:
        if self._on_event is None:
            return
        try:
            self._on_event(event)
        except Exception:
            logger.exception("the view of the startup failed; going on without it")
            self._on_event = None

    def _tear_down_late(self) -> None:
        late = asyncio.ensure_future(self.tear_down(TEARDOWN_S))
        self._late.add(late)
        late.add_done_callback(self._late.discard)

    def _now(self) -> float:
        return time.monotonic() - self._zero


async def _settle(futures: set[asyncio.Task[Any]], timeout: float) -> bool:
    """Wait until all have ended or the time is over; a cancellation cuts the wait to CANCEL_S instead of ending it.

    Returns whether that happened. Exceptions stay in the futures.
    """
    interrupted = False
    until = time.monotonic() + timeout
    while pending := {future for future in futures if not future.done()}:
        left = until - time.monotonic()
        if left <= 0:
            break
        try:
            await asyncio.wait(pending, timeout=left)
        except asyncio.CancelledError:
            interrupted = True
            until = min(until, time.monotonic() + CANCEL_S)
    return interrupted


def _retrieve(future: asyncio.Task[Any]) -> BaseException | None:
    """The exception of a future that has ended; taking it keeps asyncio from reporting it a second time."""
    return None if future.cancelled() else future.exception()


async def _call(undo: Undo, name: str) -> None:
    result = undo() if inspect.iscoroutinefunction(undo) else await _in_thread(undo, name)
    if inspect.isawaitable(result):
        await result


async def _in_thread(
    work: Callable[[], T],
    name: str,
    undo: Callable[[T], object] | None = None,
    stay_until: threading.Event | None = None,
) -> T:
    """Await ``work`` in a daemon thread; asyncio's own pool would make the interpreter wait for a thread that hangs."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()
    context = contextvars.copy_context()

    def deliver(result: T | None, error: BaseException | None) -> None:
        if future.done():
            if error is None and undo is not None:
                threading.Thread(target=undo, args=(result,), name=f"{name}-undo", daemon=True).start()
        elif error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        result, error = None, None
        try:
            result = context.run(work)
        except BaseException as caught:  # noqa: BLE001  (not swallowed: it travels to whoever awaits)
            error = caught
        try:
            loop.call_soon_threadsafe(deliver, result, error)
        except RuntimeError:  # the loop has closed, so nobody awaits any more
            if error is None and undo is not None:
                undo(result)  # type: ignore[arg-type]
        if stay_until is not None:
            stay_until.wait()  # a daemon: it may also wait for the end of the process

    threading.Thread(target=run, name=name, daemon=True).start()
    return await future


def _sentence(error: BaseException | None) -> str:
    """An error as the end of a sentence; gymloop's own already read as one, others need their type."""
    if isinstance(error, GymloopError) and str(error):
        return str(error)
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
