"""Whether two answers are the same number, set or expression, asked of math-verify in processes that may be lost.

What a model wrote can take any time, any memory, or bring the libraries down, and the outcome is then the answer's: it
is not the right one. What is not its doing (no process can be started, one does not answer although it has time left)
is an ``InfraError``. math-verify's own time limits are signals, which only a main thread can have; see ``math_child``.
"""

from __future__ import annotations

import atexit
import importlib.util
import json
import os
import queue
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from functools import cache
from pathlib import Path
from typing import IO, Literal, TypeAlias, cast, get_args

from gymloop.errors import ConfigError, InfraError

Outcome: TypeAlias = Literal[
    "equal", "different", "readable", "gold_unreadable", "out_of_time", "out_of_memory", "crashed"
]

_CHILD = Path(__file__).with_name("math_child.py")
_MOST_PROCESSES = 4
_START_S = 120.0
_WAIT_S = 600.0
"""For a free process: longer than the collector waits for a verdict, so that it, not this, decides."""
_STUCK_S = 120.0
"""Wall time for one comparison beyond its CPU time: a process that has not been given it by then is stuck."""
_LEAVE_S = 0.5
_END_S = 10.0


def require_math_verify() -> None:
    """Say how to get math-verify where it is missing.

    Raises:
        ConfigError: it is.
    """
    missing = [name for name in ("math_verify", "latex2sympy2_extended", "antlr4") if not _there(name)]
    if missing:
        raise ConfigError(
            f"the math environment compares answers with math-verify, and {', '.join(missing)} cannot be imported; "
            "run `pip install -e '.[math]'` in gymloop's checkout"
        )


def _there(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


class Judge:
    """A few processes that compare answers; they are started when first needed. Safe to call from many threads.

    Args:
        seconds: CPU time of one comparison.
        megabytes: address space of a process.
        processes: at most.
    """

    def __init__(self, seconds: float, megabytes: int = 2048, processes: int | None = None) -> None:
        self._seconds = seconds
        self._megabytes = megabytes
        count = processes or min(_MOST_PROCESSES, os.cpu_count() or 1)
        self._places: queue.LifoQueue[_Process | None] = queue.LifoQueue()  # the last used is warm, None is a place
        for _ in range(count):
            self._places.put(None)
        self._alive: set[_Process] = set()
        self._lock = threading.Lock()
        self._closed = False

    def compare(self, gold: str, answer: str | None, *, extract: bool = False) -> Outcome:
        r"""Compare an answer with the right one.

        Args:
            gold: the right answer, LaTeX or plain, without ``\boxed``.
            answer: likewise; None asks only whether ``gold`` can be read.
            extract: the answer is a text in which the answer has to be found.

        Raises:
            InfraError: there is no process to ask, or it does not answer.
        """
        request = json.dumps({"gold": gold, "answer": answer, "extract": extract}).encode() + b"\n"
        try:
            process = self._places.get(timeout=_WAIT_S)
        except queue.Empty as error:
            raise InfraError(f"no process to compare answers was free within {_WAIT_S:g} s", cause="busy") from error
        try:
            # Lost twice with the same answer, in a process that had seen no other, it was lost by the answer.
            for _ in range(2):
                process = process or self._start()
                said, process = self._ask(process, request)
                if said is not None:
                    return said
            return "crashed"
        except BaseException:
            self._end(process)
            process = None
            raise
        finally:
            self._places.put(process)

    def _ask(self, process: _Process, request: bytes) -> tuple[Outcome | None, _Process | None]:
        """What it said, None when it was lost, and the process if it can go on."""
        said = process.ask(request, self._seconds + _STUCK_S)
        if said in ("out_of_time", "out_of_memory"):
            self._end(process)
            return cast(Outcome, said), None
        if said is not None:
            if said not in get_args(Outcome):
                raise InfraError(f"the process that compares answers said {said!r:.80}", cause="bad_reply")
            return cast(Outcome, said), process
        code = self._end(process)
        return ("out_of_time" if code == -signal.SIGXCPU else None), None

    def _start(self) -> _Process:
        with self._lock:
            if self._closed:
                raise InfraError("no answers are compared any more")
            process = _Process(self._seconds, self._megabytes)
            self._alive.add(process)
        try:
            process.wait_until_ready()
        except BaseException:
            self._end(process)
            raise
        return process

    def _end(self, process: _Process | None) -> int | None:
        if process is None:
            return None
        with self._lock:
            self._alive.discard(process)
        return process.end()

    def close(self) -> None:
        """End all processes; a comparison that is going on fails."""
        with self._lock:
            self._closed = True
            for process in self._alive:
                process.kill()


@cache
def judge(seconds: float) -> Judge:
    """The judge of this process for a time limit; its processes end with this one."""
    made = Judge(seconds)
    atexit.register(made.close)
    return made


class _Process:
    def __init__(self, seconds: float, megabytes: int) -> None:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  (closed in ``end``)
        try:
            self._popen = subprocess.Popen(
                [sys.executable, "-P", str(_CHILD), str(seconds), str(megabytes)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                bufsize=0,
                start_new_session=True,  # Ctrl-C is for the run
            )
        except OSError as error:
            self._errors.close()
            raise InfraError(f"the process that compares answers could not be started: {error}") from error
        self._input = cast(IO[bytes], self._popen.stdin)
        self._output = cast(IO[bytes], self._popen.stdout)

    def wait_until_ready(self) -> None:
        said = self._line(_START_S)
        if said != "ready":
            self._errors.seek(0)
            told = self._errors.read().decode(errors="replace").strip().splitlines()
            why = told[-1] if told else f"it said {said!r}"
            raise InfraError(f"the process that compares answers did not start: {why}")

    def ask(self, request: bytes, seconds: float) -> str | None:
        """Its answer, or None when it has ended.

        Raises:
            InfraError: it did neither in time.
        """
        try:
            self._input.write(request)
        except BrokenPipeError:
            return None
        return self._line(seconds)

    def _line(self, seconds: float) -> str | None:
        """The next line, or None at the end of its output."""
        poll = select.poll()
        poll.register(self._output, select.POLLIN | select.POLLHUP)
        until = time.monotonic() + seconds
        data = b""
        while not data.endswith(b"\n"):
            left = until - time.monotonic()
            if left <= 0 or not poll.poll(left * 1000):
                raise InfraError(f"the process that compares answers was silent for {seconds:g} s", cause="timeout")
            part = os.read(self._output.fileno(), 4096)
            if not part:
                return None
            data += part
        return data.decode().strip()

    def kill(self) -> None:
        """End it now; whoever waits for its answer sees that it has ended."""
        self._popen.kill()

    def end(self) -> int:
        """End it, if it has not ended, and say with which code it did."""
        self._input.close()
        try:
            code = self._popen.wait(timeout=_LEAVE_S)
        except subprocess.TimeoutExpired:
            self._popen.kill()
            code = self._popen.wait(timeout=_END_S)
        self._output.close()
        self._errors.close()
        return code
