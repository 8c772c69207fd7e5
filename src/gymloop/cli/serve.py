"""``gymloop serve MODEL``: one model behind an OpenAI-compatible URL, in one process, until it is told to stop.

    main thread     socket and server up ──> shows progress ──> ready ──> summaries ──> stop: server, engine, exit
    loader thread         find the folder ──> tokenizer, probe ──> weights ──┘

The URL answers from the first moment: 503 with ``Retry-After`` and what is being loaded, until the model is there.
Standard output carries the ``ready:`` line and an example and nothing else; progress and logs go to standard error.
Exit codes: 2 the command line or the model is wrong, 1 another failure, 130 after SIGINT (Ctrl-C), 143 after SIGTERM.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from gymloop.cli.stop import Stop
from gymloop.config.nearest import did_you_mean
from gymloop.config.schema import REASONING_PARSERS, TOOL_PARSERS
from gymloop.errors import ConfigError
from gymloop.models.resolve import resolve_model
from gymloop.observe.progress import Progress
from gymloop.serving.traffic import summary
from gymloop.serving.worker import EngineSpec, EngineWorker
from gymloop.startup.sockets import hold_socket

if TYPE_CHECKING:
    from gymloop.serving.engines import OnProgress

log = logging.getLogger(__name__)

State = tuple[str, int, int]
"""What is being loaded, how many bytes of it are there, of how many; see ``EngineWorker.load_progress``."""
API_KEY = "GYMLOOP_API_KEY"
"""Environment variable; where it is set, clients must send it."""
ANY_PORT = (20000, 29999)
"""Where ``--port 0`` looks: below the ports that systems give to outgoing connections."""
PORTS_TRIED = 100
"""How far above a taken port a free one is looked for."""
FETCH = (sys.executable, "-m", "gymloop.cli.main", "models", "fetch")
REQUEST_TIMEOUT_S = 3600.0
POLL_S = 0.1
SUMMARY_S = 10.0
CLOSE_LIMIT_S = 15.0
"""For requests in flight, the server and the engine's running step; then the process ends all the same."""
LOADER_LIMIT_S = 1.0
"""For a loader that was told to end its download; one that reads weights cannot be told."""
_QUARTER = 25
_LOOPBACK = ("127.0.0.1", "localhost", "::1")


def run(args: argparse.Namespace) -> int:
    """Serve until a signal; returns 128 plus its number.

    Raises:
        ConfigError: the command line, the model or the port cannot be used.
        InfraError: the engine could not be started, or died.
    """
    spec = read_spec(args)
    # As in the actors of a run: threads of torch that spin while they wait would starve the server's.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    with (
        Stop() as stop,
        Progress(Console(stderr=True, highlight=False)) as progress,
        _logging_to(progress, args.verbose),
    ):
        states: deque[State] = deque()
        worker = listen(spec, lambda *state: states.append(state))
        loader = _Loader(worker, args.model)
        try:
            progress.say(f"listening on {worker.url()}, which answers 503 until the model is loaded")
            if spec.host not in _LOOPBACK and spec.api_key is None:
                log.warning("anyone who reaches this port can use the model; set %s to ask for a key", API_KEY)
            loader.start()
            if _loaded(worker, loader, states, progress, stop):
                progress.close()
                print(announcement(worker.url(), spec, loader.facts, loader.seconds), flush=True)
                _attend(worker, progress, stop)
        finally:
            if in_flight := worker.traffic().in_flight:
                ended_ones = "1 request in flight is" if in_flight == 1 else f"{in_flight} requests in flight are"
                progress.say(f"stopping; {ended_ones} ended")
            logging.getLogger("uvicorn").setLevel(logging.CRITICAL)  # it calls every such request an error
            ended = _close(worker, loader)
        progress.say(f"stopped by {signal.Signals(stop.number).name}")
    if not ended:
        # The loader or a step is still inside torch, where a thread cannot be ended; the process can.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(stop.exit_code)
    return stop.exit_code


