"""The conformance kit: named checks that any engine passes, or whose lack it names.

An engine is given as a ``Subject``: how to make one on a model folder, the folder, how close its numbers are to be, and
its capabilities. The oracle is transformers alone: ``generate``, a full forward and scalar arithmetic in float64. Every
draw has a seed, so an engine that needs one can be checked as well.
"""

from __future__ import annotations

import asyncio
import math
import random
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GenerationConfig

from gymloop.errors import ConfigError, DataError, InfraError
from gymloop.generation.engine import Engine, Sample, Sampling
from gymloop.models.load import load_causal_lm
from gymloop.weights.snapshot import Entry, WeightSnapshot, take

CAPABILITIES = frozenset(
    {
        "abort",
        "filters",  # top-p, top-k, min-p
        "load_weights",
        "on_tokens",
        "pause",
        "penalties",  # repetition, presence, frequency, logit bias
        "seeds",  # a draw that repeats
    }
)
LIMIT_S = 60.0
"""No single wait of a check is longer."""
MAX_LEN = 96
ROWS = 8


@dataclass(frozen=True)
class Subject:
    """An engine under check.

    Attributes:
        make: called with a model folder and keywords max_batch_size, max_model_len and seed.
        folder: a small model that the engine and transformers can both load; its vocabulary below 500 tokens.
        scratch: an empty folder for changed models.
        tolerance: largest difference of a logprob from the reference, nats.
        dtype: the reference is computed in this type.
        capabilities: what of ``CAPABILITIES`` the engine has.
    """

    make: Callable[..., Engine]
    folder: Path
    scratch: Path
    tolerance: float = 1e-4
    dtype: str = "float32"
    capabilities: frozenset[str] = CAPABILITIES
    _engines: list[Engine] = field(default_factory=list)

    @cached_property
    def reference(self) -> Any:
        """The same model in transformers; never changed."""
        return load_causal_lm(self.folder, self.dtype, "cpu")

    @property
    def vocab(self) -> int:
        """Size of the vocabulary."""
        return int(self.reference.get_input_embeddings().weight.shape[0])

    @asynccontextmanager
    async def fresh(self, folder: Path | None = None, **settings: Any) -> AsyncIterator[Engine]:
        """An engine of its own, closed afterwards."""
        kwargs = {"max_batch_size": ROWS, "max_model_len": MAX_LEN, "seed": 0, **settings}
        engine = await asyncio.to_thread(self.make, folder or self.folder, **kwargs)
        try:
            yield engine
        finally:
            await asyncio.to_thread(engine.close)

    def shared(self) -> Engine:
        """An engine that all checks of this subject share: no check that uses it changes it for good."""
        if not self._engines:
            self._engines.append(self.make(self.folder, max_batch_size=ROWS, max_model_len=MAX_LEN, seed=0))
        return self._engines[0]

    def close(self) -> None:
        """Close the shared engine."""
        while self._engines:
            self._engines.pop().close()

    def prompts(self, count: int, low: int, high: int, seed: int = 0) -> list[list[int]]:
        """Random prompts of ``low`` to ``high`` tokens."""
        rng = random.Random(seed)
        return [[rng.randrange(self.vocab) for _ in range(rng.randint(low, high))] for _ in range(count)]


@dataclass(frozen=True)
class Check:
    """One named check and the capabilities it needs."""

    name: str
    needs: frozenset[str]
    body: Callable[[Subject], Awaitable[None]]

    async def run(self, subject: Subject) -> None:
        """Run it, or report by name what the engine lacks."""
        unknown = subject.capabilities - CAPABILITIES
        if unknown:
            raise ValueError(f"unknown capabilities {sorted(unknown)}; known are {sorted(CAPABILITIES)}")
        lacking = self.needs - subject.capabilities
        if lacking:
            pytest.skip(f"{self.name}: the engine lacks {', '.join(sorted(lacking))}")
        await self.body(subject)


