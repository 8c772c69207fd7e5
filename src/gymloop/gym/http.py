"""One environment server over HTTP: a body is posted, and what comes back is a whole reply or an error that names it.

| what happens | error | cause |
| --- | --- | --- |
| connection refused, for as long as the caller waits | ``InfraError`` | ``disconnect`` |
| connection lost, also in the middle of a body | ``InfraError`` | ``disconnect`` |
| no whole reply in time | ``InfraError`` | ``timeout`` |
| 429 for as long as the caller waits | ``InfraError`` | ``busy`` |
| 5xx, or the server lost the session | ``InfraError`` | ``server_error`` |
| a page, a redirect, a body over the bound or that is not what was asked for | ``InfraError`` | ``bad_reply`` |
| 401, 403, 404, 405 to a call that opens a session, where none was ever opened | ``ConfigError`` | ``refused`` |
| the same, later or to another call | ``InfraError`` | ``bad_reply`` |
| any other 4xx | ``DataError`` | ``refused`` |

A request that may have had an effect is never repeated. Asked again, within the call's deadline, is only what the
server did not take on: any request it answered with 429 and ``Retry-After``; and a request that opens a session, where
the connection was refused or the answer was 503 with ``Retry-After``.

A server that was started again has lost its sessions, also where it says nothing of it: many take any cookie and begin
anew, and would judge a conversation by a state that it did not bring about. So a session belongs to one life of its
server. A life ends when a connection is refused, and when whoever watches or restarts the server says so.
"""

from __future__ import annotations

import asyncio
import re
import time
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import orjson

from gymloop.errors import ConfigError, DataError, GymloopError, InfraError
from gymloop.gym.connections import Connections, LostConnection, NoConnection, TooLarge
from gymloop.gym.deadline import retry_after_s

_WRONG_ADDRESS = {401, 403, 404, 405}
_RECONNECT_S = 0.25
# What NeMo Gym's servers say to a session they do not know, as after a restart; an exact sentence in ``detail``, since
# other 4xx bodies may repeat what the model wrote.
_LOST = re.compile(
    r"(session not initialized|no active [\w ]{1,40})\. (please )?call /?(seed_session|reset) first\.?", re.IGNORECASE
)


class Cookies:
    """What one session's server has set; sent back exactly as it came.

    Attributes:
        life: of the server, which the session was opened in; None before that.
    """

    def __init__(self) -> None:
        self.life: int | None = None
        self._values: dict[str, str] = {}
        self._header = ""

    def take(self, set_cookie: str) -> None:
        """Remember one ``Set-Cookie`` header."""
        name, equals, value = set_cookie.partition(";")[0].partition("=")
        if equals:
            self._values[name.strip()] = value.strip()
            self._header = "; ".join(f"{name}={value}" for name, value in self._values.items())

    def header(self) -> str:
        """The ``Cookie`` header; empty when nothing was set."""
        return self._header


@dataclass(frozen=True, slots=True)
class Reply:
    """A whole reply.

    Attributes:
        url: that was posted to.
        status: HTTP status.
        content_type: media type without parameters; empty when the server gave none.
        raw: body.
        stranger: the request was to open a session, and the server has opened none so far: its address may be wrong.
    """

    url: str
    status: int
    content_type: str
    raw: bytes
    stranger: bool = False

    @property
    def is_page(self) -> bool:
        """Whether the body is an HTML page, by its type or its first bytes."""
        start = self.raw[:64].lstrip().lower()
        return self.content_type in ("text/html", "application/xhtml+xml") or start.startswith((b"<!doctype", b"<html"))

    def text(self) -> str:
        """The body as text.

        Raises:
            InfraError: it is not UTF-8.
        """
        try:
            return self.raw.decode()
        except UnicodeDecodeError as error:
            raise InfraError(f"{self.url}: replied with bytes that are not UTF-8", cause="bad_reply") from error

    def value(self) -> Any:
        """The JSON value in the body of a 2xx reply.

        Raises:
            GymloopError: see the module.
        """
        if not 200 <= self.status < 300 or self.is_page:
            raise self.error()
        try:
            return orjson.loads(self.raw)
        except orjson.JSONDecodeError as error:
            raise InfraError(
                f"{self.url}: replied with what is not JSON ({error.msg}): {self._start()}", cause="bad_reply"
            ) from error

    def json(self) -> dict[str, Any]:
        """As ``value``, which is an object.

        Raises:
            GymloopError: see the module.
        """
        value = self.value()
        if not isinstance(value, dict):
            raise InfraError(f"{self.url}: replied with {self._start()}; expected a JSON object", cause="bad_reply")
        return value

    def error(self) -> GymloopError:
        """The error that this reply stands for."""
        said = f"{self.url}: {self.status}: {self._start()}"
        if self.status >= 500 or self.status == 408:
            return InfraError(said, cause="server_error")
        if self.is_page:
            return InfraError(f"{self.url}: {self.status}, and an HTML page: {self._start()}", cause="bad_reply")
        if self.status < 400:
            return InfraError(f"{said}; expected 200 and a body", cause="bad_reply")
        if self.status == 429:
            return InfraError(said, cause="busy")
        if self.lost_session:
            return InfraError(f"{self.url}: the server lost the session: {self._start()}", cause="server_error")
        if self.status in _WRONG_ADDRESS:
            return ConfigError(said, cause="refused") if self.stranger else InfraError(said, cause="bad_reply")
        return DataError(said, cause="refused")

    @property
    def lost_session(self) -> bool:
        """Whether the server says that it does not know this session."""
        if self.status not in (400, 404, 410) or len(self.raw) > 500:
            return False
        try:
            value = orjson.loads(self.raw)
        except orjson.JSONDecodeError:
            return False
        detail = value.get("detail") if isinstance(value, dict) else None
        return isinstance(detail, str) and _LOST.fullmatch(detail) is not None

    def _start(self) -> str:
        return repr(self.raw[:200].decode(errors="replace")) if self.raw else "an empty body"


