"""A TCP proxy between an HTTP client and its server that does to each request what it is told to.

It speaks as much HTTP as it takes to see whole messages: bodies have a ``Content-Length``.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from typing import Literal

Deed = Literal["reset", "truncate", "blackhole", "delay"]
DELAY_S = 0.2


class Proxy:
    """Passes requests on, but for those that ``decide`` has a deed for.

    Args:
        host: of the server.
        port: of the server.
        decide: the deed for a request with these headers (lower case); None passes it on as it is.
    """

    def __init__(self, host: str, port: int, decide: Callable[[Mapping[str, str]], Deed | None]) -> None:
        self._upstream = host, port
        self._decide = decide
        self._server: asyncio.Server | None = None

    async def start(self) -> int:
        """Listen; returns the port."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        """Stop listening. Connections end when their clients go."""
        if self._server is not None:
            self._server.close()

    async def _serve(self, client: asyncio.StreamReader, to_client: asyncio.StreamWriter) -> None:
        server, to_server = await asyncio.open_connection(*self._upstream)
        try:
            with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
                while True:
                    head, headers, body = await _message(client)
                    deed = self._decide(headers)
                    if deed == "reset":
                        to_client.transport.abort()
                        return
                    if deed == "blackhole":
                        await client.read()  # until the client has had enough
                        return
                    if deed == "delay":
                        await asyncio.sleep(DELAY_S)
                    to_server.write(head + body)
                    head, _, body = await _message(server)
                    reply = head + body
                    if deed == "truncate":
                        to_client.write(reply[: len(head) + len(body) // 2])
                        await to_client.drain()
                        await asyncio.sleep(0.05)  # the half is on its way
                        to_client.transport.abort()
                        return
                    pieces = 8 if deed == "delay" else 1
                    size = -(-len(reply) // pieces)
                    for start in range(0, len(reply), size):
                        to_client.write(reply[start : start + size])
                        await to_client.drain()
                        if deed == "delay":
                            await asyncio.sleep(DELAY_S / pieces)
        finally:
            to_server.close()
            to_client.close()


async def _message(stream: asyncio.StreamReader) -> tuple[bytes, dict[str, str], bytes]:
    head = await stream.readuntil(b"\r\n\r\n")
    pairs = (line.partition(":") for line in head.decode("latin-1").split("\r\n")[1:] if line)
    headers = {name.lower(): value.strip() for name, _, value in pairs}
    return head, headers, await stream.readexactly(int(headers.get("content-length", 0)))