CHECKS: dict[str, Check] = {}


def check(*needs: str) -> Callable[[Callable[[Subject], Awaitable[None]]], Callable[[Subject], Awaitable[None]]]:
    """Register a check under its function's name."""

    def register(body: Callable[[Subject], Awaitable[None]]) -> Callable[[Subject], Awaitable[None]]:
        CHECKS[body.__name__] = Check(body.__name__, frozenset(needs), body)
        return body

    return register


# ------------------------------------------------------------------ the oracle


def generated(model: Any, prompt: Sequence[int], new_tokens: int) -> list[int]:
    """Greedy tokens of transformers' ``generate``."""
    config = GenerationConfig(max_new_tokens=new_tokens, do_sample=False, eos_token_id=None, pad_token_id=0)
    model.generation_config = GenerationConfig()  # nothing of the folder's may reach the reference
    ids = torch.tensor([list(prompt)])
    return model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)[0, len(prompt) :].tolist()


@torch.no_grad()
def full_logits(model: Any, prompt: Sequence[int], sampled: Sequence[int]) -> torch.Tensor:
    """Float64 logits [len(sampled), vocab] that predict each sampled token, from one full forward."""
    logits = model(input_ids=torch.tensor([[*prompt, *sampled]]), use_cache=False).logits[0].double()
    return logits[len(prompt) - 1 : len(prompt) + len(sampled) - 1]


def distribution(logits: torch.Tensor, sampling: Sampling, prompt: Sequence[int], before: Sequence[int]) -> list[float]:
    """Probability of every token, one scalar at a time, as ``Sampling`` documents it."""
    z = logits.tolist()
    for token, bias in (sampling.logit_bias or {}).items():
        z[token] += bias
    for token in {*prompt, *before}:
        z[token] *= 1 / sampling.repetition_penalty if z[token] > 0 else sampling.repetition_penalty
    for token in set(before):
        z[token] -= sampling.presence_penalty + sampling.frequency_penalty * list(before).count(token)
    z = [value / (sampling.temperature or 1.0) for value in z]
    order = sorted(range(len(z)), key=lambda token: -z[token])
    kept = set(order)
    if sampling.temperature > 0:
        kept = {token for token in order if math.exp(z[token] - z[order[0]]) >= sampling.min_p}
        kept = {token for rank, token in enumerate(order) if token in kept and rank < (sampling.top_k or len(z))}
        mass, total = 0.0, sum(math.exp(z[token]) for token in kept)
        nucleus = set()
        for token in (token for token in order if token in kept):
            if mass < sampling.top_p * total:
                nucleus.add(token)
            mass += math.exp(z[token])
        kept = nucleus
    total = sum(math.exp(z[token]) for token in kept)
    return [math.exp(z[token]) / total if token in kept else 0.0 for token in range(len(z))]


def check_greedy(subject: Subject, model: Any, prompt: Sequence[int], sample: Sample, new_tokens: int) -> None:
    """The sample is what ``generate`` gives; a first difference counts only beyond what the tolerance explains."""
    expected = generated(model, prompt, new_tokens)
    found = list(sample.token_ids)
    if found != expected:
        at = next(index for index, pair in enumerate(zip(found, expected, strict=True)) if pair[0] != pair[1])
        logprobs = full_logits(model, prompt, expected)[at].log_softmax(-1)
        margin = float(logprobs[expected[at]] - logprobs[found[at]])
        assert margin < 2 * subject.tolerance, f"token {at} is {found[at]}, generate gives {expected[at]}"
    check_logprobs(subject, model, prompt, sample, Sampling(1))


