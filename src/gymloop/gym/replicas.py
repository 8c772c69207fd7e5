"""The engine replicas of a run as rollouts see them: an attempt leases one and stays on it to its end.

All turns of an attempt meet the KV cache that the turns before them filled. When a replica is gone its calls in flight
fail at once, as ``InfraError``, and the collector's next attempt leases another.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AsyncExitStack, contextmanager
from functools import partial
from types import TracebackType

from gymloop.errors import InfraError
from gymloop.gym.model_client import ModelClient
from gymloop.gym.routing import Routing


class Replicas:
    """The clients of all replicas, for one event loop. Use it as an async context manager.

    Args:
        clients: by the replica's name; at least one.
    """

    def __init__(self, clients: Mapping[str, ModelClient]) -> None:
        self._clients = dict(clients)
        self._routing = Routing(tuple(clients))
        self._closing: set[asyncio.Task[None]] = set()
        for name, client in clients.items():
            client.on_lost = partial(self._lost, name)

    async def __aenter__(self) -> Replicas:
        async with AsyncExitStack() as opened:
            for client in self._clients.values():
                await opened.enter_async_context(client)
            opened.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections; safe to call twice."""
        for client in self._clients.values():
            await client.close()

    @contextmanager
    def lease(self, failed_at: Collection[str] = ()) -> Iterator[ModelClient]:
        """The client of the replica that one attempt of a rollout is played on; see ``Routing.take``.

        Args:
            failed_at: URLs on which earlier attempts of the rollout failed.

        Raises:
            InfraError: every replica is gone.
        """
        avoid = {name for name, client in self._clients.items() if client.url in failed_at}
        name = self._routing.take(time.monotonic(), avoid)
        try:
            yield self._clients[name]
        finally:
            self._routing.give_back(name)

    def on_sampled(self, told: Callable[[], None]) -> None:
        """Have ``told`` called at every reply with sampled tokens, whichever replica it comes from."""
        for client in self._clients.values():
            client.on_sampled = told

    def bury(self, name: str, why: str) -> None:
        """A replica is gone: its calls in flight fail with ``why``, and nothing is asked of it any more."""
        self._routing.bury(name, why)
        closing = asyncio.get_running_loop().create_task(self._clients[name].abandon(why))
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)

    async def weight_version(self) -> int:
        """The version of the weights that every replica samples with now.

        Raises:
            InfraError: no reply in time, a lost connection, a 5xx, a reply without a version, or two versions.
            ConfigError: there is no such route.
        """
        versions = {name: await self._clients[name].weight_version() for name in self._routing.living}
        if len(set(versions.values())) != 1:
            raise InfraError(f"the engine replicas have different weights or are all gone: {versions}")
        return next(iter(versions.values()))

    @property
    def load(self) -> dict[str, int]:
        """Rollouts in flight, by replica."""
        return self._routing.load

    def _lost(self, name: str) -> None:
        self._routing.suspect(name, time.monotonic())