class HttpServer:
    """The connections to one server, for one event loop. Use it as an async context manager.

    Args:
        base_url: such as ``http://127.0.0.1:9000``.
        call_timeout_s: wall time of one call, its repeats included; seconds.
        refused_s: how long a server that refuses connections is asked again by a call that opens a session; seconds.
        max_reply_bytes: size of a reply's body at most.
        max_connections: open at once.

    Raises:
        ConfigError: ``base_url`` is not an HTTP address.
    """

    def __init__(
        self,
        base_url: str,
        *,
        call_timeout_s: float,
        refused_s: float = 5.0,
        max_reply_bytes: int = 64 * 2**20,
        max_connections: int = 1024,
    ) -> None:
        if not re.match(r"https?://[^/\s]+", base_url):
            raise ConfigError(f"'{base_url}' is not an address of a server; expected http://host:port")
        self.base_url = base_url.rstrip("/")
        self.call_timeout_s = call_timeout_s
        self._refused_s = refused_s
        self._max_reply_bytes = max_reply_bytes
        self._max_connections = max_connections
        self._connections: Connections | None = None
        self._life = 0
        self._opened = False

    async def __aenter__(self) -> HttpServer:
        self._connections = Connections(
            self.base_url, limit=self._max_connections, max_answer_bytes=self._max_reply_bytes
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    @property
    def open_connections(self) -> int:
        """Connections that are open now."""
        return 0 if self._connections is None else self._connections.open

    async def close(self) -> None:
        """Close the connections; safe to call twice."""
        if self._connections is not None:
            await self._connections.close()
            self._connections = None

    def died(self) -> None:
        """Say that the server is not the one it was: sessions that it has opened are lost."""
        self._life += 1

    async def post(
        self, route: str, body: Any, cookies: Cookies, *, opens: bool = False, timeout_s: float | None = None
    ) -> Reply:
        """Post ``body`` as JSON and read the whole reply, whatever its status.

        Args:
            route: with its leading slash.
            body: JSON values; tuples are lists.
            cookies: sent, and updated from the reply.
            opens: the request opens a session; see the module for what is asked again.
            timeout_s: instead of ``call_timeout_s``.

        Raises:
            InfraError: there is no whole reply, or the session was lost.
        """
        if self._connections is None:
            raise RuntimeError("the server's client is not open; use it as 'async with ...'")
        url = self.base_url + route
        data = orjson.dumps(body)
        began = time.monotonic()
        seconds = self.call_timeout_s if timeout_s is None else timeout_s
        while True:  # bounded: by ``seconds``, which every branch that goes on has compared with
            self._require_life(cookies, url)
            left = began + seconds - time.monotonic()
            cookie = cookies.header()
            try:
                answer = await self._connections.post(
                    route, data, max(left, 0.001), (("cookie", cookie),) if cookie else ()
                )
            except NoConnection as error:
                if isinstance(error.__cause__, ConnectionRefusedError):
                    self.died()
                taken = time.monotonic() - began
                if not opens or taken + _RECONNECT_S > min(self._refused_s, seconds):
                    waited = f" for {taken:.1f} s" if opens else ""
                    raise InfraError(f"{url}: no connection{waited}: {error}", cause="disconnect") from error
                wait = _RECONNECT_S
            except TimeoutError as error:
                raise InfraError(f"{url}: no reply within {seconds:g} s", cause="timeout") from error
            except LostConnection as error:
                raise InfraError(f"{url}: lost the connection: {error}", cause="disconnect") from error
            except TooLarge as error:
                raise InfraError(f"{url}: {error}", cause="bad_reply") from error
            else:
                self._require_life(cookies, url)  # it may have been started again before it read the request
                for header in answer.set_cookies:
                    cookies.take(header)
                stranger = opens and not self._opened
                reply = Reply(url, answer.status, answer.content_type, answer.body, stranger)
                if opens and 200 <= reply.status < 300:
                    cookies.life = self._life
                    self._opened = True
                not_taken_on = reply.status == 429 or (opens and reply.status == 503)
                asked = retry_after_s(answer.retry_after) if not_taken_on else None
                if asked is None:
                    return reply
                wait = asked
                if time.monotonic() + wait > began + seconds:
                    raise InfraError(
                        f"{url}: still {reply.status} after {time.monotonic() - began:.1f} s, and asks to wait "
                        f"{wait:g} s more; the call has {seconds:g} s",
                        cause="busy",
                    )
            await asyncio.sleep(wait)

    def _require_life(self, cookies: Cookies, url: str) -> None:
        if cookies.life is not None and cookies.life != self._life:
            raise InfraError(
                f"{url}: the session is lost, since its server has died or was started again", cause="server_error"
            )
