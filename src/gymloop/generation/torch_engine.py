"""The embedded engine: one thread, one forward pass per step, and every request in whichever rows it needs.

    generate (any event loop) ──submit──▶ waiting ──admit──▶ rows ──plan──▶ forward ──draw──▶ append ──▶ deliver
                                             ▲                 │                                  │
                                             └── abort, cancel ┴── new weights: compute again ────┘

Each step computes one token of every decoding row and a bounded number of prefill tokens together, then draws where a
row has all its tokens computed. Requests join and leave between any two steps. All state of rows and cache belongs to
the step thread; other threads only leave notes under one condition variable, and no wait is without a bound. A thread
that dies takes every request with it, by name and cause: nothing hangs.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from gymloop import compat
from gymloop.errors import ConfigError, DataError, GymloopError, InfraError
from gymloop.generation.engine import Sample, Sampling
from gymloop.generation.kv_cache import ATTENTION, Chunk, DenseCache, PackedStep
from gymloop.generation.request import Request, settle
from gymloop.generation.sampling import Filters, draw
from gymloop.generation.scheduler import RowTable, Work
from gymloop.models.load import load_causal_lm
from gymloop.weights.fit import check_fits
from gymloop.weights.snapshot import WeightSnapshot

log = logging.getLogger(__name__)

PREFILL_TOKENS = {"cpu": 512, "cuda": 4096}
"""Prefill per step: what decoding rows may be kept waiting for."""
IDLE_PREFILL_FACTOR = 4
"""So much more while no row is decoding: many rows then start together and stay one batch."""
IDLE_WAIT_S = 1.0
STEP_LIMIT_S = 600.0
"""How long new weights and ``close`` wait for a running step."""
LAYER_TYPES = ("full_attention", "sliding_attention")


class TorchEngine:
    """Any Hugging Face decoder with full or sliding-window attention, on one device.

    Args:
        model_folder: Hugging Face model folder.
        dtype: ``float32`` or ``bfloat16``.
        device: as torch names it.
        max_batch_size: rows of the KV cache, requests decoded together.
        max_model_len: prompt and sample together, tokens.
        seed: of the stream that requests without a seed of their own draw from.

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
    ):
        if max_batch_size < 1 or max_model_len < 2:
            raise ConfigError(
                f"the torch engine needs max_batch_size >= 1 and max_model_len >= 2, got {max_batch_size} "
                f"and {max_model_len}"
            )
        self._device = torch.device(device)
        self._model = load_causal_lm(model_folder, dtype, device)
        self._cache_argument = compat.cache_argument(self._model)
        _check_supported(self._model, max_model_len)
        self._self_check()
        self._vocab = int(self._model.get_input_embeddings().weight.shape[0])
        self._max_model_len = max_model_len
        self._cache = DenseCache(max_batch_size, max_model_len)
        self._table: RowTable[Request] = RowTable(max_batch_size, max_model_len, self._cache)
        self._generator = torch.Generator().manual_seed(seed)
        self._budget = PREFILL_TOKENS.get(self._device.type, 512)
        self._waiting: list[Request] = []
        self._prefilled = 0

        # Shared with other threads, under the condition:
        self._condition = threading.Condition()
        self._in_flight: dict[str, Request] = {}
        self._incoming: list[Request] = []
        self._sweep_due = False
        self._forget_due = False
        self._paused = False
        self._holds = 0
        self._closing = False
        self._dead: BaseException | None = None
        self._version = 0
        self._step_since: float | None = None
        self._step_size = (0, 0)

        self._load_lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="gymloop-torch-engine", daemon=True)
        self._thread.start()

    # ---------------------------------------------------------------- the Engine protocol

    @property
    def max_model_len(self) -> int:
        """Prompt and sample together never exceed this many tokens."""
        return self._max_model_len

    @property
    def weight_version(self) -> int:
        """Version of the weights that the next token will be sampled with."""
        return self._version

    @property
    def prefilled_tokens(self) -> int:
        """Tokens computed in prefill since the start; those taken over from another row are not among them."""
        return self._prefilled

    @property
    def reused_tokens(self) -> int:
        """Prompt tokens taken over from another row's cache since the start."""
        return self._table.reused

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling, request_id: str) -> Sample:
        """Sample until an end token, ``max_new_tokens`` or the context limit.

        Args:
            prompt_ids: at least one token. ``max_model_len`` or more give an empty sample, ``length``.
            sampling: how to draw.
            request_id: unique among requests in flight; names the request in errors.

        Raises:
            DataError: the prompt is empty or holds an id outside the vocabulary.
            ConfigError: ``sampling`` holds a value out of range.
            InfraError: the engine died or was closed, or the model gave logits that are not finite.
        """
        sampling.check()
        prompt = self._check_prompt(prompt_ids, request_id)
        if len(prompt) >= self._max_model_len:
            return Sample((), (), "length", self._version, self._version)
        loop = asyncio.get_running_loop()
        request = Request(
            request_id=request_id,
            prompt=prompt,
            sampling=sampling,
            limit=min(sampling.max_new_tokens, self._max_model_len - len(prompt)),
            loop=loop,
            future=loop.create_future(),
            generator=None if sampling.seed is None else torch.Generator().manual_seed(sampling.seed),
            stop=frozenset(sampling.stop_token_ids),
        )
        with self._condition:
            self._require_alive()
            if request_id in self._in_flight:
                raise InfraError(f"request {request_id!r} is already in flight; request ids must be unique")
            self._in_flight[request_id] = request
            self._incoming.append(request)
            self._condition.notify_all()
        try:
            return await request.future
        except asyncio.CancelledError:
            self._drop(request)
            raise

    def abort(self, request_id: str) -> None:
        """End a request; its ``generate`` returns what was sampled so far. Unknown ids have already ended."""
        with self._condition:
            request = self._in_flight.get(request_id)
            if request is not None:
                request.aborted = True
                self._sweep_due = True
                self._condition.notify_all()

    def pause(self, timeout: float) -> None:
        """Return once no forward pass runs; requests in flight keep their state and wait.

        Args:
            timeout: seconds.

        Raises:
            InfraError: the running step did not end in time (the engine then goes on), or the engine is dead.
        """
        with self._condition:
            self._require_alive()
            was_paused, self._paused = self._paused, True
            try:
                self._await_step_end(timeout, "pause")
            except InfraError:
                self._paused = was_paused
                self._condition.notify_all()
                raise

    def resume(self) -> None:
        """Go on after ``pause``."""
        with self._condition:
            self._paused = False
            self._condition.notify_all()

    def load_weights(self, snapshot: WeightSnapshot, version: int) -> None:
        """Replace every parameter in place, between two steps; requests in flight go on with the new weights.

        Everything is checked before anything changes. Floating types are converted to the engine's. Cached keys and
        values belong to the old weights and are computed again.

        Raises:
            ConfigError: a parameter is missing, unknown, twice there, tied, or of another shape; nothing was changed.
            InfraError: the running step did not end, or the engine is dead.
        """
        with self._load_lock:
            parameters = dict(self._live_model().named_parameters())
            check_fits(snapshot, self._live_model())
            with self._held():
                try:
                    with torch.no_grad():
                        for name, tensor in snapshot.tensors():
                            parameters[name].copy_(tensor)
                except BaseException as error:
                    self._die(error)
                    raise
                with self._condition:
                    self._version = version
                    self._forget_due = True

    def close(self) -> None:
        """Free the model and end the engine's thread; requests in flight raise InfraError. Safe to call twice.

        Raises:
            InfraError: the running step did not end in time.
        """
        with self._condition:
            self._closing = True
            self._condition.notify_all()
        self._thread.join(STEP_LIMIT_S)
        if self._thread.is_alive():
            raise InfraError(f"the engine did not close: {self._describe_step()}")
        self._model = None
        self._cache.clear()

    # ---------------------------------------------------------------- what other threads may touch

    def _require_alive(self) -> None:
        if self._dead is not None:
            raise InfraError(f"the engine is dead: {_describe(self._dead)}") from self._dead
        if self._closing:
            raise InfraError("the engine is closed")

    def _live_model(self) -> Any:
        with self._condition:
            self._require_alive()
        return self._model

    def _check_prompt(self, prompt_ids: Sequence[int], request_id: str) -> np.ndarray:
        prompt = np.asarray(prompt_ids, dtype=np.int64)
        if prompt.ndim != 1 or prompt.size == 0:
            raise DataError(f"request {request_id!r} has an empty prompt; at least one token id is needed")
        low, high = int(prompt.min()), int(prompt.max())
        if low < 0 or high >= self._vocab:
            wrong = low if low < 0 else high
            raise DataError(
                f"request {request_id!r} holds token id {wrong}; the model's ids are 0 to {self._vocab - 1}"
            )
        return prompt.astype(np.int32)

    def _drop(self, request: Request) -> None:
        """The caller went away: free the row at the next step, and the id at once."""
        with self._condition:
            if self._in_flight.get(request.request_id) is request:
                del self._in_flight[request.request_id]
            request.aborted = True
            self._sweep_due = True
            self._condition.notify_all()

    def _await_step_end(self, timeout: float, purpose: str) -> None:
        """Wait, with the condition held, until no step runs."""
        deadline = time.monotonic() + timeout
        while self._step_since is not None:
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                raise InfraError(f"{purpose} waited {timeout:g} s for the engine: {self._describe_step()}")
            self._condition.wait(remaining)
        self._require_alive()

    def _describe_step(self) -> str:
        since = self._step_since
        rows, tokens = self._step_size
        if since is None:
            return "no step is running"
        return f"a step of {rows} rows and {tokens} tokens has been running for {time.monotonic() - since:.1f} s"

    @contextmanager
    def _held(self) -> Iterator[None]:
        """No step runs inside."""
        with self._condition:
            self._holds += 1
        try:
            with self._condition:
                self._await_step_end(STEP_LIMIT_S, "load_weights")
            yield
        finally:
            with self._condition:
                self._holds -= 1
                self._condition.notify_all()

    def _die(self, error: BaseException | None) -> None:
        """Fail every request with the cause, None for ``close``; the engine takes no more."""
        with self._condition:
            self._dead = self._dead or error
            requests = list(self._in_flight.values())
            self._in_flight.clear()
            self._incoming.clear()
            self._closing = True
            self._condition.notify_all()
        end = "was closed" if error is None else f"died ({_describe(error)})"
        for request in requests:
            failure = InfraError(f"request {request.request_id!r} was lost: the engine {end}")
            failure.__cause__ = error
            settle(request, failure)

    # ---------------------------------------------------------------- the step thread

    def _run(self) -> None:
        try:
            with torch.inference_mode():
                while self._take_notes():
                    try:
                        if not (self._paused or self._holds):
                            self._step()
                    finally:
                        with self._condition:
                            self._step_since = None
                            self._condition.notify_all()
            self._die(None)
        except BaseException as error:
            log.exception("the engine's thread ends")
            self._die(error)

    def _take_notes(self) -> bool:
        """Wait for something to do and take it over; False when closing.

        On return a step counts as running, so ``pause`` waits for whatever is done with the notes.
        """
        with self._condition:
            while not (self._closing or self._sweep_due or self._ready_to_step()):
                self._condition.wait(IDLE_WAIT_S)
            if self._closing:
                return False
            self._step_since = time.monotonic()
            self._step_size = (self._table.active, 0)
            self._waiting.extend(self._incoming)
            self._incoming.clear()
            sweep, self._sweep_due = self._sweep_due, False
            forget, self._forget_due = self._forget_due, False
        if forget:
            self._table.forget()
        if sweep:
            self._sweep()
        return True

    def _ready_to_step(self) -> bool:
        return not (self._paused or self._holds) and bool(self._incoming or self._waiting or self._table.active)

    def _sweep(self) -> None:
        """Let aborted requests go."""
        for row in range(self._table.active - 1, -1, -1):
            request = self._table.requests[row]
            if request is not None and request.aborted:
                self._table.release(row)
                self._finish(request, "abort")
        for request in [request for request in self._waiting if request.aborted]:
            self._waiting.remove(request)
            self._finish(request, "abort")

    def _step(self) -> None:
        """Admit, compute, draw, deliver."""
        self._admit()
        if not self._table.active:
            return  # every request was aborted
        n, work = self._table.plan(self._budget, IDLE_PREFILL_FACTOR * self._budget)
        logits, rows = self._forward(n, work)
        if rows:
            self._draw(logits, rows)

    def _admit(self) -> None:
        if not self._waiting:
            return
        still: list[Request] = []
        for position, request in enumerate(self._waiting):
            if self._table.active == self._table.rows:
                still.extend(self._waiting[position:])
                break
            if not self._table.admit(request.prompt, request):
                still.append(request)
        self._waiting = still

    def _forward(self, n: int, work: Sequence[Work]) -> tuple[torch.Tensor, list[int]]:
        """Compute the planned tokens.

        Returns:
            Float32 logits [m, vocab] and the m rows, of those rows that now lack nothing.
        """
        table = self._table
        starts = table.computed[:n]
        ids = [table.tokens[np.arange(n), starts]]
        positions = [starts]
        owners = [np.arange(n)]
        chunks: list[Chunk] = []
        drawn = list(range(n))
        drawn_at = list(range(n))
        offset = n
        for piece in work:
            end = piece.start + piece.count
            ids.append(table.tokens[piece.row, piece.start : end])
            positions.append(np.arange(piece.start, end))
            owners.append(np.full(piece.count, piece.row))
            chunks.append(Chunk(piece.row, piece.start, piece.count, offset))
            offset += piece.count
            if end == table.known[piece.row]:
                drawn.append(piece.row)
                drawn_at.append(offset - 1)
        self._step_size = (n + len(work), offset)
        self._prefilled += offset - n

        longest = int(starts.max()) + 1 if n else 0
        needed = max([longest, *(piece.start + piece.count for piece in work)])
        if needed > self._cache.capacity:
            filled = table.computed.nonzero()[0]
            self._cache.reserve(needed, int(table.computed.max()), int(filled.max(initial=-1)) + 1)
        position = np.concatenate(positions)
        step = PackedStep(
            decode_positions=self._tensor(starts),
            chunks=chunks,
            rows=self._tensor(np.concatenate(owners)),
            positions=self._tensor(position),
            longest=longest,
            dtype=self._model.dtype,
        )
        logits = self._compute(self._cache, step, np.concatenate(ids), drawn_at)
        table.computed[:n] += 1
        for piece in work:
            table.computed[piece.row] += piece.count
        return logits, drawn

    def _compute(self, cache: DenseCache, step: PackedStep, ids: np.ndarray, drawn_at: Sequence[int]) -> torch.Tensor:
        """One pass of the model over a packed step; float32 logits [len(drawn_at), vocab]."""
        cache.step = step
        try:
            output = self._model(
                input_ids=self._tensor(ids)[None],
                position_ids=step.positions[None],
                use_cache=True,
                # An empty index is legal for every head; rows still in prefill need no logits.
                logits_to_keep=torch.tensor(drawn_at, dtype=torch.int64, device=self._device),
                packed_step=step,
                **{self._cache_argument: cache},
            )
        finally:
            cache.step = None
        return output.logits[0].float()

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array.astype(np.int64)).to(self._device, non_blocking=True)

    def _draw(self, logits: torch.Tensor, rows: Sequence[int]) -> None:
        """Draw one token for each of the rows, and deliver the requests that end with it."""
        requests = [self._request(row) for row in rows]
        tokens, logprobs = draw(logits, self._filters(requests), self._uniform(requests).to(self._device))
        token_list: list[int] = tokens.tolist()
        logprob_list: list[float] = logprobs.tolist()
        self._table.append(rows, np.asarray(token_list, dtype=np.int32))
        version = self._version
        leaving: list[int] = []
        for row, request, token, logprob in zip(rows, requests, token_list, logprob_list, strict=True):
            # NaN fails the comparison too.
            if not -np.inf < logprob <= 0:
                request_error = InfraError(
                    f"request {request.request_id!r}: the model gave token {token} logprob {logprob} at sampled "
                    f"position {len(request.token_ids)}; a finite number of at most 0 was expected"
                )
                leaving.append(row)
                self._cache.clean(row)
                self._table.computed[row] = 0
                self._fail(request, request_error)
                continue
            request.token_ids.append(token)
            request.logprobs.append(logprob)
            request.last_version = version
            if request.first_version is None:
                request.first_version = version
            if token in request.stop:
                leaving.append(row)
                self._finish(request, "stop")
            elif len(request.token_ids) >= request.limit:
                leaving.append(row)
                self._finish(request, "length")
        for row in sorted(leaving, reverse=True):
            self._table.release(row)

    def _request(self, row: int) -> Request:
        request = self._table.requests[row]
        if request is None:
            raise RuntimeError(f"row {row} is active but holds no request")
        return request

    def _filters(self, requests: Sequence[Request]) -> Filters:
        samplings = [request.sampling for request in requests]
        top_p = top_k = None
        if any(sampling.top_p < 1 for sampling in samplings):
            top_p = torch.tensor([sampling.top_p for sampling in samplings], device=self._device)
        if any(sampling.top_k is not None for sampling in samplings):
            limits = [self._vocab if sampling.top_k is None else sampling.top_k for sampling in samplings]
            top_k = torch.tensor(limits, device=self._device)
        temperature = torch.tensor([float(sampling.temperature) for sampling in samplings], device=self._device)
        return Filters(temperature, top_p, top_k)

    def _uniform(self, requests: Sequence[Request]) -> torch.Tensor:
        """One number per row, from the request's own stream where it has a seed."""
        uniform = torch.rand(len(requests), generator=self._generator, dtype=torch.float64)
        for index, request in enumerate(requests):
            if request.generator is not None:
                uniform[index] = torch.rand((), generator=request.generator, dtype=torch.float64)
        return uniform

    def _finish(self, request: Request, reason: Literal["stop", "length", "abort"]) -> None:
        self._unregister(request)
        settle(request, request.sample(reason, self._version))

    def _fail(self, request: Request, error: GymloopError) -> None:
        self._unregister(request)
        settle(request, error)

    def _unregister(self, request: Request) -> None:
        with self._condition:
            if self._in_flight.get(request.request_id) is request:
                del self._in_flight[request.request_id]

    # ---------------------------------------------------------------- start

    @torch.inference_mode()
    def _self_check(self) -> None:
        """Compare cached decoding with the model's own full forward, so that no family is ever decoded wrongly.

        Switches the model to the dense attention.

        Raises:
            ConfigError: they differ, or the model does not take the attention at all.
        """
        model = self._model
        name = type(model).__name__
        vocab = int(model.get_input_embeddings().weight.shape[0])
        ids = torch.randint(vocab, (12,), generator=torch.Generator().manual_seed(0))
        expected = model(input_ids=ids[None].to(self._device), use_cache=False).logits[0, -1].float()
        if not compat.set_attention(model, ATTENTION):
            raise ConfigError(f"{name} cannot run on the torch engine: its attention cannot be replaced")
        cache = DenseCache(rows=2, max_len=16)
        cache.reserve(16, 0, 0)
        found = expected
        # A first chunk, a chunk that continues it, and decoding, all in row 1 or after a swap in row 0.
        for start, count in ((0, 6), (6, 4), (10, 1), (11, 1)):
            decode = count == 1
            if start == 10:
                cache.swap(0, 1, 0, 10)
            row = 0 if decode else 1
            positions = np.arange(start, start + count)
            step = PackedStep(
                decode_positions=self._tensor(positions if decode else positions[:0]),
                chunks=() if decode else (Chunk(row, start, count, 0),),
                rows=self._tensor(np.full(count, row)),
                positions=self._tensor(positions),
                longest=start + 1 if decode else 0,
                dtype=model.dtype,
            )
            found = self._compute(cache, step, ids[start : start + count].numpy(), [count - 1])[0]
        error = float((found - expected).norm() / (expected - expected.mean()).norm().clamp(min=1e-12))
        limit = 1e-3 if model.dtype == torch.float32 else 0.1
        if not error <= limit:
            raise ConfigError(
                f"{name} cannot run on the torch engine: its logits with a cache differ from a full forward by "
                f"{error:.2g} of their size, at most {limit:g} was expected"
            )


def _check_supported(model: Any, max_model_len: int) -> None:
    """Refuse what the dense cache cannot hold."""
    config = model.config.get_text_config(decoder=True)
    name = type(model).__name__
    strange = [kind for kind in getattr(config, "layer_types", None) or () if kind not in LAYER_TYPES]
    if strange:
        raise ConfigError(
            f"{name} cannot run on the torch engine: it has layers of type {strange[0]!r}; "
            f"supported are {' and '.join(LAYER_TYPES)}"
        )
    if model._is_stateful or getattr(config, "is_encoder_decoder", False):
        kind = "recurrent state" if model._is_stateful else "an encoder"
        raise ConfigError(f"{name} cannot run on the torch engine: it has {kind}, which a KV cache does not hold")
    positions = getattr(config, "max_position_embeddings", None)
    if positions is not None and max_model_len > positions:
        raise ConfigError(
            f"the context limit is {max_model_len} tokens but {name} has {positions} positions "
            "(max_position_embeddings in its config.json)"
        )


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
