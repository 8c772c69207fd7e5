"""What every engine refuses before it samples: token ids that its model does not have."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gymloop.errors import ConfigError, DataError
from gymloop.generation.engine import Sampling


def check_bias(sampling: Sampling, vocab: int) -> None:
    """Check the ids of ``logit_bias``.

    Args:
        sampling: of a request.
        vocab: ids of the model.

    Raises:
        ConfigError: one is not the model's.
    """
    for token in sampling.logit_bias or ():
        if not 0 <= token < vocab:
            raise ConfigError(f"sampling has a logit_bias for token id {token}; the model's ids are 0 to {vocab - 1}")


def checked_prompt(prompt_ids: Sequence[int], request_id: str, vocab: int) -> np.ndarray:
    """The prompt as int64 [tokens].

    Raises:
        DataError: it is empty, or holds an id that is not the model's.
    """
    prompt = np.asarray(prompt_ids, dtype=np.int64)
    if prompt.ndim != 1 or prompt.size == 0:
        raise DataError(f"request {request_id!r} has an empty prompt; at least one token id is needed")
    low, high = int(prompt.min()), int(prompt.max())
    if low < 0 or high >= vocab:
        wrong = low if low < 0 else high
        raise DataError(f"request {request_id!r} holds token id {wrong}; the model's ids are 0 to {vocab - 1}")
    return prompt
