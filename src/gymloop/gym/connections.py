"""HTTP/1.1 to one address: a request goes out on a connection of its own, and a whole answer or an error comes back.

A rollout makes ten or twenty small requests, and a general client costs several times more processor time for each than
all else that a rollout needs. This one does what rollouts need and no more: a body out, a body back, connections kept.
It follows no redirect, keeps no cookies and asks for no compression. Answers are parsed by llhttp (``httptools``).

A request is sent once. A connection whose request was not answered in full is closed, also where the caller gave up;
an idle one is used again only while the server, however busy, keeps it. Every wait ends at the caller's deadline, which
counts the wait for a free connection too.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import ssl
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import cast
from urllib.parse import unquote, urlsplit

import httptools

from gymloop.descriptors import allow_descriptors

IDLE_S = 2.0
"""An idle connection is used again for this long; servers drop theirs later (uvicorn: 5 s), and a POST that met a
closing one could not be repeated."""
BUSY_S = 2.5
"""A connection whose answer took longer is not kept: a server (or this process) that is so far behind may find the time
of an idle connection over before it has read the request that came in on it."""
HEADERS_BYTES = 2**16
"""Of an answer's headers, at most."""
_JOINED = 4096
"""Bytes from which on pieces are handed over as they are rather than copied into one."""


class NoConnection(OSError):
    """The address could not be reached; nothing was sent."""


class LostConnection(ConnectionError):
    """The connection ended before the whole answer was there; the request may have had its effect."""


class TooLarge(Exception):
    """The answer is larger than the caller takes."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer.

    Attributes:
        status: HTTP status.
        content_type: media type without parameters, in lower case; empty when the server gave none.
        retry_after: that header.
        set_cookies: these headers, in order.
        body: bytes.
    """

    status: int
    content_type: str
    retry_after: str | None
    set_cookies: tuple[str, ...]
    body: bytes


class Connections:
    """The connections to one server, for one event loop.

    Args:
        base_url: ``http://host:port``, perhaps with a path that all targets begin with, or https.
        limit: open at once; further requests wait for one.
        max_answer_bytes: size of a body at most; None sets no bound.
    """

    def __init__(self, base_url: str, *, limit: int, max_answer_bytes: int | None = None) -> None:
        allow_descriptors()
        parts = urlsplit(base_url)
        self._secure = ssl.create_default_context() if parts.scheme == "https" else None
        self._host = parts.hostname or ""
        self._port = parts.port or (443 if self._secure else 80)
        self._root = parts.path.rstrip("/")
        self._limit = max_answer_bytes
        self._free = limit
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._idle: list[_Connection] = []
        self._open: set[_Connection] = set()
        self._closed = False
        netloc = parts.netloc.rpartition("@")[2]
        lines = [f"host: {netloc}", "accept: */*", "user-agent: gymloop"]
        if parts.username is not None:
            pair = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
            lines.append(f"authorization: Basic {base64.b64encode(pair.encode()).decode()}")
        self._common = "".join(f"{line}\r\n" for line in lines)

    @property
    def open(self) -> int:
        """Connections that are open."""
        return len(self._open)

    async def post(self, target: str, body: bytes, seconds: float, headers: Iterable[tuple[str, str]] = ()) -> Answer:
        """Post JSON; see ``request``."""
        return await self.request("POST", target, body, seconds, (("content-type", "application/json"), *headers))

    async def request(
        self,
        method: str,
        target: str,
        body: bytes | Sequence[bytes],
        seconds: float,
        headers: Iterable[tuple[str, str]] = (),
    ) -> Answer:
        """Send one request and read the whole answer, whatever its status.

        Args:
            method: such as ``POST``.
            target: path, with its leading slash and quoted.
            body: may be empty, and may come in pieces.
            seconds: wall time of all of it.
            headers: further ones; without line breaks.

        Raises:
            NoConnection: nobody listens there, or no connection was made.
            LostConnection: no whole answer.
            TooLarge: see ``max_answer_bytes``.
            TimeoutError: ``seconds`` are over.
        """
        more = ""
        for name, value in headers:
            more += f"{name}: {value}\r\n"
        pieces = (body,) if isinstance(body, bytes) else body
        size = sum(map(len, pieces))
        head = f"{method} {self._root}{target} HTTP/1.1\r\n{self._common}{more}content-length: {size}\r\n\r\n"
        loop = asyncio.get_running_loop()
        deadline = loop.time() + seconds
        await self._take(deadline)
        try:
            connection = self._kept(loop.time()) or await self._connect(loop, deadline)
            began = loop.time()
            try:
                answer = await connection.exchange(head.encode("latin-1"), pieces, size, deadline)
            except BaseException:
                connection.abort()
                raise
            ended = loop.time()
            if connection.reusable and not self._closed and ended - began < BUSY_S:
                connection.idle_since = ended
                self._idle.append(connection)
            else:
                connection.abort()
            return answer
        finally:
            self._give_back()

    async def close(self) -> None:
        """Close all connections; requests in progress raise ``LostConnection``. Safe to call twice."""
        self._closed = True
        self._idle.clear()
        for connection in list(self._open):
            connection.abort()

    async def _take(self, deadline: float) -> None:
        """A place among the open connections, first come, first served."""
        if self._closed:
            raise LostConnection("the client is closed")
        if self._free > 0 and not self._waiting:
            self._free -= 1
            return
        mine = asyncio.get_running_loop().create_future()
        self._waiting.append(mine)
        try:
            async with asyncio.timeout_at(deadline):
                await mine  # bounded: by the deadline
        except BaseException:
            if mine.done() and not mine.cancelled():
                self._give_back()
            else:
                with contextlib.suppress(ValueError):
                    self._waiting.remove(mine)
            raise

    def _give_back(self) -> None:
        while self._waiting:
            next_one = self._waiting.popleft()
            if not next_one.done():
                next_one.set_result(None)
                return
        self._free += 1

    def _kept(self, now: float) -> _Connection | None:
        """The connection that was used last, since it is the surest to be kept by the server."""
        while self._idle:
            connection = self._idle.pop()
            if connection.reusable and now - connection.idle_since < IDLE_S:
                return connection
            connection.abort()
        return None

    async def _connect(self, loop: asyncio.AbstractEventLoop, deadline: float) -> _Connection:
        try:
            async with asyncio.timeout_at(deadline) as scope:
                _, made = await loop.create_connection(
                    lambda: _Connection(loop, self._open, self._limit), self._host, self._port, ssl=self._secure
                )
        except (OSError, UnicodeError) as error:
            if scope.expired():
                raise
            said = getattr(error, "strerror", None) or error
            raise NoConnection(f"cannot connect to {self._host}:{self._port} ({said})") from error
        if self._closed:
            made.abort()
            raise LostConnection("the client is closed")
        return made


