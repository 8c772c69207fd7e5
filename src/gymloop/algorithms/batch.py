"""What the step function hands to the policy: token sequences with a weight and an advantage on each sampled token.

The weights already hold the whole normalisation (token or sequence mean, over the global batch), so the loss is a plain
weighted sum: it cannot depend on microbatches, packing or the number of ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class TrainSequence:
    """One segment of one trajectory.

    Attributes:
        group_id: sequences of one group share long prefixes and are packed together.
        sample_id: rollout within the group.
        ids: int64 [tokens].
        sampled: int64 [k], indices into ``ids`` of the trained tokens, ascending, each at least 1.
        advantages: float32 [k].
        weights: float32 [k], share of each token in the loss; the whole batch sums to 1.
        engine_logprobs: float32 [k], as sampled; NaN where a token was not sampled by the engine (demonstrations).
    """

    group_id: str
    sample_id: int
    ids: np.ndarray
    sampled: np.ndarray
    advantages: np.ndarray
    weights: np.ndarray
    engine_logprobs: np.ndarray


@dataclass(frozen=True, slots=True)
class TrainBatch:
    """All sequences of one training step, ordered by group and sample, never by arrival."""

    sequences: tuple[TrainSequence, ...]

    @property
    def num_tokens(self) -> int:
        """Tokens in all sequences, shared prefixes counted once per sequence."""
        return sum(len(sequence.ids) for sequence in self.sequences)

    @property
    def num_trained(self) -> int:
        """Tokens that carry loss."""
        return sum(len(sequence.sampled) for sequence in self.sequences)
