"""Sessions of an environment behind HTTP, a NeMo Gym resources server or anything that answers the same routes.

``POST /seed_session`` (the row) opens a session, known to the server by the cookies it sets. ``POST /<tool>`` (JSON
arguments) runs a tool, and its body is the tool's result. ``POST /verify`` (the row and ``response``) judges.
``POST /close_session`` (empty) frees the session; a server that answers 404, 405 or 422 has no such thing and is not
asked again.

What a tool says with 4xx is shown to the model, as NeMo Gym does: the model asked for something that cannot be. What
stands for the server or for something in front of it never is: 5xx, 401, 403, 408, 429, a redirect, a page, an empty
body, a lost session. These end the attempt.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from types import TracebackType
from typing import Any
from urllib.parse import quote

from gymloop.errors import InfraError
from gymloop.gym.bundle import whole_response, without_tokens
from gymloop.gym.contract import ROLLOUT_SEED, Row, Verdict
from gymloop.gym.http import Cookies, HttpServer
from gymloop.gym.verdict import read_verdict

_NOT_THE_TOOLS = {401, 403, 407, 408, 421, 425, 429}
_NO_CLOSE = {404, 405, 422}
_RESERVED = {"seed_session", "verify", "close_session", "aggregate_metrics", "reset", "step", "close", "run"}
"""Routes of the server's own; no tool goes by these names."""


@cache
def _route(tool: str) -> str:
    """Of a tool; their names are few, those that rows offer."""
    return f"/{quote(tool, safe='')}"


class HttpSource:
    """Opens sessions of one server. Use it as an async context manager.

    Args:
        name: as rows carry it in ``agent_ref.name``.
        base_url: of the server.
        call_timeout_s: wall time of one call; seconds.
        send_token_ids: give ``/verify`` the token bundles as well; few environments read them, and they are most of a
            long conversation's bytes.
        limits: further arguments of ``HttpServer``.
    """

    tools = None
    """Not known before a row names them."""

    def __init__(
        self, name: str, base_url: str, *, call_timeout_s: float, send_token_ids: bool = False, **limits: Any
    ) -> None:
        self.name = name
        self.server = HttpServer(base_url, call_timeout_s=call_timeout_s, **limits)
        self.send_token_ids = send_token_ids
        self.closes: bool | None = None
        """Whether the server has a way to free a session; None before one was freed."""

    async def __aenter__(self) -> HttpSource:
        await self.server.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.server.close()

    async def seed_session(self, row: Row) -> HttpSession:
        """Open a session for this row.

        Raises:
            InfraError: the server failed.
            DataError: it refuses this row.
            ConfigError: it has no such route.
        """
        cookies = Cookies()
        reply = await self.server.post("/seed_session", row, cookies, opens=True)
        if not 200 <= reply.status < 300:
            raise reply.error()
        reply.value()  # whatever JSON it is, it is the server's own and not a page of something in front of it
        return HttpSession(self, {key: value for key, value in row.items() if key != ROLLOUT_SEED}, cookies)


class HttpSession:
    """One rollout on the server."""

    def __init__(self, source: HttpSource, row: Row, cookies: Cookies) -> None:
        self._source = source
        self._row = row
        self._cookies = cookies
        self._closed = False

    async def call_tool(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Run a tool, once; see the module for what becomes a result."""
        if name in _RESERVED or not name:
            return f"Error: there is no tool '{name}'"
        reply = await self._source.server.post(_route(name), arguments, self._cookies)
        good = 200 <= reply.status < 300
        told = 400 <= reply.status < 500 and reply.status not in _NOT_THE_TOOLS and not reply.lost_session
        if not (good or told) or reply.is_page:
            error = reply.error()
            raise error if isinstance(error, InfraError) else InfraError(str(error), cause="bad_reply")
        if not reply.raw and reply.status != 204:  # a status of its own says that there is no content
            raise InfraError(f"{reply.url}: {reply.status}, and an empty body", cause="bad_reply")
        return reply.text()

    async def verify(self, response: Mapping[str, Any]) -> Verdict:
        """Ask for the verdict, once."""
        source = self._source
        whole = whole_response(self._row, response)
        sent = whole if source.send_token_ids else {**whole, "output": without_tokens(whole["output"])}
        reply = await source.server.post("/verify", {**self._row, "response": sent}, self._cookies)
        return read_verdict(reply.json(), reply.url, self._row)

    async def close(self) -> None:
        """Free the session where the server has a way to; safe to call twice."""
        if self._closed or self._source.closes is False:
            return
        self._closed = True
        reply = await self._source.server.post("/close_session", {}, self._cookies)
        if 200 <= reply.status < 300:
            self._source.closes = True
        elif reply.status in _NO_CLOSE and self._source.closes is None:
            self._source.closes = False
        else:
            raise reply.error()