class _Connection(asyncio.Protocol):
    """One connection; at most one request is in flight on it."""

    def __init__(self, loop: asyncio.AbstractEventLoop, register: set[_Connection], limit: int | None) -> None:
        self._loop = loop
        self._register = register
        self._limit = limit
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._answer: asyncio.Future[Answer] | None = None
        self._ended = False
        self.idle_since = 0.0
        self._begin()

    def _begin(self) -> None:
        self._kind = ""
        self._retry_after: str | None = None
        self._cookies: list[str] = []
        self._body: list[bytes] = []
        self._size = 0
        self._header_bytes = 0
        self._measured = False
        self._told = False

    @property
    def reusable(self) -> bool:
        """Whether another request may go out on it."""
        return not self._ended

    async def exchange(self, head: bytes, body: Sequence[bytes], size: int, deadline: float) -> Answer:
        """Send a request and wait for its answer."""
        if self._transport is None or self._ended:
            raise LostConnection("the connection was closed before the request was sent")
        self._begin()
        self._answer = answer = self._loop.create_future()
        if size < _JOINED:
            self._transport.write(b"".join((head, *body)))
        else:
            self._transport.writelines((head, *body))
        timer = self._loop.call_at(deadline, self._expire)
        try:
            return await answer  # bounded: by the timer
        finally:
            timer.cancel()

    def abort(self) -> None:
        """Close it now; a request in flight fails."""
        self._ended = True
        self._register.discard(self)
        if self._transport is not None:
            self._transport.abort()
        self._fail(LostConnection("the connection was closed"))

    # What asyncio calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See ``asyncio.Protocol``."""
        self._transport = cast(asyncio.Transport, transport)
        self._register.add(self)

    def data_received(self, data: bytes) -> None:
        """See ``asyncio.Protocol``."""
        if self._answer is None or self._answer.done():
            self.abort()  # the server speaks unasked, as one does that is about to close
            return
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._ended = True
            self._fail(LostConnection(f"the answer is not HTTP/1.1 ({error})"))

    def connection_lost(self, error: Exception | None) -> None:
        """See ``asyncio.Protocol``."""
        self._ended = True
        self._register.discard(self)
        if self._told and not self._measured and error is None:
            self._finish()  # a body without a length ends with the connection
        if error is not None:
            self._fail(LostConnection(str(error) or type(error).__name__))
        else:
            self._fail(LostConnection("the server closed it" if not self._told else "the server closed it mid-answer"))

    # What the parser calls.

    def on_header(self, name: bytes, value: bytes) -> None:
        """One header of the answer."""
        self._header_bytes += len(name) + len(value)
        if self._header_bytes > HEADERS_BYTES:
            self._ended = True
            self._fail(TooLarge(f"the reply's headers have over {HEADERS_BYTES} bytes"))
            return
        match name.lower():
            case b"content-length" | b"transfer-encoding":
                self._measured = True
            case b"content-type":
                self._kind = value.decode("latin-1").partition(";")[0].strip().lower()
            case b"set-cookie":
                self._cookies.append(value.decode("latin-1"))
            case b"retry-after":
                self._retry_after = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        """All of them."""
        self._told = True

    def on_body(self, piece: bytes) -> None:
        """A piece of the body, its chunking undone."""
        self._size += len(piece)
        if self._limit is not None and self._size > self._limit:
            self._ended = True
            self._fail(TooLarge(f"the reply has over {self._limit} bytes"))
        else:
            self._body.append(piece)

    def on_message_complete(self) -> None:
        """The answer is whole, or it is only a word on the way to it."""
        if self._parser.get_status_code() < 200:
            self._begin()
            return
        if not self._parser.should_keep_alive():
            self._ended = True
        self._finish()

    def _finish(self) -> None:
        if self._answer is None or self._answer.done():
            return
        self._answer.set_result(
            Answer(
                self._parser.get_status_code(),
                self._kind,
                self._retry_after,
                tuple(self._cookies),
                self._body[0] if len(self._body) == 1 else b"".join(self._body),
            )
        )

    def _fail(self, error: Exception) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(error)

    def _expire(self) -> None:
        self._fail(TimeoutError())
