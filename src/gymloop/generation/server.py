"""The OpenAI-compatible face of one engine replica, up before its engine is.

The server runs on a socket that is already held, in a thread and an event loop of its own. Until an engine is ready
every route but ``/livez`` answers 503 and says what it waits for; when loading failed it answers 503 and says why. No
request hangs: each has a deadline, and a client that goes away frees its slot. Importing and starting it imports
neither torch nor transformers.

    GET  /livez, /readyz, /v1/models
    POST /v1/chat/completions, /tokenize, /v1/tokenize
"""

from __future__ import annotations

import asyncio
import http.client
import logging
import socket
import threading
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import orjson
import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from gymloop.errors import DataError, GymloopError, InfraError
from gymloop.generation.chat import PROFILE_HEADER, ChatRequest, SamplingProfiles, completion, read_request
from gymloop.generation.engine import Engine, Sample, Sampling
from gymloop.generation.prompt import build_prompt
from gymloop.generation.refusal import ApiError

if TYPE_CHECKING:
    from gymloop.tokens.renderer import Renderer

log = logging.getLogger(__name__)

KEEP_ALIVE_S = 120
"""Idle connections stay open this long; uvicorn's 5 s made clients meet closing ones."""
RETRY_AFTER_S = 1
START_LIMIT_S = 15.0
CLOSE_GRACE_S = 2
CLOSE_LIMIT_S = 10.0
CLIENT_CLOSED_REQUEST = 499


@dataclass(frozen=True, slots=True)
class _Ready:
    engine: Engine
    renderer: Renderer


class _Json(Response):
    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return orjson.dumps(content)


