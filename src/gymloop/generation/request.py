"""One call of ``generate`` in flight: its pieces and its outcome go to the event loop it came from, in order.

The step thread appends and asks the loop to look; the loop hands out whatever has arrived since it last looked. A slow
loop thus gets fewer and longer pieces, never a backlog. The outcome is set exactly once, after the last piece.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from gymloop.generation.engine import Sample, Sampling

log = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class Request:
    """One call of ``generate`` while it is in flight.

    Attributes:
        prompt: int32 [tokens].
        limit: most tokens to sample: the caller's limit or what the context leaves.
        on_tokens: of the caller, None where it does not stream.
    """

    request_id: str
    prompt: np.ndarray
    sampling: Sampling
    limit: int
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[Sample]
    on_tokens: Callable[[Sequence[int], Sequence[float]], None] | None = None
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    first_version: int | None = None
    last_version: int | None = None
    aborted: bool = False
    stop: frozenset[int] = field(init=False)
    _handed_out: int = 0
    _announced: bool = False

    def __post_init__(self) -> None:
        self.stop = frozenset(self.sampling.stop_token_ids)

    def append(self, token: int, logprob: float, version: int) -> None:
        """Add one sampled token, on the step thread."""
        self.token_ids.append(token)
        self.logprobs.append(logprob)
        self.last_version = version
        if self.first_version is None:
            self.first_version = version
        if self.on_tokens is not None and not self._announced:
            self._announced = True
            self._call_soon(self._look)

    def sample(self, finish_reason: Literal["stop", "length", "abort"], version: int) -> Sample:
        """The result so far; ``version`` stands in where no token was sampled."""
        first = version if self.first_version is None else self.first_version
        last = version if self.last_version is None else self.last_version
        return Sample(tuple(self.token_ids), tuple(self.logprobs), finish_reason, first, last)

    def settle(self, outcome: Sample | BaseException) -> None:
        """Hand the last piece and the outcome to the request's own event loop."""

        def settle() -> None:
            self._hand_out()
            if self.future.done():
                return
            if isinstance(outcome, BaseException):
                self.future.set_exception(outcome)
            else:
                self.future.set_result(outcome)

        self._call_soon(settle)

    def uniform(self, engine_seed: int) -> float | None:
        """The random number of the next token where it follows from a seed or a key, else None."""
        sampling = self.sampling
        if sampling.seed is None and sampling.noise_key is None:
            return None
        seed = engine_seed if sampling.seed is None else sampling.seed
        return keyed_uniform(seed, sampling.noise_key or "", len(self.token_ids))

    def _look(self) -> None:
        # Cleared before looking: what is appended from here on is either seen below or announced again.
        self._announced = False
        self._hand_out()

    def _hand_out(self) -> None:
        """Call ``on_tokens`` with what it has not seen, on the event loop."""
        end = len(self.logprobs)  # appended after the id, so both are there
        if self.on_tokens is None or self._handed_out == end or self.future.done():
            return
        start, self._handed_out = self._handed_out, end
        try:
            self.on_tokens(self.token_ids[start:end], self.logprobs[start:end])
        except Exception as error:  # noqa: BLE001  (not swallowed: generate raises it)
            self.future.set_exception(error)

    def _call_soon(self, callback: Callable[[], None]) -> None:
        try:
            self.loop.call_soon_threadsafe(callback)
        except RuntimeError:
            # The loop is closed, so nobody waits for this request any more.
            log.debug("request %r has an event loop that is closed", self.request_id)


def keyed_uniform(seed: int, key: str, position: int) -> float:
    """A number in [0, 1) that follows from its arguments alone: 53 bits of BLAKE2b.

    Counter-based: no stream to keep, so neither order nor company nor a restart can move it.
    """
    digest = hashlib.blake2b(f"{seed}\0{key}\0{position}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53
