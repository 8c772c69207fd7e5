"""vLLM's engine core: child processes that die with this one, whose death is known at once and by its cause.

A watch on each child's sentinel sets ``died`` the moment one ends, so that a wait for a reply that can no longer come
ends with it. What the children log as an error is kept in memory: a failed start then has its real cause, which vLLM
itself only prints.
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import re
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from multiprocessing import resource_tracker
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path

from gymloop.errors import InfraError
from gymloop.generation.vllm import warm
from gymloop.generation.vllm.environment import LOGGING, setting
from gymloop.generation.vllm.shared_bytes import SharedBytes
from gymloop.lifeline import Reaper

_KILLED_WORKER = re.compile(r"Worker proc (\S+) died unexpectedly \(exit code: (-\d+)\)")
_SILENT_WORKER = "WorkerProc initialization failed"
_CONSEQUENCES = ("EngineDeadError", "See root cause", "See stack trace for root cause", "RuntimeError: cancelled")
"""Marks of errors that follow from another one."""
_ERROR_LINE = re.compile(r"(?:\([^)]*\)\s*)?((?:[\w.]*\.)?[A-Z]\w*(?:Error|Exception|Exit): .+)")
TURN_LIMIT_S = 3600.0
"""Within which an engine that starts in this process makes way for the next: as long as a start may take."""
_turn = threading.Lock()


class EngineCore:
    """The children that vLLM starts within ``starting``."""

    def __init__(self) -> None:
        self._reaper = Reaper()
        self._errors = SharedBytes("gymloop-vllm-errors")
        self._processes: list[BaseProcess] = []
        self._seen: dict[int | None, BaseProcess] = {}
        self._before: frozenset[int | None] = frozenset()
        self._closing = threading.Event()
        self._watch: threading.Thread | None = None

    @contextmanager
    def starting(self, environment: Mapping[str, str]) -> Iterator[None]:
        """What is started within the block is a child of the engine. One engine of a process starts at a time.

        Args:
            environment: further variables for what is started.

        Raises:
            InfraError: another engine of this process has been starting for ``TURN_LIMIT_S``.
        """
        with _turn_taken(), tempfile.TemporaryDirectory(prefix="gymloop-vllm-") as folder:
            resource_tracker.ensure_running()  # it serves all of this process and must outlive this engine
            self._before = frozenset(process.pid for process in multiprocessing.active_children())
            config = Path(folder) / "logging.json"
            config.write_text(json.dumps(_logging(self._errors.path)), encoding="utf-8")
            warm.begin(environment)
            try:
                with self._reaper.marking(), setting({**environment, LOGGING: str(config)}), warm.forked():
                    yield
            finally:
                self._processes = self._children()

    def _children(self) -> list[BaseProcess]:
        found = [process for process in multiprocessing.active_children() if process.pid not in self._before]
        self._seen |= {process.pid: process for process in found}
        return [process for process in found if process.name != warm.INSPECTION]

    def killed(self) -> str | None:
        """Which child a signal ended while it started, a clause; None for none."""
        for process in list(self._seen.values()):  # the thread that waits for the start adds to it
            if process.name == warm.INSPECTION or not wait([process.sentinel], timeout=0):
                continue
            if (code := _exit_code(process)) is not None and code < 0:
                return f"vLLM's process {process.name} (pid {process.pid}) {_ending(code)}"
        return None

    def resident_bytes(self) -> int:
        """Memory that vLLM's processes hold, shared pages counted in each."""
        found = [process.pid for process in self._children() if process.pid is not None]
        for pid in found:
            found.extend(_children_of(pid))
        return sum(_resident_bytes(pid) for pid in found)

    def watch(self, on_death: Callable[[str], None]) -> None:
        """Call ``on_death`` once, with what happened, when a child ends before ``close``; in a thread of its own."""
        self._watch = threading.Thread(target=self._wait, args=(on_death,), name="vllm-watch", daemon=True)
        self._watch.start()

    @property
    def pids(self) -> list[int]:
        """Of the children."""
        return [process.pid for process in self._processes if process.pid is not None]

    def cause(self) -> str | None:
        """The last error that a child logged (the last line of its traceback), or the signal that ended a worker."""
        logged = self._errors.read_text()
        lines = [match[1] for line in logged.splitlines() if (match := _ERROR_LINE.match(line))]
        told = [line for line in lines if not any(mark in line for mark in _CONSEQUENCES)]
        if told:
            return told[-1]
        if killed := _KILLED_WORKER.search(logged):
            return f"its worker {killed[1]} {_ending(int(killed[2]))}"
        if _SILENT_WORKER in logged:
            return "a worker of vLLM's ended without a word; the kernel kills one that there is too little memory for"
        return None

    def close(self) -> None:
        """Kill what is left of the children. Safe to call twice."""
        self._closing.set()
        # Forks of the server carry its mark and not ours, which what they start in turn does carry.
        for process in list(self._seen.values()):
            if not wait([process.sentinel], timeout=0):
                process.kill()
        self._reaper.close()
        for process in self._processes:
            process.join(timeout=5.0)
        if self._watch is not None:
            self._watch.join(timeout=5.0)
        _forget_handler(self._errors.path)
        self._errors.close()

    def _wait(self, on_death: Callable[[str], None]) -> None:
        sentinels = {process.sentinel: process for process in self._processes}
        while not self._closing.is_set():
            for sentinel in wait(list(sentinels), timeout=0.5):
                if self._closing.is_set():
                    return
                process = sentinels[sentinel]  # type: ignore[index]
                cause = self.cause()
                death = f"vLLM's process {process.name} (pid {process.pid}) {_ending(_exit_code(process))}"
                on_death(f"{death}: {cause}" if cause else death)
                return


