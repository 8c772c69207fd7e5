"""A process that gymloop starts does not outlive the process that started it, however that one ends.

Cleaning up is what a process does while it lives; SIGKILL and the out-of-memory killer leave it no time. Two things
work without it, both on Linux:

* ``tie_to_parent``: the kernel kills a process (PR_SET_PDEATHSIG) when the *thread* that started it ends. At once, and
  for one process: whoever starts a tied process must do so from a thread that lives as long as the process should.
* ``reaped``: a small process of its own waits for the end of this one, then kills whatever carries the mark that this
  one put into the environment of everything it started. That reaches processes which others start for us, as Ray does.

    python -m gymloop.lifeline PARENT COMMAND...      tie this process to PARENT, then become COMMAND
    python lifeline.py --reap MARK                    wait for the end of standard input, then kill what is marked

This file is also run by its path, without site-packages: it imports the standard library only.
"""

from __future__ import annotations

import os
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
"""Has setproctitle, with which Ray and vLLM name their processes, write no title over the mark."""
REAP_S = 10.0
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
        # Without a mark of its own, and in a session of its own, so that Ctrl-C reaches the run and not what cleans up.
        unmarked = {name: value for name, value in os.environ.items() if name != MARK}
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True, env=unmarked)

    @contextmanager
    def marking(self) -> Iterator[None]:
        """What is started within the block, by whichever thread of this process, carries the mark."""
        if not self.mark:
            yield
            return
        new = {**KEEP_ENVIRONMENT, MARK: self.mark}
        before = {name: os.environ[name] for name in new if name in os.environ}
        os.environ.update(new)
        try:
            yield
        finally:
            for name in new:
                del os.environ[name]
            os.environ.update(before)

    def close(self) -> None:
        """Kill what is left of the marked processes. Safe to call twice."""
        process, self._process = self._process, None
        if process is None:
            return
        if process.stdin is not None:
            process.stdin.close()
        # One look at a process that is stuck in the kernel may take longer; the reaper goes on by itself.
        with suppress(subprocess.TimeoutExpired):
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


def _reap(mark: str) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sys.stdin.read()  # bounded: by the life of the process that holds the other end
    until = time.monotonic() + REAP_S
    wanted = f"{MARK}={mark}".encode()
    while _kill_marked(wanted) and time.monotonic() < until:
        time.sleep(0.05)


def _kill_marked(wanted: bytes) -> bool:
    """Kill every process that carries the mark; returns whether there was one."""
    found = False
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            process = os.pidfd_open(int(name))
        except OSError:
            continue
        try:
            # Read after the process was pinned, so that its pid cannot have passed to another.
            with open(f"/proc/{name}/environ", "rb") as file:
                marked = wanted in file.read().split(b"\0")
            if marked:
                signal.pidfd_send_signal(process, signal.SIGKILL)
                found = True
        except OSError:  # another user's, or it has just ended
            pass
        finally:
            os.close(process)
    return found


if __name__ == "__main__":
    if sys.argv[1] == "--reap":
        _reap(sys.argv[2])
    else:
        tie_to_parent(int(sys.argv[1]))
        os.execvp(sys.argv[2], sys.argv[2:])
