"""The deterministic engine: equal bits in any order, company and process; an engine that is not fails the same test."""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3MoeConfig

from gymloop.errors import ConfigError, DataError
from gymloop.generation import fixed
from gymloop.generation.engine import Sampling
from gymloop.generation.fixed import CHUNK, row_of
from gymloop.generation.request import keyed_uniform
from gymloop.generation.torch_engine import TorchEngine
from gymloop.models.load import load_causal_lm
from gymloop.weights.snapshot import take

VOCAB = 509
ROWS = 6
# Widths are no multiple of any vector register: the ends of rows are where shapes show in the bits.
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 60,
    "intermediate_size": 101,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
CONFIGS = {
    "llama": LlamaConfig(**SHAPE),
    "qwen3-moe": Qwen3MoeConfig(**SHAPE, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24),
}
Bits = dict[str, tuple[tuple[int, ...], tuple[float, ...]]]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = {}
    for name, config in CONFIGS.items():
        torch.manual_seed(0)
        found[name] = tmp_path_factory.mktemp(name)
        AutoModelForCausalLM.from_config(config).save_pretrained(found[name])
    return found


def start(folder: Path, deterministic: bool = True, **settings: Any) -> TorchEngine:
    kwargs = {"dtype": "float32", "max_batch_size": ROWS, "max_model_len": 320, "seed": 3, **settings}
    return TorchEngine(folder, deterministic=deterministic, **kwargs)


