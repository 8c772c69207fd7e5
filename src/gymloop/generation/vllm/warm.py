"""vLLM's processes start as forks of one that imports vLLM at the same time as this one does.

vLLM asks for a spawned process for its core, and starts another to look at a model's class for the first time. Each
would begin to import vLLM when this one has just finished: as many seconds again, on the way to the first token.
Python's fork server imports alone and has no threads, so what is forked from it is as safe as what is spawned. There is
one for this process, and it ends with it, however that ends.
"""

from __future__ import annotations

import json
import logging.config
import multiprocessing.context
import multiprocessing.forkserver
import os
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from multiprocessing import popen_forkserver, resource_tracker
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, TypeVar, cast

from gymloop.generation.vllm.environment import LOGGING, setting
from gymloop.lifeline import Reaper

T = TypeVar("T")

PRELOADED = "gymloop.generation.vllm.preloaded"
INSPECTION = "model-inspection"
"""Name of the process that looks at a model's class."""
INSPECTION_LIMIT_S = 300.0
_IN_SUBPROCESS = "_run_in_subprocess"
"""Of vLLM's registry of models, 0.25 to 0.32."""
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


@contextmanager
def inspecting() -> Iterator[None]:
    """Within the block, vLLM looks at a model's class in a fork of the server; vLLM is imported before.

    A build that does it in another way does it in its own.
    """
    from vllm.model_executor.models import registry

    before = getattr(registry, _IN_SUBPROCESS, None)
    if before is not None:
        setattr(registry, _IN_SUBPROCESS, in_a_fork)
    try:
        yield
    finally:
        if before is not None:
            setattr(registry, _IN_SUBPROCESS, before)


def in_a_fork(work: Callable[[], T]) -> T:
    """The result of ``work`` in a fork of the server.

    Args:
        work: may be a closure.

    Raises:
        RuntimeError: it failed, with its traceback, or its process ended.
    """
    import cloudpickle

    context = WarmContext()
    receiver, sender = context.Pipe(duplex=False)
    with receiver:
        process = context.Process(target=_send_result, args=(cloudpickle.dumps(work), sender), name=INSPECTION)
        process.start()
        sender.close()
        try:
            if not receiver.poll(INSPECTION_LIMIT_S):
                raise RuntimeError(f"the look at the model's class took longer than {INSPECTION_LIMIT_S:g} s")
            result, failure = receiver.recv()
        except EOFError as error:
            process.join(INSPECTION_LIMIT_S)
            raise RuntimeError(f"the process that looks at the model's class ended with {process.exitcode}") from error
        finally:
            process.kill()  # it has nothing more to do
            process.join(INSPECTION_LIMIT_S)
    if failure is not None:
        raise RuntimeError(f"in the process that looks at the model's class:\n{failure}")
    return cast(T, result)


def _send_result(work: bytes, sender: Connection) -> None:
    """In the fork."""
    import cloudpickle
    from vllm.plugins import load_general_plugins

    try:
        load_general_plugins()
        sender.send((cloudpickle.loads(work)(), None))
    except Exception:  # noqa: BLE001  (a model's module may raise anything; whoever asked hears of it)
        sender.send((None, traceback.format_exc()))
