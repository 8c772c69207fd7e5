"""The whole waist between sampling and everything else: prompt token ids in, sampled token ids and logprobs out.

An engine never sees text. Its logprobs are those of the distribution it sampled from, its end tokens are part of the
sample, and every sample names the weight versions that produced it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from gymloop.errors import ConfigError

if TYPE_CHECKING:
    from gymloop.weights.snapshot import WeightSnapshot


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to draw tokens. Every field that changes the distribution is here.

    Attributes:
        max_new_tokens: at most this many tokens, at least 1; the engine also stops at its context limit.
        temperature: 0 means greedy; logprobs are then those of the temperature-1 distribution.
        top_p: nucleus mass in (0, 1].
        top_k: keep the k likeliest tokens; None keeps all.
        stop_token_ids: any of these ends the sample and is part of it.
        seed: makes the draw of this request repeatable on its own; None takes the engine's stream.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    seed: int | None = None

    def check(self) -> None:
        """Check every field's range.

        Raises:
            ConfigError: one is out of range.
        """
        for name, good, expected in (
            ("max_new_tokens", self.max_new_tokens >= 1, "at least 1"),
            ("temperature", 0 <= self.temperature < math.inf, "a finite number of at least 0"),
            ("top_p", 0 < self.top_p <= 1, "a number in (0, 1]"),
            ("top_k", self.top_k is None or self.top_k >= 1, "at least 1 or None"),
        ):
            if not good:
                raise ConfigError(f"sampling has {name} {getattr(self, name)}; expected {expected}")


@dataclass(frozen=True, slots=True)
class Sample:
    """What one request produced.

    Attributes:
        token_ids: sampled tokens, the end token included when one was sampled.
        logprobs: natural log, one per token, finite and not positive.
        finish_reason: ``stop`` (an end token), ``length`` (limit) or ``abort``.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: Literal["stop", "length", "abort"]
    first_version: int
    last_version: int


class Engine(Protocol):
    """One replica. ``generate`` is called from an asyncio loop; the other methods may be called from any thread."""

    @property
    def max_model_len(self) -> int:
        """Prompt and sample together never exceed this many tokens."""

    @property
    def weight_version(self) -> int:
        """Version of the weights that the next token will be sampled with."""

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        request_id: str,
        on_tokens: Callable[[Sequence[int], Sequence[float]], None] | None = None,
    ) -> Sample:
        """Sample until an end token, ``max_new_tokens`` or the context limit.

        Args:
            prompt_ids: every token of the prompt.
            sampling: how to draw.
            request_id: unique among the requests in flight.
            on_tokens: called on the caller's event loop with each piece of newly sampled ids and their logprobs, in
                order, before ``generate`` returns; together the pieces are the sample.

        A prompt of ``max_model_len`` tokens or more returns an empty sample with ``finish_reason == "length"``.
        Cancelling the awaiting task aborts the request and frees its slot.

        Raises:
            InfraError: the engine died or was closed while the request was in flight.
        """

    def abort(self, request_id: str) -> None:
        """End a request; its ``generate`` returns what was sampled so far with ``finish_reason == "abort"``."""

    def pause(self, timeout: float) -> None:
        """Return once no forward pass runs; requests in flight keep their state and wait."""

    def resume(self) -> None:
        """Go on after ``pause``."""

    def load_weights(self, snapshot: WeightSnapshot, version: int) -> None:
        """Replace every parameter in place; nothing is sampled from a half-replaced model.

        Raises:
            ConfigError: the snapshot lacks a parameter, has one too many, or a shape differs; nothing was changed.
        """

    def close(self) -> None:
        """Free the model and end the engine's thread; requests in flight raise InfraError."""
