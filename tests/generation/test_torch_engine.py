"""The embedded engine against transformers itself: same tokens, same logprobs, and nothing ever hangs."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GenerationConfig,
    GPT2Config,
    GptOssConfig,
    LlamaConfig,
    MambaConfig,
    MistralConfig,
    Phi3Config,
    Qwen3Config,
    Qwen3NextConfig,
)

from gymloop import compat
from gymloop.errors import ConfigError, DataError, InfraError
from gymloop.generation import decoder, kv_cache
from gymloop.generation.engine import Sample, Sampling
from gymloop.generation.torch_engine import TorchEngine
from gymloop.models.load import load_causal_lm
from gymloop.weights.snapshot import Entry, WeightSnapshot, take

VOCAB = 97
SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.4,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
FAMILIES = {
    "llama": LlamaConfig(**SMALL),
    "llama-tied": LlamaConfig(**SMALL, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**SMALL, head_dim=16),
    "mistral-window": MistralConfig(**SMALL, head_dim=8, sliding_window=8),
    "gemma3-window": Gemma3TextConfig(
        **SMALL, head_dim=8, sliding_window=8, layer_types=["sliding_attention", "full_attention"]
    ),
    "gpt2": GPT2Config(vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=512, initializer_range=0.4),
}


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny models gain nothing from more threads, and lose much where other processes want the cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root = tmp_path_factory.mktemp("models")

    def get(family: str) -> Path:
        folder = root / family
        if not folder.exists():
            torch.manual_seed(0)
            AutoModelForCausalLM.from_config(FAMILIES[family]).save_pretrained(folder)
        return folder

    return get


@contextmanager
def running(folder: Path, **kwargs: Any) -> Iterator[TorchEngine]:
    engine = TorchEngine(folder, **{"dtype": "float32", "max_batch_size": 8, "max_model_len": 128, **kwargs})
    try:
        yield engine
    finally:
        engine.close()


@pytest.fixture
def engine(folder_of: Callable[[str], Path]) -> Iterator[TorchEngine]:
    with running(folder_of("llama")) as started:
        yield started


def slow_down(engine: TorchEngine, monkeypatch: pytest.MonkeyPatch, seconds: float) -> threading.Event:
    """Make every step take this long; the event is set when the first one has begun."""
    forward = engine._decoder.model.forward
    begun = threading.Event()

    def slow(*args: Any, **kwargs: Any) -> Any:
        begun.set()
        time.sleep(seconds)
        return forward(*args, **kwargs)

    monkeypatch.setattr(engine._decoder.model, "forward", slow)
    return begun


def random_prompts(count: int, low: int, high: int, vocab: int = VOCAB, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(vocab) for _ in range(rng.randint(low, high))] for _ in range(count)]


def reference_tokens(model: Any, prompt: Sequence[int], new_tokens: int) -> list[int]:
    config = GenerationConfig(max_new_tokens=new_tokens, do_sample=False, eos_token_id=None, pad_token_id=0)
    model.generation_config.eos_token_id = None
    ids = torch.tensor([prompt])
    output = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
    return output[0, len(prompt) :].tolist()


@torch.no_grad()
def reference_logprobs(model: Any, prompt: Sequence[int], sampled: Sequence[int], temperature: float) -> torch.Tensor:
    logits = model(input_ids=torch.tensor([[*prompt, *sampled]]), use_cache=False).logits[0].double() / temperature
    return logits.log_softmax(-1)[torch.arange(len(prompt) - 1, len(prompt) + len(sampled) - 1), list(sampled)]


async def join_at_random_times(engine: TorchEngine, prompts: list[list[int]], sampling: Sampling) -> list[Sample]:
    rng = random.Random(1)

    async def one(index: int, prompt: list[int]) -> Sample:
        await asyncio.sleep(rng.random() * 0.3)
        return await engine.generate(prompt, sampling, f"request {index}")

    return await asyncio.gather(*(one(index, prompt) for index, prompt in enumerate(prompts)))


async def check_against_transformers(folder: Path, new_tokens: int, vocab: int, low: int, high: int) -> None:
    model = load_causal_lm(folder, "float32", "cpu")
    prompts = random_prompts(32, low, high, vocab)
    with running(folder, max_batch_size=12, max_model_len=high + new_tokens) as engine:
        samples = await join_at_random_times(engine, prompts, Sampling(new_tokens, temperature=0))
    for prompt, sample in zip(prompts, samples, strict=True):
        assert list(sample.token_ids) == reference_tokens(model, prompt, new_tokens)
        expected = reference_logprobs(model, prompt, sample.token_ids, 1.0)
        assert (torch.tensor(sample.logprobs, dtype=torch.float64) - expected).abs().max() < 1e-4


@pytest.mark.parametrize("family", FAMILIES)
async def test_greedy_equals_generate_token_for_token_and_logprobs_equal_a_full_forward(
    folder_of: Callable[[str], Path], family: str
) -> None:
    await check_against_transformers(folder_of(family), new_tokens=20, vocab=VOCAB, low=1, high=60)


@pytest.mark.slow
async def test_greedy_equals_generate_on_smollm2() -> None:
    from gymloop.models.resolve import resolve_model

    folder = resolve_model("HuggingFaceTB/SmolLM2-135M-Instruct")
    await check_against_transformers(folder, new_tokens=16, vocab=49152, low=4, high=80)


async def test_logprobs_are_of_the_distribution_at_the_sampling_temperature(
    engine: TorchEngine, folder_of: Callable[[str], Path]
) -> None:
    model = load_causal_lm(folder_of("llama"), "float32", "cpu")
    prompts = random_prompts(8, 3, 30)
    samples = await join_at_random_times(engine, prompts, Sampling(20, temperature=0.7))
    for prompt, sample in zip(prompts, samples, strict=True):
        expected = reference_logprobs(model, prompt, sample.token_ids, 0.7)
        assert (torch.tensor(sample.logprobs, dtype=torch.float64) - expected).abs().max() < 1e-4
    assert len({sample.token_ids for sample in samples}) == 8


async def test_top_k_and_top_p_raise_the_logprobs_of_what_is_left(
    engine: TorchEngine, folder_of: Callable[[str], Path]
) -> None:
    model = load_causal_lm(folder_of("llama"), "float32", "cpu")
    prompt = random_prompts(1, 10, 10)[0]
    sample = await engine.generate(prompt, Sampling(10, temperature=1.0, top_k=3, seed=5), "r")
    ids = [*prompt, *sample.token_ids]
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([ids])).logits[0]
    for index, (token, logprob) in enumerate(zip(sample.token_ids, sample.logprobs, strict=True)):
        best = logits[len(prompt) - 1 + index].topk(3)
        assert token in best.indices.tolist()
        expected = best.values.log_softmax(-1)[best.indices.tolist().index(token)]
        assert logprob == pytest.approx(float(expected), abs=1e-4)


async def test_a_seeded_request_repeats_itself_in_any_company(engine: TorchEngine) -> None:
    prompt = random_prompts(1, 10, 10)[0]
    alone = await engine.generate(prompt, Sampling(20, seed=3), "alone")
    crowd = [engine.generate(other, Sampling(20), f"other {i}") for i, other in enumerate(random_prompts(5, 2, 40))]
    again, other_seed, *_ = await asyncio.gather(
        engine.generate(prompt, Sampling(20, seed=3), "again"),
        engine.generate(prompt, Sampling(20, seed=4), "other seed"),
        *crowd,
    )
    assert again.token_ids == alone.token_ids
    assert other_seed.token_ids != alone.token_ids


async def test_any_of_several_end_tokens_stops_and_is_part_of_the_sample(
    engine: TorchEngine, folder_of: Callable[[str], Path]
) -> None:
    model = load_causal_lm(folder_of("llama"), "float32", "cpu")
    prompt = random_prompts(1, 10, 10)[0]
    free = reference_tokens(model, prompt, 20)
    end = free[6]
    unused = next(token for token in range(VOCAB) if token not in free)
    sample = await engine.generate(prompt, Sampling(20, temperature=0, stop_token_ids=(unused, end)), "r")
    assert sample.finish_reason == "stop"
    assert list(sample.token_ids) == free[: free.index(end) + 1]


async def test_length_is_the_requests_limit_or_the_context_limit(engine: TorchEngine) -> None:
    short = await engine.generate([1, 2, 3], Sampling(5), "short")
    assert (len(short.token_ids), short.finish_reason) == (5, "length")
    full = await engine.generate([1] * 120, Sampling(100), "full")
    assert (len(full.token_ids), full.finish_reason) == (8, "length")


@pytest.mark.parametrize("length", [128, 129, 500])
async def test_a_prompt_at_or_over_the_context_limit_gives_an_empty_sample(engine: TorchEngine, length: int) -> None:
    assert await engine.generate([1] * length, Sampling(5), "r") == Sample((), (), "length", 0, 0)


@pytest.mark.parametrize("prompt", [[], [VOCAB], [3, -1]])
async def test_a_prompt_the_model_cannot_read_fails_alone(engine: TorchEngine, prompt: list[int]) -> None:
    with pytest.raises(DataError, match="'bad'"):
        await engine.generate(prompt, Sampling(5), "bad")
    assert len((await engine.generate([1], Sampling(5), "good")).token_ids) == 5


@pytest.mark.parametrize(
    "sampling", [Sampling(0), Sampling(1, temperature=-1), Sampling(1, top_p=0), Sampling(1, top_k=0)]
)
async def test_sampling_out_of_range_is_refused(engine: TorchEngine, sampling: Sampling) -> None:
    with pytest.raises(ConfigError, match="expected"):
        await engine.generate([1], sampling, "r")


async def test_a_group_of_one_prompt_computes_it_once(engine: TorchEngine) -> None:
    prompt = random_prompts(1, 90, 90)[0]
    samples = await asyncio.gather(*(engine.generate(prompt, Sampling(8), f"r{i}") for i in range(8)))
    assert engine.prefilled_tokens == 90
    assert len({sample.token_ids for sample in samples}) > 1


async def test_a_second_turn_computes_only_its_new_tokens_and_answers_as_a_fresh_engine_would(
    engine: TorchEngine, folder_of: Callable[[str], Path]
) -> None:
    model = load_causal_lm(folder_of("llama"), "float32", "cpu")
    prompt = random_prompts(1, 60, 60)[0]
    first = await engine.generate(prompt, Sampling(10), "turn 1")
    second_prompt = [*prompt, *first.token_ids, 5, 6, 7, 8]
    second = await engine.generate(second_prompt, Sampling(10, temperature=0), "turn 2")
    # The last sampled token of a turn was never fed back, so it is computed with the four new ones.
    assert engine.prefilled_tokens == 60 + 5
    assert list(second.token_ids) == reference_tokens(model, second_prompt, 10)


async def test_abort_returns_what_was_sampled_so_far(engine: TorchEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    slow_down(engine, monkeypatch, 0.05)
    # There are 8 rows, so four requests are still waiting when they are aborted.
    begun = [asyncio.Event() for _ in range(12)]
    tasks = [
        asyncio.create_task(engine.generate([i], Sampling(120), f"r{i}", lambda *_, event=event: event.set()))
        for i, event in enumerate(begun, 1)
    ]
    await asyncio.wait_for(asyncio.gather(*(event.wait() for event in begun[:8])), 30)
    for i in range(1, 13):
        engine.abort(f"r{i}")
    engine.abort("never seen")
    samples = await asyncio.wait_for(asyncio.gather(*tasks), 10)
    assert {sample.finish_reason for sample in samples} == {"abort"}
    assert all(0 < len(sample.token_ids) == len(sample.logprobs) < 120 for sample in samples[:8])
    assert [sample.token_ids for sample in samples[8:]] == [()] * 4
    assert len((await engine.generate([1], Sampling(5), "after")).token_ids) == 5


async def test_cancelling_the_caller_frees_its_row(folder_of: Callable[[str], Path]) -> None:
    with running(folder_of("llama"), max_batch_size=1) as engine:
        engine.pause(10)
        first = asyncio.create_task(engine.generate([1, 2], Sampling(100), "same id"))
        await asyncio.sleep(0.05)
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        engine.resume()
        sample = await asyncio.wait_for(engine.generate([1, 2], Sampling(5), "same id"), 10)
        assert len(sample.token_ids) == 5


async def test_one_id_cannot_be_in_flight_twice(engine: TorchEngine) -> None:
    engine.pause(10)
    first = asyncio.create_task(engine.generate([1], Sampling(5), "twin"))
    await asyncio.sleep(0)
    with pytest.raises(InfraError, match="'twin' is already in flight"):
        await engine.generate([1], Sampling(5), "twin")
    engine.resume()
    await first


async def test_requests_wait_through_a_pause_and_keep_their_state(
    engine: TorchEngine, folder_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    slow_down(engine, monkeypatch, 0.01)
    model = load_causal_lm(folder_of("llama"), "float32", "cpu")
    prompt = random_prompts(1, 10, 10)[0]
    task = asyncio.create_task(engine.generate(prompt, Sampling(100, temperature=0), "r"))
    await asyncio.sleep(0.1)
    await asyncio.to_thread(engine.pause, 10)
    await asyncio.sleep(0.1)
    assert not task.done()
    engine.resume()
    assert list((await task).token_ids) == reference_tokens(model, prompt, 100)


async def test_abort_works_while_paused(engine: TorchEngine) -> None:
    engine.pause(10)
    task = asyncio.create_task(engine.generate([1], Sampling(5), "r"))
    await asyncio.sleep(0.05)
    engine.abort("r")
    assert await asyncio.wait_for(task, 10) == Sample((), (), "abort", 0, 0)


def test_many_event_loops_share_one_engine(engine: TorchEngine) -> None:
    lengths: list[int] = []

    def client(name: str) -> None:
        async def talk() -> int:
            samples = await asyncio.gather(*(engine.generate([i], Sampling(6), f"{name} {i}") for i in range(6)))
            return sum(len(sample.token_ids) for sample in samples)

        lengths.append(asyncio.run(talk()))

    threads = [threading.Thread(target=client, args=(name,)) for name in "abc"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert lengths == [36, 36, 36]


# ------------------------------------------------------------------ weights


def snapshot_of(folder: Path, change: float = 0.0) -> WeightSnapshot:
    model = load_causal_lm(folder, "float32", "cpu")
    with torch.no_grad():
        generator = torch.Generator().manual_seed(9)
        for parameter in model.parameters():
            parameter += change * torch.randn(parameter.shape, generator=generator)
    return take(model.named_parameters())


@pytest.mark.parametrize("family", ["llama", "llama-tied"])
async def test_after_new_weights_the_engine_answers_as_a_fresh_engine_on_them(
    folder_of: Callable[[str], Path], family: str, tmp_path: Path
) -> None:
    snapshot = snapshot_of(folder_of(family), change=0.1)
    changed = load_causal_lm(folder_of(family), "float32", "cpu")
    parameters = dict(changed.named_parameters())
    with torch.no_grad():
        for name, tensor in snapshot.tensors():
            parameters[name].copy_(tensor)
    changed.save_pretrained(tmp_path)
    prompt = random_prompts(1, 40, 40)[0]
    greedy = Sampling(20, temperature=0)
    with running(folder_of(family)) as engine, running(tmp_path) as fresh:
        old = await engine.generate(prompt, greedy, "old")
        engine.load_weights(snapshot, 7)
        assert engine.weight_version == 7
        new = await engine.generate(prompt, greedy, "new")
        expected = await fresh.generate(prompt, greedy, "fresh")
    assert (old.first_version, old.last_version, new.first_version, new.last_version) == (0, 0, 7, 7)
    assert new.token_ids == expected.token_ids
    assert new.logprobs == pytest.approx(expected.logprobs, abs=1e-6)
    assert new.token_ids != old.token_ids


async def test_the_same_weights_change_nothing(engine: TorchEngine, folder_of: Callable[[str], Path]) -> None:
    prompt = random_prompts(1, 40, 40)[0]
    before = await engine.generate(prompt, Sampling(20, temperature=0), "before")
    engine.load_weights(snapshot_of(folder_of("llama")), 1)
    after = await engine.generate(prompt, Sampling(20, temperature=0), "after")
    assert (after.token_ids, after.logprobs) == (before.token_ids, before.logprobs)


async def test_weights_that_arrive_mid_request_apply_to_its_next_tokens(
    engine: TorchEngine, folder_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    slow_down(engine, monkeypatch, 0.02)
    snapshot = snapshot_of(folder_of("llama"), change=0.1)
    prompt = random_prompts(1, 10, 10)[0]
    begun = asyncio.Event()
    task = asyncio.create_task(engine.generate(prompt, Sampling(100, temperature=0), "r", lambda *_: begun.set()))
    await asyncio.wait_for(begun.wait(), 30)
    await asyncio.to_thread(engine.pause, 10)
    assert not task.done()
    engine.load_weights(snapshot, 1)
    engine.resume()
    sample = await task
    assert (sample.first_version, sample.last_version) == (0, 1)
    # From some token on every logprob is the new weights', with keys and values of old tokens computed anew.
    model = load_causal_lm(folder_of("llama"), "float32", "cpu")
    old = reference_logprobs(model, prompt, sample.token_ids, 1.0)
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name, tensor in snapshot.tensors():
            parameters[name].copy_(tensor)
    new = reference_logprobs(model, prompt, sample.token_ids, 1.0)
    found = torch.tensor(sample.logprobs, dtype=torch.float64)
    is_old, is_new = (found - old).abs() < 1e-4, (found - new).abs() < 1e-4
    switch = int((~is_old).to(torch.int8).argmax())
    assert 0 < switch < 100
    assert bool(is_old[:switch].all())
    assert bool(is_new[switch:].all())


def renamed(snapshot: WeightSnapshot, index: int, **change: Any) -> WeightSnapshot:
    entries = list(snapshot.manifest)
    old = entries[index]
    fields = {name: getattr(old, name) for name in ("name", "dtype", "shape", "offset", "nbytes")}
    entries[index] = Entry(**{**fields, **change})
    return WeightSnapshot(tuple(entries), snapshot.buffer)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda s: WeightSnapshot(s.manifest[:-1], s.buffer), "lacks 'model.norm.weight'"),
        (lambda s: WeightSnapshot((*s.manifest, s.manifest[0]), s.buffer), "twice"),
        (lambda s: renamed(s, -1, name="model.other"), "no such parameter"),
        (lambda s: renamed(s, -1, name="lm_head.weight"), "tied to 'model.embed_tokens.weight'"),
        (lambda s: renamed(s, -1, shape=(16, 2)), r"shape \[16, 2\]; the model has \[32\]"),
        (lambda s: renamed(s, -1, dtype="int32"), "floating type"),
        (lambda s: renamed(s, -1, dtype="bfloat16"), "64 were expected"),
        (lambda s: renamed(s, -1, offset=s.buffer.nbytes), "within the buffer"),
    ],
)
async def test_a_snapshot_that_does_not_fit_is_refused_before_anything_changes(
    folder_of: Callable[[str], Path], damage: Callable[[WeightSnapshot], WeightSnapshot], message: str
) -> None:
    with running(folder_of("llama-tied")) as engine:
        before = await engine.generate([1, 2, 3], Sampling(10, temperature=0), "before")
        with pytest.raises(ConfigError, match=message):
            engine.load_weights(damage(snapshot_of(folder_of("llama-tied"), change=1.0)), 1)
        after = await engine.generate([1, 2, 3], Sampling(10, temperature=0), "after")
    # Not equal to the last bit: the second request takes over what the first one left in the cache.
    assert after.token_ids == before.token_ids
    assert after.logprobs == pytest.approx(before.logprobs, abs=1e-5)
    assert after.last_version == 0


# ------------------------------------------------------------------ failure


async def test_a_step_that_raises_fails_every_request_with_the_cause(
    engine: TorchEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = engine._decoder.model.forward
    steps = 0

    def breaks(*args: Any, **kwargs: Any) -> Any:
        nonlocal steps
        steps += 1
        if steps > 3:
            raise MemoryError("no more memory")
        return forward(*args, **kwargs)

    monkeypatch.setattr(engine._decoder.model, "forward", breaks)
    tasks = [asyncio.create_task(engine.generate([i], Sampling(50), f"r{i}")) for i in range(12)]
    results = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 10)
    assert len(results) == 12
    for index, result in enumerate(results):
        assert isinstance(result, InfraError)
        assert f"'r{index}' was lost" in str(result)
        assert "MemoryError: no more memory" in str(result)
        assert isinstance(result.__cause__, MemoryError)
    with pytest.raises(InfraError, match="engine is dead: MemoryError"):
        await engine.generate([1], Sampling(5), "later")
    with pytest.raises(InfraError, match="engine is dead"):
        engine.pause(1)


async def test_logits_that_are_not_finite_fail_the_request_by_name_and_the_engine_goes_on(engine: TorchEngine) -> None:
    good = snapshot_of_engine(engine)
    with torch.no_grad():
        engine._decoder.model.lm_head.weight[5] = float("nan")
    with pytest.raises(InfraError, match=r"'broken'.*logprob nan.*position 0"):
        await asyncio.wait_for(engine.generate([1, 2], Sampling(5), "broken"), 10)
    engine.load_weights(good, 1)
    assert len((await engine.generate([1, 2], Sampling(5), "fine")).token_ids) == 5


def snapshot_of_engine(engine: TorchEngine) -> WeightSnapshot:
    return take(engine._decoder.model.named_parameters())


async def test_close_fails_requests_in_flight_and_refuses_new_ones(folder_of: Callable[[str], Path]) -> None:
    engine = TorchEngine(folder_of("llama"), dtype="float32", max_batch_size=2, max_model_len=128)
    engine.pause(10)
    task = asyncio.create_task(engine.generate([1], Sampling(5), "r"))
    await asyncio.sleep(0.05)
    await asyncio.to_thread(engine.close)
    with pytest.raises(InfraError, match="'r' was lost: the engine was closed"):
        await asyncio.wait_for(task, 10)
    with pytest.raises(InfraError, match="closed"):
        await engine.generate([1], Sampling(5), "late")
    engine.close()
    assert not engine._loop.thread.is_alive()


async def test_a_pause_that_does_not_come_names_the_step_it_waited_for(
    engine: TorchEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = slow_down(engine, monkeypatch, 3.0)
    task = asyncio.create_task(engine.generate([1, 2, 3], Sampling(1), "r"))
    await asyncio.to_thread(begun.wait, 10)
    with pytest.raises(InfraError, match=r"pause waited 0\.1 s .* step of 1 rows and 3 tokens has been running"):
        await asyncio.to_thread(engine.pause, 0.1)
    # The engine was not left paused.
    assert len((await asyncio.wait_for(task, 30)).token_ids) == 1


# ------------------------------------------------------------------ start


def test_a_recurrent_model_is_refused(tmp_path: Path) -> None:
    config = MambaConfig(vocab_size=VOCAB, hidden_size=16, num_hidden_layers=1, state_size=4, tie_word_embeddings=False)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="MambaForCausalLM cannot run on the torch engine"):
        TorchEngine(tmp_path, dtype="float32", max_batch_size=1, max_model_len=16)


def test_a_model_with_linear_attention_is_refused(tmp_path: Path) -> None:
    layers = ["linear_attention", "full_attention"]
    config = Qwen3NextConfig(**SMALL, head_dim=8, layer_types=layers, num_experts=0, linear_num_value_heads=2)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"Qwen3NextForCausalLM cannot run .* layers of type 'linear_attention'"):
        TorchEngine(tmp_path, dtype="float32", max_batch_size=1, max_model_len=16)


def test_attention_that_would_be_computed_wrongly_is_refused(tmp_path: Path) -> None:
    config = GptOssConfig(**SMALL, head_dim=8, num_local_experts=2, num_experts_per_tok=1)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="s_aux"):
        TorchEngine(tmp_path, dtype="float32", max_batch_size=1, max_model_len=16)


def test_a_sliding_window_that_never_reaches_the_attention_is_found(
    folder_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Longer than the probe at start, so that no logit of it shows whether the window was applied.
    config = MistralConfig(**SMALL, head_dim=8, sliding_window=64)
    folder = folder_of("llama").parent / "long-window"
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    with running(folder, max_batch_size=2) as engine:
        assert engine.max_model_len == 128
    dense = kv_cache.dense_attention
    compat.register_attention("forgets_windows", lambda *args, sliding_window, **kwargs: dense(*args, **kwargs))
    monkeypatch.setattr(decoder, "ATTENTION", "forgets_windows")
    with pytest.raises(ConfigError, match="sliding window of 64 does not reach"):
        TorchEngine(folder, dtype="float32", max_batch_size=1, max_model_len=128)


def test_a_model_whose_layers_do_not_work_with_our_cache_is_refused_in_one_sentence(
    folder_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decoder, "ATTENTION", "sdpa")
    with pytest.raises(ConfigError, match=r"^LlamaForCausalLM cannot run on the torch engine: .*$"):
        TorchEngine(folder_of("llama"), dtype="float32", max_batch_size=1, max_model_len=128)


def test_positions_that_depend_on_the_longest_row_are_refused(tmp_path: Path) -> None:
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "long_factor": [2.0] * 4, "short_factor": [1.0] * 4}
    config = Phi3Config(**SMALL, original_max_position_embeddings=64, rope_parameters=rope)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="65 tokens but Phi3ForCausalLM encodes positions differently beyond 64"):
        TorchEngine(tmp_path, dtype="float32", max_batch_size=1, max_model_len=65)
    with running(tmp_path, max_model_len=64) as engine:
        assert engine.max_model_len == 64


def test_a_wrong_cache_is_found_at_start(folder_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_cache.DenseCache, "swap", lambda *args: None)
    with pytest.raises(ConfigError, match="differ from a full forward"):
        TorchEngine(folder_of("llama"), dtype="float32", max_batch_size=1, max_model_len=16)


def test_a_context_limit_beyond_the_models_positions_is_refused(folder_of: Callable[[str], Path]) -> None:
    with pytest.raises(ConfigError, match=r"513 tokens but LlamaForCausalLM has 512 positions"):
        TorchEngine(folder_of("llama"), dtype="float32", max_batch_size=1, max_model_len=513)


async def test_bfloat16_decodes(folder_of: Callable[[str], Path]) -> None:
    with running(folder_of("llama"), dtype="bfloat16") as engine:
        sample = await engine.generate([1, 2, 3], Sampling(10), "r")
    assert len(sample.token_ids) == 10
    assert np.isfinite(sample.logprobs).all()


def test_a_folder_that_is_no_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no config\.json"):
        load_causal_lm(tmp_path, "float32", "cpu")
