"""uvicorn's HTTP protocol with one more bound: a client that opens a connection must also send its headers.

uvicorn bounds idle connections between requests only. Here the first byte of a request, and the first moment of a
connection, start a timer that the end of the headers stops; when it fires the client is told 408.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol


def with_header_deadline(seconds: float, body: bytes) -> type[asyncio.Protocol]:
    """uvicorn's protocol class, httptools where it is installed, whose headers must arrive within ``seconds``.

    Args:
        seconds: from the first byte awaited.
        body: JSON, of the 408 that a client gets that is slower.
    """
    base: Any = AutoHTTPProtocol
    reply = b"HTTP/1.1 408 Request Timeout\r\ncontent-type: application/json\r\nconnection: close\r\n" + (
        b"content-length: %d\r\n\r\n%s" % (len(body), body)
    )

    class DeadlineProtocol(base):
        _timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            super().connection_made(transport)
            self._start_timer()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if not self._awaits_headers():
                self._stop_timer()
            elif self._timer is None:
                self._start_timer()

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_timer()
            super().connection_lost(exc)

        def _awaits_headers(self) -> bool:
            return self.cycle is None or self.cycle.response_complete

        def _start_timer(self) -> None:
            self._timer = asyncio.get_running_loop().call_later(seconds, self._too_slow)

        def _stop_timer(self) -> None:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

        def _too_slow(self) -> None:
            self._timer = None
            if self._awaits_headers() and not self.transport.is_closing():
                self.transport.write(reply)
                self.transport.close()

    return DeadlineProtocol
