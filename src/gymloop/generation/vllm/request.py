"""One call of ``generate``: what vLLM is asked for, what has come so far, and how it reaches the caller's loop."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from gymloop.generation.engine import Sample, Sampling

OnTokens = Callable[[Sequence[int], Sequence[float]], None]


@dataclass(slots=True, eq=False)
class Request:
    """Everything but ``future`` and ``on_tokens`` is touched on the engine's loop only.

    Attributes:
        request_id: the caller's name for it.
        prompt: at least one token.
        sampling: how to draw.
        limit: tokens at most.
        loop: the caller's.
        future: on the caller's loop; its sample or its error.
        on_tokens: called on the caller's loop with each piece.
        aborted: someone asked for what there is.
        task: what reads vLLM's replies.
        name: vLLM's for it.
    """

    request_id: str
    prompt: list[int]
    sampling: Sampling
    limit: int
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[Sample]
    on_tokens: OnTokens | None
    aborted: bool = False
    task: asyncio.Task[None] | None = None
    name: str = ""
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    first_version: int | None = None
    last_version: int | None = None

    def take(self, ids: Sequence[int], logprobs: Sequence[float], version: int) -> None:
        """Add a piece and hand it on."""
        if not ids:
            return
        if self.first_version is None:
            self.first_version = version
        self.last_version = version
        self.ids.extend(ids)
        self.logprobs.extend(logprobs)
        if self.on_tokens is not None:
            self._call(self._hand_on, tuple(ids), tuple(logprobs))

    def finish(self, reason: Literal["stop", "length", "abort"], version: int) -> None:
        """Hand over the sample. ``version`` is for a sample without tokens."""
        first = version if self.first_version is None else self.first_version
        last = version if self.last_version is None else self.last_version
        self._call(self._settle, Sample(tuple(self.ids), tuple(self.logprobs), reason, first, last), None)

    def fail(self, error: Exception) -> None:
        """Raise an error where the sample is awaited."""
        self._call(self._settle, None, error)

    def _call(self, callback: Callable[..., object], *args: Any) -> None:
        try:
            self.loop.call_soon_threadsafe(callback, *args)
        except RuntimeError:  # the caller's loop is closed: nobody waits any more
            return

    def _hand_on(self, ids: Sequence[int], logprobs: Sequence[float]) -> None:
        if self.future.done() or self.on_tokens is None:
            return
        try:
            self.on_tokens(ids, logprobs)
        except Exception as error:  # noqa: BLE001  (the caller's own; it gets it back)
            self.future.set_exception(error)

    def _settle(self, sample: Sample | None, error: Exception | None) -> None:
        if self.future.done():
            return
        if sample is not None:
            self.future.set_result(sample)
        elif error is not None:
            self.future.set_exception(error)


def draw_seed(sampling: Sampling, engine_seed: int) -> int | None:
    """vLLM's seed of one request: from its seed (the engine's where it has none) and its noise key; None for neither.

    vLLM draws a seeded request from a generator of its own, one number per token and vocabulary entry, so what is drawn
    follows from the seed and the position.
    """
    if sampling.noise_key is None:
        return None if sampling.seed is None else sampling.seed % 2**63
    seed = engine_seed if sampling.seed is None else sampling.seed
    digest = hashlib.sha256(f"{seed}/{sampling.noise_key}".encode()).digest()
    return int.from_bytes(digest[:8]) >> 1


def sampling_params(sampling: Sampling, limit: int, engine_seed: int, *, whole: bool) -> Any:
    """vLLM's ``SamplingParams``: ids only, one logprob a token, and no end token but ours.

    Args:
        sampling: how to draw.
        limit: tokens at most.
        engine_seed: see ``draw_seed``.
        whole: one reply at the end. Pieces cost the engine's loop half as much time again and more, and where many rows
            run that loop is what limits them.
    """
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        n=1,
        max_tokens=limit,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k or 0,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        logit_bias=dict(sampling.logit_bias) if sampling.logit_bias else None,
        stop_token_ids=list(sampling.stop_token_ids),
        ignore_eos=True,  # the model's own end tokens are in ``stop_token_ids`` where they are wanted
        seed=draw_seed(sampling, engine_seed),
        logprobs=0,  # that of the sampled token alone
        flat_logprobs=whole,  # numbers in lists: two objects a token cost more to collect than to read
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY if whole else RequestOutputKind.DELTA,
        skip_clone=True,  # nobody else holds it
    )
