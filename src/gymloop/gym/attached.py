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
from gymloop.gym.agents import Agent
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
_ABSENT = {502, 503, 504}


class AttachedEnvironment:
    """One environment of a recipe, by the URL of its server; a part that ``cluster.health`` can watch.

    Args:
        environment: its name, as rows carry it in ``agent_ref.name``.
        url: of the server.
        kind: the agent that plays its rollouts.

    Raises:
        ConfigError: ``url`` is not an HTTP address.
    """

    tools = None
    """Not known before a row names them."""

    def __init__(self, environment: str, url: str, kind: AgentKind = "tool_calling") -> None:
        self.environment = environment
        self.url = url.rstrip("/")
        self._kind: AgentKind = kind
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
        why = await self._silence(deadline_s)
        if why is not None:
            raise InfraError(f"{self.name} did not answer within {deadline_s:g} s: {why}", cause="timeout")

    async def check(self) -> None:
        """Return once it has answered.

        Raises:
            InfraError: for ``GONE_AFTER_S`` it has refused.
        """
        # The answer itself may take its time: whoever checks decides how long a server may be silent.
        why = await self._silence(GONE_AFTER_S, answer_s=None)
        if why is not None:
            raise InfraError(f"{self.name} is gone, for {GONE_AFTER_S:g} s: {why}", cause="disconnect")

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
        match self._kind:
            case "tool_calling":
                return self._source
            case "gymnasium":
                return Gymnasium(self.environment, self._source.server)
            case "remote":
                return RemoteAgent(self.environment, self._source.server, model.weight_version, sampling)
        raise ConfigError(f"{self.name}: there is no agent {self._kind!r}")

    async def _silence(self, seconds: float, answer_s: float | None = GONE_AFTER_S) -> str | None:
        """Ask until it answers: None. After ``seconds`` of refusals: why there is no answer.

        Args:
            seconds: without an answer.
            answer_s: wall time of one answer, None leaves it to the caller.
        """
        until = time.monotonic() + seconds
        while True:  # bounded: by ``until``, with which every round is compared
            left = until - time.monotonic()
            total = None if answer_s is None else max(0.01, min(answer_s, left - _PAUSE_S))
            try:
                async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=total)) as client:
                    async with client.get(self.url + _ROUTE, allow_redirects=False) as response:
                        if response.status not in _ABSENT:
                            return None
                        why = f"GET {_ROUTE} answered {response.status}"
            except TimeoutError:
                why = f"GET {_ROUTE} was not answered within {total:.1f} s"
            except (aiohttp.ClientError, OSError) as error:
                why = f"{type(error).__name__}: {error}"
            if time.monotonic() + 2 * _PAUSE_S > until:
                return why
            await asyncio.sleep(_PAUSE_S)
