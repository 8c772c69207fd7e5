"""vLLM as an engine, on its public API: token ids in, sampled ids with the logprobs of what they were drawn from out.

VllmEngine              the public face: starts vLLM, and takes requests to it
  ├ vllm/event_loop     the thread whose loop ``AsyncLLM`` lives on
  ├ vllm/request        one request: vLLM's sampling parameters, its pieces, the caller's loop
  ├ vllm/control        what is not a request: stand still, take weights, sleep
  ├ vllm/life           dead of what, or closed; whatever waits ends with it
  ├ vllm/core           vLLM's processes: tied to this one, watched, the cause of their death
  ├ vllm/warm           what they are forked from: vLLM, imported while this process imports it
  ├ vllm/extension      runs inside vLLM's workers: weights in place
  └ vllm/support        which builds will do
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import itertools
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from gymloop.config.rules.vllm import LEAST_TEMPERATURE
from gymloop.errors import ConfigError, InfraError
from gymloop.generation.capacity import text_config
from gymloop.generation.engine import Sample, Sampling
from gymloop.generation.vllm import extension, support, warm
from gymloop.generation.vllm.control import Control
from gymloop.generation.vllm.core import EngineCore
from gymloop.generation.vllm.event_loop import LoopThread
from gymloop.generation.vllm.life import Life
from gymloop.generation.vllm.request import OnTokens, Request, sampling_params
from gymloop.generation.vocabulary import check_bias, checked_prompt
from gymloop.weights.offer import Offer
from gymloop.weights.source import WeightSource

logger = logging.getLogger(__name__)

LOAD_LIMIT_S = 3600.0
"""Of one start; the startup task's deadline ends one that is stuck long before."""
POLL_S = 0.5
CLOSE_LIMIT_S = 10.0
ABORT_S = 0.5
"""What vLLM has of a request it hands over within its loop's next turns."""
WATCH_S = 3.0
"""A child's death is seen by then."""


