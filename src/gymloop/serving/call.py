"""One request's samples: every one of them is finished, or is ended in the engine.

The engine knows tokens; here they become text, piece by piece where a client streams or a stop string must be found.
Whatever happens to a request (its client goes away, its time is over, a sibling fails) its samples are aborted.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from dataclasses import dataclass

from gymloop.errors import InfraError
from gymloop.generation.engine import Engine, Sample, Sampling
from gymloop.serving.refusal import ApiError
from gymloop.serving.streaming import Detokenizer, StopSearch

Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True, slots=True)
class Said:
    """A finished sample.

    Attributes:
        sample: its tokens; up to the one that completed a stop string, if one did.
        text: without the end token, and without the stop string and what follows it.
    """

    sample: Sample
    text: str


@dataclass(frozen=True, slots=True)
class Piece:
    """What a sample gained; ``said`` where it is finished, and ``text`` then holds the rest."""

    index: int
    text: str
    token_ids: Sequence[int]
    logprobs: Sequence[float]
    said: Said | None = None


class Call:
    """The samples of one prompt.

    Args:
        engine: samples.
        decode: ids to text.
        held: see ``Detokenizer``.
        prompt_ids: shorter than the engine's context; otherwise the samples are empty.
        samplings: one a sample.
        stop: strings that end a sample.
        request_id: unique.
        timeout_s: for all samples together, seconds.
        listen: whether ``pieces`` will be asked for.
    """

    def __init__(
        self,
        engine: Engine,
        decode: Decode,
        held: Collection[int],
        prompt_ids: Sequence[int],
        samplings: Sequence[Sampling],
        stop: Sequence[str],
        request_id: str,
        timeout_s: float,
        listen: bool,
    ):
        self._engine = engine
        self._decode = decode
        self._prompt_ids = prompt_ids
        self._samplings = samplings
        self._timeout_s = timeout_s
        self._deadline = time.monotonic() + timeout_s
        self._ids = [request_id if index == 0 else f"{request_id}-{index}" for index in range(len(samplings))]
        self._woken = asyncio.Event()
        self._expired = False
        self._listeners = [
            _Listener(decode, {*held, *sampling.stop_token_ids}, stop, self._woken.set, self._stopper(index))
            if listen or stop
            else None
            for index, sampling in enumerate(samplings)
        ]

    async def results(self) -> list[Said]:
        """Every sample, finished.

        Raises:
            ApiError: 504, the time is over.
            InfraError: the engine died, or returned a sample that lacks a logprob.
        """
        tasks = self._start()
        try:
            done, waiting = await asyncio.wait(tasks, timeout=self._left(), return_when=asyncio.FIRST_EXCEPTION)
            said = [task.result() for task in tasks if task in done]
            if waiting:
                raise self._too_late()
            return said
        finally:
            self._end(tasks)

    async def pieces(self) -> AsyncIterator[Piece]:
        """The samples as they grow, pieces that came together joined; the last piece of each is its end.

        Raises:
            ApiError, InfraError: as ``results``.
        """
        tasks = self._start()
        for task in tasks:
            task.add_done_callback(lambda _: self._woken.set())
        open_ones = dict(enumerate(tasks))
        timer = asyncio.get_running_loop().call_later(self._left(), self._expire)
        try:
            while open_ones:
                await self._woken.wait()  # bounded: by the timer
                self._woken.clear()
                if self._expired:
                    raise self._too_late()
                for index, task in list(open_ones.items()):
                    listener = self._listeners[index]
                    if listener is None:
                        raise RuntimeError("pieces were asked for of a call that does not listen")
                    if task.done():
                        said = task.result()
                        yield Piece(index, *listener.take(), said)
                        del open_ones[index]
                    elif listener.gained:
                        yield Piece(index, *listener.take())
        finally:
            timer.cancel()
            self._end(tasks)

    def _start(self) -> list[asyncio.Task[Said]]:
        return [asyncio.ensure_future(self._sample(index)) for index in range(len(self._samplings))]

    async def _sample(self, index: int) -> Said:
        sampling, listener = self._samplings[index], self._listeners[index]
        if len(self._prompt_ids) >= self._engine.max_model_len:
            version = self._engine.weight_version
            return Said(Sample((), (), "length", version, version), "")
        heard = listener.hear if listener else None
        sample = await self._engine.generate(self._prompt_ids, sampling, self._ids[index], heard)
        check_sample(sample)
        if listener:
            return listener.end(sample, sampling.stop_token_ids)
        return Said(sample, said(self._decode, sample.token_ids, sampling.stop_token_ids))

    def _stopper(self, index: int) -> Callable[[], None]:
        return lambda: self._engine.abort(self._ids[index])

    def _expire(self) -> None:
        # A flag and not a look at the clock: timers may fire a little early, and this one fires once.
        self._expired = True
        self._woken.set()

    def _left(self) -> float:
        return max(0.0, self._deadline - time.monotonic())

    def _too_late(self) -> ApiError:
        return ApiError(504, "request_timeout", f"no whole sample within {self._timeout_s:g} s; the request was ended")

    def _end(self, tasks: Sequence[asyncio.Task[Said]]) -> None:
        for task, request_id in zip(tasks, self._ids, strict=True):
            if not task.done():
                self._engine.abort(request_id)
                task.cancel()
            elif not task.cancelled():
                task.exception()  # looked at, for a sibling's failure is the one that is told


class _Listener:
    """Text and tokens of one sample, from the engine's callback to whoever takes them."""

    def __init__(
        self,
        decode: Decode,
        held: Collection[int],
        stop: Sequence[str],
        wake: Callable[[], None],
        abort: Callable[[], None],
    ):
        self._decode = decode
        self._detokenizer = Detokenizer(decode, held)
        self._search = StopSearch(stop) if stop else None
        self._wake = wake
        self._abort = abort
        self._text: list[str] = []
        self._taken = (0, 0)  # pieces of text, tokens
        self._ids: list[int] = []
        self._logprobs: list[float] = []

    @property
    def gained(self) -> bool:
        return self._taken != (len(self._text), len(self._ids))

    def hear(self, ids: Sequence[int], logprobs: Sequence[float]) -> None:
        if self._search is None:
            self._ids += ids
            self._logprobs += logprobs
            self._show(self._detokenizer.feed(ids))
        else:
            # One by one, so that the sample ends with the token that completes the stop string.
            for token, logprob in zip(ids, logprobs, strict=True):
                if self._search.found:
                    break
                self._ids.append(token)
                self._logprobs.append(logprob)
                self._show(self._search.feed(self._detokenizer.feed((token,))))
            if self._search.found:
                self._abort()
        self._wake()

    def end(self, sample: Sample, stop_token_ids: Sequence[int]) -> Said:
        """Settle, whether or not the engine called back."""
        self.hear(sample.token_ids[len(self._ids) :], sample.logprobs[len(self._ids) :])
        whole = said(self._decode, self._ids, stop_token_ids)
        if self._search is not None and not self._search.found:
            self._show(self._search.feed(self._detokenizer.end(whole)))
            if not self._search.found:
                self._show(self._search.end())
        elif self._search is None:
            self._show(self._detokenizer.end(whole))
        if self._search is not None and self._search.found:
            versions = sample.first_version, sample.last_version
            sample = Sample(tuple(self._ids), tuple(self._logprobs), "stop", *versions)
        return Said(sample, "".join(self._text))

    def take(self) -> tuple[str, list[int], list[float]]:
        """What was gained since the last time."""
        texts, tokens = self._taken
        self._taken = len(self._text), len(self._ids)
        return "".join(self._text[texts:]), self._ids[tokens:], self._logprobs[tokens:]

    def _show(self, text: str) -> None:
        if text:
            self._text.append(text)


def said(decode: Decode, token_ids: Sequence[int], stop_token_ids: Sequence[int]) -> str:
    """The text of a sample without the token that ended it."""
    ended = bool(token_ids) and token_ids[-1] in stop_token_ids
    return decode(token_ids[:-1] if ended else token_ids)


def check_sample(sample: Sample) -> None:
    """Every token of a sample has its logprob; none is ever made up.

    Raises:
        InfraError: one is missing, not finite, or positive.
    """
    logprobs = sample.logprobs
    whole = len(sample.token_ids) == len(logprobs) and all(map(math.isfinite, logprobs))
    if not whole or max(logprobs, default=0.0) > 0:
        raise InfraError(
            f"the engine returned {len(sample.token_ids)} tokens and {len(logprobs)} logprobs, "
            "which must be as many, finite and not positive"
        )
