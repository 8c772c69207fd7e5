"""The engine's one thread: between any two steps requests join, leave, are aborted, or get new weights.

    submit (any thread) ──▶ incoming ──▶ waiting ──admit──▶ rows ──step──▶ draw ──▶ append ──▶ deliver
                                                             ▲
                       abort, drop ──▶ sweep ────────────────┴──── new weights ──▶ forget

All state of rows and cache belongs to the thread; other threads only leave notes under one condition variable, and no
wait is without a bound. A thread that dies takes every request with it, by name and cause: nothing hangs.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

import numpy as np
import torch

from gymloop.errors import GymloopError, InfraError
from gymloop.generation.drawing import Drawer
from gymloop.generation.request import Request
from gymloop.generation.rows import Rows

log = logging.getLogger(__name__)

IDLE_WAIT_S = 1.0
STEP_LIMIT_S = 600.0
"""How long new weights and ``close`` wait for a running step."""


class StepLoop:
    """Runs steps on a thread of its own while there is something to do.

    Args:
        rows: computes the steps.
        drawer: draws from their logits.
    """

    def __init__(self, rows: Rows[Request], drawer: Drawer):
        self._rows = rows
        self._drawer = drawer
        self._waiting: list[Request] = []

        # Shared with other threads, under the condition:
        self._condition = threading.Condition()
        self._in_flight: dict[str, Request] = {}
        self._incoming: list[Request] = []
        self._sweep_due = False
        self._forget_due = False
        self._paused = False
        self._holds = 0
        self._closing = False
        self._dead: BaseException | None = None
        self._version = 0
        self._unfinished: str | None = None  # why the weights are half replaced
        self._step_since: float | None = None

        self.thread = threading.Thread(target=self._run, name="gymloop-torch-engine", daemon=True)
        self.thread.start()

    # ---------------------------------------------------------------- other threads

    @property
    def version(self) -> int:
        """Version of the weights that the next token will be sampled with."""
        return self._version

    def submit(self, request: Request) -> None:
        """Take a request in.

        Raises:
            InfraError: the loop is dead or closed, its weights are half replaced, or the id is in flight already.
        """
        with self._condition:
            self._require_serving()
            if request.request_id in self._in_flight:
                raise InfraError(f"request {request.request_id!r} is already in flight; request ids must be unique")
            self._in_flight[request.request_id] = request
            self._incoming.append(request)
            self._condition.notify_all()

    def drop(self, request: Request) -> None:
        """The caller went away: free the row at the next step, and the id at once."""
        with self._condition:
            if self._in_flight.get(request.request_id) is request:
                del self._in_flight[request.request_id]
            request.aborted = True
            self._sweep_due = True
            self._condition.notify_all()

    def abort(self, request_id: str) -> None:
        """End a request with what it has; unknown ids have already ended."""
        with self._condition:
            request = self._in_flight.get(request_id)
            if request is not None:
                request.aborted = True
                self._sweep_due = True
                self._condition.notify_all()

    def pause(self, timeout: float) -> None:
        """Return once no step runs; the next one waits for ``resume``.

        Raises:
            InfraError: the running step did not end in ``timeout`` seconds (the loop then goes on), or it is dead.
        """
        with self._condition:
            self._require_alive()
            was_paused, self._paused = self._paused, True
            try:
                self._await_step_end(timeout, "pause")
            except InfraError:
                self._paused = was_paused
                self._condition.notify_all()
                raise

    def resume(self) -> None:
        """Go on after ``pause``."""
        with self._condition:
            self._paused = False
            self._condition.notify_all()

    @property
    def queued(self) -> int:
        """Requests that wait for a row."""
        return len(self._incoming) + len(self._waiting)

    def require_alive(self) -> None:
        """Raise InfraError where the loop is dead or closed."""
        with self._condition:
            self._require_alive()

    def require_serving(self) -> None:
        """Raise InfraError where ``submit`` would, whatever the request."""
        with self._condition:
            self._require_serving()

    def change_weights(self, change: Callable[[], None], version: int) -> None:
        """Run ``change`` while no step runs, and count what was computed before as void.

        Where ``change`` raises, the weights may be half replaced and are never sampled from: what is in flight fails,
        and so does whatever is submitted, until a change has come to its end.

        Raises:
            InfraError: the running step did not end, or the loop is dead.
        """
        with self._held():
            try:
                change()
            except BaseException as error:
                self._fail_all(
                    f"the engine has no weights to sample from: their sync to version {version} was not finished "
                    f"({_describe(error)})"
                )
                raise
            with self._condition:
                self._version = version
                self._unfinished = None
                self._forget_due = True

    def _fail_all(self, unfinished: str) -> None:
        with self._condition:
            self._unfinished = unfinished
            for request in self._in_flight.values():
                # Before the thread sees that it is aborted, and frees its row: the first outcome counts.
                request.settle(InfraError(f"request {request.request_id!r} was lost: {unfinished}"))
                request.aborted = True
            self._in_flight.clear()
            self._sweep_due = True
            self._condition.notify_all()

    def close(self) -> None:
        """End the thread; requests in flight raise InfraError. Safe to call twice.

        Raises:
            InfraError: the running step did not end in time.
        """
        with self._condition:
            self._closing = True
            self._condition.notify_all()
        self.thread.join(STEP_LIMIT_S)
        if self.thread.is_alive():
            raise InfraError(f"the engine did not close: {self._describe_step()}")

    def _require_alive(self) -> None:
        if self._dead is not None:
            raise InfraError(f"the engine is dead: {_describe(self._dead)}") from self._dead
        if self._closing:
            raise InfraError("the engine is closed")

    def _require_serving(self) -> None:
        self._require_alive()
        if self._unfinished is not None:
            raise InfraError(self._unfinished)

    def _await_step_end(self, timeout: float, purpose: str) -> None:
        """Wait, with the condition held, until no step runs."""
        deadline = time.monotonic() + timeout
        while self._step_since is not None:
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                raise InfraError(f"{purpose} waited {timeout:g} s for the engine: {self._describe_step()}")
            self._condition.wait(remaining)
        self._require_alive()

    def _describe_step(self) -> str:
        since = self._step_since
        rows, tokens = self._rows.in_step
        if since is None:
            return "no step is running"
        return f"a step of {rows} rows and {tokens} tokens has been running for {time.monotonic() - since:.1f} s"

    @contextmanager
    def _held(self) -> Iterator[None]:
        """No step runs inside."""
        with self._condition:
            self._holds += 1
        try:
            with self._condition:
                self._await_step_end(STEP_LIMIT_S, "load_weights")
            yield
        finally:
            with self._condition:
                self._holds -= 1
                self._condition.notify_all()

    def _die(self, error: BaseException | None) -> None:
        """Fail every request with the cause, None for ``close``; the loop takes no more."""
        with self._condition:
            self._dead = self._dead or error
            requests = list(self._in_flight.values())
            self._in_flight.clear()
            self._incoming.clear()
            self._closing = True
            self._condition.notify_all()
        end = "was closed" if error is None else f"died ({_describe(error)})"
        for request in requests:
            failure = InfraError(f"request {request.request_id!r} was lost: the engine {end}")
            failure.__cause__ = error
            request.settle(failure)

    # ---------------------------------------------------------------- the thread

    def _run(self) -> None:
        try:
            with torch.inference_mode():
                while self._take_notes():
                    try:
                        if not (self._paused or self._holds):
                            self._step()
                    finally:
                        with self._condition:
                            self._step_since = None
                            self._condition.notify_all()
            self._die(None)
        except BaseException as error:
            log.exception("the engine's thread ends")
            self._die(error)

    def _take_notes(self) -> bool:
        """Wait for something to do and take it over; False when closing.

        On return a step counts as running, so ``pause`` waits for whatever is done with the notes.
        """
        with self._condition:
            while not (self._closing or self._sweep_due or self._ready_to_step()):
                self._condition.wait(IDLE_WAIT_S)
            if self._closing:
                return False
            self._step_since = time.monotonic()
            self._waiting.extend(self._incoming)
            self._incoming.clear()
            sweep, self._sweep_due = self._sweep_due, False
            forget, self._forget_due = self._forget_due, False
        if forget:
            self._rows.forget()
        if sweep:
            self._sweep()
        return True

    def _ready_to_step(self) -> bool:
        return not (self._paused or self._holds) and bool(self._incoming or self._waiting or self._rows.requests)

    def _sweep(self) -> None:
        """Let aborted requests go."""
        leaving = [request for request in self._rows.requests if request.aborted]
        self._rows.remove(leaving)
        leaving += [request for request in self._waiting if request.aborted]
        self._waiting = [request for request in self._waiting if not request.aborted]
        for request in leaving:
            self._finish(request, "abort")

    def _step(self) -> None:
        """Admit, compute, draw, deliver."""
        self._waiting = [request for request in self._waiting if not self._rows.admit(request)]
        if not self._rows.requests:
            return  # every request was aborted
        leaving: list[Request] = []
        broken: list[Request] = []
        for ready in self._rows.step():
            tokens, logprobs = self._drawer.draw(ready.logits, ready.requests)
            self._rows.append(ready, np.asarray(tokens, dtype=np.int32))
            for request, token, logprob in zip(ready.requests, tokens, logprobs, strict=True):
                self._deliver(request, token, logprob, leaving, broken)
        self._rows.remove(leaving, broken)

    def _deliver(
        self, request: Request, token: int, logprob: float, leaving: list[Request], broken: list[Request]
    ) -> None:
        """Give a request its token, and its outcome where it ends."""
        if not -math.inf < logprob <= 0:  # NaN fails the comparison too
            leaving.append(request)
            broken.append(request)
            self._fail(
                request,
                InfraError(
                    f"request {request.request_id!r}: the model gave token {token} logprob {logprob} at sampled "
                    f"position {len(request.token_ids)}; a finite number of at most 0 was expected"
                ),
            )
            return
        request.append(token, logprob, self._version)
        if token in request.stop:
            leaving.append(request)
            self._finish(request, "stop")
        elif len(request.token_ids) >= request.limit:
            leaving.append(request)
            self._finish(request, "length")

    def _finish(self, request: Request, reason: Literal["stop", "length", "abort"]) -> None:
        self._unregister(request)
        request.settle(request.sample(reason, self._version))

    def _fail(self, request: Request, error: GymloopError) -> None:
        self._unregister(request)
        request.settle(error)

    def _unregister(self, request: Request) -> None:
        with self._condition:
            if self._in_flight.get(request.request_id) is request:
                del self._in_flight[request.request_id]


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
