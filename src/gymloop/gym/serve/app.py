"""The routes of a served environment, and what becomes of an error.

    GET  /  /healthz  /health  /livez  /readyz          {"status": "ok"}
    GET  /global_config_dict_yaml  /server_instances    as of a head server
    GET  /reverify_mode                                 a verdict needs its session
    POST /seed_session  /<tool>  /verify  /close_session  /aggregate_metrics
    POST /run                                           where there is a model

| what happens | status | body |
| --- | --- | --- |
| a body that is no JSON or of the wrong form, a row that the environment does not take | 422 | ``detail`` |
| a session that is not open | 400 | ``detail`` |
| arguments that do not fit a tool's signature, a tool that is not there | 422, 404 | the sentence for the model |
| what a tool tells the model, its errors included | 200 | the text as it is, 204 where it is empty |
| the environment or the model failed | 500 | one sentence, a JSON string |

An agent shows the model what a tool's body says, so a tool's text is the one that an agent in this process reads.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import orjson
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from gymloop.errors import ConfigError, DataError, GymloopError, PolicyError
from gymloop.gym.deadline import within
from gymloop.gym.serve.aggregate import aggregate
from gymloop.gym.serve.body import check_params, check_seed, read_object, read_response
from gymloop.gym.serve.discovery import as_yaml, configuration, instances
from gymloop.gym.serve.refusal import Refusal
from gymloop.gym.serve.run import Play, Rollouts, judged, with_seed
from gymloop.gym.serve.sessions import Sessions
from gymloop.gym.session import InProcessSource
from gymloop.gym.tools import ToolError

SIGNS_OF_LIFE = ("/", "/healthz", "/health", "/livez", "/readyz")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
_CLIENT_GONE = 499
_LEAVE_S = 30.0
"""For a rollout that is cancelled to free what it holds."""

log = logging.getLogger(__name__)
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Bounds:
    """What clients may take.

    Attributes:
        header_timeout_s: from a connection's first byte awaited to the end of the headers.
        max_body_bytes: of a request.
        body_timeout_s: for the whole body.
        max_sessions: open at once.
        session_idle_s: silence after which a session is closed.
        call_timeout_s: wall time of one call of the environment.
        sweep_s: between two looks for silent sessions.
    """

    header_timeout_s: float = 30.0
    max_body_bytes: int = 64 * 2**20
    body_timeout_s: float = 60.0
    max_sessions: int = 16384
    session_idle_s: float = 3600.0
    call_timeout_s: float = 60.0
    sweep_s: float = 10.0


class EnvironmentApp:
    """The ASGI application of one environment, for one event loop.

    Args:
        source: the environment.
        at: host and port at which clients reach it.
        play: how ``/run`` plays; None where there is no model.
        bounds: of requests and sessions.

    Raises:
        ConfigError: its name cannot be a cookie's, or a tool is called like a route.
    """

    def __init__(
        self, source: InProcessSource, at: tuple[str, int], play: Play | None = None, bounds: Bounds | None = None
    ) -> None:
        if not _NAME.fullmatch(source.name):
            raise ConfigError(f"environment name {source.name!r}: expected letters, digits and . _ - only")
        self._source = source
        self.bounds = bounds or Bounds()
        self._play = play
        self._started = time.time()
        self._config = configuration(source.name, *at, plays=play is not None)
        self._cookie = f"{source.environment.__name__}___{source.name}"
        self.sessions = Sessions(
            source,
            most=self.bounds.max_sessions,
            idle_s=self.bounds.session_idle_s,
            call_timeout_s=self.bounds.call_timeout_s,
        )
        self._rollouts: Rollouts | None = None
        posts: dict[str, Callable[[Request], Awaitable[Response]]] = {
            "/seed_session": self._seed_session,
            "/verify": self._verify,
            "/close_session": self._close_session,
            "/aggregate_metrics": self._aggregate_metrics,
            "/run": self._run,
        }
        for tool in source.environment.tool_specs:
            if f"/{tool}" in posts:
                raise ConfigError(f"environment {source.name}: the tool '{tool}' is called like a route of its server")
        routes = [Route(path, _telling(self._status)) for path in SIGNS_OF_LIFE]
        routes.append(Route("/global_config_dict_yaml", _telling(self._configuration)))
        routes.append(Route("/server_instances", _telling(self._instances)))
        routes.append(Route("/reverify_mode", _telling(self._reverify_mode)))
        routes += [Route(path, _telling(endpoint), methods=["POST"]) for path, endpoint in posts.items()]
        routes.append(Route("/{tool:path}", _telling(self._tool), methods=["POST"]))
        self.asgi = Starlette(routes=routes, lifespan=self._life, exception_handlers={HTTPException: _no_route})

    @contextlib.asynccontextmanager
    async def _life(self, _app: Starlette) -> AsyncGenerator[None, None]:
        async with contextlib.AsyncExitStack() as stack:
            if self._play is not None:
                rollouts = Rollouts(self._source, self._play, self.bounds.call_timeout_s)
                self._rollouts = await stack.enter_async_context(rollouts)
            stack.push_async_callback(self.sessions.close_all)
            sweeping = asyncio.create_task(self._sweep())
            stack.callback(sweeping.cancel)
            yield

    async def _sweep(self) -> None:
        while True:  # bounded: by the life of the server
            await asyncio.sleep(self.bounds.sweep_s)
            await self.sessions.sweep()

    async def _body(self, request: Request) -> dict[str, Any]:
        return await read_object(request, self.bounds.max_body_bytes, self.bounds.body_timeout_s)

    async def _status(self, _request: Request) -> Response:
        return json_reply({"status": "ok"})

    async def _configuration(self, _request: Request) -> Response:
        return json_reply(as_yaml(self._config))

    async def _instances(self, _request: Request) -> Response:
        return json_reply(instances(self._config, self._started))

    async def _reverify_mode(self, _request: Request) -> Response:
        return json_reply("unsupported")

    async def _seed_session(self, request: Request) -> Response:
        row = await self._body(request)
        check_seed(row)
        token = await self.sessions.open(with_seed(row), self._token(request))
        return self._with_cookie(json_reply({}), token)

    async def _tool(self, request: Request) -> Response:
        name = request.path_params["tool"]
        spec = self._source.environment.tool_specs.get(name)
        arguments = await self._body(request)
        async with self.sessions.playing(token := self._token(request)) as session:
            status = 200
            try:
                if spec is not None:
                    spec.bind(arguments)
            except ToolError:  # said below, in the session's words
                status = 422
            if spec is None:
                status = 404
            where = f"environment {self._source.name}, {name}"
            text = await within(self.bounds.call_timeout_s, where, session.call_tool(name, arguments))
        reply = Response(text.encode(), status if text else 204, media_type="text/plain")
        return self._with_cookie(reply, token)

    async def _verify(self, request: Request) -> Response:
        body = await self._body(request)
        check_params(body)
        response = read_response(body)
        token = self._token(request)
        try:
            async with self.sessions.playing(token) as session:
                where = f"environment {self._source.name}, verify"
                verdict = await within(self.bounds.call_timeout_s, where, session.verify(response))
        finally:
            await self.sessions.close(token)
        return self._with_cookie(json_reply(judged(body, verdict)), token)

    async def _close_session(self, request: Request) -> Response:
        body = await self._body(request)
        await self.sessions.close(self._token(request))
        known = body.get("resources_session_id")
        return json_reply({"resources_session_id": known} if isinstance(known, str) else {})

    async def _aggregate_metrics(self, request: Request) -> Response:
        return json_reply(aggregate(await self._body(request)))

    async def _run(self, request: Request) -> Response:
        if self._rollouts is None:
            raise Refusal(404, "this server has no model to play with; start it with --model-url and --model-name")
        body = await self._body(request)
        return json_reply(await _while_connected(request, self._rollouts.run(body)))

    def _token(self, request: Request) -> str | None:
        return request.cookies.get(self._cookie)

    def _with_cookie(self, reply: Response, token: str | None) -> Response:
        """Given again with every reply of a session, as NeMo Gym does: agents may keep only the last one's cookies."""
        if token is not None:
            reply.set_cookie(self._cookie, token, httponly=True, samesite="lax")
        return reply


