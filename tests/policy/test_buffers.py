"""Buffers that a checkpoint holds go wherever the weights go: into a saved policy, out of it, and into an engine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from gymloop.algorithms.batch import TrainBatch, TrainSequence
from gymloop.config.schema import Loss, OptimizerKwargs
from gymloop.errors import ConfigError
from gymloop.models.tensors import checkpoint_tensors, persistent_buffers
from gymloop.policy.spec import PolicySpec
from gymloop.policy.worker import PolicyWorker

Tiny = Callable[[str], Path]
WITH_BUFFERS = ["apertus", "gemma4", "glm4-moe"]
PROMPT = torch.tensor([[3, 9, 4, 27, 11]])


def worker_of(folder: Path, precision: str = "float32") -> PolicyWorker:
    loss, optimizer = Loss(), OptimizerKwargs(lr=0.01)
    worker = PolicyWorker(PolicySpec(str(folder), 1.0, loss, optimizer, precision, packing=False, threads=1))  # type: ignore[arg-type]
    worker.load()
    return worker


def batch() -> TrainBatch:
    rng = np.random.default_rng(3)
    sequences = []
    for sample in range(4):
        weights, engine = np.full(6, 1 / 24, np.float32), np.full(6, np.nan, np.float32)
        ids, advantages = rng.integers(2, 60, 12), np.full(6, sample - 1.5, np.float32)
        sequences.append(TrainSequence("g", sample, ids, np.arange(6, 12), advantages, weights, engine))
    return TrainBatch(tuple(sequences))


def by_transformers(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True).eval()


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    return model(PROMPT).logits


@pytest.mark.parametrize("name", [*WITH_BUFFERS, "llama", "llama-untied", "mamba"])
def test_a_checkpoint_holds_parameters_and_persistent_buffers_and_nothing_else(name: str, tiny: Tiny):
    model = by_transformers(tiny(name))
    named = dict(checkpoint_tensors(model))
    tied = set(dict(model.named_parameters(remove_duplicate=False))) - set(dict(model.named_parameters()))
    assert named.keys() == model.state_dict().keys() - tied
    assert bool(persistent_buffers(model)) == (name in WITH_BUFFERS)
    assert all(tensor is model.get_parameter(key) for key, tensor in model.named_parameters())


def test_a_buffer_under_two_names_has_both_and_one_that_is_not_saved_has_none():
    model, inner = torch.nn.Module(), torch.nn.Module()
    inner.register_buffer("kept", torch.ones(2))
    inner.register_buffer("derived", torch.ones(2), persistent=False)
    model.one = model.other = inner
    model.register_buffer("own", torch.zeros(()))
    model.register_buffer("absent", None)
    assert persistent_buffers(model).keys() == model.state_dict().keys() == {"own", "one.kept", "other.kept"}


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", WITH_BUFFERS)
def test_a_saved_policy_computes_the_same_in_transformers_alone(name: str, precision: str, tiny: Tiny, tmp_path: Path):
    worker = worker_of(tiny(name), precision)
    worker.train(batch())
    worker.save(tmp_path)
    weights = tmp_path / "weights"
    loaded = by_transformers(weights)
    kept = persistent_buffers(by_transformers(tiny(name)))
    assert kept
    for key, buffer in persistent_buffers(loaded).items():
        assert torch.equal(buffer, kept[key]), key
    if precision == "float32":
        torch.testing.assert_close(logits(loaded), logits(worker._model), rtol=1e-4, atol=1e-4)
    bare = {key: value for key, value in load_file(weights / "model.safetensors").items() if key not in kept}
    save_file(bare, weights / "model.safetensors", metadata={"format": "pt"})
    assert not torch.allclose(logits(by_transformers(weights)), logits(loaded), atol=1e-3), "they are part of the model"


@pytest.mark.parametrize("name", WITH_BUFFERS)
def test_a_policy_with_buffers_goes_on_where_it_stopped(name: str, tiny: Tiny, tmp_path: Path):
    whole = worker_of(tiny(name))
    with torch.no_grad():  # as a model that counts in them would
        for buffer in persistent_buffers(whole._model).values():
            buffer.add_(0.25)
    whole.train(batch())
    whole.save(tmp_path)
    resumed = worker_of(tiny(name))
    resumed.restore(tmp_path)
    assert resumed.snapshot().buffer.tobytes() == whole.snapshot().buffer.tobytes()
    assert [resumed.train(batch())["loss"] for _ in range(2)] == [whole.train(batch())["loss"] for _ in range(2)]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda tensors, key: tensors.pop(key), r"it lacks model\.layers\.0\.layer_scalar \(1 such tensors\)"),
        (
            lambda tensors, key: tensors.update({key: torch.ones(2)}),
            r"model\.layers\.0\.layer_scalar has shape \[2\], expected \[1\]",
        ),
        (lambda tensors, key: tensors.update(other=torch.ones(1)), r"this one has no other \(1 such tensors\)"),
    ],
)
def test_a_saved_policy_whose_buffers_are_not_the_models_is_refused_and_nothing_changes(
    change: Callable[..., Any], says: str, tiny: Tiny, tmp_path: Path
):
    worker = worker_of(tiny("gemma4"))
    worker.save(tmp_path)
    file = tmp_path / "weights" / "model.safetensors"
    tensors = load_file(file)
    change(tensors, "model.layers.0.layer_scalar")
    save_file(tensors, file)
    before = worker.snapshot().buffer.tobytes()
    with pytest.raises(ConfigError, match=says):
        worker.restore(tmp_path)
    assert worker.snapshot().buffer.tobytes() == before


def test_a_checkpoint_of_a_model_without_buffers_is_the_parameters_alone(tiny: Tiny, tmp_path: Path):
    worker = worker_of(tiny("llama"))
    worker.save(tmp_path)
    assert load_file(tmp_path / "weights" / "model.safetensors").keys() == dict(worker._model.named_parameters()).keys()
    worker_of(tiny("llama")).restore(tmp_path)
