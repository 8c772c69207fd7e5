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
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, TypeVar

from gymloop.errors import GymloopError
from gymloop.startup.order import dependency_order
from gymloop.startup.settling import settle
from gymloop.startup.task import Event, StartupError, Task, Undo
from gymloop.startup.teardown import Teardown, sentence
from gymloop.startup.timeline import Outcome, Record, Timeline
from gymloop.threads import in_thread

logger = logging.getLogger(__name__)

T = TypeVar("T")

CANCEL_S = 0.8
"""A cancelled task has this long to end before it is abandoned, so that a failure is told within a second."""
TEARDOWN_S = 10.0
"""Each teardown of a startup that failed has this long."""


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
        troubles, interrupted = await self._graph.teardown.run(timeout)
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


@dataclass(slots=True)
class _State:
    """One task while the graph runs. ``heard`` is when it last showed progress, all times on the graph's clock."""

    task: Task[Any]
    future: asyncio.Task[None] | None = None
    start: float | None = None
    end: float | None = None
    heard: float = 0.0
    notes: list[tuple[float, str]] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
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


class _Context:
    """See ``task.Context``."""

    def __init__(self, state: _State, results: Mapping[str, Any], graph: _Graph) -> None:
        self._state = state
        self._graph = graph
        self.results: Mapping[str, Any] = _Needed(state.task.name, results)

    def progress(self, waits_for: str) -> None:
        self._graph.note(self._state, waits_for)

    def remark(self, text: str) -> None:
        self._state.remarks.append(text)

    def on_teardown(self, undo: Undo) -> None:
        self._graph.push(self._state.task.name, undo)

    async def in_thread(self, work: Callable[..., T], *args: Any, undo: Callable[[T], object] | None = None) -> T:
        return await in_thread(partial(work, *args), f"startup-{self._state.task.name}", undo)


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
        self._zero = self._loop.time()
        self.teardown = Teardown()
        self._failed: str | None = None
        self._unwound = False
        self._late: set[asyncio.Task[Any]] = set()

    def timeline(self) -> Timeline:
        return Timeline(
            tuple(
                Record(
                    name,
                    state.start,
                    state.end,
                    state.task.needs,
                    tuple(state.notes),
                    state.outcome,
                    tuple(state.remarks),
                )
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
        await settle(set(futures.values()), CANCEL_S, CANCEL_S)
        troubles = []
        for name, future in futures.items():
            if not future.done():
                self._end(self._states[name], "abandoned")
                future.add_done_callback(_retrieve)
                troubles.append(f"startup task {name!r} ignored its cancellation and was abandoned")
            elif (error := _retrieve(future)) is not None and name != self._failed:
                troubles.append(f"startup task {name!r} failed as well: {sentence(error)}")
        for trouble in troubles:
            logger.warning(trouble)
        failures, _ = await self.teardown.run(teardown_s)
        self._unwound = True
        return (*troubles, *failures)

    def push(self, name: str, undo: Undo) -> None:
        self.teardown.push(name, undo)
        if self._unwound:  # an abandoned task built something after all
            self._loop.call_soon_threadsafe(self._tear_down_late)

    def note(self, state: _State, waits_for: str) -> None:
        if state.end is not None:  # a thread that outlives its task has nothing left to say
            return
        state.heard = self._now()
        if state.notes and state.notes[-1][1] == waits_for:
            return  # it goes on with the same; the view knows
        state.notes.append((state.heard, waits_for))
        self._emit(Event(state.task.name, "progress", state.heard, waits_for))

    def _begin_ready(self) -> None:
        free = self._max_parallel - len(self._running())
        waiting = [state for state in self._states.values() if state.start is None]
        ready = [state for state in waiting if self.results.keys() >= set(state.task.needs)]
        for state in ready[:free]:
            state.start = state.heard = self._now()
            needed = {need: self.results[need] for need in state.task.needs}
            context = _Context(state, needed, self)
            state.future = asyncio.create_task(self._one(state, context), name=f"startup {state.task.name}")
            self._emit(Event(state.task.name, "started", state.start))

    async def _one(self, state: _State, context: _Context) -> None:
        task = state.task
        try:
            result = await task.run(context)
        except asyncio.CancelledError:
            self._end(state, "cancelled")
            raise
        except BaseException as error:
            self._end(state, "failed", sentence(error))
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
            f"{'it cancelled itself' if cause is None else sentence(cause)}",
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
        late = asyncio.ensure_future(self.teardown.run(TEARDOWN_S))
        self._late.add(late)
        late.add_done_callback(self._late.discard)

    def _now(self) -> float:
        return self._loop.time() - self._zero


def _retrieve(future: asyncio.Task[Any]) -> BaseException | None:
    """The exception of a future that has ended; taking it keeps asyncio from reporting it a second time."""
    return None if future.cancelled() else future.exception()
