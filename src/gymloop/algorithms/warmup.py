"""A demonstration is a sequence whose assistant tokens are all worth imitating: advantage 1, no engine logprob.

The warm-up minimises ``losses.nll_loss`` on it, with the mean over all assistant tokens of the batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gymloop.algorithms.batch import TrainBatch, TrainSequence
from gymloop.algorithms.weighting import weigh
from gymloop.errors import DataError

GROUP_ID = "demonstrations"
"""One group, because demonstrations of one environment share their system prompt and tools."""


def demonstration_batch(demonstrations: Sequence[tuple[Sequence[int], Sequence[int]]]) -> TrainBatch:
    """Make the batch of one supervised step.

    Args:
        demonstrations: (ids, sampled) each: all tokens, and the ascending indices of those the assistant wrote.

    Returns:
        One sequence per demonstration, in the given order: advantages 1, weights 1 / N for N assistant tokens in the
        batch, engine logprobs NaN.

    Raises:
        DataError: a demonstration has no assistant token, or its indices are not ascending within 1 and its length.
    """
    sequences = []
    for index, (ids, sampled) in enumerate(demonstrations):
        positions = np.asarray(sampled, dtype=np.int64)
        if not len(positions):
            raise DataError(f"demonstration {index} has no assistant token to learn from")
        if positions[0] < 1 or positions[-1] >= len(ids) or np.any(np.diff(positions) < 1):
            raise DataError(
                f"demonstration {index} marks the assistant tokens {positions.tolist()} of {len(ids)}; "
                f"ascending indices from 1 to {len(ids) - 1} were expected"
            )
        sequences.append(
            TrainSequence(
                group_id=GROUP_ID,
                sample_id=index,
                ids=np.asarray(ids, dtype=np.int64),
                sampled=positions,
                advantages=np.ones(len(positions), dtype=np.float32),
                weights=np.empty(len(positions), dtype=np.float32),
                engine_logprobs=np.full(len(positions), np.nan, dtype=np.float32),
            )
        )
    return TrainBatch(weigh(sequences, token_level=True))
