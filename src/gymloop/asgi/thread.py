"""An ASGI application on a socket that is held already, served in a thread and an event loop of its own.

It is up when ``start`` returns, and over when ``close`` returns: requests in flight get a grace and are then cancelled.
Neither waits without a bound.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import uvicorn

from gymloop.asgi.protocol import with_header_deadline
from gymloop.errors import InfraError
from gymloop.loops import fast_loop

KEEP_ALIVE_S = 120
"""Idle connections stay open this long; uvicorn's 5 s made clients meet closing ones."""
START_LIMIT_S = 15.0
_LOOK_S = 0.005

log = logging.getLogger(__name__)


class ServerThread:
    """Serves one application once.

    Args:
        sock: listening; this object owns it from ``start`` on.
        app: what it serves.
        what: names it in errors, with its article: ``the environment's server``.
        name: of the thread.
        header_timeout_s: from a connection's first byte awaited to the end of the headers; then 408.
        header_reply: JSON body of that 408.
        grace_s: for requests in flight at the end.
        close_limit_s: after which an end that does not come is an error.
        lifespan: whether the application is told of start and end.
        watched: entered on the thread's event loop while it serves.
    """

    def __init__(
        self,
        sock: socket.socket,
        app: Any,
        *,
        what: str,
        name: str,
        header_timeout_s: float,
        header_reply: bytes,
        grace_s: int,
        close_limit_s: float,
        lifespan: Literal["on", "off"] = "off",
        watched: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        self._sock = sock
        self._what = what
        self._close_limit_s = close_limit_s
        self._watched = watched
        config = uvicorn.Config(
            app,
            http=with_header_deadline(header_timeout_s, header_reply),
            log_config=None,
            access_log=False,
            lifespan=lifespan,
            ws="none",
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=grace_s,
        )
        self._uvicorn = uvicorn.Server(config)
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)

    def start(self) -> None:
        """Serve; returns when connections are taken.

        Raises:
            InfraError: it did not come up within 15 s; the message says why.
        """
        self._thread.start()
        until = time.monotonic() + START_LIMIT_S
        while not self._uvicorn.started:
            if not self._thread.is_alive() or time.monotonic() > until:
                ended = "" if self._error is None else f": {self._error!r}"
                raise InfraError(f"{self._what} did not come up within {START_LIMIT_S:g} s{ended}")
            time.sleep(_LOOK_S)

    @property
    def alive(self) -> bool:
        """Whether it still serves."""
        return self._thread.is_alive()

    def close(self) -> None:
        """End it and free its port; safe to call twice.

        Raises:
            InfraError: something in it did not end in time.
        """
        self._uvicorn.should_exit = True
        if self._thread.ident is not None:
            self._thread.join(self._close_limit_s)
            if self._thread.is_alive():
                raise InfraError(f"{self._what} did not end within {self._close_limit_s:g} s")
        self._sock.close()

    def _serve(self) -> None:
        try:
            with asyncio.Runner(loop_factory=fast_loop()) as runner:
                runner.run(self._run())
        except (Exception, SystemExit) as error:  # a thread has no caller; start() tells it
            self._error = error
            log.exception("%s ended", self._what)

    async def _run(self) -> None:
        with self._watched():
            await self._uvicorn.serve(sockets=[self._sock])
