"""What a startup is made of: tasks, what a running one may ask for, what a view is told, the error that ends it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, Protocol, TypeVar

from gymloop.errors import GymloopError
from gymloop.startup.timeline import Timeline

T = TypeVar("T")
Undo = Callable[[], Awaitable[object] | object]
"""A coroutine function runs on the event loop, a plain function in a thread of its own."""


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


class Context(Protocol):
    """What a running task may ask of the graph. Every method may be called from any thread."""

    results: Mapping[str, Any]
    """Results of the tasks it needs, by name."""

    def progress(self, waits_for: str) -> None:
        """Extend the deadline by ``deadline_s`` from now, and say what the task waits for now."""

    def remark(self, text: str) -> None:
        """Say something of the task that the timeline keeps and its table shows; extends nothing."""

    def on_teardown(self, undo: Undo) -> None:
        """Register the undoing of something half built, before the task has ended.

        Called whether the task then succeeds, fails or is cancelled; after its ``teardown``, in reverse order.
        """

    async def in_thread(self, work: Callable[..., T], *args: Any, undo: Callable[[T], object] | None = None) -> T:
        """Run blocking work in a thread that never keeps the process alive.

        Cancelling the task leaves the thread to finish on its own; ``undo`` then gets the result that nobody took. The
        thread ends with the work, so what the work started must not be tied to it (see ``gymloop.lifeline``).
        """
