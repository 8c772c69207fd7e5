"""The OpenAI-compatible face of one engine replica, up before its engine is.

The server runs on a socket that is already held, in a thread and an event loop of its own. Until an engine is ready
every route but ``/livez`` and ``/metrics`` answers 503 and says what it waits for; when loading failed it answers 503
and says why. No request hangs: each has a deadline, and a client that goes away frees its slot. Importing and starting
it imports neither torch nor transformers.

    GET  /livez, /readyz, /metrics, /v1/models, /v1/models/{id}
    POST /v1/chat/completions, /v1/responses, /v1/completions, /tokenize, /detokenize, /v1/tokenize, /v1/detokenize
"""

from __future__ import annotations

import json
import logging
import socket
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from gymloop.asgi.thread import ServerThread
from gymloop.descriptors import allow_descriptors
from gymloop.generation.engine import Engine
from gymloop.observe.watchdog import LoopWatchdog
from gymloop.serving.app import App
from gymloop.serving.guard import SamplingProfiles
from gymloop.serving.limits import Limits
from gymloop.serving.refusal import ApiError
from gymloop.serving.state import Served
from gymloop.serving.traffic import Traffic

if TYPE_CHECKING:
    from gymloop.tokens.renderer import Renderer

log = logging.getLogger(__name__)

RETRY_AFTER_S = 1
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
        bounds = limits or Limits()
        if request_timeout_s is not None:
            bounds = replace(bounds, request_timeout_s=request_timeout_s)
        host, port = sock.getsockname()[:2]
        loopback = {"0.0.0.0": "127.0.0.1", "::": "::1"}
        shown = advertised_host or loopback.get(host, host)
        self._url = f"http://{f'[{shown}]' if ':' in shown else shown}:{port}/v1"
        self._ready: Served | None = None
        self._failure: str | None = None
        self._waiting_for = "the engine to load its model"
        self._app = App(model_name, profiles, bounds, default_max_tokens, self._served, api_key)
        too_slow = ApiError(408, "header_timeout", "the request headers did not arrive in time")
        self._thread = ServerThread(
            sock,
            self._app,
            what=f"the generation server at {self._url}",
            name="generation-server",
            header_timeout_s=bounds.header_timeout_s,
            header_reply=json.dumps(too_slow.body).encode(),
            grace_s=CLOSE_GRACE_S,
            close_limit_s=CLOSE_LIMIT_S,
            watched=partial(
                LoopWatchdog, f"the event loop of the generation server at {self._url}", loop_lag_s, log.warning
            ),
        )

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
        """Serve; returns when requests are answered.

        Raises:
            InfraError: it did not come up within 15 s; the message says why.
        """
        allow_descriptors()  # each client has a connection
        self._thread.start()

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
        self._thread.close()

    def _served(self) -> Served | ApiError:
        """What requests are served with, or why they cannot be served now."""
        if self._failure is not None:
            return ApiError(503, "startup_failed", f"the engine did not start: {self._failure}")
        # Only a wait is worth coming back for.
        waiting = f"waiting for {self._waiting_for}"
        return self._ready or ApiError(503, "not_ready", waiting, retry_after_s=RETRY_AFTER_S)
