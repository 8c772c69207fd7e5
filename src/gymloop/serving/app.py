"""One server's requests: which route serves each, who may ask, how many at once; every reply is counted.

A request that samples holds a slot from its headers to its last byte, so a client that goes away at any moment, in the
middle of its body or of a stream, frees it.
"""

from __future__ import annotations

import asyncio
import hmac
import time
from collections.abc import Callable, Coroutine
from typing import Any, Protocol, runtime_checkable

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gymloop.serving.guard import SamplingProfiles
from gymloop.serving.limits import Limits, Slots
from gymloop.serving.metrics import Metrics
from gymloop.serving.refusal import ApiError, refusal_of, server_closing
from gymloop.serving.reply import json_reply
from gymloop.serving.sampling_routes import SamplingRoutes
from gymloop.serving.service_routes import ServiceRoutes
from gymloop.serving.state import Served, ServerState
from gymloop.serving.traffic import Traffic

SAMPLING_ROUTES = frozenset({"/v1/chat/completions", "/v1/responses", "/v1/completions"})
ALWAYS_OPEN = frozenset({"/livez", "/metrics"})
"""Routes that answer before the engine is ready."""
WITHOUT_KEY = ALWAYS_OPEN | {"/readyz"}
"""Routes that never ask for the API key."""


@runtime_checkable
class Queueing(Protocol):
    """An engine that says how many requests wait in it."""

    @property
    def queued(self) -> int:
        """Requests without a row."""


class App:
    """The ASGI application of one server.

    Args:
        model_name: the one model.
        profiles: what sampling is locked to; None accepts whatever the engine can do.
        limits: of requests.
        default_max_tokens: where a request sets none; None means the rest of the context.
        served: engine and renderer, or the reason why there are none.
        api_key: what clients must send as ``Authorization: Bearer``; None asks for nothing.
    """

    def __init__(
        self,
        model_name: str,
        profiles: SamplingProfiles | None,
        limits: Limits,
        default_max_tokens: int | None,
        served: Callable[[], Served | ApiError],
        api_key: str | None = None,
    ):
        self._served = served
        self._authorization = None if api_key is None else f"Bearer {api_key}".encode()
        self.slots = Slots(limits.max_concurrent)
        self._metrics = Metrics(lambda: self.slots.taken, self._queued, self._weight_version)
        state = ServerState(model_name, profiles, limits, default_max_tokens, served, self._metrics)
        self._routes = self._starlette(ServiceRoutes(state), SamplingRoutes(state))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            return
        path, begun = scope["path"], time.perf_counter()
        status = 0

        async def count(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            served = self._served()
            if path not in WITHOUT_KEY and not self._knows_key(scope):
                unknown = ApiError(401, "invalid_api_key", "this server asks for a key: Authorization: Bearer KEY")
                await self._refuse(unknown)(scope, receive, count)
            elif isinstance(served, ApiError) and path not in ALWAYS_OPEN:
                await self._refuse(served)(scope, receive, count)
            elif path in SAMPLING_ROUTES and scope["method"] == "POST":
                try:
                    with self.slots.take():
                        await self._routes(scope, receive, count)
                except ApiError as refusal:  # there was no slot; whatever a route raises is told inside
                    await self._refuse(refusal)(scope, receive, count)
            else:
                await self._routes(scope, receive, count)
        except asyncio.CancelledError:
            # Nobody but a closing server cancels a request's task; what was not begun can still be told why it ended.
            if status == 0:
                await self._refuse(server_closing())(scope, receive, count)
        finally:
            self._metrics.replied(path if path in self._paths else "other", status, time.perf_counter() - begun)

    def _knows_key(self, scope: Scope) -> bool:
        if self._authorization is None:
            return True
        sent = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        return hmac.compare_digest(sent, self._authorization)

    def traffic(self) -> Traffic:
        """The counters since the start."""
        return self._metrics.traffic()

    def _starlette(self, service: ServiceRoutes, sampling: SamplingRoutes) -> ASGIApp:
        get: dict[str, Any] = {
            "/livez": service.livez,
            "/readyz": service.readyz,
            "/metrics": service.show_metrics,
            "/v1/models": service.models,
            "/v1/models/{model_id:path}": service.model,
        }
        post: dict[str, Any] = {
            "/v1/chat/completions": sampling.chat,
            "/v1/responses": sampling.responses,
            "/v1/completions": sampling.completions,
            "/tokenize": service.tokenize,
            "/v1/tokenize": service.tokenize,
            "/detokenize": service.detokenize,
            "/v1/detokenize": service.detokenize,
        }
        self._paths = get.keys() | post.keys()
        routes = [Route(path, self._telling(endpoint)) for path, endpoint in get.items()]
        routes += [Route(path, self._telling(endpoint), methods=["POST"]) for path, endpoint in post.items()]
        return Starlette(routes=routes, exception_handlers={HTTPException: self._no_route})

    def _telling(
        self, endpoint: Callable[[Request], Coroutine[Any, Any, Any]]
    ) -> Callable[[Request], Coroutine[Any, Any, Any]]:
        """An endpoint whose errors are replies."""

        async def told(request: Request) -> Any:
            try:
                return await endpoint(request)
            except Exception as error:  # noqa: BLE001 - whatever it is, the client is told and the log has it
                return self._refuse(refusal_of(error, request.url.path))

        return told

    def _refuse(self, refusal: ApiError) -> Response:
        self._metrics.refused(refusal)
        return json_reply(refusal.body, refusal.status, refusal.headers)

    async def _no_route(self, request: Request, error: Exception) -> Response:
        status = error.status_code if isinstance(error, HTTPException) else 500
        code = "method_not_allowed" if status == 405 else "no_such_route"
        message = f"{request.method} {request.url.path} is not served; "
        message += "another method is" if status == 405 else f"these are: {', '.join(sorted(self._paths))}"
        reply = self._refuse(ApiError(status, code, message))
        if isinstance(error, HTTPException) and error.headers:
            reply.headers.update(error.headers)
        return reply

    def _weight_version(self) -> int | None:
        served = self._served()
        return None if isinstance(served, ApiError) else served.engine.weight_version

    def _queued(self) -> int | None:
        served = self._served()
        if isinstance(served, Served) and isinstance(served.engine, Queueing):
            return served.engine.queued
        return None
