"""What an engine is told beside requests: to stand still, to take weights, to sleep.

Nothing is sampled from half replaced weights: the scheduler stands still while they change, cached keys and values of
the old weights are dropped and computed again, and an update that fails half way ends the engine. Every call ends by
its time or by the death of vLLM's processes.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch

from gymloop.errors import InfraError
from gymloop.generation.vllm.event_loop import LoopThread
from gymloop.generation.vllm.life import Life
from gymloop.generation.vllm.shared_bytes import SharedBytes
from gymloop.generation.vllm.support import Build
from gymloop.weights.fit import check_fits
from gymloop.weights.layout import Entry
from gymloop.weights.source import WeightSource

T = TypeVar("T")
CALL_LIMIT_S = 600.0
"""Of a call to vLLM's processes, a weight update among them."""


class Control:
    """Of one running engine; its methods may be called from any thread but the engine's loop.

    Args:
        llm: vLLM's ``AsyncLLM``.
        loop: where it lives.
        life: of the engine.
        build: which vLLM it is.
        folder: of the model, whose parameters a snapshot must have.
    """

    def __init__(self, llm: Any, loop: LoopThread, life: Life, build: Build, folder: Path) -> None:
        self._llm = llm
        self._loop = loop
        self._life = life
        self._build = build
        self._folder = folder
        self._version = 0
        self._paused = False
        self._skeleton: Any = None
        self._gate = asyncio.Lock()
        self._load_lock = threading.Lock()
        self._weights = SharedBytes("gymloop-weights")

    @property
    def version(self) -> int:
        """Of the weights that the next token will be sampled with."""
        return self._version

    def pause(self, timeout: float) -> None:
        """See ``VllmEngine.pause``."""
        self._call(self._pause(), timeout, "pause", undo=self._resume)

    def resume(self) -> None:
        """See ``VllmEngine.resume``."""
        self._call(self._resume(), CALL_LIMIT_S, "resume")

    def load_weights(self, source: WeightSource, version: int) -> None:
        """See ``VllmEngine.load_weights``."""
        with self._load_lock:
            self._life.require()
            check_fits(source, self._model_skeleton())
            self._weights.reserve(source.nbytes)
            for piece in source.pieces():
                data = piece.values.detach().cpu().contiguous().view(torch.uint8).numpy()
                self._weights.write(piece.entry.offset + piece.first_byte, data)
            self._call(self._update(source.manifest, source.nbytes, version), CALL_LIMIT_S, "weight update")

    def sleep(self, level: int) -> None:
        """See ``VllmEngine.sleep``."""
        self._call(self._llm.sleep(level), CALL_LIMIT_S, "sleep")

    def wake(self, tags: Sequence[str] | None) -> None:
        """See ``VllmEngine.wake``."""
        self._call(self._llm.wake_up(None if tags is None else list(tags)), CALL_LIMIT_S, "wake-up")

    def close(self) -> None:
        """Free the memory that weights arrive in."""
        self._weights.close()
        self._skeleton = None

    async def _pause(self) -> None:
        async with self._gate:
            if not self._paused:
                await self._llm.pause_generation(mode="keep", clear_cache=False)
                self._paused = True

    async def _resume(self) -> None:
        async with self._gate:
            if self._paused:
                await self._llm.resume_generation()
                self._paused = False

    async def _update(self, entries: Sequence[Entry], nbytes: int, version: int) -> None:
        async with self._gate:
            if not self._paused:
                await self._llm.pause_generation(mode="keep", clear_cache=False)
            manifest = [[e.name, e.dtype, list(e.shape), e.offset, e.nbytes] for e in entries]
            arguments = (self._weights.path, nbytes, manifest)
            try:
                await self._llm.collective_rpc("gymloop_load_weights", timeout=CALL_LIMIT_S, args=arguments)
                if not await self._llm.reset_prefix_cache(reset_running_requests=True):
                    raise InfraError("vLLM did not drop the keys and values of the old weights")
                if self._build.stamps_versions:
                    await self._llm.update_weight_version(str(version))
            except BaseException as error:  # half replaced: nothing may be sampled from it any more
                self._life.die(
                    f"the update to weight version {version} failed half way: {type(error).__name__}: {error}"
                )
                raise
            self._version = version
            if not self._paused:
                await self._llm.resume_generation()

    def _call(
        self,
        work: Coroutine[Any, Any, T],
        timeout: float,
        what: str,
        undo: Callable[[], Coroutine[Any, Any, None]] | None = None,
    ) -> T:
        """Run one call to vLLM's processes, ended by their death or after ``timeout`` seconds.

        Args:
            work: the call.
            timeout: seconds.
            what: names it.
            undo: run behind a call that came to its end too late.
        """
        if self._life.over:
            work.close()
            self._life.require()
        call = self._loop.submit(self._life.unless_dead(work))
        try:
            return call.result(timeout)
        except concurrent.futures.TimeoutError as error:
            if undo is not None:
                call.add_done_callback(lambda _: self._loop.submit(undo()))
            raise InfraError(f"the engine's {what} took longer than {timeout:g} s") from error
        except InfraError:
            raise
        except Exception as error:  # vLLM's
            self._life.require()
            raise InfraError(f"the engine's {what} failed: {type(error).__name__}: {error}") from error

    def _model_skeleton(self) -> Any:
        """The model's parameters without memory: their names and shapes are what a snapshot must have."""
        if self._skeleton is None:
            from transformers import AutoConfig, AutoModelForCausalLM

            config = AutoConfig.from_pretrained(str(self._folder), local_files_only=True)
            with torch.device("meta"):
                self._skeleton = AutoModelForCausalLM.from_config(config)
        return self._skeleton