def read_spec(args: argparse.Namespace) -> EngineSpec:
    """What the engine's worker needs, from the command line and the environment.

    Raises:
        ConfigError: a file is missing or a parser unknown.
    """
    _check_parser("tool", args.tool_parser, args.tool_parser_plugin, TOOL_PARSERS)
    _check_parser("reasoning", args.reasoning_parser, args.reasoning_parser_plugin, REASONING_PARSERS)
    return EngineSpec(
        model_name=args.served_model_name or args.model,
        profiles=None,
        port_range=(args.port, args.port) if args.port else ANY_PORT,
        max_model_len=args.max_model_len,
        max_batch_size=args.max_batch_size,
        request_timeout_s=REQUEST_TIMEOUT_S,
        precision=args.precision,
        device=args.device,
        host=args.host,
        chat_template=None if args.chat_template is None else _text("--chat-template", args.chat_template),
        tool_parser=args.tool_parser,
        tool_parser_plugin=args.tool_parser_plugin,
        reasoning_parser=args.reasoning_parser,
        reasoning_parser_plugin=args.reasoning_parser_plugin,
        template_required=False,
        api_key=os.environ.get(API_KEY) or None,
    )


def listen(spec: EngineSpec, on_progress: OnProgress) -> EngineWorker:
    """The worker, its socket bound and its server up.

    Raises:
        ConfigError: the port is taken; the message names the next free one. Or the host is not this machine's.
    """
    try:
        return EngineWorker(spec, on_progress)
    except ConfigError as error:
        low, high = spec.port_range
        above = range(low + 1, min(low + PORTS_TRIED, 65535) + 1)
        free = next((port for port in above if _free(spec.host, port)), None)
        if low != high or free is None:
            raise
        raise ConfigError(f"--port {low}: the port is taken on {spec.host}; {free} is free") from error


def _free(host: str, port: int) -> bool:
    try:
        hold_socket(port, port, host).close()
    except ConfigError:
        return False
    return True


def _check_parser(kind: str, name: str | None, plugin: str | None, known: tuple[str, ...]) -> None:
    if plugin is not None:
        if not Path(plugin).is_file():
            raise ConfigError(f"--{kind}-parser-plugin: the file {plugin} does not exist")
        return  # the plug-in may define further names; the reader checks them
    if name is not None and name not in known:
        raise ConfigError(
            f"--{kind}-parser: there is no parser {name!r}{did_you_mean(name, known)} (built in: {', '.join(known)})"
        )


def _text(option: str, file: str) -> str:
    try:
        return Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"{option}: the file {file} cannot be read: {reason}") from error


def announcement(url: str, spec: EngineSpec, facts: dict[str, Any], seconds: float) -> str:
    """The ``ready:`` line, and a request to copy."""
    name = spec.model_name
    if facts["chat"]:
        route, body = "chat/completions", {"model": name, "messages": [{"role": "user", "content": "Hello!"}]}
    else:
        route, body = "completions", {"model": name, "prompt": "Hello"}
    key = "" if spec.api_key is None else f' -H "authorization: Bearer ${API_KEY}"'
    example = shlex.quote(json.dumps({**body, "max_tokens": 64}, ensure_ascii=False))
    return (
        f"ready: {url}  model {name}  ({facts['precision']} on {facts['device']}, {facts['max_model_len']} tokens of "
        f"context, {facts['max_batch_size']} requests at once, {seconds:.1f} s)\n"
        f"  curl {url}/{route} -H 'content-type: application/json'{key} -d {example}"
    )


class _Loader(threading.Thread):
    """Finds the model's folder and loads it. What it found is in ``facts``; why it could not, in ``error``."""

    def __init__(self, worker: EngineWorker, model: str):
        super().__init__(name="loader", daemon=True)
        self.note = ""
        self.facts: dict[str, Any] = {}
        self.error: Exception | None = None
        self.seconds = 0.0
        self._worker = worker
        self._model = model
        self._child: subprocess.Popen[str] | None = None
        self._ended = False

    def run(self) -> None:
        began = time.monotonic()
        try:
            folder = str(self._folder())
            self.facts = self._worker.load(folder, folder)
        except Exception as error:  # noqa: BLE001 - a thread has no caller; the main thread raises it
            self.error = error
            self._worker.fail(str(error))
        self.seconds = time.monotonic() - began

    def end(self) -> None:
        """End a download or conversion that is under way."""
        self._ended = True
        child = self._child
        if child is not None and child.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # its own thread is about to have its exit code
                os.killpg(child.pid, signal.SIGTERM)

    def _folder(self) -> Path:
        """In a process of its own where it may take long: a download or conversion can then be ended at once."""
        if Path(self._model).is_dir():
            return resolve_model(self._model)
        with subprocess.Popen(
            [*FETCH, self._model],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        ) as child:
            self._child = child
            if self._ended:
                self.end()
            last = ""
            for line in child.stderr or ():  # progress bars end their states with \r, which text mode reads as lines
                if text := line.strip():
                    last = self.note = text.removeprefix("gymloop: ")
            output = (child.stdout.read() if child.stdout else "").strip()
        if child.returncode or not output:
            raise ConfigError(last or f"model {self._model} could not be fetched")
        self.note = ""
        return Path(output.splitlines()[-1])