def rollouts() -> list[tuple[str, list[int]]]:
    """Rollouts of three groups: prompts that share a stem of one and a half chunks, of lengths around the grid."""
    rng = random.Random(0)
    stem = [rng.randrange(VOCAB) for _ in range(CHUNK * 3 // 2)]
    prompts = [stem + [7] * 3, stem + [8] * (CHUNK // 2), stem[: CHUNK + 1]]
    return [(f"group {g}/{sample}", prompt) for g, prompt in enumerate(prompts) for sample in range(2)]


async def play(engine: TorchEngine, traffic: int) -> Bits:
    """Two turns of every rollout, in an order and among other requests that the number decides."""
    rng = random.Random(traffic)
    bits: Bits = {}

    async def rollout(key: str, prompt: list[int]) -> None:
        await asyncio.sleep(rng.random() * 0.1)
        for turn in range(2):
            name = f"{key}/{turn}"
            sample = await engine.generate(prompt, Sampling(8, temperature=1.1, noise_key=name), name)
            bits[name] = (sample.token_ids, sample.logprobs)
            prompt = [*prompt, *sample.token_ids, 1, 2, 3]

    async def passer_by(index: int) -> None:
        await asyncio.sleep(rng.random() * 0.2)
        prompt = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 200))]
        sampling = Sampling(rng.randint(1, 20), noise_key=f"other {traffic} {index}", top_k=rng.choice([None, 5]))
        await engine.generate(prompt, sampling, f"other {index}")

    order = rollouts()
    rng.shuffle(order)
    others = [passer_by(index) for index in range(rng.randint(1, 5) if traffic else 0)]
    await asyncio.wait_for(asyncio.gather(*(rollout(*one) for one in order), *others), 120)
    return dict(sorted(bits.items()))


@pytest.mark.parametrize(
    ("family", "dtype", "times"),
    [
        ("llama", "float32", 5),
        ("llama", "bfloat16", 2),
        pytest.param("qwen3-moe", "float32", 5, marks=pytest.mark.slow),
        pytest.param("qwen3-moe", "bfloat16", 5, marks=pytest.mark.slow),
    ],
)
def test_bits_are_equal_in_any_order_company_and_process(
    folders: dict[str, Path], family: str, dtype: str, times: int
) -> None:
    engine = start(folders[family], dtype=dtype)
    try:
        expected = asyncio.run(play(engine, 0))
        for traffic in range(1, times):
            assert asyncio.run(play(engine, traffic)) == expected
    finally:
        engine.close()
    other = subprocess.run(
        [sys.executable, __file__, str(folders[family]), dtype],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert other.returncode == 0, other.stderr
    found = {key: (tuple(ids), tuple(logprobs)) for key, (ids, logprobs) in json.loads(other.stdout).items()}
    assert found == expected


@pytest.mark.parametrize("deterministic", [False, True])
async def test_logprobs_of_a_model_in_bfloat16_are_float32(folders: dict[str, Path], deterministic: bool) -> None:
    engine = start(folders["llama"], deterministic, dtype="bfloat16")
    try:
        sample = await engine.generate([1, 2, 3], Sampling(8, seed=1), "r")
    finally:
        engine.close()
    logprobs = torch.tensor(sample.logprobs)
    assert (logprobs.bfloat16().float() != logprobs).any()


def test_the_fast_engine_would_fail_that_test(folders: dict[str, Path]) -> None:
    engine = start(folders["llama"], deterministic=False)
    try:
        seen = [asyncio.run(play(engine, traffic)) for traffic in range(3)]
    finally:
        engine.close()
    assert seen[0] != seen[1] or seen[0] != seen[2]


def test_reuse_takes_over_the_very_bits_that_would_be_computed(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = start(folders["llama"])
    try:
        with_reuse = asyncio.run(play(engine, 1))
        assert engine.reused_tokens > 4 * CHUNK
    finally:
        engine.close()
    monkeypatch.setattr(fixed.FixedRows, "_whole_chunks", lambda self, length, end: 0)
    engine = start(folders["llama"])
    try:
        without = asyncio.run(play(engine, 1))
        assert engine.reused_tokens == 0
    finally:
        engine.close()
    assert with_reuse == without


async def test_noise_does_not_depend_on_weight_versions(folders: dict[str, Path]) -> None:
    snapshot = take(load_causal_lm(folders["llama"], "float32", "cpu").named_parameters())
    sampling = Sampling(20, noise_key="g/0/0")
    engine = start(folders["llama"])
    try:
        before = await engine.generate([1, 2, 3], sampling, "r")
        engine.load_weights(snapshot, 9)
        after = await engine.generate([1, 2, 3], sampling, "r")
    finally:
        engine.close()
    assert (after.token_ids, after.logprobs) == (before.token_ids, before.logprobs)
    assert (before.last_version, after.first_version) == (0, 9)


async def test_requests_for_one_row_wait_for_each_other(folders: dict[str, Path]) -> None:
    engine = start(folders["llama"])
    try:
        calls = [engine.generate([i + 1], Sampling(5, noise_key="same", slot=2), f"r{i}") for i in range(4)]
        samples = await asyncio.wait_for(asyncio.gather(*calls), 60)
    finally:
        engine.close()
    assert [len(sample.token_ids) for sample in samples] == [5] * 4


async def test_a_draw_that_nothing_repeats_is_refused(folders: dict[str, Path]) -> None:
    engine = start(folders["llama"])
    try:
        with pytest.raises(DataError, match="'r' names neither a noise key nor a seed"):
            await engine.generate([1], Sampling(5), "r")
        assert len((await engine.generate([1], Sampling(5, temperature=0), "greedy")).token_ids) == 5
    finally:
        engine.close()


def test_a_rollouts_turns_share_a_row_and_its_group_stands_side_by_side() -> None:
    def row(key: str | None, **fields: Any) -> int:
        return row_of(Sampling(1, noise_key=key, **fields), np.array([1, 2], dtype=np.int32), 16, "r")

    assert row("step 3/g 7/0/0") == row("step 3/g 7/0/5")
    first = row("g/0/0")
    assert [row(f"g/{sample}/0") for sample in range(16)] == [(first + sample) % 16 for sample in range(16)]
    assert row("g/3/0", slot=35) == 3
    assert len({row(f"key {i}") for i in range(100)}) > 10
    assert len({row(None, seed=i) for i in range(100)}) > 10


def test_keyed_noise_is_uniform_and_follows_from_seed_key_and_position_alone() -> None:
    numbers = [keyed_uniform(seed, key, at) for seed in range(10) for key in ("", "a", "b") for at in range(100)]
    assert len(set(numbers)) == len(numbers)
    assert all(0 <= number < 1 for number in numbers)
    assert np.mean(numbers) == pytest.approx(0.5, abs=0.025)  # more than four standard errors
    assert np.var(numbers) == pytest.approx(1 / 12, abs=0.01)
    # The first bits of BLAKE2b are part of what a run can be resumed from, so they are written down here.
    assert keyed_uniform(0, "g/0/0", 0) == 0.18187353064478073


def test_experts_of_unknown_shape_are_refused(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import Qwen3MoeForCausalLM

    monkeypatch.setattr(Qwen3MoeForCausalLM, "_can_set_experts_implementation", classmethod(lambda cls: False))
    with pytest.raises(ConfigError, match="experts compute in follow from the routing"):
        start(folders["qwen3-moe"])


if __name__ == "__main__":
    torch.set_num_threads(1)
    started = start(Path(sys.argv[1]), dtype=sys.argv[2])
    print(json.dumps(asyncio.run(play(started, 77))))
    started.close()
