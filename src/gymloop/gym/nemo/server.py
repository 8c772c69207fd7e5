"""One server of NeMo Gym: a process that gymloop starts and ends.

Its port is held by listening on it before its process exists, so its URL is true from the first moment, nobody can take
the port, and a restarted process serves on the same one; while there is none, connections are refused rather than left
to wait. The process leads a group of its own, is killed by the kernel when the thread that started it ends, and its
group is killed before its pid is given back.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp

from gymloop import lifeline
from gymloop.errors import InfraError
from gymloop.threads import in_thread

HEALTH_ROUTE = "/healthz"
GRACE_S = 3.0
"""Between asking a server to end and killing it; uvicorn gives requests in flight half a second."""
_REAP_S = 10.0
_LOOK_S = 0.1
_ASK_AGAIN_S = 0.25
_TAIL_LINES = 20
_TAIL_BYTES = 16_384


@dataclass(frozen=True, slots=True)
class Command:
    """How a server's process is started.

    Attributes:
        arguments: of the program; ``{fd}`` in one stands for the descriptor of the listening socket.
        folder: its working folder.
        environ: its whole environment.
        log: file that takes both of its outputs; appended to.
    """

    arguments: Sequence[str]
    folder: Path
    environ: Mapping[str, str] = field(repr=False)  # holds keys of judge models
    log: Path


class NemoGymServer:
    """A resources server, or an agent with a ``/run`` of its own; a part that ``cluster.health`` can watch.

    Args:
        name: the instance, as configs call it.
        url: base URL.
        command: how to start its process.
        held: the listening socket of its port; this object closes it.
    """

    def __init__(self, name: str, url: str, *, command: Command, held: socket.socket) -> None:
        self._instance = name
        self.url = url.rstrip("/")
        self._command = command
        self._held = held
        self._process: subprocess.Popen[bytes] | None = None
        self._log_start = 0
        self._refusing = False

    @property
    def name(self) -> str:
        """As errors call it."""
        return f"NeMo Gym server {self._instance}"

    @property
    def instance(self) -> str:
        """The instance's name, as configs and rows carry it."""
        return self._instance

    @property
    def pid(self) -> int | None:
        """Of its process, while there is one."""
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Start the process; returns at once. To be called from a thread that outlives the server.

        Raises:
            InfraError: it runs already, or the program cannot be started.
        """
        if self._held.fileno() < 0:
            raise InfraError(f"{self.name} was closed")
        if self._process is not None:
            raise InfraError(f"{self.name} runs already, pid {self._process.pid}")
        if self._refusing:
            self._held.listen(socket.SOMAXCONN)
            self._refusing = False
        descriptor = self._held.fileno()
        arguments = [part.replace("{fd}", str(descriptor)) for part in self._command.arguments]
        try:
            self._command.log.parent.mkdir(parents=True, exist_ok=True)
            with self._command.log.open("ab") as log:
                self._log_start = log.tell()
                self._process = subprocess.Popen(
                    _tied(arguments),
                    cwd=self._command.folder,
                    env=dict(self._command.environ),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    pass_fds=(descriptor,),
                    start_new_session=True,
                )
        except OSError as error:
            raise InfraError(f"{self.name} could not be started: {error}") from error

    async def ready(self, deadline_s: float) -> None:
        """Return once it answers ``/healthz``.

        Raises:
            InfraError: it ended, or did not answer within ``deadline_s``; with the end of its log.
        """
        # The request waits in the queue of the held socket and is answered when the server begins to; it is asked again
        # only of one that answers that it is not well yet.
        until = time.monotonic() + deadline_s
        while (why := await self._answers_or_ended(max(_LOOK_S, until - time.monotonic()))) is not None:
            self._raise_if_ended()
            if time.monotonic() + _ASK_AGAIN_S > until:
                raise InfraError(
                    f"{self.name} did not become ready within {deadline_s:g} s: no answer to {self.url}{HEALTH_ROUTE} "
                    f"({why}){self._told()}",
                    cause="timeout",
                )
            await asyncio.sleep(_ASK_AGAIN_S)

    async def check(self) -> None:
        """Return once it has answered; how long it may be silent is for the caller to say.

        Raises:
            InfraError: its process ended, or it refuses; with the end of its log.
        """
        if (why := await self._answers_or_ended(None)) is not None:
            self._raise_if_ended()
            raise InfraError(f"{self.name} at {self.url} is not well: {why}{self._told()}", cause="disconnect")

    def symptoms(self) -> str:
        """The state of its process and the end of its log."""
        state = "" if self.pid is None else f" (pid {self.pid}, {_state(self.pid)})"
        return f"{state}{self._told()}"

    async def restart(self, deadline_s: float) -> None:
        """End what is left of the process, start another on the same port, and wait for it. Sessions are lost.

        Raises:
            InfraError: it does not become ready.
        """
        await in_thread(self._end)
        self.start()
        await self.ready(deadline_s)

    async def close(self) -> None:
        """End the process and all it started, and give back the port."""
        await in_thread(self.end)

    def end(self) -> None:
        """``close`` for callers without an event loop; takes at most ``GRACE_S`` and a moment."""
        self._end()
        self._held.close()

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        _signal_group(process.pid, signal.SIGTERM)
        until = time.monotonic() + GRACE_S
        while not _ended(process.pid) and time.monotonic() < until:
            time.sleep(0.02)
        # Before the leader is reaped, so that the number of the group cannot have passed to another.
        _signal_group(process.pid, signal.SIGKILL)
        process.wait(timeout=_REAP_S)

    def _raise_if_ended(self) -> None:
        """Raises InfraError when the process is gone."""
        if self._process is not None and _ended(self._process.pid):
            self._refuse()
            raise InfraError(f"{self.name} ended, {_exit(self._process.pid)}{self._told()}", cause="disconnect")

    def _refuse(self) -> None:
        """Have the kernel refuse connections, those that wait among them; the port stays taken."""
        if not self._refusing and sys.platform == "linux":
            self._held.shutdown(socket.SHUT_RDWR)
            self._refusing = True

    async def _answers_or_ended(self, seconds: float | None) -> str | None:
        """As ``_answers``; raises InfraError when the process ends meanwhile.

        The kernel keeps a request to the held socket waiting although there is nobody left to take it.
        """
        self._raise_if_ended()
        answer = asyncio.ensure_future(self._answers(seconds))
        try:
            while not (await asyncio.wait({answer}, timeout=_LOOK_S))[0]:
                self._raise_if_ended()
            return answer.result()
        finally:
            answer.cancel()

    async def _answers(self, seconds: float | None) -> str | None:
        """None when it says that it is well, else what happened instead."""
        try:
            async with (
                aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=seconds)) as client,
                client.get(self.url + HEALTH_ROUTE) as response,
            ):
                return None if response.ok else f"{HEALTH_ROUTE} answered {response.status}"
        except TimeoutError:
            return f"none within {seconds or 0:g} s"
        except (aiohttp.ClientError, OSError) as error:
            return f"{type(error).__name__}: {error}"

    def _told(self) -> str:
        """The end of what the process has written since it was started, to follow a sentence."""
        try:
            with self._command.log.open("rb") as log:
                size = log.seek(0, os.SEEK_END)
                log.seek(max(self._log_start, size - _TAIL_BYTES))
                lines = log.read().decode(errors="replace").strip().splitlines()[-_TAIL_LINES:]
        except OSError as error:
            return f"; its log {self._command.log} cannot be read: {error}"
        said = "\n  ".join(lines) if lines else "(nothing)"
        return f"; the end of {self._command.log}:\n  {said}"


def _tied(arguments: Sequence[str]) -> list[str]:
    """``lifeline.tied`` by its path: with ``-m``, a module of the server's folder could pass for one of Python's."""
    return [sys.executable, "-S", "-E", lifeline.__file__, str(os.getpid()), *arguments]


def _ended(pid: int) -> bool:
    """Whether a child is over; it stays a zombie, so its pid stays its own."""
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _exit(pid: int) -> str:
    result = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if result is None:
        return "code unknown"
    if result.si_code == os.CLD_EXITED:
        return f"exit code {result.si_status}"
    return f"killed by {signal.Signals(result.si_status).name}"


def _signal_group(leader: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # all of it has ended
        os.killpg(leader, number)


def _state(pid: int) -> str:
    """As the kernel shows it: sleeping, running, disk sleep, stopped."""
    try:
        with open(f"/proc/{pid}/status", encoding="utf-8") as file:
            found = next((line for line in file if line.startswith("State:")), "")
    except OSError:
        return "not visible"
    return found.partition("(")[2].rstrip(")\n") or "state unknown"
