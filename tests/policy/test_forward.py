"""Packed, padded and separate rows give the same logprobs and the same gradients."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from gymloop.algorithms.batch import TrainSequence
from gymloop.models.load import load_causal_lm
from gymloop.policy import forward
from gymloop.policy.forward import HeadLogprobs, pack, pad, sampled_logprobs, use_tree_attention, why_not_packed

TEMPERATURE = 0.7


def sequence(group: str, sample: int, ids: np.ndarray, sampled: np.ndarray) -> TrainSequence:
    blank = np.zeros(len(sampled), dtype=np.float32)
    return TrainSequence(group, sample, ids, sampled, blank, blank, blank)


def some_sequences() -> list[TrainSequence]:
    """Two groups with shared prompts, two equal rollouts, one that continues another, several turns."""
    rng = np.random.default_rng(3)
    first, second = rng.integers(2, 61, 14), rng.integers(2, 61, 5)
    long = np.concatenate([first, rng.integers(2, 61, 12)])
    return [
        sequence("a", 0, long, np.r_[14:18, 21:26]),
        sequence("a", 1, long.copy(), np.r_[14:18, 21:26]),
        sequence("a", 2, long[:19], np.r_[14:19]),
        sequence("a", 3, np.concatenate([first, rng.integers(2, 61, 3)]), np.r_[14:17]),
        sequence("b", 0, np.concatenate([second, rng.integers(2, 61, 20)]), np.r_[5:25]),
        sequence("b", 1, np.concatenate([second, rng.integers(2, 61, 1)]), np.r_[1:6]),
    ]


def logprobs_and_gradients(model, layouts, scores: torch.Tensor):
    """Each layout is a microbatch; ``scores`` weigh the logprobs of all of them."""
    model.zero_grad()
    logprobs = torch.cat([sampled_logprobs(model, layout, TEMPERATURE) for layout in layouts])
    (logprobs * scores).sum().backward()
    return logprobs.detach(), {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("name", ["llama", "llama-untied", "qwen3", "mistral-window", "phi-bias"])
def test_packed_padded_and_separate_rows_agree(name: str, tiny: Callable[[str], Path]):
    model = load_causal_lm(tiny(name), "float32", "cpu")
    sequences = some_sequences()
    scores = torch.randn(sum(len(s.sampled) for s in sequences), generator=torch.Generator().manual_seed(0))
    rows = logprobs_and_gradients(model, [pad([s]) for s in sequences], scores)
    padded = logprobs_and_gradients(model, [pad(sequences)], scores)
    assert use_tree_attention(model)
    packed = logprobs_and_gradients(model, [pack(sequences)], scores)
    halves = logprobs_and_gradients(model, [pack(sequences[:3]), pack(sequences[3:])], scores)
    assert rows[0].std() > 0.5  # the model is not uniform, so agreement means something
    for other in (padded, packed, halves):
        torch.testing.assert_close(other[0], rows[0], atol=1e-5, rtol=1e-5)
        for parameter, gradient in rows[1].items():
            limit = 1e-5 * max(1.0, float(gradient.abs().max()))
            torch.testing.assert_close(other[1][parameter], gradient, atol=limit, rtol=0, msg=parameter)


def test_logprobs_are_those_of_a_plain_forward_under_temperature(tiny: Callable[[str], Path]):
    model = load_causal_lm(tiny("qwen3"), "float32", "cpu")
    one = some_sequences()[0]
    with torch.no_grad():
        logits = model(input_ids=torch.from_numpy(one.ids)[None]).logits[0] / TEMPERATURE
        expected = [float(logits[index - 1].log_softmax(0)[one.ids[index]]) for index in one.sampled]
        use_tree_attention(model)
        got = sampled_logprobs(model, pack([one]), TEMPERATURE)
    np.testing.assert_allclose(got, expected, atol=1e-5)


def test_padding_content_has_no_effect(tiny: Callable[[str], Path]):
    model = load_causal_lm(tiny("llama"), "float32", "cpu")
    padded = pad(some_sequences())
    filled = pad(some_sequences())
    for row, one in enumerate(some_sequences()):
        filled.ids[row, len(one.ids) :] = 33
    with torch.no_grad():
        assert torch.equal(sampled_logprobs(model, padded, 1.0), sampled_logprobs(model, filled, 1.0))


@pytest.mark.parametrize("name", ["llama", "qwen3", "mistral-window", "phi-bias"])
def test_models_of_plain_attention_are_packed(name: str, tiny: Callable[[str], Path]):
    assert why_not_packed(load_causal_lm(tiny(name), "float32", "cpu"), TEMPERATURE) is None


@pytest.mark.parametrize("name", ["mamba", "gemma2-softcap"])
def test_other_models_are_not_packed_and_keep_their_own_attention(name: str, tiny: Callable[[str], Path]):
    model = load_causal_lm(tiny(name), "float32", "cpu")
    own = model.config._attn_implementation
    assert why_not_packed(model, TEMPERATURE)
    assert model.config._attn_implementation == own
    sampled_logprobs(model, pad(some_sequences()), TEMPERATURE)


def test_a_window_longer_than_the_probe_still_counts(tiny: Callable[[str], Path]):
    model = load_causal_lm(tiny("llama"), "float32", "cpu")
    model.config.sliding_window = 128  # declared, but no layer passes it on
    assert why_not_packed(model, TEMPERATURE) == "its sliding window does not reach the attention function"


@pytest.mark.parametrize(("kept", "chunk"), [(2**26, 2**24), (2**26, 22), (0, 22), (0, 2**24)])
@pytest.mark.parametrize("bias", [False, True])
def test_head_equals_autograd_in_every_chunking(kept: int, chunk: int, bias: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(forward, "KEPT_LOGITS", kept)
    monkeypatch.setattr(forward, "CHUNK_LOGITS", chunk)
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(shape, generator=generator) for shape in ((5, 4), (11, 4), (11,))]
    rows, tokens = torch.tensor([0, 1, 1, 1, 3, 4]), torch.tensor([2, 0, 5, 10, 7, 7])
    scores = torch.randn(6, generator=generator)
    results = []
    for ours in (True, False):
        hidden, weight, shift = (tensor.clone().requires_grad_() for tensor in inputs)
        if ours:
            logprobs = HeadLogprobs.apply(hidden, weight, shift if bias else None, rows, tokens, 0.5)
        else:
            logits = hidden @ weight.T + (shift if bias else 0)
            logprobs = (logits / 0.5).log_softmax(1)[rows, tokens]
        (logprobs * scores).sum().backward()
        results.append([logprobs.detach(), hidden.grad, weight.grad] + ([shift.grad] if bias else []))
    for got, expected in zip(*results, strict=True):
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