def _loaded(worker: EngineWorker, loader: _Loader, states: deque[State], progress: Progress, stop: Stop) -> bool:
    """Show the loading, each state of it; True when it is done, False when a signal came first.

    Raises:
        GymloopError: loading failed.
    """
    view = _LoadingView(progress)
    state = worker.load_progress()
    while not stop.wait(POLL_S):
        ended = not loader.is_alive()
        while states:
            state = states.popleft()
            view.show(*state)
        if ended:
            if loader.error is not None:
                raise loader.error
            return True
        view.show(*state, note=loader.note)
    return False


class _LoadingView:
    """Loading as one live line on a terminal, elsewhere as a line for each change and each quarter of the weights."""

    def __init__(self, progress: Progress):
        self._progress = progress
        self._last = ""

    def show(self, what: str, done: int, total: int, note: str = "") -> None:
        """Show where loading is."""
        percent = 100 * done // total if total else 0
        amount = f", {_size(done)} of {_size(total)} ({percent}%)" if total else ""
        self._progress.phase(f"starting: {what}{amount or (note and f', {note}')}")
        mark = f"starting: {what}" + (f", {percent - percent % _QUARTER}% of {_size(total)}" if total else "")
        if mark != self._last and not self._progress.console.is_terminal:
            self._progress.say(mark)
        self._last = mark


def _size(count: int) -> str:
    for unit, scale in (("GB", 10**9), ("MB", 10**6)):
        if count >= scale:
            return f"{count / scale:.3g} {unit}"
    return f"{count / 1000:.3g} kB"


def _attend(worker: EngineWorker, progress: Progress, stop: Stop) -> None:
    """Say every ten seconds what was served, if anything was; returns when asked to stop.

    Raises:
        InfraError: the engine died; it cannot come back in this process.
    """
    before, began = worker.traffic(), time.monotonic()
    while not stop.wait(SUMMARY_S):
        worker.check()
        now, seconds = worker.traffic(), time.monotonic() - began
        if text := summary(before, now, seconds):
            log.info(text)
        before, began = now, began + seconds


def _close(worker: EngineWorker, loader: _Loader) -> bool:
    """End server, engine and loader; False where something did not end in time."""
    loader.end()
    closing = threading.Thread(target=worker.close, name="close", daemon=True)
    closing.start()
    closing.join(CLOSE_LIMIT_S)
    if loader.ident is not None:
        loader.join(LOADER_LIMIT_S)
    return not (closing.is_alive() or loader.is_alive())


class _Lines(logging.Handler):
    """Log records as lines of the progress display, so that a live line is never torn."""

    def __init__(self, progress: Progress):
        super().__init__()
        self.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s", datefmt="%H:%M:%S"))
        self._progress = progress

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._progress.say(self.format(record))
        except (OSError, ValueError):
            self.handleError(record)


@contextmanager
def _logging_to(progress: Progress, verbose: bool) -> Iterator[None]:
    """Show gymloop's log from info on, or from debug, and everybody else's warnings."""
    levels = {"": logging.WARNING, "gymloop": logging.DEBUG if verbose else logging.INFO, "uvicorn": logging.WARNING}
    before = {name: logging.getLogger(name).level for name in levels}
    handler = _Lines(progress)
    logging.getLogger().addHandler(handler)
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)
    try:
        yield
    finally:
        logging.getLogger().removeHandler(handler)
        for name, level in before.items():
            logging.getLogger(name).setLevel(level)
