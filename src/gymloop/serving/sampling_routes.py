"""The routes that sample: read a request, have the engine sample, write a reply, whole or streamed.

Whoever goes away while the engine works is noticed, and the samples are ended. What requests and replies say is in the
modules of each route.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import unquote

import orjson
from starlette.requests import Request
from starlette.types import ASGIApp

from gymloop.serving.call import Call, Piece, Said
from gymloop.serving.chat_reply import ChatChunks, completion
from gymloop.serving.chat_request import Conversation, read_chat
from gymloop.serving.completions import CompletionChunks, read_completion, text_completion
from gymloop.serving.guard import Wish
from gymloop.serving.prompt import Prompt, build_prompt
from gymloop.serving.refusal import ApiError, ClientGone
from gymloop.serving.reply import disconnected, json_reply
from gymloop.serving.response_events import ResponseEvents
from gymloop.serving.responses import read_responses, response_body
from gymloop.serving.sse import EventStream
from gymloop.serving.state import Served, ServerState
from gymloop.serving.turn import Turn

if TYPE_CHECKING:
    from gymloop.tokens.renderer import Renderer

NOISE_HEADER = "x-gymloop-noise-key"
NOISE_KEY_LIMIT = 512
DONE = b"data: [DONE]\n\n"


class Events(Protocol):
    """A route's way to tell a streamed reply."""

    def of(self, piece: Piece) -> Sequence[dict[str, Any]]:
        """The events of a piece."""

    def closing(self) -> Sequence[dict[str, Any]]:
        """The events after the last piece."""

    def failure(self, refusal: ApiError) -> dict[str, Any]:
        """The event of an error that comes after the first piece."""


class SamplingRoutes:
    """Each method serves one route, and may raise what ``refusal_of`` understands."""

    def __init__(self, state: ServerState):
        self._state = state

    async def chat(self, request: Request) -> ASGIApp:
        """``/v1/chat/completions``."""
        now, body = self._state.now(), await self._state.body(request)
        asked = read_chat(body, self._state.terms(request, now))
        turn = _turn(now.renderer, asked.conversation, asked.parse_tools)
        request_id = f"chatcmpl-{uuid.uuid4().hex}"
        call = self._call(request, now, turn, asked.wish, asked.max_tokens, request_id, asked.stream)
        if asked.stream:
            return self._stream(call, turn, ChatChunks(request_id, self._state.model_name, asked, turn), DONE)
        said = await self._results(request, call, turn)
        return json_reply(completion(request_id, self._state.model_name, asked, turn, said))

    async def responses(self, request: Request) -> ASGIApp:
        """``/v1/responses``."""
        now, body = self._state.now(), await self._state.body(request)
        asked = read_responses(body, self._state.terms(request, now))
        chat = asked.chat
        turn = _turn(now.renderer, chat.conversation, chat.parse_tools)
        request_id = f"resp_{uuid.uuid4().hex}"
        call = self._call(request, now, turn, chat.wish, chat.max_tokens, request_id, chat.stream)
        if chat.stream:
            return self._stream(call, turn, ResponseEvents(request_id, self._state.model_name, asked, turn), named=True)
        said = await self._results(request, call, turn)
        return json_reply(response_body(request_id, self._state.model_name, asked, turn, said))

    async def completions(self, request: Request) -> ASGIApp:
        """``/v1/completions``."""
        now, body = self._state.now(), await self._state.body(request)
        asked = read_completion(body, self._state.terms(request, now), now.renderer, self._state.default_max_tokens)
        turn = Turn.of(now.renderer, Prompt(asked.prompt_ids), ())
        request_id = f"cmpl-{uuid.uuid4().hex}"
        call = self._call(request, now, turn, asked.wish, asked.max_tokens, request_id, asked.stream)
        if asked.stream:
            chunks = CompletionChunks(request_id, self._state.model_name, asked, turn)
            return self._stream(call, turn, chunks, DONE)
        said = await self._results(request, call, turn)
        return json_reply(text_completion(request_id, self._state.model_name, asked, turn, said))

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
        wanted = max_tokens if max_tokens is not None else self._state.default_max_tokens
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
            self._state.limits.request_timeout_s,
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
        self._state.metrics.sampled(len(turn.prompt.ids), turn.prompt.new_segment is not None, said)
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
                    self._state.metrics.first_token(time.perf_counter() - begun)
                if piece.said is not None:
                    said.append(piece.said)
                if found := b"".join(map(encode, events.of(piece))):
                    yield found
            self._state.metrics.sampled(len(turn.prompt.ids), turn.prompt.new_segment is not None, said)
            yield b"".join(map(encode, events.closing())) + done

        def told(refusal: ApiError) -> bytes:
            return encode(events.failure(refusal)) + done

        return EventStream(encoded(), told, self._state.metrics.refused)


def _turn(renderer: Renderer, asked: Conversation, parse_tools: bool) -> Turn:
    prompt = build_prompt(renderer, asked.messages, asked.tools, asked.prefix_ids, provenance=asked.provenance)
    return Turn.of(renderer, prompt, asked.tools, parse_tools)
