"""vLLM's core starts as a fork of a process that imports vLLM at the same time as this one does.

vLLM asks for a spawned process, which would begin to import it when this one has just finished: as many seconds again,
on the way to the first token. Python's fork server imports alone and has no threads, so what is forked from it is as
safe as what is spawned. There is one for this process, and it ends with it, however that ends.
"""

from __future__ import annotations

import json
import logging.config
import multiprocessing.context
import multiprocessing.forkserver
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from multiprocessing import popen_forkserver, resource_tracker
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from gymloop.generation.vllm.environment import LOGGING, setting
from gymloop.lifeline import Reaper

PRELOADED = "gymloop.generation.vllm.preloaded"
_starting = threading.Lock()
_reaper: Reaper | None = None


class _Popen(popen_forkserver.Popen):
    """The exit status comes through a pipe, once: two threads that ask for it at once would lose it for both."""

    def __init__(self, process: Any) -> None:
        self._asking = threading.Lock()
        super().__init__(process)

    def poll(self, flag: int = os.WNOHANG) -> int | None:
        if flag != os.WNOHANG:
            wait([self.sentinel])  # bounded: whoever gives no time waits for the process's end
        with self._asking:
            return super().poll(os.WNOHANG)


class WarmProcess(multiprocessing.context.ForkServerProcess):
    """A fork with the environment that its maker has at that moment, as a spawned process would have it."""

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self._environment = dict(os.environ)

    @staticmethod
    def _Popen(process: Any) -> _Popen:
        return _Popen(process)

    def run(self) -> None:
        """In the fork."""
        os.environ.clear()
        os.environ.update(self._environment)
        if LOGGING in os.environ:  # vLLM reads it where it is imported, which was long ago
            logging.config.dictConfig(json.loads(Path(os.environ[LOGGING]).read_text(encoding="utf-8")))
        super().run()


class WarmContext(multiprocessing.context.ForkServerContext):
    """The context whose processes these are."""

    Process = WarmProcess


def begin(environment: Mapping[str, str]) -> None:
    """Start the server, where it does not run; it imports on its own from here on. Safe to call twice.

    Args:
        environment: variables that imports read, the number of threads among them.
    """
    global _reaper
    resource_tracker.ensure_running()  # without the mark: it cleans up after whatever the reaper kills
    with _starting:
        if _reaper is None:
            _reaper = Reaper()
        multiprocessing.forkserver.set_forkserver_preload([PRELOADED])
        with _reaper.marking(), setting({**environment, "VLLM_CONFIGURE_LOGGING": "0"}):
            multiprocessing.forkserver.ensure_running()


@contextmanager
def forked() -> Iterator[None]:
    """Within the block, whoever asks this process's ``multiprocessing`` for ``spawn`` gets a fork of the server."""
    contexts: dict[str, Any] = vars(multiprocessing.context)["_concrete_contexts"]
    before = contexts["spawn"]
    contexts["spawn"] = WarmContext()
    try:
        yield
    finally:
        contexts["spawn"] = before
