"""The routes: each reads a request, has the engine sample, and writes a reply; what they say is in other modules.

A request that samples holds a slot from its headers to its last byte, so a client that goes away at any moment, in the
middle of its body or of a stream, frees it. Every reply is counted.
"""

from __future__ import annotations

import asyncio
import hmac
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable
from urllib.parse import unquote

import orjson
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gymloop.generation.engine import Engine
from gymloop.serving import metrics as numbers
from gymloop.serving.call import Call, Piece, Said
from gymloop.serving.chat import ChatChunks, Conversation, completion, read_chat
from gymloop.serving.completions import CompletionChunks, read_completion, text_completion
from gymloop.serving.guard import PROFILE_HEADER, SamplingProfiles, Wish
from gymloop.serving.limits import Limits, Slots, read_json
from gymloop.serving.metrics import Metrics
from gymloop.serving.prompt import Prompt, build_prompt
from gymloop.serving.refusal import ApiError, ClientGone, refusal_of
from gymloop.serving.reply import disconnected, json_reply
from gymloop.serving.response_events import ResponseEvents
from gymloop.serving.responses import read_responses, response_body
from gymloop.serving.sse import EventStream
from gymloop.serving.tokenize import detokenize, tokenize
from gymloop.serving.traffic import Traffic
from gymloop.serving.turn import Terms, Turn

if TYPE_CHECKING:
    from gymloop.tokens.renderer import Renderer

NOISE_HEADER = "x-gymloop-noise-key"
NOISE_KEY_LIMIT = 512
DONE = b"data: [DONE]\n\n"
SAMPLING_ROUTES = frozenset({"/v1/chat/completions", "/v1/responses", "/v1/completions"})
ALWAYS_OPEN = frozenset({"/livez", "/metrics"})
"""Routes that answer before the engine is ready."""
WITHOUT_KEY = ALWAYS_OPEN | {"/readyz"}
"""Routes that never ask for the API key."""


@dataclass(frozen=True, slots=True)
class Served:
    """What requests are served with, once there is something."""

    engine: Engine
    renderer: Renderer


@runtime_checkable
class Queueing(Protocol):
    """An engine that says how many requests wait in it."""

    @property
    def queued(self) -> int:
        """Requests without a row."""


