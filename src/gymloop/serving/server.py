"""The OpenAI-compatible face of one engine replica, up before its engine is.

The server runs on a socket that is already held, in a thread and an event loop of its own. Until an engine is ready
every route but ``/livez`` and ``/metrics`` answers 503 and says what it waits for; when loading failed it answers 503
and says why. No request hangs: each has a deadline, and a client that goes away frees its slot. Importing and starting
it imports neither torch nor transformers.

    GET  /livez, /readyz, /metrics, /v1/models, /v1/models/{id}
    POST /v1/chat/completions, /v1/responses, /v1/completions, /tokenize, /detokenize, /v1/tokenize, /v1/detokenize
"""

from __future__ import annotations

import asyncio
import http.client
import logging
import socket
import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING

import uvicorn

from gymloop.descriptors import allow_descriptors
from gymloop.errors import InfraError
from gymloop.generation.engine import Engine
from gymloop.loops import fast_loop
from gymloop.observe.watchdog import LoopWatchdog
from gymloop.serving.app import App
from gymloop.serving.guard import SamplingProfiles
from gymloop.serving.limits import Limits
from gymloop.serving.protocol import with_header_deadline
from gymloop.serving.refusal import ApiError
from gymloop.serving.state import Served
from gymloop.serving.traffic import Traffic

if TYPE_CHECKING:
    from gymloop.tokens.renderer import Renderer

log = logging.getLogger(__name__)

KEEP_ALIVE_S = 120
"""Idle connections stay open this long; uvicorn's 5 s made clients meet closing ones."""
RETRY_AFTER_S = 1
START_LIMIT_S = 15.0
CLOSE_GRACE_S = 2
CLOSE_LIMIT_S = 10.0


class GenerationServer:
    """One served model.

    Args:
        sock: a listening socket; the server owns it from ``start`` on.
        model_name: the name that requests give.
        profiles: what sampling is locked to; None accepts whatever the engine can do.
        request_timeout_s: wall time of one request, seconds; then 504, and the engine drops it. None leaves it to
            ``limits``.
        default_max_tokens: tokens to sample where a request sets no limit; None means the rest of the context.
        advertised_host: host in ``url``; None takes the socket's address, the loopback for a wildcard.
        limits: of requests: their size, number and time.
        api_key: what clients must send as ``Authorization: Bearer``; None asks for nothing.
        loop_lag_s: a warning with its stack says when the event loop has stood still for this long.
    """

    def __init__(
        self,
        sock: socket.socket,
        model_name: str,
        profiles: SamplingProfiles | None,
        *,
        request_timeout_s: float | None = None,
        default_max_tokens: int | None = None,
        advertised_host: str | None = None,
        limits: Limits | None = None,
        api_key: str | None = None,
        loop_lag_s: float = 5.0,
    ):
        self.model_name = model_name
        self._sock = sock
        bounds = limits or Limits()
        if request_timeout_s is not None:
            bounds = replace(bounds, request_timeout_s=request_timeout_s)
        host, port = sock.getsockname()[:2]
        loopback = {"0.0.0.0": "127.0.0.1", "::": "::1"}
        self._local = (loopback.get(host, host), port)
        shown = advertised_host or self._local[0]
        self._url = f"http://{f'[{shown}]' if ':' in shown else shown}:{port}/v1"
        self._ready: Served | None = None
        self._failure: str | None = None
        self._loop_lag_s = loop_lag_s
        self._waiting_for = "the engine to load its model"
        self._crash: BaseException | None = None
        self._app = App(model_name, profiles, bounds, default_max_tokens, self._served, api_key)
        config = uvicorn.Config(
            self._app,
            http=with_header_deadline(bounds.header_timeout_s),
            log_config=None,
            access_log=False,
            lifespan="off",
            ws="none",
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=CLOSE_GRACE_S,
        )
        self._uvicorn = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._serve, name="generation-server", daemon=True)

    @property
    def url(self) -> str:
        """Base URL for OpenAI clients, ``http://host:port/v1``; true as soon as the socket is held."""
        return self._url

    @property
    def active_requests(self) -> int:
        """Requests that sample, or wait to, now."""
        return self._app.slots.taken

    def traffic(self) -> Traffic:
        """The counters since the start."""
        return self._app.traffic()

    def start(self) -> None:
        """Serve; returns when ``/livez`` has answered over the network.

        Raises:
            InfraError: it did not answer within 15 s, or the server's thread ended; the message says why.
        """
        allow_descriptors()  # each client has a connection
        self._thread.start()
        deadline = time.monotonic() + START_LIMIT_S
        last = "no answer"
        while time.monotonic() < deadline and self._thread.is_alive():
            try:
                if self._probe() == 200:
                    return
            except (OSError, http.client.HTTPException) as error:
                last = f"{type(error).__name__}: {error}"
            time.sleep(0.01)
        ended = "" if self._thread.is_alive() else f"; its thread ended: {self._crash!r}"
        raise InfraError(
            f"the generation server at {self.url} did not come up within {START_LIMIT_S:g} s: {last}{ended}"
        )

    def waiting_for(self, what: str) -> None:
        """Say what a 503 names as awaited."""
        self._waiting_for = what

    def ready(self, engine: Engine, renderer: Renderer) -> None:
        """Answer requests from now on. The renderer belongs to the server's thread."""
        self._ready = Served(engine, renderer)

    def fail(self, reason: str) -> None:
        """Answer every request with 503 and this reason, for good."""
        self._failure = reason

    def close(self) -> None:
        """End the server and free its port: requests in flight get a short grace, then are cancelled. Safe twice.

        Raises:
            InfraError: the thread did not end within 10 s.
        """
        self._uvicorn.should_exit = True
        if self._thread.ident is not None:
            self._thread.join(CLOSE_LIMIT_S)
            if self._thread.is_alive():
                raise InfraError(f"the generation server at {self.url} did not end within {CLOSE_LIMIT_S:g} s")
        self._sock.close()

    def _served(self) -> Served | ApiError:
        """What requests are served with, or why they cannot be served now."""
        if self._failure is not None:
            return ApiError(503, "startup_failed", f"the engine did not start: {self._failure}")
        # Only a wait is worth coming back for.
        waiting = f"waiting for {self._waiting_for}"
        return self._ready or ApiError(503, "not_ready", waiting, retry_after_s=RETRY_AFTER_S)

    def _serve(self) -> None:
        try:
            with asyncio.Runner(loop_factory=fast_loop()) as runner:
                runner.run(self._run())
        except (Exception, SystemExit) as error:  # a thread has no caller; start() reports it
            self._crash = error
            log.exception("the generation server ended")

    async def _run(self) -> None:
        with LoopWatchdog(f"the event loop of the generation server at {self.url}", self._loop_lag_s, log.warning):
            await self._uvicorn.serve(sockets=[self._sock])

    def _probe(self) -> int:
        connection = http.client.HTTPConnection(*self._local, timeout=2.0)
        try:
            connection.request("GET", "/livez")
            return connection.getresponse().status
        finally:
            connection.close()
