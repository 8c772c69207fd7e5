"""A worker in a Ray actor: a process with an environment and a log file of its own, that cannot outlive its node.

The worker is read and built by the first call, not by the actor's constructor: what that raises arrives as itself, and
heartbeats are answered while it imports torch. They have a thread of their own in the actor, so an update that takes
minutes does not hold them up; a process that is stopped, or whose interpreter is stuck, answers none. The process
notes its start and each call in its log, so that the log of one that is killed ends with what it was doing.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

from gymloop.cluster.environment import carried, is_needed, python_without
from gymloop.cluster.remote import ask, named
from gymloop.errors import GymloopError, InfraError
from gymloop.garbage import uncollected
from gymloop.lifeline import tie_to_parent

LOG_TAIL_LINES = 12
STACK_LINES = 60
_STACK_WAIT_S = 0.5
_PULSE = "pulse"
_STATES = {
    "R": "it is computing",
    "S": "it is waiting for something",
    "D": "it waits for a disk or network file system",
    "T": "it is stopped (SIGSTOP)",
    "t": "a debugger holds it",
    "Z": "it has ended",
}


_REMOTES: WeakValueDictionary[str, RayRemote] = WeakValueDictionary()
"""By Ray's id of the actor: an error that came through another actor's call says no more of the dead one."""


@dataclass(frozen=True, slots=True)
class Pulse:
    """Which process answered: its pid is only unique with the node and the time it was started, in clock ticks."""

    node: str
    pid: int
    started: str

    def state(self) -> str | None:
        """The process's state letter (see ``man proc``); None when it is gone or not of this machine."""
        stat = _stat(self.pid)
        return stat[0] if stat is not None and stat[1] == self.started else None


class RayRemote:
    """Runs the worker in a Ray actor; see ``Remote``.

    Args:
        name: as errors call it.
        build: the worker class or a picklable function that makes the worker.
        env: environment variables of the actor, among them its thread counts (Ray's default is one thread); what
            ``environment.carried`` takes of this process's comes beside them.
        log_file: receives the actor's standard output and error; its tail is shown when the actor dies.
        num_cpus: Ray CPUs the actor holds.
        num_gpus: Ray GPUs the actor holds.
        strategy: where Ray puts it; None leaves that to Ray. See ``placement.Place``.
        further_env: names of variables that it gets beside those every worker does; see ``environment``.
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
        strategy: Any = None,
        further_env: Sequence[str] = (),
    ) -> None:
        import ray

        from gymloop.cluster import local

        self._name = name
        self._log_file = log_file
        self._killed = False
        self._pulse: Pulse | None = None  # of the last heartbeat, when the actor is on this node
        host = ray.remote(
            num_cpus=num_cpus, num_gpus=num_gpus, max_concurrency=8, max_restarts=0, concurrency_groups={_PULSE: 1}
        )(_Host)
        ours = carried(os.environ, further_env)
        unshown = {name: value for name, value in ours.unshown.items() if name not in env}
        further = ray.cloudpickle.dumps((unshown, ours.fallback))
        runtime_env: dict[str, Any] = {"env_vars": {**ours.shown, **env}}
        if (inherited := local.inherited()) is not None:
            runtime_env["py_executable"] = python_without(inherited, further_env)
        self._actor = host.options(runtime_env=runtime_env, scheduling_strategy=strategy).remote(
            ray.cloudpickle.dumps(build), str(log_file), (*env, *further_env), further
        )
        self._node = ray.get_runtime_context().get_node_id()
        _REMOTES[self._actor._actor_id.hex()] = self

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

    async def check(self) -> None:
        """Return once the actor has answered a heartbeat; see ``Remote.check``."""
        beat = self._actor.pulse.options(concurrency_group=_PULSE).remote()
        try:
            # bounded: ``health.Health`` gives up on it, and the actor's death ends it
            pulse = await asyncio.wrap_future(beat.future())
        except Exception as error:
            raise self._ill(error) from error
        self._pulse = pulse if pulse.node == self._node else None

    def symptoms(self) -> str:
        """The process's state, and the stack of all its threads if it can still write one to its log.

        Where the actor is on another node only the tail of its log is known.
        """
        pulse = self._pulse
        state = None if pulse is None else pulse.state()
        if pulse is None or state is None:
            return self._log_tail()
        said = f"; process {pulse.pid}: {_STATES.get(state, f'state {state}')}"
        if state in "RS":
            os.kill(pulse.pid, signal.SIGUSR1)  # the host's faulthandler; needs no interpreter lock
            time.sleep(_STACK_WAIT_S)
            return said + self._log_tail(STACK_LINES)
        return said + self._log_tail()

    def kill(self) -> None:
        """Kill the actor's process; see ``Remote.kill``."""
        import ray

        if not self._killed:
            self._killed = True
            # Ray raises where the actor never started or the cluster is already gone: nothing is left to kill then.
            with contextlib.suppress(ValueError, RuntimeError, ray.exceptions.RayError):
                ray.kill(self._actor)
            # Ray asks the process to end itself, which one that is stopped does not do.
            if self._pulse is not None and self._pulse.state() is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self._pulse.pid, signal.SIGKILL)

    def _ill(self, error: Exception) -> GymloopError:
        """What a heartbeat met: a process that is gone, or a worker that says itself that it cannot go on."""
        told = self._translated(error, "its work")
        if not isinstance(getattr(error, "cause", None), GymloopError):
            return told
        return InfraError(named(self._name, told), cause=told.cause)

    def _translated(self, error: Exception, method: str) -> GymloopError:
        import ray

        # First: a call whose argument another actor should have made fails with an error that is both.
        if isinstance(error, ray.exceptions.RayActorError):
            dead = _REMOTES.get(error.actor_id or "", self)
            during = method if dead is self else f"its part in {method} of {self.name}"
            return InfraError(f"{dead.name} died during {during}{dead._log_tail()}")
        if isinstance(error, ray.exceptions.RayTaskError):
            cause = error.cause
            if isinstance(cause, GymloopError):
                return cause
            return InfraError(f"{self.name} failed in {method}: {type(cause).__name__}: {cause}{self._log_tail()}")
        return InfraError(f"{self.name} could not run {method}: {type(error).__name__}: {error}")

    def _log_tail(self, count: int = LOG_TAIL_LINES) -> str:
        try:
            lines = self._log_file.read_text(errors="replace").splitlines()[-count:]
        except OSError:
            return ""
        return "".join(f"\n  {self._log_file.name}: {line}" for line in lines)


