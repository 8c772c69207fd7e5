"""What an engine is told beside requests: to stand still, to take weights, to sleep.

Nothing is sampled from half replaced weights: the scheduler stands still while they change, cached keys and values of
the old weights are dropped and computed again, and after an update that failed half way every request is refused until
another one is complete; where none can mend it, the engine is dead. Every call ends by its time or by the death of
vLLM's processes, and an engine that did not answer in its time is dead: nobody knows what it will still do. Only a
pause may come too late.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import dataclasses
import functools
import math
import threading
from collections.abc import Callable, Coroutine, Sequence
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any, TypeVar

import torch

from gymloop.errors import ConfigError, GymloopError, InfraError
from gymloop.generation.vllm.event_loop import LoopThread
from gymloop.generation.vllm.life import Life
from gymloop.generation.vllm.support import Build
from gymloop.weights.fit import Described, check_fits
from gymloop.weights.offer import Offer, SyncAborted
from gymloop.weights.receiver import WeightReceiver
from gymloop.weights.shared import SharedSender
from gymloop.weights.source import WeightSource

T = TypeVar("T")
CALL_LIMIT_S = 600.0
"""Of a call to vLLM's processes that is no weight update."""
STALLS = 3
"""A transport gives up on itself first: it may stall where its parties meet, as they connect, and on the way."""
SLOWEST_BYTES_PER_S = 1e8
"""At which weights arrive and are loaded: that of a network of 1 Gbit/s."""
LOCAL_STALL_S = 60.0
"""Of weights that are in this host's memory already; no recipe may call a healthy engine stuck sooner."""
SETTLED_S = 5.0
"""A call ends by then, once its engine is dead."""
KV_CACHE = "kv_cache"
"""vLLM's tag of it; weights are woken before."""
FORGETS_WEIGHTS = 2
"""vLLM's level of sleep that keeps nothing."""
_KINDS: dict[str, type[GymloopError]] = {kind.__name__: kind for kind in (ConfigError, InfraError, SyncAborted)}