class VllmEngine:
    """One vLLM engine: its core, and as many worker processes as it has tensor-parallel ranks.

    Args:
        model_folder: Hugging Face model folder.
        dtype: ``float32`` or ``bfloat16``.
        max_batch_size: requests decoded together.
        max_model_len: prompt and sample together, tokens.
        seed: of the stream that requests without a seed of their own draw from.
        device: that the caller planned with, as torch names it; None takes vLLM's.
        arguments: further fields of vLLM's ``AsyncEngineArgs``, see ``vllm.settings``.
        environment: further variables for vLLM and its processes.
        repeatable_draws: a request that names its noise draws the same again, in any company; False heeds seeds only,
            and lets vLLM draw the other rows all at once, which is faster.
        on_loading: hears how the start gets on: what is being done, and the bytes of memory that vLLM's processes hold.
        meanwhile: further work of this process, done once vLLM's own are loading; what it raises ends the start.

    Raises:
        ConfigError: vLLM is not there or unsuitable, or it refuses the model or an argument; with its own reason.
        InfraError: its process died while it loaded.
    """

    def __init__(
        self,
        model_folder: str | Path,
        *,
        dtype: Literal["float32", "bfloat16"],
        max_batch_size: int,
        max_model_len: int,
        seed: int = 0,
        device: str | None = None,
        arguments: Mapping[str, Any] | None = None,
        environment: Mapping[str, str] | None = None,
        repeatable_draws: bool = True,
        on_loading: Callable[[str, int], None] | None = None,
        meanwhile: Callable[[], None] | None = None,
    ):
        folder = Path(model_folder)
        if not (folder / "config.json").is_file():
            raise ConfigError(f"{folder} is not a model folder: it has no config.json")
        self._folder = folder
        self._max_model_len = max_model_len
        self._max_batch_size = max_batch_size
        self._seed = seed
        self._repeatable = repeatable_draws
        self._vocab = int(text_config(folder).vocab_size)
        self._names = itertools.count()
        self._requests: dict[str, Request] = {}
        self._endings: set[asyncio.Task[None]] = set()
        self._life = Life(self._give_up)
        self._core = EngineCore()
        self._loop = LoopThread("vllm-engine")
        try:
            with self._core.starting(environment or {}):
                if on_loading is not None:
                    on_loading("vLLM's modules", 0)
                self.build = support.probe(device, arguments)
                args = {
                    "model": str(folder),
                    "dtype": dtype,
                    "seed": seed % 2**31,
                    "max_model_len": max_model_len,
                    "max_num_seqs": max_batch_size,
                    "logprobs_mode": "processed_logprobs",
                    "generation_config": "vllm",  # nothing of the folder's sampling settings may reach a request
                    "skip_tokenizer_init": True,
                    "worker_extension_cls": extension.NAME,
                    "disable_log_stats": True,
                    **(arguments or {}),
                }
                self._llm = self._loaded(self._loop.submit(self._start(args)), on_loading, meanwhile)
        except BaseException:
            self.close()
            raise
        self._control = Control(self._llm, self._loop, self._life, self.build, folder)
        self._core.watch(lambda what: self._loop.soon(self._life.die, what))

    def _loaded(
        self,
        start: concurrent.futures.Future[Any],
        on_loading: Callable[[str, int], None] | None,
        meanwhile: Callable[[], None] | None,
    ) -> Any:
        until = time.monotonic() + LOAD_LIMIT_S
        while not concurrent.futures.wait([start], timeout=POLL_S).done:
            resident = self._core.resident_bytes()
            if on_loading is not None:
                on_loading("the model in vLLM's processes", resident)
            # Not before they are there: two threads that import transformers disturb each other.
            if meanwhile is not None and resident:
                meanwhile()
                meanwhile = None
            if time.monotonic() > until:
                raise InfraError(f"vLLM was not ready after {LOAD_LIMIT_S:g} s")
        llm = start.result(0)
        if meanwhile is not None:
            meanwhile()
        return llm

    async def _start(self, args: Mapping[str, Any]) -> Any:
        """On the engine's loop, whose thread is blocked meanwhile: nobody else needs it yet."""
        from vllm import AsyncEngineArgs
        from vllm.usage.usage_lib import UsageContext
        from vllm.v1.engine.async_llm import AsyncLLM

        try:
            # What vLLM leaves open it chooses by this and the GPU: as a server's, its steps take longer prompts.
            with warm.inspecting():
                llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**args), usage_context=UsageContext.OPENAI_API_SERVER)
        except Exception as error:  # vLLM raises many kinds; all of them say that it cannot start like this
            killed = self._core.killed()
            if killed is not None:
                raise InfraError(f"vLLM {self.build.version} did not start on {self._folder}: {killed}") from error
            cause = self._core.cause() or f"{type(error).__name__}: {error}"
            raise ConfigError(f"vLLM {self.build.version} could not start on {self._folder}: {cause}") from error
        if self.build.stamps_versions:
            await llm.update_weight_version("0")
        return llm

    # ---------------------------------------------------------------- what anyone may ask

    @property
    def max_model_len(self) -> int:
        """Prompt and sample together never exceed this many tokens."""
        return self._max_model_len

    @property
    def weight_version(self) -> int:
        """Version of the weights that the next token will be sampled with."""
        return self._control.version

    @property
    def queued(self) -> int:
        """Requests beyond those that are decoded together."""
        return max(0, len(self._requests) - self._max_batch_size)

    @property
    def pids(self) -> list[int]:
        """Of vLLM's processes."""
        return self._core.pids

    def require_alive(self) -> None:
        """Raise InfraError, with the cause, where the engine is dead or closed."""
        self._life.require()

    def require_serving(self) -> None:
        """Raise InfraError, with the reason, where every request would be refused."""
        self._life.require_serving()

    # ---------------------------------------------------------------- sampling

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        request_id: str,
        on_tokens: OnTokens | None = None,
    ) -> Sample:
        """Sample until an end token, ``max_new_tokens`` or the context limit; see ``Engine.generate``.

        Raises:
            DataError: the prompt is empty or holds an id outside the vocabulary.
            ConfigError: ``sampling`` holds a value out of range, or one that vLLM would silently change.
            InfraError: the engine died or was closed.
        """
        self._check_sampling(sampling)
        prompt = checked_prompt(prompt_ids, request_id, self._vocab).tolist()
        if self._life.refuses:
            raise self._life.loss(request_id)
        if len(prompt) >= self._max_model_len:
            return Sample((), (), "length", self.weight_version, self.weight_version)
        loop = asyncio.get_running_loop()
        limit = min(sampling.max_new_tokens, self._max_model_len - len(prompt))
        request = Request(request_id, prompt, sampling, limit, loop, loop.create_future(), on_tokens)
        self._loop.soon(self._admit, request)
        try:
            return await request.future  # bounded: whoever asks gives it a time; the engine's death ends it
        except BaseException:
            # Cancelled, or its on_tokens raised; where the engine itself ended the request this changes nothing.
            self._loop.soon(self._drop, request)
            raise

    def abort(self, request_id: str) -> None:
        """End a request; its ``generate`` returns what was sampled so far. Unknown ids have already ended."""
        self._loop.soon(self._abort, request_id)

    def _admit(self, request: Request) -> None:
        if self._life.refuses:
            request.fail(self._life.loss(request.request_id))
            return
        if request.request_id in self._requests:
            request.fail(InfraError(f"request {request.request_id!r} is already in flight; request ids must be unique"))
            return
        self._requests[request.request_id] = request
        request.task = asyncio.ensure_future(self._read(request))

    def _abort(self, request_id: str) -> None:
        request = self._requests.get(request_id)
        if request is not None and request.task is not None and not request.aborted:
            request.aborted = True
            ending = asyncio.ensure_future(self._end_early(request, request.task))
            self._endings.add(ending)
            ending.add_done_callback(self._endings.discard)

    async def _end_early(self, request: Request, task: asyncio.Task[None]) -> None:
        """vLLM hands over what it has of a request; of one that has not reached it there is nothing."""
        try:
            await self._llm.abort(request.name)
            await asyncio.wait({task}, timeout=ABORT_S)
        except Exception as error:  # noqa: BLE001  (vLLM's: its core died, which the watch tells)
            logger.debug("vLLM did not abort request %r: %s", request.request_id, error)
        finally:
            task.cancel()  # changes nothing where it has ended

    def _drop(self, request: Request) -> None:
        if self._requests.get(request.request_id) is request:
            del self._requests[request.request_id]  # its id is free again at once
        if request.task is not None:
            request.task.cancel()

    async def _read(self, request: Request) -> None:
        """Read vLLM's replies until the last. Cancelling it makes vLLM abort the request."""
        request.name = f"{request.request_id}#{next(self._names)}"  # an id may come again before vLLM forgot the first
        whole = request.on_tokens is None
        try:
            sampling = request.sampling if self._repeatable else replace(request.sampling, noise_key=None)
            params = sampling_params(sampling, request.limit, self._seed, whole=whole)
            if whole:
                request.first_version = self.weight_version  # at the latest; vLLM tells more where it stamps versions
            reason = None
            async for output in self._llm.generate(_prompt(request.prompt), params, request.name):
                piece = output.outputs[0]
                request.take(piece.token_ids, _logprobs(piece), self.weight_version)
                reason = piece.finish_reason or reason
                if spans := getattr(output, "weight_versions", None) or getattr(piece, "weight_versions", None):
                    request.first_version, request.last_version = int(spans[0].version), int(spans[-1].version)
            if reason == "abort" and request.aborted:
                request.finish("abort", self.weight_version)
                return
            if reason not in ("stop", "length"):
                raise InfraError(
                    f"request {request.request_id!r}: vLLM ended it with {reason!r}, which nobody asked for"
                )
            request.finish("stop" if reason == "stop" else "length", self.weight_version)
        except asyncio.CancelledError:
            if request.aborted:
                request.finish("abort", self.weight_version)
            elif self._life.refuses:
                request.fail(self._life.loss(request.request_id))
        except InfraError as error:
            request.fail(error)
        except Exception as error:  # noqa: BLE001  (vLLM's: its core died, or it could not serve this)
            request.fail(await self._told(request.request_id, error))
        finally:
            if self._requests.get(request.request_id) is request:
                del self._requests[request.request_id]

    async def _told(self, request_id: str, error: Exception) -> InfraError:
        """vLLM's error as ours; a dead core's is told by the watch, which may need a moment more."""
        cause = error.__cause__ or error
        said = f"{type(cause).__name__}: {cause}"
        if not self._life.dead and self._llm.errored:
            await self._life.told(WATCH_S)
            said = self._core.cause() or said  # its own error says only that it is dead
        if self._life.dead:
            return self._life.loss(request_id)
        return InfraError(f"request {request_id!r} was lost: vLLM failed: {said}")

    def _fail_all(self) -> None:
        """The engine is over; on its loop."""
        for request in list(self._requests.values()):
            request.fail(self._life.loss(request.request_id))

    def _give_up(self) -> None:
        """The engine is dead, or its weights are; on its loop. vLLM may wait for a dead core before it lets go."""
        self._fail_all()
        for request in list(self._requests.values()):
            if request.task is not None:
                request.task.cancel()

    # ---------------------------------------------------------------- control

    def pause(self, timeout: float) -> None:
        """Return once no forward pass runs; requests in flight keep their state and wait.

        Args:
            timeout: seconds.

        Raises:
            InfraError: the running step did not end in time (the engine then goes on), or the engine is dead.
        """
        self._control.pause(timeout)

    def resume(self) -> None:
        """Go on after ``pause``."""
        self._control.resume()

    def take_weights(self, offer: Offer, version: int, first_rank: int = 1) -> None:
        """Have vLLM's processes take the policy's weights, each by itself; requests in flight go on with the new ones.

        Cached keys and values belong to the old weights and are computed again.

        Args:
            offer: of the policy.
            version: number of the weights.
            first_rank: of the first process among the receivers of the offer; the others follow.

        Raises:
            ConfigError: the weights do not fit the model; nothing was changed.
            InfraError: they did not arrive. Where some were replaced before, every request is refused until an update
                is complete, or, where none can mend it, the engine is dead.
        """
        self._control.take_weights(offer, version, first_rank)

    def load_weights(self, source: WeightSource, version: int) -> None:
        """Replace every parameter by those that this process has, or receives; see ``take_weights``.

        All bytes are brought into memory that vLLM's processes share before anything changes.

        Raises:
            ConfigError: a parameter is missing, unknown, twice there, tied, or of another shape; nothing was changed.
            InfraError: the source ended early, and nothing was changed; or the engine is dead, maybe of this update.
        """
        self._control.load_weights(source, version)

    def sleep(self, level: int = 1) -> None:
        """Free device memory: level 1 drops the KV cache and offloads the weights, 2 drops both.

        After level 2 every request is refused until an update is complete. A CPU build frees nothing and stands still
        until ``wake``.
        """
        self._control.sleep(level)

    def wake(self, tags: Sequence[str] | None = None) -> None:
        """Take memory again: ``weights``, then, after a sync, ``kv_cache``; None takes both."""
        self._control.wake(tags)

    def close(self) -> None:
        """End vLLM's processes and the engine's thread; requests in flight raise InfraError. Safe to call twice."""
        self._life.closed = True
        if not hasattr(self, "_llm"):
            self._core.close()  # a start that is under way holds the loop until they are gone
        self._loop.soon(self._end)
        self._loop.stop(CLOSE_LIMIT_S)
        self._core.close()
        if hasattr(self, "_control"):
            self._control.close()

    def _end(self) -> None:
        self._fail_all()
        if not hasattr(self, "_llm"):
            return
        vllms = logging.getLogger("vllm")
        before = vllms.level
        vllms.setLevel(logging.ERROR)  # it warns of every process that it kills
        try:
            self._llm.shutdown(timeout=0.5)  # what is not gone by then is killed
        finally:
            vllms.setLevel(before)
        del self._llm

    # ---------------------------------------------------------------- checks

    def _check_sampling(self, sampling: Sampling) -> None:
        sampling.check()
        if 0 < sampling.temperature < LEAST_TEMPERATURE:
            raise ConfigError(
                f"sampling has temperature {sampling.temperature}; expected 0 or at least {LEAST_TEMPERATURE}, below "
                "which vLLM samples at another temperature than asked"
            )
        check_bias(sampling, self._vocab)


def _prompt(ids: list[int]) -> Any:
    """vLLM's own form of a prompt that needs no more work: it takes it without a tokenizer and without a thread."""
    return {"type": "token", "prompt_token_ids": ids}


def _logprobs(piece: Any) -> list[float]:
    """The logprob of each new token. float32 rounding can put one a hair above 0."""
    if not piece.token_ids:
        return []  # with the last piece of a request that was aborted, vLLM 0.25 gives all logprobs once more
    entries: Any = piece.logprobs or ()
    if len(piece.token_ids) != len(entries):
        raise InfraError(f"vLLM sampled {len(piece.token_ids)} tokens and gave {len(entries)} logprobs")
    flat = getattr(entries, "logprobs", None)  # all in one list, in order, where each token has one
    if flat is not None and list(entries.token_ids) == list(piece.token_ids):
        return [min(0.0, value) for value in flat]
    return [min(0.0, float(one[token].logprob)) for token, one in zip(piece.token_ids, entries, strict=True)]