def check_logprobs(subject: Subject, model: Any, prompt: Sequence[int], sample: Sample, sampling: Sampling) -> None:
    """Every reported logprob is the log of the probability under ``distribution``."""
    assert len(sample.token_ids) == len(sample.logprobs)
    assert all(-math.inf < logprob <= 0 for logprob in sample.logprobs)
    for index, logits in enumerate(full_logits(model, prompt, sample.token_ids)):
        probability = distribution(logits, sampling, prompt, sample.token_ids[:index])[sample.token_ids[index]]
        assert probability > 0, f"token {index} ({sample.token_ids[index]}) is outside the filters' set"
        assert sample.logprobs[index] == pytest.approx(math.log(probability), abs=subject.tolerance)


async def soon(awaitable: Awaitable[Any]) -> Any:
    """Wait, but not for ever."""
    return await asyncio.wait_for(awaitable, LIMIT_S)


async def join_at_random_times(
    engine: Engine, prompts: Sequence[Sequence[int]], samplings: Sequence[Sampling], within_s: float = 0.2
) -> list[Sample]:
    """Requests that come one after the other while others run."""
    rng = random.Random(1)

    async def one(index: int) -> Sample:
        await asyncio.sleep(rng.random() * within_s)
        return await engine.generate(prompts[index], samplings[index], f"joins {index}")

    return await soon(asyncio.gather(*(one(index) for index in range(len(prompts)))))


class Gate:
    """An ``on_tokens`` that says when the first tokens are there, and how many have come."""

    def __init__(self) -> None:
        self.open = asyncio.Event()
        self.count = 0

    def __call__(self, ids: Sequence[int], logprobs: Sequence[float]) -> None:
        self.count += len(ids)
        self.open.set()


# ------------------------------------------------------------------ what is sampled


@check()
async def greedy_equals_generate_when_requests_join_at_random_times(subject: Subject) -> None:
    prompts = subject.prompts(12, 1, 50)
    samples = await join_at_random_times(subject.shared(), prompts, [Sampling(12, temperature=0)] * len(prompts))
    for prompt, sample in zip(prompts, samples, strict=True):
        check_greedy(subject, subject.reference, prompt, sample, 12)


@check("seeds")
async def f07_logprobs_equal_a_full_forward_at_temperature_1(subject: Subject) -> None:
    prompts = subject.prompts(8, 1, 40, seed=1)
    samplings = [Sampling(12, seed=seed) for seed in range(8)]
    samples = await join_at_random_times(subject.shared(), prompts, samplings)
    for prompt, sample in zip(prompts, samples, strict=True):
        assert len(sample.token_ids) == 12
        check_logprobs(subject, subject.reference, prompt, sample, Sampling(1))
    assert len({sample.token_ids for sample in samples}) == len(samples)


@check("seeds", "filters")
async def logprobs_are_of_the_distribution_after_temperature_and_filters(subject: Subject) -> None:
    samplings = [
        Sampling(10, seed=1, temperature=0.6),
        Sampling(10, seed=2, temperature=1.7),
        Sampling(10, seed=3, top_k=3),
        Sampling(10, seed=4, top_p=0.5),
        Sampling(10, seed=5, min_p=0.2),
        Sampling(10, seed=6, temperature=1.4, top_p=0.8, top_k=9, min_p=0.02),
        Sampling(10, seed=7),
    ]
    prompts = subject.prompts(len(samplings), 2, 30, seed=2)
    for prompt, sampling, sample in zip(
        prompts, samplings, await join_at_random_times(subject.shared(), prompts, samplings, 0), strict=True
    ):
        check_logprobs(subject, subject.reference, prompt, sample, sampling)


@check("seeds", "penalties")
async def logprobs_are_of_the_distribution_after_bias_and_penalties(subject: Subject) -> None:
    samplings = [
        Sampling(12, seed=1, repetition_penalty=1.3),
        Sampling(12, seed=2, presence_penalty=1.5),
        Sampling(12, seed=3, frequency_penalty=-1.5),
        Sampling(12, seed=4, logit_bias={3: 9.0, 5: -100.0}),
        Sampling(12, temperature=0, repetition_penalty=2.0, frequency_penalty=1.0, logit_bias={1: 2.0}),
        Sampling(12, seed=6),
    ]
    prompts = subject.prompts(len(samplings), 2, 30, seed=3)
    for prompt, sampling, sample in zip(
        prompts, samplings, await join_at_random_times(subject.shared(), prompts, samplings, 0), strict=True
    ):
        check_logprobs(subject, subject.reference, prompt, sample, sampling)


