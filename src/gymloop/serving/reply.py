"""JSON replies, and how to know that nobody reads them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson
from starlette.responses import Response
from starlette.types import Receive


def json_reply(content: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """A reply whose body is ``content`` as JSON."""
    return Response(orjson.dumps(content), status, headers, "application/json")


async def disconnected(receive: Receive) -> None:
    """Return when the client has closed the connection; the body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass
