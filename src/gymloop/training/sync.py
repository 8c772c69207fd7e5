"""Weight sync: the policy's weights become the engines', under a version number, without passing through the driver.

    driver   where is everybody? ─ choose a transport ─┬─ policy: offer ──────────────────────────────┬─ policy: release
                                                       └─ every engine: take the offer (at once) ─────┘

The offer is a reference that the driver never looks at. All engines take it at the same time; the slowest is bounded
by the deadline. Where one fails, those that wait for it are ended too, and the error names the part that caused it
rather than one that noticed.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from gymloop.cluster.remote import Remote, named
from gymloop.config.schema import Recipe
from gymloop.errors import ConfigError, GymloopError, InfraError
from gymloop.weights.offer import SyncAborted, SyncRequest
from gymloop.weights.transport import Transport, choose_transport

logger = logging.getLogger(__name__)

ANSWER_S = 30.0
"""For what a part that is left has to say about a failure."""


@dataclass(frozen=True, slots=True)
class SyncSettings:
    """What a recipe says of its weight syncs.

    Attributes:
        transport: None chooses by the places.
        bucket_bytes: of one bucket of a broadcast.
        checksum: on the first sync, always or never.
        stall_s: after which the parties of a broadcast give up on each other.
        patience_s: after which a part that answers no heartbeat has failed.
    """

    transport: Transport | None = None
    bucket_bytes: int = 2**29
    checksum: Literal["first", "always", "never"] = "first"
    stall_s: float = 60.0
    patience_s: float = 60.0

    @classmethod
    def of(cls, recipe: Recipe) -> SyncSettings:
        """The recipe's."""
        generation = recipe.policy.generation
        asked = generation.refit_transport
        return cls(
            transport=None if asked is None or asked == "auto" else asked,
            bucket_bytes=int(recipe.policy.refit_buffer_size_gb * 2**30) // 2,
            checksum=generation.refit_cfg.checksum,
            stall_s=generation.refit_cfg.stall_timeout_s,
            patience_s=recipe.health.unresponsive_after_s,
        )


DEFAULTS = SyncSettings()


async def sync_weights(
    policy: Remote,
    engines: Sequence[Remote],
    version: int,
    timeout: float,
    settings: SyncSettings = DEFAULTS,
) -> dict[str, float]:
    """Move all weights; returns when every engine samples from them.

    An engine that has this version already, from a sync that failed for others, is left as it is.

    Args:
        policy: worker with ``place``, ``offer_weights`` and ``release_weights``.
        engines: workers with ``sync_state`` and ``load_weights``; when this raises, each of them has ended, well or
            not, or does not answer.
        version: number of the new weights.
        timeout: seconds for the whole sync.

    Returns:
        ``weights/sync_s``, ``weights/bytes``, ``weights/gb_per_s``, ``weights/copy_limit_share`` (see ``METRICS``).

    Raises:
        InfraError: a worker died or took too long. Every engine has its old weights, or the new ones, or refuses to
            sample until a sync is complete.
        ConfigError: the weights do not fit the engines' model, or the transport that is asked for cannot be used.
    """
    began = time.monotonic()
    # Longer than a heartbeat's patience: whoever watches the parts finds one that is stuck first, and says more of it.
    answer_s = min(timeout, 2 * settings.patience_s)
    place, *states = await _answers([policy, *engines], ["place", *["sync_state"] * len(engines)], answer_s)
    missing = [engine for engine, (_, has) in zip(engines, states, strict=True) if has != version]
    if not missing:
        return {}
    places = [where for where, has in states if has != version]
    choice = choose_transport(place, places, settings.transport)
    first = any(has is None for _, has in states)
    if first:
        logger.info("weights go by %s: %s", choice.transport, choice.reason)
    request = SyncRequest(
        transport=choice.transport,
        version=version,
        receivers=sum(one.processes for one in places),
        bucket_bytes=settings.bucket_bytes,
        checksums=settings.checksum == "always" or (settings.checksum == "first" and first),
        stall_s=settings.stall_s,
        address=place.address,
        device="cuda" if all(one.device == "cuda" for one in places) else "cpu",
    )
    ranks = itertools.accumulate((one.processes for one in places[:-1]), initial=1)
    sync = _Sync(policy, dict(zip(missing, ranks, strict=True)), request, began + timeout, settings.patience_s)
    sent = await sync.run()
    return _metrics(sent, time.monotonic() - began)


async def _answers(parts: Sequence[Remote], methods: Sequence[str], timeout: float) -> list[Any]:
    calls = [part.call(method, timeout=timeout) for part, method in zip(parts, methods, strict=True)]
    # bounded: each call by its timeout
    outcomes = await asyncio.gather(*calls, return_exceptions=True)
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome
    return list(outcomes)


def _metrics(sent: Mapping[str, float], seconds: float) -> dict[str, float]:
    rate = sent["bytes"] / seconds
    return {
        "weights/sync_s": seconds,
        "weights/bytes": sent["bytes"],
        "weights/gb_per_s": rate / 1e9,
        "weights/copy_limit_share": rate / sent["copy_bytes_per_s"],
    }


class _Sync:
    """One sync under way.

    Args:
        engines: each takes the offer once; with the rank of its first process among the receivers.
        deadline: ``time.monotonic`` seconds.
        patience_s: for a heartbeat.
    """

    def __init__(
        self, policy: Remote, engines: Mapping[Remote, int], request: SyncRequest, deadline: float, patience_s: float
    ) -> None:
        self._policy = policy
        self._engines = engines
        self._request = request
        self._deadline = deadline
        self._patience_s = patience_s
        self._failures: dict[Remote, BaseException] = {}
        self._released = False

    async def run(self) -> dict[str, float]:
        """Offer, have it taken, release; what the policy says of the bytes it sent."""
        offer = self._policy.refer("offer_weights", self._request)  # made once, however many engines take it
        limit = max(0.0, self._deadline - time.monotonic())
        loads: dict[asyncio.Future[Any], Remote] = {
            asyncio.ensure_future(
                engine.call("load_weights", offer, self._request.version, rank, timeout=limit + self._patience_s)
            ): engine
            for engine, rank in self._engines.items()
        }
        try:
            await self._settle(loads)
        finally:
            for load in loads:
                load.cancel()
        if self._failures:
            await self._abort()
            raise self._named(await self._culprit())
        limit = min(2 * self._patience_s, max(ANSWER_S, self._deadline - time.monotonic()))
        released: dict[str, float] = await self._policy.call("release_weights", True, timeout=limit)
        return released

    async def _settle(self, loads: dict[asyncio.Future[Any], Remote]) -> None:
        """Wait until every engine has ended or is known not to; ``loads`` keeps those that have not."""
        while loads:  # bounded: by the deadline, after which whoever has not ended has failed
            remaining = self._deadline - time.monotonic()
            tick = min(self._patience_s, max(0.0, remaining))
            done, _ = await asyncio.wait(loads, timeout=tick, return_when=asyncio.FIRST_COMPLETED)
            for load in done:
                engine = loads.pop(load)
                if load.cancelled():
                    self._failures[engine] = InfraError(f"{engine.name} was ended")
                elif (error := load.exception()) is not None:
                    self._failures[engine] = error
            if self._failures and self._request.transport == "broadcast":
                await self._abort()  # the others wait for whoever failed
            if done:
                continue
            silent = await _silent([self._policy, *loads.values()], self._patience_s)
            self._failures |= silent
            late = time.monotonic() > self._deadline or self._policy in silent
            for load, engine in list(loads.items()):
                if late or engine in silent:
                    self._failures.setdefault(engine, InfraError(f"{engine.name} did not take the weights in time"))
                    del loads[load]
                    load.cancel()

    async def _abort(self) -> None:
        """Have the policy give up on the sync, where it still can."""
        if not self._released:
            self._released = True
            try:
                await self._policy.call("release_weights", False, timeout=min(ANSWER_S, self._patience_s))
            except InfraError as error:
                self._failures.setdefault(self._policy, error)

    async def _culprit(self) -> Remote:
        """The part whose failure the others follow from."""
        if all(isinstance(error, SyncAborted) for error in self._failures.values()):
            self._failures |= await _silent([self._policy, *self._engines], min(ANSWER_S, self._patience_s))
        causes = [part for part, error in self._failures.items() if not isinstance(error, SyncAborted)]
        if self._policy in causes:
            return self._policy
        return next(iter(causes), next(iter(self._failures)))

    def _named(self, part: Remote) -> BaseException:
        error = self._failures[part]
        if not isinstance(error, GymloopError):
            return error
        what = f"weight sync to version {self._request.version} by {self._request.transport}"
        kind = ConfigError if isinstance(error, ConfigError) else InfraError
        told = kind(f"{what}: {named(part.name, error)}", cause=error.cause)
        told.__cause__ = error
        return told


async def _silent(parts: Sequence[Remote], patience_s: float) -> dict[Remote, BaseException]:
    """Those that are gone or answer no heartbeat, each with its error."""
    checks = {asyncio.ensure_future(part.check()): part for part in parts}
    _, late = await asyncio.wait(checks, timeout=patience_s)
    found: dict[Remote, BaseException] = {}
    for check, part in checks.items():
        if check in late:
            check.cancel()
            found[part] = InfraError(
                f"{part.name} does not respond: no answer to a heartbeat for {patience_s:.0f} s{part.symptoms()}"
            )
        elif (error := check.exception()) is not None:
            found[part] = error
    return found