@contextmanager
def _turn_taken() -> Iterator[None]:
    """Environment and contexts belong to the whole process: of two starts at once, each would undo the other's."""
    if not _turn.acquire(timeout=TURN_LIMIT_S):
        raise InfraError(
            f"another vLLM engine of this process is still starting after {TURN_LIMIT_S:g} s; one starts at a time"
        )
    try:
        yield
    finally:
        _turn.release()


def _children_of(pid: int) -> list[int]:
    try:
        found = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/children")]
    except OSError:  # it has ended
        return []
    return [int(child) for text in found for child in text.split()]


def _resident_bytes(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError):  # it has ended
        return 0


def _exit_code(process: BaseProcess) -> int | None:
    """Of a process that has ended. vLLM waits for it too: whichever thread comes second has the code a moment later."""
    until = time.monotonic() + 1.0
    while (code := process.exitcode) is None and time.monotonic() < until:
        time.sleep(0.01)
    return code


def _ending(code: int | None) -> str:
    if code is not None and code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"ended with status {code}"


def _logging(errors: str) -> dict[str, object]:
    """vLLM's own lines on standard error, from WARNING up or as the user has it, and errors in ``errors`` as well."""
    level = os.environ.get("VLLM_LOGGING_LEVEL", "WARNING")
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {
            "plain": {"format": "%(asctime)s %(levelname)s [%(name)s] %(message)s"},
            "bare": {"format": "%(message)s"},
        },
        "handlers": {
            "console": {"class": "logging.StreamHandler", "formatter": "plain", "level": level},
            "errors": {
                "class": "logging.FileHandler", "filename": errors, "formatter": "bare", "level": "ERROR",
                "delay": True,
            },
        },
        "loggers": {"vllm": {"handlers": ["console", "errors"], "level": "INFO", "propagate": False}},
    }  # fmt: skip


def _forget_handler(path: str) -> None:
    """vLLM's logger in this process writes there too, and the path may soon be another file's."""
    logger = logging.getLogger("vllm")
    for handler in list(logger.handlers):
        if isinstance(handler, logging.FileHandler) and handler.baseFilename == path:
            logger.removeHandler(handler)
            handler.close()
