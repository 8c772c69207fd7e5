"""Serves an environment: what is open when the end comes gets a grace, then every open session is closed."""

from __future__ import annotations

import json
import socket

from gymloop.asgi.thread import ServerThread
from gymloop.gym.serve.app import EnvironmentApp

GRACE_S = 5
CLOSE_LIMIT_S = 30.0


def environment_server(sock: socket.socket, app: EnvironmentApp) -> ServerThread:
    """One environment behind one socket, in a thread of its own once it is started.

    Args:
        sock: listening; the server owns it from ``start`` on.
        app: what it serves.
    """
    return ServerThread(
        sock,
        app.asgi,
        what="the environment's server",
        name="environment-server",
        header_timeout_s=app.bounds.header_timeout_s,
        header_reply=json.dumps({"detail": "the request headers did not arrive in time"}).encode(),
        grace_s=GRACE_S,
        close_limit_s=CLOSE_LIMIT_S,
        lifespan="on",  # the application closes its sessions
    )
