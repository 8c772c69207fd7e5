"""A process that gymloop starts does not outlive the process that started it, however that one ends.

Cleaning up is what a process does while it lives; SIGKILL and the out-of-memory killer leave it no time. Two things
work without it, both on Linux:

* ``tie_to_parent``: the kernel kills a process (PR_SET_PDEATHSIG) when the *thread* that started it ends. At once, and
  for one process: whoever starts a tied process must do so from a thread that lives as long as the process should.
* ``reaped``: a small process of its own waits for the end of this one, then kills whatever carries the mark that this
  one put into the environment of everything it started. That reaches processes which others start for us, as Ray does.
  A program that gives itself a title may write it over its environment (Redis and PostgreSQL do), so the small
  process keeps an eye on what is there: a child without a mark belongs to the run that its parent is of.

    python -m gymloop.lifeline PARENT COMMAND...      tie this process to PARENT, then become COMMAND
    python lifeline.py --reap MARK                    wait for the end of standard input, then kill what is marked

This file is also run by its path, without site-packages: it imports the standard library only.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

MARK = "GYMLOOP_RUN"
"""Environment variable that names the run a process belongs to."""
KEEP_ENVIRONMENT = {"SPT_NOENV": "1"}
"""Has setproctitle, which Ray and vLLM use, write no title over the environment."""
REAP_S = 10.0
LOOK_S = 2.0
"""Between two looks at what a run has started."""
_PR_SET_PDEATHSIG = 1


def tie_to_parent(parent: int) -> None:
    """Have the kernel kill this process when the thread that started it ends.

    Args:
        parent: pid of the process that started this one; if it is gone already, this process ends here and now.
    """
    if sys.platform != "linux":
        return
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"the kernel refused to tie this process to its parent: {os.strerror(error)}")
    if os.getppid() != parent:  # it ended before the kernel was told
        os._exit(1)


def tied(command: Sequence[str]) -> list[str]:
    """The command line that runs ``command`` as a child that dies with this process."""
    return [sys.executable, "-m", "gymloop.lifeline", str(os.getpid()), *command]


class Reaper:
    """A small process that kills whatever carries its mark, once ``close`` is called or this process is gone.

    Attributes:
        mark: the value of ``MARK`` that what is started under ``marking`` carries; empty where nothing is reaped.
    """

    def __init__(self) -> None:
        self.mark = ""
        self._process: subprocess.Popen[bytes] | None = None
        if sys.platform != "linux":
            return
        self.mark = uuid.uuid4().hex
        command = [sys.executable, "-S", "-E", __file__, "--reap", self.mark]
        # Of no run, also not of the one around it, and in a session of its own: Ctrl-C is not for what cleans up.
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, start_new_session=True, env={**os.environ, MARK: ""}
        )

    @contextmanager
    def marking(self) -> Iterator[None]:
        """What is started within the block, by whichever thread of this process, carries the mark."""
        if not self.mark:
            yield
            return
        new = {**KEEP_ENVIRONMENT, MARK: self.mark}
        before = {name: os.environ.get(name) for name in new}
        os.environ.update(new)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value

    def close(self) -> None:
        """Kill what is left of the marked processes. Safe to call twice."""
        process, self._process = self._process, None
        if process is None:
            return
        if process.stdin is not None:
            process.stdin.close()
        process.wait(timeout=2 * REAP_S)


@contextmanager
def reaped() -> Iterator[None]:
    """Whatever is started within the block ends with it, at the latest with this process."""
    reaper = Reaper()
    try:
        with reaper.marking():
            yield
    finally:
        reaper.close()


class _Marked:
    """The processes that carry a mark, and their children that carry none."""

    def __init__(self, mark: str) -> None:
        self._mark = mark.encode()
        self._alive: dict[int, int] = {}

    def look(self) -> bool:
        """Find those that are new and forget those that have ended; returns whether one is alive."""
        for pid, pinned in list(self._alive.items()):
            if select.select([pinned], [], [], 0)[0]:
                os.close(self._alive.pop(pid))
        for pid in sorted(int(name) for name in os.listdir("/proc") if name.isdigit()):
            if pid in self._alive:
                continue
            try:
                pinned = os.pidfd_open(pid)  # before anything is read, so that the pid cannot pass to another
            except OSError:
                continue
            try:
                found = self._is_of_the_run(pid)
            except OSError:  # another user's, or it has just ended
                found = False
            if found and not select.select([pinned], [], [], 0)[0]:
                self._alive[pid] = pinned
            else:
                os.close(pinned)
        return bool(self._alive)

    def kill(self) -> None:
        for pinned in self._alive.values():
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(pinned, signal.SIGKILL)

    def _is_of_the_run(self, pid: int) -> bool:
        with open(f"/proc/{pid}/environ", "rb") as file:
            variables = file.read().split(b"\0")
        name = f"{MARK}=".encode()
        marks = [variable[len(name) :] for variable in variables if variable.startswith(name)]
        if marks:
            return self._mark in marks
        with open(f"/proc/{pid}/stat", "rb") as file:
            parent = int(file.read().rpartition(b")")[2].split()[1])
        return parent in self._alive


def _reap(mark: str) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    marked = _Marked(mark)
    while not select.select([sys.stdin], [], [], LOOK_S)[0]:  # bounded: by the life of who holds the other end
        marked.look()
    until = time.monotonic() + REAP_S
    while marked.look() and time.monotonic() < until:
        marked.kill()
        time.sleep(0.05)


if __name__ == "__main__":
    if sys.argv[1] == "--reap":
        _reap(sys.argv[2])
    else:
        tie_to_parent(int(sys.argv[1]))
        os.execvp(sys.argv[2], sys.argv[2:])
