"""What one client may take: every size, count and time of a request has a bound, and each bound has a code.

body size 413, slow body or headers 408, requests at once 429, time of a request 504, counts 400
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import orjson
from starlette.types import Receive, Scope

from gymloop.serving.refusal import ApiError, ClientGone

BUSY_RETRY_AFTER_S = 1


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of requests.

    Attributes:
        max_body_bytes: of a request. A whole history with token fields of 100 turns at 32k tokens is about this large.
        max_concurrent: requests that sample at once, those that wait for a row of the engine included.
        max_messages: messages or items of a conversation.
        max_tools: of a request.
        max_n: samples of one request.
        max_stop: stop strings of one request.
        header_timeout_s: from a connection's first byte awaited to the end of the headers.
        body_timeout_s: for the whole body.
        request_timeout_s: from the whole body to the last token.
    """

    max_body_bytes: int = 32 * 2**20
    max_concurrent: int = 4096
    max_messages: int = 10_000
    max_tools: int = 1000
    max_n: int = 128
    max_stop: int = 16
    header_timeout_s: float = 30.0
    body_timeout_s: float = 60.0
    request_timeout_s: float = 600.0


class Slots:
    """How many requests are being served, and no more than a limit.

    Attributes:
        taken: now.
    """

    def __init__(self, limit: int):
        self._limit = limit
        self.taken = 0

    @contextmanager
    def take(self) -> Iterator[None]:
        """Hold a slot.

        Raises:
            ApiError: 429, none is free.
        """
        if self.taken >= self._limit:
            message = f"{self.taken} requests are being served, as many as this server takes; try again"
            raise ApiError(429, "too_many_requests", message, retry_after_s=BUSY_RETRY_AFTER_S)
        self.taken += 1
        try:
            yield
        finally:
            self.taken -= 1


async def read_json(scope: Scope, receive: Receive, limits: Limits) -> Any:
    """The decoded body of a request.

    Raises:
        ApiError: 413, 408, or 400 ``invalid_json``.
        ClientGone: the client went away before the body's end.
    """
    try:
        async with asyncio.timeout(limits.body_timeout_s):
            raw = await _read(scope, receive, limits.max_body_bytes)
    except TimeoutError:
        message = f"the request body did not arrive within {limits.body_timeout_s:g} s"
        raise ApiError(408, "body_timeout", message) from None
    try:
        return orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise ApiError(400, "invalid_json", f"the request body is not JSON: {error}") from error


async def _read(scope: Scope, receive: Receive, limit: int) -> bytes:
    declared = next((value for name, value in scope["headers"] if name == b"content-length"), b"0")
    size = int(declared) if declared.isdigit() else 0
    if size > 2 * limit:
        raise _too_large(limit)
    pieces: list[bytes] = []
    size = 0
    while True:  # bounded: by ``body_timeout_s``
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        piece = message.get("body", b"")
        size += len(piece)
        # A little too much is read to its end and dropped, since most clients look for a reply only after sending.
        if size > limit:
            pieces.clear()
        else:
            pieces.append(piece)
        if size > 2 * limit or (size > limit and not message.get("more_body", False)):
            raise _too_large(limit)
        if not message.get("more_body", False):
            return b"".join(pieces)


def _too_large(limit: int) -> ApiError:
    return ApiError(413, "body_too_large", f"the request body is larger than {limit} bytes, the most this server takes")
