"""The embedded engine: one thread, one step at a time, and every request in a row of one KV cache.

TorchEngine            the public face: checks a call, waits for its outcome
  └ step_loop          the thread: joins, leaves, aborts, pauses, new weights between two steps
      ├ packed | fixed  the rows: what a step computes; ``fixed`` is ``deterministic=True``
      │   └ decoder     the model: one pass over a step, weights in place
      └ drawing         filters and random numbers, then ``sampling``
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from gymloop.errors import ConfigError
from gymloop.generation.decoder import PROBE_TOKENS, Decoder
from gymloop.generation.drawing import Drawer
from gymloop.generation.engine import Sample, Sampling
from gymloop.generation.fixed import FixedRows, row_of
from gymloop.generation.packed import PackedRows
from gymloop.generation.request import Request
from gymloop.generation.rows import Rows
from gymloop.generation.step_loop import StepLoop
from gymloop.generation.vocabulary import check_bias, checked_prompt
from gymloop.models.load import OnBytes
from gymloop.weights.source import WeightSource


class TorchEngine:
    """Any Hugging Face decoder with full or sliding-window attention, on one device.

    Args:
        model_folder: Hugging Face model folder.
        dtype: ``float32`` or ``bfloat16``.
        device: as torch names it.
        max_batch_size: rows of the KV cache, requests decoded together.
        max_model_len: prompt and sample together, tokens.
        seed: of the stream that requests without a seed of their own draw from.
        deterministic: a request's ids and logprobs then follow from weights, prompt, sampling and noise key alone, to
            the last bit, in any company, order and process; it costs speed, and every request that draws random
            numbers must name ``noise_key`` or ``seed``. ``fixed`` says how.
        on_loading: hears of the weights' progress, in bytes; see ``load_causal_lm``.

    Raises:
        ConfigError: the folder cannot be loaded, or the model cannot be decoded by this engine.
    """

    def __init__(
        self,
        model_folder: str | Path,
        *,
        dtype: Literal["float32", "bfloat16"],
        device: str = "cpu",
        max_batch_size: int,
        max_model_len: int,
        seed: int = 0,
        deterministic: bool = False,
        on_loading: OnBytes | None = None,
    ):
        if max_batch_size < 1 or max_model_len < 2:
            raise ConfigError(
                f"the torch engine needs max_batch_size >= 1 and max_model_len >= 2, got {max_batch_size} "
                f"and {max_model_len}"
            )
        self._max_batch_size = max_batch_size
        self._max_model_len = max_model_len
        self._deterministic = deterministic
        self._decoder: Decoder | None = Decoder(
            model_folder, dtype, device, max_model_len, fixed_shapes=deterministic, on_loading=on_loading
        )
        self._vocab = self._decoder.vocab
        self._decoder.probe(lambda: self._make_rows(2, PROBE_TOKENS + 1, small=True))
        self._rows: Rows[Request] = self._make_rows(max_batch_size, max_model_len)
        drawer = Drawer(self._vocab, self._decoder.device, seed, one_by_one=deterministic)
        self._loop = StepLoop(self._rows, drawer)
        self._load_lock = threading.Lock()

    def _make_rows(self, rows: int, max_len: int, small: bool = False) -> Rows[Any]:
        decoder = self._live_decoder()
        if self._deterministic:
            return FixedRows(decoder, rows, max_len)
        return PackedRows(decoder, rows, max_len, budget=2 if small else None)

    @property
    def max_model_len(self) -> int:
        """Prompt and sample together never exceed this many tokens."""
        return self._max_model_len

    @property
    def weight_version(self) -> int:
        """Version of the weights that the next token will be sampled with."""
        return self._loop.version

    def require_alive(self) -> None:
        """Raise InfraError, with the cause, where the engine is dead or closed."""
        self._loop.require_alive()

    def require_serving(self) -> None:
        """Raise InfraError, with the reason, where every request would be refused."""
        self._loop.require_serving()

    @property
    def queued(self) -> int:
        """Requests that wait for a row of the cache."""
        return self._loop.queued

    @property
    def prefilled_tokens(self) -> int:
        """Tokens computed in prefill since the start; those taken over from another row are not among them."""
        return self._rows.prefilled

    @property
    def reused_tokens(self) -> int:
        """Prompt tokens taken over from another row's cache since the start."""
        return self._rows.reused

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        request_id: str,
        on_tokens: Callable[[Sequence[int], Sequence[float]], None] | None = None,
    ) -> Sample:
        """Sample until an end token, ``max_new_tokens`` or the context limit.

        Args:
            prompt_ids: at least one token. ``max_model_len`` or more give an empty sample, ``length``.
            sampling: how to draw.
            request_id: unique among requests in flight; names the request in errors.
            on_tokens: called on this event loop with each piece of new ids and logprobs, in order; together the
                pieces are the sample. What it raises ends the request and is raised here.

        Raises:
            DataError: the prompt is empty or holds an id outside the vocabulary, or a deterministic engine is not
                told what the draw follows from.
            ConfigError: ``sampling`` holds a value out of range.
            InfraError: the engine died or was closed, or the model gave logits that are not finite.
        """
        sampling.check()
        check_bias(sampling, self._vocab)
        prompt = checked_prompt(prompt_ids, request_id, self._vocab).astype(np.int32)
        if self._deterministic:
            row_of(sampling, prompt, self._max_batch_size, request_id)
        if len(prompt) >= self._max_model_len:
            return Sample((), (), "length", self._loop.version, self._loop.version)
        loop = asyncio.get_running_loop()
        request = Request(
            request_id=request_id,
            prompt=prompt,
            sampling=sampling,
            limit=min(sampling.max_new_tokens, self._max_model_len - len(prompt)),
            loop=loop,
            future=loop.create_future(),
            on_tokens=on_tokens,
        )
        self._loop.submit(request)
        try:
            return await request.future  # bounded: whoever asks gives it a time; the engine's death ends it
        except BaseException:
            # Cancelled, or its on_tokens raised; where the engine itself ended the request this changes nothing.
            self._loop.drop(request)
            raise

    def abort(self, request_id: str) -> None:
        """End a request; its ``generate`` returns what was sampled so far. Unknown ids have already ended."""
        self._loop.abort(request_id)

    def pause(self, timeout: float) -> None:
        """Return once no forward pass runs; requests in flight keep their state and wait.

        Args:
            timeout: seconds.

        Raises:
            InfraError: the running step did not end in time (the engine then goes on), or the engine is dead.
        """
        self._loop.pause(timeout)

    def resume(self) -> None:
        """Go on after ``pause``."""
        self._loop.resume()

    def sleep(self, level: int = 1) -> None:
        """Nothing: beside a policy of the sizes that this engine is for there is room for its memory."""

    def wake(self, tags: Sequence[str] | None = None) -> None:
        """Nothing; see ``sleep``."""

    def load_weights(self, source: WeightSource, version: int) -> None:
        """Replace every parameter in place, between two steps; requests in flight go on with the new weights.

        Everything is checked before anything changes. Floating types are converted to the engine's. Cached keys and
        values belong to the old weights and are computed again.

        Raises:
            ConfigError: a parameter is missing, unknown, twice there, tied, or of another shape; nothing was changed.
            InfraError: the running step did not end, or the engine is dead; or the source ended early: the weights are
                then half replaced, and every request fails with this sync's name until another one has been complete.
        """
        with self._load_lock:
            self._loop.require_alive()
            decoder = self._live_decoder()
            decoder.check_fits(source)
            self._loop.change_weights(lambda: decoder.replace_weights(source), version)

    def close(self) -> None:
        """Free the model and end the engine's thread; requests in flight raise InfraError. Safe to call twice.

        Raises:
            InfraError: the running step did not end in time.
        """
        self._loop.close()
        self._decoder = None
        self._rows.clear()

    def _live_decoder(self) -> Decoder:
        if self._decoder is None:
            raise RuntimeError("the engine has no model any more")
        return self._decoder