class _UpdateFailed(Exception):
    """An update failed, and the engine lives: with its old weights, or until the next one with none."""

    def __init__(self, told: GymloopError) -> None:
        super().__init__(str(told))
        self.told = told


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
        self._asleep = False
        self._skeleton: Any = None
        self._gate = asyncio.Lock()
        self._load_lock = threading.Lock()
        self._copy = SharedSender()

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

    def take_weights(self, offer: Offer, version: int, first_rank: int) -> None:
        """See ``VllmEngine.take_weights``."""
        self._replace(offer, version, first_rank, functools.partial(self._light, offer, version, first_rank))

    def load_weights(self, source: WeightSource, version: int) -> None:
        """See ``VllmEngine.load_weights``."""
        self._replace(source, version, 1, functools.partial(self._copy.copied, source, version, LOCAL_STALL_S))

    def _replace(self, weights: Described, version: int, first_rank: int, offered: Callable[[], Offer]) -> None:
        """One update, once it is known that the weights fit; ``offered`` makes of them what vLLM's processes take."""
        with self._load_lock:
            self._life.require()
            check_fits(weights, self._model_skeleton())
            offer = offered()
            limit = update_limit_s(offer)
            self._call(self._update(offer, version, first_rank), limit, f"update to weight version {version}")

    def _light(self, offer: Offer, version: int, first_rank: int) -> Offer:
        """The same weights, in an offer that can be handed on."""
        if offer.carrier.light:
            return offer
        with offer.carrier.opened(offer, WeightReceiver("cpu"), first_rank) as source:
            copy = self._copy.copied(source, version, offer.stall_s)
        return dataclasses.replace(copy, checksums=offer.checksums)

    def sleep(self, level: int) -> None:
        """See ``VllmEngine.sleep``."""
        self._call(self._sleep(level), CALL_LIMIT_S, "sleep")

    def wake(self, tags: Sequence[str] | None) -> None:
        """See ``VllmEngine.wake``."""
        self._call(self._wake(tags), CALL_LIMIT_S, "wake-up")

    def close(self) -> None:
        """Free the memory that weights arrive in."""
        self._copy.close()
        self._skeleton = None

    async def _pause(self) -> None:
        async with self._gate:
            if not self._paused:
                await self._llm.pause_generation(mode="keep", clear_cache=False)
                self._paused = True

    async def _resume(self) -> None:
        async with self._gate:
            if self._paused:
                self._paused = False
                await self._go_on()

    async def _go_on(self) -> None:
        """Not while the KV cache is away: a step would write to memory that is not there. Its wake-up resumes vLLM."""
        if not (self._paused or self._asleep):
            await self._llm.resume_generation()

    async def _wake(self, tags: Sequence[str] | None) -> None:
        await self._llm.wake_up(None if tags is None else list(tags))
        if tags is None or KV_CACHE in tags:
            self._asleep = False

    async def _sleep(self, level: int) -> None:
        self._asleep = True
        await self._llm.sleep(level)
        if level == FORGETS_WEIGHTS:
            self._life.lose_weights("they were forgotten when it was put to sleep, and none have come since")

    async def _update(self, offer: Offer, version: int, first_rank: int) -> None:
        async with self._gate:
            if not self._paused:
                await self._llm.pause_generation(mode="keep", clear_cache=False)
            arguments = (bytes(ForkingPickler.dumps(offer)), version, first_rank)
            try:
                await self._take(arguments, version)
                if not await self._llm.reset_prefix_cache(reset_running_requests=True):
                    raise InfraError("vLLM did not drop the keys and values of the old weights")
                if self._build.stamps_versions:
                    await self._llm.update_weight_version(str(version))
            except _UpdateFailed as error:
                await self._go_on()
                raise error.told from None
            except BaseException as error:  # nobody knows what the weights are now
                self._life.die(f"{_half_way(version)}: {type(error).__name__}: {error}")
                raise
            self._version = version
            self._life.have_weights()
            await self._go_on()

    async def _take(self, arguments: tuple[Any, ...], version: int) -> None:
        """Have every process take the offer.

        Raises:
            _UpdateFailed: the weights are the old ones, or the next update can mend them.
            InfraError: they are lost.
        """
        outcomes = await self._llm.collective_rpc("gymloop_take_weights", args=arguments)
        failures = [outcome for outcome in outcomes if outcome is not None]
        if not failures:
            return
        kind, text, _ = next((one for one in failures if one[0] != SyncAborted.__name__), failures[0])
        error = _KINDS.get(kind, InfraError)(text if kind in _KINDS else f"{kind}: {text}")
        damages = {damage for _, _, damage in failures}
        if "lost" in damages:
            raise error
        if "half" in damages or len(failures) < len(outcomes):
            self._life.lose_weights(f"{_half_way(version)}: {error}")
        raise _UpdateFailed(error)

    def _call(
        self,
        work: Coroutine[Any, Any, T],
        timeout: float,
        what: str,
        undo: Callable[[], Coroutine[Any, Any, None]] | None = None,
    ) -> T:
        """Run one call to vLLM's processes, ended by their death.

        Args:
            work: the call.
            timeout: seconds, after which the engine is dead of it, unless the call can be undone.
            what: names it.
            undo: run behind a call that came to its end too late.
        """
        if self._life.over:
            work.close()
            self._life.require()
        call = self._loop.submit(self._life.unless_dead(work))
        if not concurrent.futures.wait([call], timeout=timeout).done:
            late = f"{what} took longer than {timeout:g} s"
            if undo is not None:
                call.add_done_callback(lambda _: self._loop.submit(undo()))
            else:
                self._loop.soon(self._life.die, f"its {late}")
                concurrent.futures.wait([call], timeout=SETTLED_S)  # so that whoever asks next is told of a death
                self._life.require()
            raise InfraError(f"the engine's {late}")
        try:
            return call.result(0)
        except GymloopError:
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


def update_limit_s(offer: Offer) -> int:
    """Seconds within which vLLM's processes have an offer's weights, or have said why not."""
    return math.ceil(STALLS * max(offer.stall_s, LOCAL_STALL_S) + offer.nbytes / SLOWEST_BYTES_PER_S)


def _half_way(version: int) -> str:
    return f"the update to weight version {version} failed half way"
