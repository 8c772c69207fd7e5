"""A reply in server-sent events: nothing is sent before there is something to say, and the end is always told.

Until the first event exists an error is an ordinary reply with its status. After it, an error is the last event. When
the client goes away the source of events is closed at once, which ends the work behind it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable

from starlette.types import Receive, Scope, Send

from gymloop.serving.refusal import ApiError, refusal_of, server_closing
from gymloop.serving.reply import disconnected, json_reply

HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]


class EventStream:
    """An ASGI reply.

    Args:
        events: encoded events.
        told: encodes an error that comes after the first event, and the end of the stream.
        failed: called with an error, whenever it comes.
    """

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        told: Callable[[ApiError], bytes],
        failed: Callable[[ApiError], None],
    ):
        self._events = events
        self._told = told
        self._failed = failed
        self._begun = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send all events, or as many as the client stays for; a stream that the server's end cuts short says so."""
        work = asyncio.ensure_future(self._send_all(scope, receive, send))
        gone = asyncio.ensure_future(disconnected(receive))
        try:
            # bounded: by the request's time, which the events keep
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            if self._begun and not work.done():
                work.cancel()
                await self._fail(server_closing(), send)  # first of all: the loop ends soon, and waits for nobody
            raise
        finally:
            await self._end(work, gone)
        if not work.cancelled():
            work.result()

    async def _end(self, *tasks: asyncio.Future[None]) -> None:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)  # bounded: all have ended or were cancelled
        await self._events.aclose()

    async def _send_all(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async for event in self._events:
                if not self._begun:
                    self._begun = True
                    await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
                await send({"type": "http.response.body", "body": event, "more_body": True})
        except Exception as error:  # noqa: BLE001 - whatever it is, the client is told and the log has it
            refusal = refusal_of(error, scope["path"])
            if self._begun:
                await self._fail(refusal, send)
            else:
                self._failed(refusal)
                await json_reply(refusal.body, refusal.status, refusal.headers)(scope, receive, send)
        else:
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _fail(self, refusal: ApiError, send: Send) -> None:
        """End a stream that has begun."""
        self._failed(refusal)
        await send({"type": "http.response.body", "body": self._told(refusal), "more_body": False})
