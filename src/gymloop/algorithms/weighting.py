"""The weights of a batch hold the whole normalisation of the loss and sum to 1.

They are fixed here, over everything one optimizer step sees, before the batch is cut into microbatches or spread over
ranks. After that a loss only multiplies and adds; nothing divides again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from gymloop.algorithms.batch import TrainSequence


def weigh(sequences: Sequence[TrainSequence], *, token_level: bool) -> tuple[TrainSequence, ...]:
    """Give every trained token its share of the loss.

    With ``N`` trained tokens in all sequences, ``R`` rollouts and ``n_r`` trained tokens in all segments of rollout
    ``r``, a token weighs ``1 / N`` at token level (DAPO, arXiv 2503.14476) and ``1 / (R n_r)`` at sequence level
    (GRPO, arXiv 2402.03300). Both sum to 1.

    Args:
        sequences: each with at least one trained token; their present weights are ignored.
        token_level: as ``loss_fn.token_level_loss``.
    """
    tokens: Counter[tuple[str, int]] = Counter()
    for sequence in sequences:
        tokens[sequence.group_id, sequence.sample_id] += len(sequence.sampled)

    def weight(sequence: TrainSequence) -> float:
        if token_level:
            return 1.0 / tokens.total()
        return 1.0 / (len(tokens) * tokens[sequence.group_id, sequence.sample_id])

    return tuple(
        replace(sequence, weights=np.full(len(sequence.sampled), weight(sequence), dtype=np.float32))
        for sequence in sequences
    )
