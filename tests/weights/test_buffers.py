"""A sync brings an engine the policy's persistent buffers with its parameters, whatever it began with."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from gymloop.errors import ConfigError
from gymloop.generation.engine import Sampling
from gymloop.generation.torch_engine import TorchEngine
from gymloop.models.load import load_causal_lm
from gymloop.models.tensors import checkpoint_tensors, persistent_buffers
from gymloop.weights.fit import check_fits
from gymloop.weights.layout import lay_out
from gymloop.weights.offer import SyncRequest
from gymloop.weights.receiver import WeightReceiver
from gymloop.weights.sender import WeightSender
from gymloop.weights.snapshot import WeightSnapshot, take
from toys import build_toy, small_vllm

GEMMA: dict[str, Any] = {
    "config": "Gemma4TextConfig",
    "num_hidden_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"],
    "head_dim": 32,
    "global_head_dim": 32,
    "hidden_size_per_layer_input": 0,
    "pad_token_id": 0,
}
APERTUS: dict[str, Any] = {
    "config": "ApertusConfig",
    "head_dim": 32,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
}
EXPERTS: dict[str, Any] = {
    "config": "Glm4MoeConfig",
    "num_hidden_layers": 2,
    "head_dim": 32,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
PROMPT = [20, 21, 22, 23]
GREEDY = Sampling(8, temperature=0)


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Models this small only wait for threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@torch.no_grad()
def moved(folder: Path, seed: int) -> Any:
    """The folder's model with other parameters and other buffers."""
    model = load_causal_lm(folder, "float32", "cpu")
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    for buffer in persistent_buffers(model).values():
        buffer.add_(0.2 + 0.2 * torch.rand(buffer.shape, generator=generator))
    return model


@torch.no_grad()
def greedy(model: Any) -> tuple[list[int], list[float]]:
    ids, logprobs = list(PROMPT), []
    for _ in range(GREEDY.max_new_tokens):
        row = torch.log_softmax(model(torch.tensor([ids])).logits[0, -1], -1)
        ids.append(int(row.argmax()))
        logprobs.append(float(row.max()))
    return ids[len(PROMPT) :], logprobs


def assert_samples_as(model: Any, engine: Any, version: int) -> None:
    sample = asyncio.run(asyncio.wait_for(engine.generate(PROMPT, GREEDY, f"sampled-{version}"), 60))
    ids, logprobs = greedy(model)
    assert list(sample.token_ids) == ids
    assert sample.logprobs == pytest.approx(logprobs, abs=2e-3)


@pytest.mark.parametrize("transport", ["shared_memory", "object_store"])
@pytest.mark.parametrize("shape", [GEMMA, APERTUS], ids=["gemma4", "apertus"])
def test_the_embedded_engine_samples_what_a_policy_with_other_buffers_computes(
    shape: dict[str, Any], transport: Any, tmp_path: Path
):
    folder = build_toy(tmp_path, "q", **shape)
    model = moved(folder, seed=5)
    sender, receiver = WeightSender(lambda: checkpoint_tensors(model), "cpu"), WeightReceiver("cpu")
    engine = TorchEngine(folder, dtype="float32", max_batch_size=2, max_model_len=64)
    try:
        with receiver.opened(sender.offer(SyncRequest(transport, 1, 1, 4096, True, 30.0)), 1) as source:
            engine.load_weights(source, 1)
        sender.release(True)
        assert_samples_as(model, engine, 1)
        held = dict(checkpoint_tensors(engine._live_decoder().model))
        assert all(torch.equal(held[name], tensor) for name, tensor in checkpoint_tensors(model))
    finally:
        engine.close()
        sender.close()


def with_entry(snapshot: WeightSnapshot, name: str, **changes: Any) -> WeightSnapshot:
    manifest = tuple(replace(entry, **changes) if entry.name == name else entry for entry in snapshot.manifest)
    return WeightSnapshot(manifest, snapshot.buffer)


def test_weights_without_a_buffer_or_with_one_of_another_kind_are_refused(tmp_path: Path):
    model = load_causal_lm(build_toy(tmp_path, "q", **GEMMA), "float32", "cpu")
    key = "model.layers.1.layer_scalar"
    with pytest.raises(ConfigError, match=r"lacks 'model.layers.0.layer_scalar' and 1 more"):
        check_fits(take(model.named_parameters()), model)
    whole = take(checkpoint_tensors(model))
    check_fits(whole, model)
    with pytest.raises(ConfigError, match=r"layer_scalar' with shape \[2\]; the model has \[1\]"):
        check_fits(with_entry(whole, key, shape=(2,)), model)
    with pytest.raises(ConfigError, match=r"layer_scalar' as int32; a floating type is needed"):
        check_fits(with_entry(whole, key, dtype="int32"), model)


def test_a_buffer_of_integers_arrives_as_it_is_and_as_nothing_else():
    model = torch.nn.Linear(2, 2)
    model.register_buffer("counted", torch.tensor(7))
    snapshot = take(checkpoint_tensors(model))
    check_fits(snapshot, model)
    assert dict(snapshot.tensors())["counted"].item() == 7
    other = lay_out([*model.named_parameters(), ("counted", torch.tensor(7.0, dtype=torch.float64))])
    with pytest.raises(ConfigError, match=r"'counted' as float64; int64 is needed"):
        check_fits(WeightSnapshot(other, snapshot.buffer), model)


@pytest.fixture(scope="module", params=[GEMMA, EXPERTS], ids=["gemma4", "experts"])
def begun_without_weights(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Path, Any]]:
    from gymloop.generation.vllm_engine import VllmEngine

    folder = build_toy(tmp_path_factory.mktemp("dummy"), "q", **request.param)
    engine = VllmEngine(
        folder,
        dtype="float32",
        max_batch_size=2,
        max_model_len=128,
        arguments=small_vllm(load_format="dummy"),
        environment={"OMP_NUM_THREADS": "1"},
    )
    yield folder, engine
    engine.close()


@pytest.mark.vllm
@pytest.mark.timeout(600)
def test_vllm_that_began_with_random_buffers_samples_what_the_policy_computes_after_each_sync(begun_without_weights):
    folder, engine = begun_without_weights
    for version in (1, 2):
        model = moved(folder, seed=version)
        engine.load_weights(take(checkpoint_tensors(model)), version)
        assert_samples_as(model, engine, version)