def json_reply(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """JSON; tuples are lists."""
    return Response(orjson.dumps(value), status, headers=dict(headers or {}), media_type="application/json")


async def _while_connected(request: Request, work: Awaitable[_T]) -> _T:
    """The result of ``work``, which is cancelled when the client goes away: nobody would read it.

    Raises:
        ClientDisconnect: it has gone.
    """
    playing = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({playing, gone}, return_when=asyncio.FIRST_COMPLETED)  # bounded: by the rollout's deadline
        if not playing.done():
            raise ClientDisconnect
        return playing.result()
    finally:
        gone.cancel()
        if playing.cancel():
            await asyncio.wait({playing}, timeout=_LEAVE_S)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":  # bounded: by the rollout it is awaited beside
        pass


def _telling(endpoint: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
    """An endpoint whose errors are replies."""

    async def told(request: Request) -> Response:
        try:
            return await endpoint(request)
        except Refusal as refusal:
            return json_reply({"detail": refusal.detail}, refusal.status, refusal.headers)
        except ClientDisconnect:
            return Response(status_code=_CLIENT_GONE)
        except (DataError, PolicyError) as error:
            return json_reply({"detail": str(error)}, 422)
        except GymloopError as error:
            log.warning("%s: %s", request.url.path, error)
            return json_reply(str(error), 500)
        except Exception as error:
            log.exception("%s", request.url.path)
            return json_reply(f"{type(error).__name__}: {error}", 500)

    return told


async def _no_route(request: Request, error: Exception) -> Response:
    """NeMo Gym's own words for a path or a method that is not served."""
    if not isinstance(error, HTTPException):
        raise error
    return json_reply({"detail": error.detail}, error.status_code, error.headers)