class GenerationServer:
    """One served model.

    Args:
        sock: a listening socket; the server owns it from ``start`` on.
        model_name: the name that requests give.
        profiles: what sampling is locked to; None accepts any.
        request_timeout_s: wall time of one request, seconds; then 504, and the engine drops it.
        default_max_tokens: tokens to sample where a request sets no limit; None means the rest of the context.
        advertised_host: host in ``url``; None takes the socket's address, the loopback for a wildcard.
    """

    def __init__(
        self,
        sock: socket.socket,
        model_name: str,
        profiles: SamplingProfiles | None,
        *,
        request_timeout_s: float = 600.0,
        default_max_tokens: int | None = None,
        advertised_host: str | None = None,
    ):
        self.model_name = model_name
        self._sock = sock
        self._profiles = profiles
        self._request_timeout_s = request_timeout_s
        self._default_max_tokens = default_max_tokens
        host, port = sock.getsockname()[:2]
        loopback = {"0.0.0.0": "127.0.0.1", "::": "::1"}
        self._local = (loopback.get(host, host), port)
        shown = advertised_host or self._local[0]
        self._url = f"http://{f'[{shown}]' if ':' in shown else shown}:{port}/v1"
        self._ready: _Ready | None = None
        self._failure: str | None = None
        self._waiting_for = "the engine to load its model"
        self._started_at = int(time.time())
        self._crash: BaseException | None = None
        config = uvicorn.Config(
            _Gate(self, self._routes()),
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

    def start(self) -> None:
        """Serve; returns when ``/livez`` has answered over the network.

        Raises:
            InfraError: it did not answer within 15 s, or the server's thread ended; the message says why.
        """
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
        self._ready = _Ready(engine, renderer)

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

    def refusal(self) -> ApiError | None:
        """Why requests cannot be served now, or None."""
        if self._failure is not None:
            return ApiError(503, "startup_failed", f"the engine did not start: {self._failure}")
        if self._ready is None:
            return ApiError(503, "not_ready", f"waiting for {self._waiting_for}")
        return None

    def _serve(self) -> None:
        try:
            asyncio.run(self._uvicorn.serve(sockets=[self._sock]))
        except (Exception, SystemExit) as error:  # a thread has no caller; start() reports it
            self._crash = error
            log.exception("the generation server ended")

    def _probe(self) -> int:
        connection = http.client.HTTPConnection(*self._local, timeout=2.0)
        try:
            connection.request("GET", "/livez")
            return connection.getresponse().status
        finally:
            connection.close()

    def _routes(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/livez", self._livez),
                Route("/readyz", self._readyz),
                Route("/v1/models", self._models),
                Route("/v1/chat/completions", self._chat, methods=["POST"]),
                Route("/tokenize", self._tokenize, methods=["POST"]),
                Route("/v1/tokenize", self._tokenize, methods=["POST"]),
            ],
            exception_handlers=dict.fromkeys((GymloopError, ApiError, HTTPException, Exception), _failed),
        )

    async def _livez(self, request: Request) -> Response:
        return _Json({"status": "alive"})

    async def _readyz(self, request: Request) -> Response:
        return _Json({"status": "ready"})

    async def _models(self, request: Request) -> Response:
        model = {"id": self.model_name, "object": "model", "created": self._started_at, "owned_by": "gymloop"}
        model |= {"max_model_len": self._now().engine.max_model_len}
        return _Json({"object": "list", "data": [model]})

    async def _tokenize(self, request: Request) -> Response:
        now = self._now()
        chat = await self._read(request, now.renderer)
        ids = build_prompt(now.renderer, chat.messages, chat.tools, chat.prefix_ids).ids
        return _Json({"tokens": ids, "count": len(ids), "max_model_len": now.engine.max_model_len})

    async def _chat(self, request: Request) -> Response:
        now = self._now()
        chat = await self._read(request, now.renderer)
        prompt = build_prompt(now.renderer, chat.messages, chat.tools, chat.prefix_ids)
        request_id = f"chatcmpl-{uuid.uuid4().hex}"
        room = now.engine.max_model_len - len(prompt.ids)
        if room > 0:
            sampling = chat.sampling(room, now.renderer.end_token_ids, self._default_max_tokens)
            sample = await self._sample(request, now.engine, prompt.ids, sampling, request_id)
        else:
            version = now.engine.weight_version
            sample = Sample((), (), "length", version, version)
        if sample is None:
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        return _Json(completion(request_id, self.model_name, chat, prompt, sample, now.renderer))

    async def _read(self, request: Request, renderer: Renderer) -> ChatRequest:
        try:
            body = orjson.loads(await request.body())
        except orjson.JSONDecodeError as error:
            raise ApiError(400, "invalid_json", f"the request body is not JSON: {error}") from error
        profile = self._profiles.select(request.headers.get(PROFILE_HEADER)) if self._profiles else None
        return read_request(body, self.model_name, profile, renderer.chat_template_kwargs, renderer.vocab_size)

    async def _sample(
        self, request: Request, engine: Engine, prompt_ids: Sequence[int], sampling: Sampling, request_id: str
    ) -> Sample | None:
        """The engine's sample, or None when the client went away.

        Raises:
            ApiError: 504 when the request's time is over.
            InfraError: the engine died.
        """
        work = asyncio.ensure_future(engine.generate(prompt_ids, sampling, request_id))
        gone = asyncio.ensure_future(_disconnected(request))
        try:
            await asyncio.wait({work, gone}, timeout=self._request_timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                return work.result()
            if gone.done():
                return None
            message = f"no sample within {self._request_timeout_s:g} s; the request was ended"
            raise ApiError(504, "request_timeout", message)
        finally:
            gone.cancel()
            if not work.done():
                engine.abort(request_id)
                work.cancel()

    def _now(self) -> _Ready:
        # The gate lets no request through before.
        if self._ready is None:
            raise ApiError(503, "not_ready", f"waiting for {self._waiting_for}")
        return self._ready


class _Gate:
    """Lets requests through to the routes once the server is ready; ``/livez`` always."""

    def __init__(self, server: GenerationServer, routes: ASGIApp):
        self._server = server
        self._routes = routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = self._server.refusal()
        if refusal is None or scope["path"] == "/livez":
            await self._routes(scope, receive, send)
            return
        # Only a wait is worth coming back for.
        headers = {"retry-after": str(RETRY_AFTER_S)} if refusal.code == "not_ready" else {}
        await _Json(refusal.body, refusal.status, headers)(scope, receive, send)


async def _disconnected(request: Request) -> None:
    """Return when the client has closed the connection; the body must have been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _failed(request: Request, error: Exception) -> Response:
    """The reply to a request that raised; Starlette then logs the traceback of anything not listed here."""
    match error:
        case ApiError():
            refusal = error
        case DataError():
            refusal = ApiError(400, getattr(error, "code", "invalid_conversation"), str(error), "messages")
        case InfraError():
            log.error("%s: %s", request.url.path, error)
            refusal = ApiError(503, "engine_failed", str(error))
        case HTTPException():
            refusal = ApiError(
                error.status_code, "no_such_route", f"{request.method} {request.url.path}: {error.detail}"
            )
        case _:
            refusal = ApiError(500, "internal_error", f"{type(error).__name__}: {error}")
    return _Json(refusal.body, refusal.status)
