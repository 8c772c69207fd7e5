"""Serves an environment on a socket that is held already, in a thread and an event loop of its own.

The end is orderly: no new connections, a grace for requests in flight, then every open session is closed.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
import time

import uvicorn

from gymloop.errors import InfraError
from gymloop.gym.serve.app import EnvironmentApp

KEEP_ALIVE_S = 120
"""Longer than clients keep idle connections, so that none meets a closing one."""
START_LIMIT_S = 15.0
GRACE_S = 5
CLOSE_LIMIT_S = 30.0

log = logging.getLogger(__name__)


class EnvironmentServer:
    """One environment behind one socket.

    Args:
        sock: listening; the server owns it from ``start`` on.
        app: what it serves.
    """

    def __init__(self, sock: socket.socket, app: EnvironmentApp) -> None:
        self._sock = sock
        config = uvicorn.Config(
            app.asgi,
            log_config=None,
            access_log=False,
            lifespan="on",
            ws="none",
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=GRACE_S,
        )
        self._uvicorn = uvicorn.Server(config)
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._serve, name="environment-server", daemon=True)

    def start(self) -> None:
        """Serve; returns when requests are answered.

        Raises:
            InfraError: it did not come up within 15 s.
        """
        self._thread.start()
        until = time.monotonic() + START_LIMIT_S
        while not self._uvicorn.started:
            if not self._thread.is_alive() or time.monotonic() > until:
                raise InfraError(
                    f"the environment's server did not come up within {START_LIMIT_S:g} s: {self._error!r}"
                )
            time.sleep(0.005)

    @property
    def alive(self) -> bool:
        """Whether it still serves."""
        return self._thread.is_alive()

    def close(self) -> None:
        """End it; safe to call twice.

        Raises:
            InfraError: something in it did not end within 30 s.
        """
        self._uvicorn.should_exit = True
        if self._thread.ident is not None:
            self._thread.join(CLOSE_LIMIT_S)
            if self._thread.is_alive():
                raise InfraError(f"the environment's server did not end within {CLOSE_LIMIT_S:g} s")
        self._sock.close()

    def _serve(self) -> None:
        try:
            asyncio.run(self._uvicorn.serve(sockets=[self._sock]))
        except (Exception, SystemExit) as error:  # a thread has no caller; start() tells it
            self._error = error
            log.exception("the environment's server ended")
