"""One call of ``generate`` while it is in flight; its outcome goes to the event loop it came from, exactly once."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch

from gymloop.generation.engine import Sample, Sampling

log = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class Request:
    """One call of ``generate`` while it is in flight."""

    request_id: str
    prompt: np.ndarray
    sampling: Sampling
    limit: int
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[Sample]
    generator: torch.Generator | None
    stop: frozenset[int]
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    first_version: int | None = None
    last_version: int | None = None
    aborted: bool = False

    def sample(self, finish_reason: Literal["stop", "length", "abort"], version: int) -> Sample:
        """The result so far; ``version`` stands in where no token was sampled."""
        first = version if self.first_version is None else self.first_version
        last = version if self.last_version is None else self.last_version
        return Sample(tuple(self.token_ids), tuple(self.logprobs), finish_reason, first, last)


def settle(request: Request, outcome: Sample | BaseException) -> None:
    """Hand the outcome to the request's own event loop."""

    def settle() -> None:
        if request.future.done():
            return
        if isinstance(outcome, BaseException):
            request.future.set_exception(outcome)
        else:
            request.future.set_result(outcome)

    try:
        request.loop.call_soon_threadsafe(settle)
    except RuntimeError:
        # The loop is closed, so nobody waits for this request any more.
        log.debug("request %r ended after its event loop was closed", request.request_id)
