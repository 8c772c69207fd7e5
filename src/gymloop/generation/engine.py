"""The whole waist between sampling and everything else: prompt token ids in, sampled token ids and logprobs out.

An engine never sees text. Its logprobs are those of the distribution it sampled from, its end tokens are part of the
sample, and every sample names the weight versions that produced it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol

from gymloop.errors import ConfigError

if TYPE_CHECKING:
    from gymloop.weights.source import WeightSource


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to draw tokens. Every field that changes the distribution is here.

    The logits pass through ``logit_bias``, the penalties, ``temperature``, ``min_p``, ``top_k`` and ``top_p``, in this
    order, which is vLLM's; each is defined as vLLM defines it (transformers agrees but for the order of ``min_p``).
    Logprobs are those of the distribution that is left.

    Attributes:
        max_new_tokens: at most this many tokens, at least 1; the engine also stops at its context limit.
        temperature: 0 means greedy; logprobs are then those of the temperature-1 distribution.
        top_p: nucleus mass in (0, 1].
        top_k: keep the k likeliest tokens; None keeps all.
        stop_token_ids: any of these ends the sample and is part of it.
        seed: makes the draw of this request repeatable on its own: it follows from seed, ``noise_key`` and position.
        min_p: in [0, 1]; drop tokens less likely than this share of the likeliest. 0 keeps all.
        repetition_penalty: above 0; positive logits of tokens in the prompt or the sample are divided by it, negative
            ones multiplied. 1 is off.
        presence_penalty: subtracted from the logit of every token that was sampled; -2 to 2, 0 is off.
        frequency_penalty: subtracted once for each time a token was sampled; -2 to 2, 0 is off.
        logit_bias: added to the logits of these tokens, each -100 to 100; None is off.
        noise_key: names what the draw is for, such as a rollout's turn: the draw then follows from seed (the engine's
            where none is given), key and position, in whatever company and order. None with no seed takes the
            engine's stream.
        slot: where a deterministic engine computes this request, modulo its rows; None lets it follow from
            ``noise_key``. Requests that would share a row wait for each other, so a caller that numbers its rollouts
            keeps them apart.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    seed: int | None = None
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = field(default=None, hash=False)
    noise_key: str | None = None
    slot: int | None = None

    @property
    def penalises(self) -> bool:
        """Whether the distribution depends on which tokens came before, other than through the model."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

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
            ("min_p", 0 <= self.min_p <= 1, "a number in [0, 1]"),
            ("repetition_penalty", 0 < self.repetition_penalty < math.inf, "a finite number above 0"),
            ("presence_penalty", -2 <= self.presence_penalty <= 2, "a number in [-2, 2]"),
            ("frequency_penalty", -2 <= self.frequency_penalty <= 2, "a number in [-2, 2]"),
            ("slot", self.slot is None or self.slot >= 0, "at least 0 or None"),
            (
                "logit_bias",
                all(-100 <= bias <= 100 for bias in (self.logit_bias or {}).values()),
                "values in [-100, 100]",
            ),
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

    def require_serving(self) -> None:
        """Raise InfraError, with the reason, where a request would be refused now, whatever it asks for."""

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
                order, before ``generate`` returns; together the pieces are the sample. What it raises ends the
                request, and ``generate`` raises it.

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

    def load_weights(self, source: WeightSource, version: int) -> None:
        """Replace every parameter in place; nothing is sampled from a half-replaced model.

        Args:
            source: read to its end, once: ``pieces`` or ``tensors``, whichever the engine can use.
            version: number of the new weights.

        Raises:
            ConfigError: the source lacks a parameter, has one too many, or a shape differs; nothing was changed.
            InfraError: the source ended early; whoever samples is told so until a later update is complete.
        """

    def close(self) -> None:
        """Free the model and end the engine's thread; requests in flight raise InfraError."""