class Events(Protocol):
    """A route's way to tell a streamed reply."""

    def of(self, piece: Piece) -> Sequence[dict[str, Any]]:
        """The events of a piece."""

    def closing(self) -> Sequence[dict[str, Any]]:
        """The events after the last piece."""

    def failure(self, refusal: ApiError) -> dict[str, Any]:
        """The event of an error that comes after the first piece."""


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
        self._model_name = model_name
        self._profiles = profiles
        self._limits = limits
        self._default_max_tokens = default_max_tokens
        self._served = served
        self._authorization = None if api_key is None else f"Bearer {api_key}".encode()
        self._started_at = int(time.time())
        self.slots = Slots(limits.max_concurrent)
        self._metrics = Metrics(lambda: self.slots.taken, self._queued, self._weight_version)
        self._routes = self._starlette()

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
                closing = ApiError(503, "server_closing", "the server is closing; the request was ended")
                await self._refuse(closing)(scope, receive, count)
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

    def _starlette(self) -> ASGIApp:
        get: dict[str, Any] = {
            "/livez": self._livez,
            "/readyz": self._readyz,
            "/metrics": self._show_metrics,
            "/v1/models": self._models,
            "/v1/models/{model_id:path}": self._model,
        }
        post: dict[str, Any] = {
            "/v1/chat/completions": self._chat,
            "/v1/responses": self._responses,
            "/v1/completions": self._completions,
            "/tokenize": self._tokenize,
            "/v1/tokenize": self._tokenize,
            "/detokenize": self._detokenize,
            "/v1/detokenize": self._detokenize,
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
        message = f"{request.method} {request.url.path} is not served"
        reply = self._refuse(ApiError(status, code, message))
        if isinstance(error, HTTPException) and error.headers:
            reply.headers.update(error.headers)
        return reply

    # ---------------------------------------------------------------- about the server

    async def _livez(self, request: Request) -> Response:
        return json_reply({"status": "alive"})

    async def _readyz(self, request: Request) -> Response:
        return json_reply({"status": "ready"})

    async def _show_metrics(self, request: Request) -> Response:
        return Response(self._metrics.text(), media_type=numbers.CONTENT_TYPE)

    async def _models(self, request: Request) -> Response:
        return json_reply({"object": "list", "data": [self._model_card()]})

    async def _model(self, request: Request) -> Response:
        asked = request.path_params["model_id"]
        if asked != self._model_name:
            message = f"model {asked!r} is not served; {self._model_name!r} is"
            raise ApiError(404, "model_not_found", message, "model")
        return json_reply(self._model_card())

    def _model_card(self) -> dict[str, Any]:
        return {
            "id": self._model_name,
            "object": "model",
            "created": self._started_at,
            "owned_by": "gymloop",
            "max_model_len": self._now().engine.max_model_len,
        }

    def _weight_version(self) -> int | None:
        served = self._served()
        return None if isinstance(served, ApiError) else served.engine.weight_version

    def _queued(self) -> int | None:
        served = self._served()
        if isinstance(served, Served) and isinstance(served.engine, Queueing):
            return served.engine.queued
        return None

    def _now(self) -> Served:
        served = self._served()
        if isinstance(served, ApiError):
            raise served
        return served

    # ---------------------------------------------------------------- tokens

    async def _tokenize(self, request: Request) -> Response:
        now, body = self._now(), await self._body(request)
        return json_reply(tokenize(body, self._terms(request, now), now.renderer, now.engine.max_model_len))

    async def _detokenize(self, request: Request) -> Response:
        now, body = self._now(), await self._body(request)
        return json_reply(detokenize(body, self._terms(request, now), now.renderer))

    # ---------------------------------------------------------------- sampling

    async def _chat(self, request: Request) -> ASGIApp:
        now, body = self._now(), await self._body(request)
        asked = read_chat(body, self._terms(request, now))
        turn = _turn(now.renderer, asked.conversation, asked.parse_tools)
        request_id = f"chatcmpl-{uuid.uuid4().hex}"
        call = self._call(request, now, turn, asked.wish, asked.max_tokens, request_id, asked.stream)
        if asked.stream:
            return self._stream(call, turn, ChatChunks(request_id, self._model_name, asked, turn), DONE)
        said = await self._results(request, call, turn)
        return json_reply(completion(request_id, self._model_name, asked, turn, said))

    async def _responses(self, request: Request) -> ASGIApp:
        now, body = self._now(), await self._body(request)
        asked = read_responses(body, self._terms(request, now))
        chat = asked.chat
        turn = _turn(now.renderer, chat.conversation, chat.parse_tools)
        request_id = f"resp_{uuid.uuid4().hex}"
        call = self._call(request, now, turn, chat.wish, chat.max_tokens, request_id, chat.stream)
        if chat.stream:
            return self._stream(call, turn, ResponseEvents(request_id, self._model_name, asked, turn), named=True)
        said = await self._results(request, call, turn)
        return json_reply(response_body(request_id, self._model_name, asked, turn, said))

    async def _completions(self, request: Request) -> ASGIApp:
        now, body = self._now(), await self._body(request)
        asked = read_completion(body, self._terms(request, now), now.renderer, self._default_max_tokens)
        turn = Turn.of(now.renderer, Prompt(asked.prompt_ids), ())
        request_id = f"cmpl-{uuid.uuid4().hex}"
        call = self._call(request, now, turn, asked.wish, asked.max_tokens, request_id, asked.stream)
        if asked.stream:
            chunks = CompletionChunks(request_id, self._model_name, asked, turn)
            return self._stream(call, turn, chunks, DONE)
        said = await self._results(request, call, turn)
        return json_reply(text_completion(request_id, self._model_name, asked, turn, said))

    async def _body(self, request: Request) -> Any:
        return await read_json(request.scope, request.receive, self._limits)

    def _terms(self, request: Request, now: Served) -> Terms:
        profile = self._profiles.select(request.headers.get(PROFILE_HEADER)) if self._profiles else None
        renderer = now.renderer
        return Terms(self._model_name, profile, renderer.chat_template_kwargs, renderer.vocab_size, self._limits)

    def _call(
        self,
        request: Request,
        now: Served,
        turn: Turn,
        wish: Wish,
        max_tokens: int | None,
        request_id: str,
        listen: bool,
    ) -> Call:
        noise_key = request.headers.get(NOISE_HEADER)
        noise_key = None if noise_key is None else unquote(noise_key)
        if noise_key is not None and len(noise_key) > NOISE_KEY_LIMIT:
            message = f"{NOISE_HEADER} has {len(noise_key)} characters; expected {NOISE_KEY_LIMIT} at most"
            raise ApiError(400, "invalid_value", message, NOISE_HEADER)
        room = max(1, now.engine.max_model_len - len(turn.prompt.ids))
        wanted = max_tokens if max_tokens is not None else self._default_max_tokens
        limit = room if wanted is None else min(wanted, room)
        renderer = now.renderer
        return Call(
            now.engine,
            renderer.decode,
            renderer.byte_token_ids,
            turn.prompt.ids,
            [wish.sampling(limit, renderer.end_token_ids, noise_key, index) for index in range(wish.n)],
            wish.stop,
            request_id,
            self._limits.request_timeout_s,
            listen,
        )

    async def _results(self, request: Request, call: Call, turn: Turn) -> list[Said]:
        """The samples of a request.

        Raises:
            ClientGone: nobody waits for them any more; they were aborted.
        """
        work = asyncio.ensure_future(call.results())
        gone = asyncio.ensure_future(disconnected(request.receive))
        try:
            # bounded: by the request's time, which the call keeps
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                raise ClientGone
        finally:
            gone.cancel()
            if not work.done():
                work.cancel()
                await asyncio.gather(work, return_exceptions=True)  # bounded: it was cancelled
        said = work.result()
        self._metrics.sampled(len(turn.prompt.ids), turn.prompt.new_segment is not None, said)
        return said

    def _stream(self, call: Call, turn: Turn, events: Events, done: bytes = b"", named: bool = False) -> EventStream:
        def encode(event: dict[str, Any]) -> bytes:
            name = f"event: {event['type']}\n".encode() if named else b""
            return name + b"data: " + orjson.dumps(event) + b"\n\n"

        async def encoded() -> AsyncGenerator[bytes, None]:
            begun, said = time.perf_counter(), []
            first = True
            async for piece in call.pieces():
                if first:
                    first = False
                    self._metrics.first_token(time.perf_counter() - begun)
                if piece.said is not None:
                    said.append(piece.said)
                if found := b"".join(map(encode, events.of(piece))):
                    yield found
            self._metrics.sampled(len(turn.prompt.ids), turn.prompt.new_segment is not None, said)
            yield b"".join(map(encode, events.closing())) + done

        def told(refusal: ApiError) -> bytes:
            return encode(events.failure(refusal))

        return EventStream(encoded(), told, self._metrics.refused)


def _turn(renderer: Renderer, asked: Conversation, parse_tools: bool) -> Turn:
    prompt = build_prompt(renderer, asked.messages, asked.tools, asked.prefix_ids, provenance=asked.provenance)
    return Turn.of(renderer, prompt, asked.tools, parse_tools)
