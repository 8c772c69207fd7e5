"""An environment's server that somebody else started and will end: waited for, watched, and played with.

Any answer over HTTP is a sign of life, whatever its status; a proxy that says in the server's place that it is not
there (502, 503, 504) is none. A server that refuses connections is asked again for as long as a call that opens a
session waits for it, then it counts as gone.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Any, Literal

import aiohttp

from gymloop.errors import ConfigError, InfraError
from gymloop.gym.agents import Agent, Limited, agent_of
from gymloop.gym.contract import SessionSource
from gymloop.gym.gymnasium import Gymnasium
from gymloop.gym.http import HttpServer
from gymloop.gym.http_source import HttpSource
from gymloop.gym.model_client import ModelClient, Profile
from gymloop.gym.remote_agent import RemoteAgent

AgentKind = Literal["tool_calling", "gymnasium", "remote"]

GONE_AFTER_S = 5.0
_ROUTE = "/healthz"
_PAUSE_S = 0.25
_FAIR_S = 1.0
_ABSENT = {502, 503, 504}


class AttachedEnvironment:
    """One environment of a recipe, by the URL of its server; a part that ``cluster.health`` can watch.

    Args:
        environment: its name, as rows carry it in ``agent_ref.name``.
        url: of the server.
        kind: the agent that plays its rollouts.
        max_steps: model calls of a rollout at most, beside the run's own limit; None sets none.

    Raises:
        ConfigError: ``url`` is not an HTTP address.
    """

    tools = None
    """Not known before a row names them."""

    def __init__(
        self, environment: str, url: str, kind: AgentKind = "tool_calling", *, max_steps: int | None = None
    ) -> None:
        self.environment = environment
        self.url = url.rstrip("/")
        self._kind: AgentKind = kind
        self._max_steps = max_steps
        HttpServer(url, call_timeout_s=GONE_AFTER_S)  # refuses what is no address
        self._source: HttpSource | None = None

    @property
    def name(self) -> str:
        """As errors call it."""
        return f"environment server {self.environment} at {self.url}"

    async def open(self, *, call_timeout_s: float, max_connections: int) -> None:
        """Prepare the connections of the running event loop; none is made yet.

        Args:
            call_timeout_s: wall time of one call; seconds.
            max_connections: open at once.
        """
        source = HttpSource(
            self.environment,
            self.url,
            call_timeout_s=call_timeout_s,
            refused_s=GONE_AFTER_S,
            max_connections=max_connections,
        )
        self._source = await source.__aenter__()

    async def close(self) -> None:
        """Close the connections; the server is left as it is. Safe to call twice."""
        if self._source is not None:
            await self._source.server.close()

    async def ready(self, deadline_s: float) -> None:
        """Return once it has answered; a server that is still starting is waited for.

        Raises:
            InfraError: it has not within ``deadline_s``.
        """
        until = time.monotonic() + deadline_s
        last: str | None = None
        while True:  # bounded: by ``until``
            left = until - time.monotonic()
            why = await self._asked(max(_PAUSE_S, left - _PAUSE_S))
            if why is None:
                return
            if last is None or left > _FAIR_S:  # a try that the deadline cut short says less than the one before it
                last = why
            if time.monotonic() + 2 * _PAUSE_S > until:  # before whoever counts the same seconds
                raise InfraError(f"{self.name} did not answer within {deadline_s:g} s: {last}", cause="timeout")
            await asyncio.sleep(_PAUSE_S)

    def died(self) -> None:
        """Say that the server was started again: what sessions it had are lost."""
        if self._source is not None:
            self._source.server.died()

    async def check(self) -> None:
        """Return once it has answered; how long it may be silent is for the caller to say.

        Raises:
            InfraError: it is not there, and was not for ``GONE_AFTER_S``.
        """
        first: float | None = None
        while (why := await self._asked(None)) is not None:
            first = time.monotonic() if first is None else first
            if time.monotonic() - first + _PAUSE_S > GONE_AFTER_S:
                raise InfraError(f"{self.name} is gone: {why}", cause="disconnect")
            await asyncio.sleep(_PAUSE_S)

    def symptoms(self) -> str:
        """Nothing can be seen of a server from outside but that it is silent."""
        return f": connections are accepted, GET {_ROUTE} is not answered"

    def agent(self, model: ModelClient, sampling: Mapping[Profile, Mapping[str, Any]]) -> SessionSource | Agent:
        """What a collector plays its rollouts with; the connections must be open.

        Args:
            model: asked for the weight version by a remote agent.
            sampling: see ``RemoteAgent``.
        """
        if self._source is None:
            raise RuntimeError(f"{self.name}: its connections are not open")
        agent = self._unlimited(self._source, model, sampling)
        return agent if self._max_steps is None else Limited(agent_of(agent), self._max_steps)

    def _unlimited(
        self, source: HttpSource, model: ModelClient, sampling: Mapping[Profile, Mapping[str, Any]]
    ) -> SessionSource | Agent:
        match self._kind:
            case "tool_calling":
                return source
            case "gymnasium":
                return Gymnasium(self.environment, source.server)
            case "remote":
                return RemoteAgent(self.environment, source.server, model.weight_version, sampling)
        raise ConfigError(f"{self.name}: there is no agent {self._kind!r}")

    async def _asked(self, seconds: float | None) -> str | None:
        """None when it answers, else what happened instead."""
        timeout = aiohttp.ClientTimeout(total=seconds)
        try:
            async with (
                aiohttp.ClientSession(timeout=timeout) as client,
                client.get(self.url + _ROUTE, allow_redirects=False) as response,
            ):
                return f"GET {_ROUTE} answered {response.status}" if response.status in _ABSENT else None
        except TimeoutError:
            return f"GET {_ROUTE} was not answered"
        except (aiohttp.ClientError, OSError) as error:
            if isinstance(error, aiohttp.ClientConnectorError) and isinstance(error.os_error, ConnectionRefusedError):
                self.died()  # whoever listens there next is another
            return f"GET {_ROUTE}: {type(error).__name__}: {error}"
