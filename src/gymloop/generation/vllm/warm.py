"""vLLM's core starts as a fork of a process that imports vLLM at the same time as this one does.

vLLM asks for a spawned process, which would begin to import it when this one has just finished: as many seconds again,
on the way to the first token. Python's fork server imports alone and has no threads, so what is forked from it is as
safe as what is spawned. It lives and dies with the engine that started it.
"""

from __future__ import annotations

import multiprocessing.context
import multiprocessing.forkserver
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

PRELOADED = "gymloop.generation.vllm.preloaded"


class WarmProcess(multiprocessing.context.ForkServerProcess):
    """A fork with the environment that its maker has at that moment, as a spawned process would have it."""

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self._environment = dict(os.environ)

    def run(self) -> None:
        """In the fork."""
        os.environ.clear()
        os.environ.update(self._environment)
        super().run()


class WarmContext(multiprocessing.context.ForkServerContext):
    """The context whose processes these are."""

    Process = WarmProcess


def begin() -> None:
    """Start the server; it imports on its own from here on. Variables that imports read must be set."""
    multiprocessing.forkserver.set_forkserver_preload([PRELOADED])
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