class _Host:
    """The actor: holds the worker and forwards calls to it, in threads."""

    def __init__(self, build: bytes, log_file: str, further_env: Sequence[str], further: bytes) -> None:
        import faulthandler

        import ray

        for variable in [name for name in os.environ if not is_needed(name, further_env)]:
            del os.environ[variable]
        unshown, fallback = ray.cloudpickle.loads(further)
        os.environ.update({**fallback, **os.environ, **unshown})

        tie_to_parent(os.getppid())  # the node's raylet: a process that is stopped would not see it go
        _redirect_output(log_file)
        faulthandler.register(signal.SIGUSR1, all_threads=True)
        self._build = build
        self._lock = threading.Lock()
        self._worker: Any = None
        self._last_call = ""
        _note(f"process {os.getpid()} started")

    def run(self, method: str, *args: Any) -> Any:
        import ray

        if method != self._last_call:  # one that is polled fills no log
            self._last_call = method
            _note(method)
        with self._lock:
            if self._worker is None:
                with uncollected():
                    self._worker = ray.cloudpickle.loads(self._build)()
        return getattr(self._worker, method)(*args)

    def pulse(self) -> Pulse:
        import ray

        ask(self._worker)
        stat = _stat(os.getpid())
        return Pulse(ray.get_runtime_context().get_node_id(), os.getpid(), "" if stat is None else stat[1])


def _stat(pid: int) -> tuple[str, str] | None:
    """State letter and start time of a process; None when there is no such process, or no /proc."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return fields[0], fields[19]


def _note(text: str) -> None:
    # Not through a buffer, which a process that is killed takes with it.
    os.write(2, f"{time.strftime('%H:%M:%S')} {text}\n".encode())


def _redirect_output(log_file: str) -> None:
    fd = os.open(log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)
