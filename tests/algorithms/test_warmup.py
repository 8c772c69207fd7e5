"""Demonstrations: every assistant token weighs the same, and what cannot be learned from is refused by its row."""

import math
import subprocess
import sys

import numpy as np
import pytest
import torch

from gymloop.algorithms.losses import nll_loss
from gymloop.algorithms.warmup import demonstration_batch
from gymloop.errors import DataError


def test_assistant_tokens_of_all_demonstrations_weigh_the_same():
    batch = demonstration_batch([([1, 2, 3, 4, 5], [2, 3, 4]), ((1, 2, 9), (2,))])
    first, second = batch.sequences
    assert (first.ids.tolist(), first.sampled.tolist()) == ([1, 2, 3, 4, 5], [2, 3, 4])
    assert (second.ids.tolist(), second.sampled.tolist()) == ([1, 2, 9], [2])
    assert (first.weights.tolist(), second.weights.tolist()) == ([0.25] * 3, [0.25])
    assert first.advantages.tolist() == [1.0] * 3
    assert np.isnan(first.engine_logprobs).all()
    assert [sequence.sample_id for sequence in batch.sequences] == [0, 1]
    assert (batch.num_tokens, batch.num_trained) == (8, 4)


def test_the_loss_is_the_mean_over_assistant_tokens():
    batch = demonstration_batch([([1, 2, 3, 4, 5], [2, 3, 4]), ([1, 2, 9], [2])])
    logprobs = [torch.tensor([-1.0, -2.0, -3.0]), torch.tensor([-6.0])]
    losses = [
        nll_loss(current, torch.from_numpy(sequence.weights))[0].item()
        for current, sequence in zip(logprobs, batch.sequences, strict=True)
    ]
    assert losses == [1.5, 1.5]  # two microbatches add up to the mean of 1, 2, 3, 6


def test_no_demonstrations_are_an_empty_batch():
    assert demonstration_batch([]).sequences == ()


@pytest.mark.parametrize("sampled", [[0, 1], [2, 1], [1, 1], [3]])
def test_wrong_indices_are_refused_by_row(sampled):
    with pytest.raises(DataError, match=r"demonstration 1 marks .* of 3; ascending indices from 1 to 2"):
        demonstration_batch([([1, 2], [1]), ([1, 2, 3], sampled)])


def test_a_demonstration_without_assistant_tokens_is_refused_by_row():
    with pytest.raises(DataError, match="demonstration 0 has no assistant token"):
        demonstration_batch([([1, 2, 3], [])])


def test_nothing_but_the_losses_imports_torch():
    code = (
        "import sys, gymloop.algorithms.step, gymloop.algorithms.warmup\n"
        "print([m for m in ('torch', 'ray', 'transformers', 'vllm') if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout.strip() == "[]"


def test_demonstrations_cannot_be_mistaken_for_samples():
    (sequence,) = demonstration_batch([([1, 2], [1])]).sequences
    assert math.isnan(sequence.engine_logprobs[0])