@check("seeds")
async def draws_follow_the_distribution(subject: Subject) -> None:
    prompt = subject.prompts(1, 9, 9, seed=4)[0]
    sampling = Sampling(1, temperature=1.3, top_p=0.95)
    probabilities = distribution(full_logits(subject.reference, prompt, [0])[0], sampling, prompt, [])
    draws = 800
    engine = subject.shared()
    samples = await soon(
        asyncio.gather(
            *(
                engine.generate(prompt, Sampling(1, temperature=1.3, top_p=0.95, seed=seed), f"draw {seed}")
                for seed in range(draws)
            )
        )
    )
    counts = [0] * subject.vocab
    for sample in samples:
        counts[sample.token_ids[0]] += 1
    # Pearson's chi-square; cells with fewer than five expected draws are one cell together.
    cells = [(count, draws * p) for count, p in zip(counts, probabilities, strict=True) if draws * p >= 5]
    rest = (draws - sum(cell[0] for cell in cells), draws - sum(cell[1] for cell in cells))
    cells += [rest] if rest[1] >= 5 else []
    statistic = sum((found - expected) ** 2 / expected for found, expected in cells)
    freedom = max(1, len(cells) - 1)
    # Wilson and Hilferty's normal approximation; 4.5 standard deviations are 3 in a million.
    deviation = ((statistic / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / math.sqrt(2 / (9 * freedom))
    assert len(cells) > 3
    assert deviation < 4.5
    assert all(probability > 0 for count, probability in zip(counts, probabilities, strict=True) if count)


@check("seeds")
async def a_seed_or_key_repeats_its_draw_in_any_company(subject: Subject) -> None:
    engine = subject.shared()
    prompt = subject.prompts(1, 12, 12, seed=5)[0]
    wanted = [
        Sampling(12, seed=3),
        Sampling(12, seed=4),
        Sampling(12, noise_key="g/0/0"),
        Sampling(12, noise_key="g/1/0"),
    ]
    alone = [await soon(engine.generate(prompt, sampling, f"alone {i}")) for i, sampling in enumerate(wanted)]
    crowd = subject.prompts(6, 2, 40, seed=6)
    samples = await join_at_random_times(
        engine, [prompt] * len(wanted) + crowd, [*wanted, *(Sampling(12, seed=100 + i) for i in range(len(crowd)))]
    )
    for lone, again in zip(alone, samples, strict=False):
        assert again.token_ids == lone.token_ids
        assert again.logprobs == pytest.approx(lone.logprobs, abs=subject.tolerance)
    assert len({sample.token_ids for sample in alone}) == len(wanted)


@check()
async def concurrent_requests_equal_lone_ones(subject: Subject) -> None:
    engine = subject.shared()
    prompts = subject.prompts(10, 1, 40, seed=7)
    greedy = Sampling(12, temperature=0)
    together = await join_at_random_times(engine, prompts, [greedy] * len(prompts))
    for index, (prompt, sample) in enumerate(zip(prompts, together, strict=True)):
        lone = await soon(engine.generate(prompt, greedy, f"lone {index}"))
        assert lone.token_ids == sample.token_ids
        assert lone.logprobs == pytest.approx(sample.logprobs, abs=subject.tolerance)


@check("seeds")
async def exact_carry_a_second_turn_on_the_sampled_ids_reads_as_a_fresh_engine_does(subject: Subject) -> None:
    prompt = subject.prompts(1, 30, 30, seed=8)[0]
    engine = subject.shared()
    first = await soon(engine.generate(prompt, Sampling(12, seed=1), "turn 1"))
    second_prompt = [*prompt, *first.token_ids, 5, 6, 7]
    greedy = Sampling(12, temperature=0)
    second = await soon(engine.generate(second_prompt, greedy, "turn 2"))
    check_greedy(subject, subject.reference, second_prompt, second, 12)
    async with subject.fresh() as other:
        expected = await soon(other.generate(second_prompt, greedy, "turn 2"))
    assert second.token_ids == expected.token_ids
    assert second.logprobs == pytest.approx(expected.logprobs, abs=subject.tolerance)


# ------------------------------------------------------------------ where a sample ends


@check()
async def any_of_several_end_tokens_ends_the_sample_and_is_part_of_it(subject: Subject) -> None:
    prompt = subject.prompts(1, 10, 10, seed=9)[0]
    free = generated(subject.reference, prompt, 16)
    unused = next(token for token in range(subject.vocab) if token not in free)
    for end in (free[5], free[11]):
        for stops in ((unused, end), (end, unused)):
            sampling = Sampling(16, temperature=0, stop_token_ids=stops)
            sample = await soon(subject.shared().generate(prompt, sampling, "ends"))
            assert sample.finish_reason == "stop"
            assert list(sample.token_ids) == free[: free.index(end) + 1]
            assert len(sample.logprobs) == len(sample.token_ids)


@check()
async def max_new_tokens_is_the_length_of_a_sample_that_nothing_ends(subject: Subject) -> None:
    for count in (1, 2, 7):
        sample = await soon(subject.shared().generate([1, 2], Sampling(count, temperature=0), "length"))
        assert (len(sample.token_ids), sample.finish_reason) == (count, "length")


@check()
async def a11_prompts_around_the_context_limit_end_with_length(subject: Subject) -> None:
    engine = subject.shared()
    assert engine.max_model_len == MAX_LEN
    for length, room in ((MAX_LEN - 3, 3), (MAX_LEN - 1, 1), (MAX_LEN, 0), (MAX_LEN + 1, 0), (3 * MAX_LEN, 0)):
        prompt = subject.prompts(1, length, length, seed=length)[0]
        sample = await soon(engine.generate(prompt, Sampling(20, temperature=0), f"limit {length}"))
        assert sample.finish_reason == "length"
        if not room:
            assert sample == Sample((), (), "length", engine.weight_version, engine.weight_version)
        else:
            assert len(sample.token_ids) == room
            check_greedy(subject, subject.reference, prompt, sample, room)


@check()
async def wrong_input_is_refused_by_name_and_costs_nobody_else(subject: Subject) -> None:
    engine = subject.shared()
    other = asyncio.create_task(engine.generate([1, 2, 3], Sampling(12, temperature=0), "other"))
    for sampling in (
        Sampling(0),
        Sampling(1, temperature=-1),
        Sampling(1, temperature=math.nan),
        Sampling(1, top_p=0),
        Sampling(1, top_k=0),
        Sampling(1, min_p=2),
        Sampling(1, repetition_penalty=0),
        Sampling(1, presence_penalty=3),
        Sampling(1, frequency_penalty=-3),
        Sampling(1, logit_bias={1: 101}),
        Sampling(1, logit_bias={subject.vocab: 1.0}),
    ):
        with pytest.raises(ConfigError, match=r"expected|ids are"):
            await engine.generate([1], sampling, "wrong")
    for prompt in ([], [-1], [1, subject.vocab]):
        with pytest.raises(DataError, match="'wrong'"):
            await engine.generate(prompt, Sampling(1, temperature=0), "wrong")
    assert len((await soon(other)).token_ids) == 12


@check("abort", "pause", "on_tokens")
async def abort_before_while_and_after(subject: Subject) -> None:
    engine = subject.shared()
    prompt = subject.prompts(1, 10, 10, seed=10)[0]
    greedy = Sampling(MAX_LEN, temperature=0)
    engine.abort("never seen")

    await asyncio.to_thread(engine.pause, LIMIT_S)
    waiting = asyncio.create_task(engine.generate(prompt, greedy, "before"))
    await asyncio.sleep(0.02)
    engine.abort("before")
    engine.resume()
    before = await soon(waiting)
    assert (before.token_ids, before.logprobs, before.finish_reason) == ((), (), "abort")

    gate = Gate()
    running = asyncio.create_task(engine.generate(prompt, greedy, "while", gate))
    await soon(gate.open.wait())
    engine.abort("while")
    sample = await soon(running)
    if sample.finish_reason != "length":  # a fast engine may have been done
        assert sample.finish_reason == "abort"
        assert 0 < len(sample.token_ids) == len(sample.logprobs) < MAX_LEN - len(prompt)
    assert gate.count == len(sample.token_ids)
    assert list(sample.token_ids) == generated(subject.reference, prompt, len(sample.token_ids))

    engine.abort("while")
    assert len((await soon(engine.generate(prompt, Sampling(3, temperature=0), "while"))).token_ids) == 3


@check("on_tokens")
async def cancelling_frees_the_slot_and_the_id(subject: Subject) -> None:
    engine = subject.shared()
    greedy = Sampling(MAX_LEN, temperature=0)
    for _ in range(3):
        gates = [Gate() for _ in range(ROWS)]
        tasks = [
            asyncio.create_task(engine.generate([i + 1, 2], greedy, f"cancelled {i}", gate))
            for i, gate in enumerate(gates)
        ]
        await soon(gates[0].open.wait())
        for task in tasks:
            task.cancel()
        results = await soon(asyncio.gather(*tasks, return_exceptions=True))
        assert all(isinstance(result, asyncio.CancelledError | Sample) for result in results)
    again = [engine.generate([i + 1, 2], Sampling(4, temperature=0), f"cancelled {i}") for i in range(ROWS)]
    assert [len(sample.token_ids) for sample in await soon(asyncio.gather(*again))] == [4] * ROWS


# ------------------------------------------------------------------ while it runs


@check("on_tokens", "seeds")
async def pieces_join_to_the_sample_on_the_callers_loop(subject: Subject) -> None:
    engine = subject.shared()
    mine = threading.get_ident()
    pieces: list[tuple[list[int], list[float]]] = []

    def collect(ids: Sequence[int], logprobs: Sequence[float]) -> None:
        assert threading.get_ident() == mine
        assert len(ids) == len(logprobs) > 0
        pieces.append((list(ids), list(logprobs)))

    sample = await soon(engine.generate([1, 2, 3], Sampling(20, seed=1), "streams", collect))
    seen = len(pieces)
    assert tuple(token for ids, _ in pieces for token in ids) == sample.token_ids
    assert tuple(logprob for _, logprobs in pieces for logprob in logprobs) == sample.logprobs
    await asyncio.sleep(0.02)
    assert len(pieces) == seen


@check("on_tokens")
async def what_on_tokens_raises_ends_its_request_alone(subject: Subject) -> None:
    engine = subject.shared()

    def breaks(ids: Sequence[int], logprobs: Sequence[float]) -> None:
        raise LookupError("the reader went away")

    for _ in range(2):
        other = asyncio.create_task(engine.generate([4, 5], Sampling(12, temperature=0), "other"))
        calls = [
            engine.generate([i, 2], Sampling(MAX_LEN, temperature=0), f"breaks {i}", breaks) for i in range(ROWS + 2)
        ]
        results = await soon(asyncio.gather(*calls, return_exceptions=True))
        assert all(isinstance(result, LookupError) for result in results)
        assert len((await soon(other)).token_ids) == 12


@check("pause", "on_tokens")
async def requests_wait_through_a_pause_and_keep_their_state(subject: Subject) -> None:
    engine = subject.shared()
    prompt = subject.prompts(1, 10, 10, seed=11)[0]
    count = MAX_LEN - len(prompt)
    gate = Gate()
    task = asyncio.create_task(engine.generate(prompt, Sampling(count, temperature=0), "pauses", gate))
    await soon(gate.open.wait())
    await asyncio.to_thread(engine.pause, LIMIT_S)
    await asyncio.to_thread(engine.pause, LIMIT_S)  # a second one changes nothing
    await asyncio.sleep(0.02)
    at_pause = gate.count
    late = asyncio.create_task(engine.generate(prompt, Sampling(2, temperature=0), "comes late"))
    await asyncio.sleep(0.05)
    assert gate.count == at_pause
    assert not late.done()
    engine.resume()
    check_greedy(subject, subject.reference, prompt, await soon(task), count)
    assert len((await soon(late)).token_ids) == 2


@check("pause")
async def a_pause_that_comes_too_late_leaves_the_engine_running(subject: Subject) -> None:
    engine = subject.shared()
    tasks = [asyncio.create_task(engine.generate([i], Sampling(40, temperature=0), f"r {i}")) for i in range(4)]
    await asyncio.sleep(0.01)
    try:
        await asyncio.to_thread(engine.pause, 0.0)
    except InfraError as error:
        assert "pause" in str(error)  # noqa: PT017  (an engine between two steps pauses in no time at all)
    else:
        engine.resume()
    assert [len(sample.token_ids) for sample in await soon(asyncio.gather(*tasks))] == [40] * 4


@check()
async def close_in_flight_raises_infra_error_by_name(subject: Subject) -> None:
    async with subject.fresh(max_model_len=MAX_LEN) as engine:
        calls = [engine.generate([i], Sampling(MAX_LEN, temperature=0), f"lost {i}") for i in range(30)]
        tasks = [asyncio.create_task(call) for call in calls]
        await asyncio.sleep(0.02)
        await soon(asyncio.to_thread(engine.close))
        results = await soon(asyncio.gather(*tasks, return_exceptions=True))
        lost = [(index, result) for index, result in enumerate(results) if not isinstance(result, Sample)]
        assert lost, "thirty requests for eight rows were done before close"
        for index, result in lost:
            assert isinstance(result, InfraError)
            assert f"'lost {index}'" in str(result)
        with pytest.raises(InfraError, match="clos"):
            await engine.generate([1], Sampling(1, temperature=0), "late")


# ------------------------------------------------------------------ weights


def changed(subject: Subject, name: str, amount: float) -> tuple[Path, WeightSnapshot]:
    """A model that differs in every parameter, in a folder and as a snapshot."""
    model = load_causal_lm(subject.folder, subject.dtype, "cpu")
    generator = torch.Generator().manual_seed(len(name))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += amount * torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
    folder = subject.scratch / name
    model.save_pretrained(folder)
    return folder, take(model.named_parameters())


def current(subject: Subject) -> WeightSnapshot:
    """The weights that the subject's engines start with."""
    return take(subject.reference.named_parameters())


@check("load_weights")
async def new_weights_answer_as_a_fresh_engine_on_them_and_again_after_a_second_sync(subject: Subject) -> None:
    prompts = subject.prompts(4, 5, 40, seed=12)
    greedy = [Sampling(12, temperature=0)] * len(prompts)
    before = await join_at_random_times(subject.shared(), prompts, greedy, 0)
    async with subject.fresh() as engine:
        for version, name in ((7, "first"), (8, "second")):
            folder, snapshot = changed(subject, name, 0.1)
            await asyncio.to_thread(engine.load_weights, snapshot, version)
            assert engine.weight_version == version
            found = await join_at_random_times(engine, prompts, greedy, 0)
            async with subject.fresh(folder) as fresh:
                expected = await join_at_random_times(fresh, prompts, greedy, 0)
            for ours, theirs in zip(found, expected, strict=True):
                assert ours.token_ids == theirs.token_ids
                assert ours.logprobs == pytest.approx(theirs.logprobs, abs=subject.tolerance)
                assert (ours.first_version, ours.last_version) == (version, version)
            change = [abs(new.logprobs[0] - old.logprobs[0]) for new, old in zip(found, before, strict=True)]
            assert min(change) > min(10 * subject.tolerance, 1e-3), "the weights had no effect"
            before = found


@check("load_weights", "seeds")
async def the_same_weights_again_change_nothing(subject: Subject) -> None:
    prompt = subject.prompts(1, 30, 30, seed=13)[0]
    samplings = [Sampling(12, temperature=0), Sampling(12, seed=1), Sampling(12, noise_key="g/0/0")]
    async with subject.fresh() as engine:
        before = [await soon(engine.generate(prompt, sampling, "r")) for sampling in samplings]
        await asyncio.to_thread(engine.load_weights, current(subject), 5)
        after = [await soon(engine.generate(prompt, sampling, "r")) for sampling in samplings]
    for old, new in zip(before, after, strict=True):
        assert new.token_ids == old.token_ids
        assert new.logprobs == pytest.approx(old.logprobs, abs=subject.tolerance)
        assert (old.last_version, new.first_version) == (0, 5)


@check("load_weights", "pause", "on_tokens")
async def a_sample_names_the_versions_of_its_first_and_last_token(subject: Subject) -> None:
    prompt = subject.prompts(1, 10, 10, seed=14)[0]
    _, snapshot = changed(subject, "mid", 0.1)
    async with subject.fresh() as engine:
        count = MAX_LEN - len(prompt)
        for _ in range(5):  # a busy machine may come back to this loop only when the engine is through
            gate = Gate()
            task = asyncio.create_task(engine.generate(prompt, Sampling(count, temperature=0), "spans", gate))
            await soon(gate.open.wait())
            await asyncio.to_thread(engine.pause, LIMIT_S)
            if not (await asyncio.wait({task}, timeout=0.1))[0]:
                break
            engine.resume()
        assert not task.done(), "the engine sampled a whole context before it could be paused"
        await asyncio.to_thread(engine.load_weights, snapshot, 3)
        engine.resume()
        sample = await soon(task)
        assert (sample.first_version, sample.last_version) == (0, 3)
        empty = await soon(engine.generate([1] * MAX_LEN, Sampling(1, temperature=0), "empty"))
        assert (empty.first_version, empty.last_version) == (3, 3)


@check("load_weights")
async def a_snapshot_that_does_not_fit_is_refused_and_changes_nothing(subject: Subject) -> None:
    _, whole = changed(subject, "refused", 1.0)
    last = whole.manifest[-1]
    turned = Entry(last.name, last.dtype, (*last.shape, 1), last.offset, last.nbytes)
    stranger = Entry("no.such.parameter", last.dtype, last.shape, last.offset, last.nbytes)
    half = whole.manifest[: len(whole.manifest) // 2]
    engine = subject.shared()
    prompt = subject.prompts(1, 20, 20, seed=15)[0]
    greedy = Sampling(12, temperature=0)
    before = await soon(engine.generate(prompt, greedy, "before"))
    for manifest, named in (
        (half, whole.manifest[len(half)].name),
        ((*whole.manifest[:-1], turned), last.name),
        ((*whole.manifest, stranger), stranger.name),
        ((*whole.manifest, whole.manifest[0]), whole.manifest[0].name),
    ):
        with pytest.raises(ConfigError, match=named.replace(".", r"\.")):
            await asyncio.to_thread(engine.load_weights, WeightSnapshot(manifest, whole.buffer), 9)
    after = await soon(engine.generate(prompt, greedy, "after"))
    assert after.token_ids == before.token_ids
    assert after.logprobs == pytest.approx(before.logprobs, abs=subject.tolerance)
    assert (after.last_version, engine.weight_version) == (0, 0)
