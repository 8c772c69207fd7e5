"""What the step thread asks of the rows of the cache: who is in them, one step at a time, and who may go.

Two kinds of rows exist. ``packed`` computes all that can be computed in one pass, which is fast; ``fixed`` computes
every token in a shape that no other request can change, which is repeatable to the last bit.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import numpy as np
import torch

from gymloop.generation.engine import Sampling


class Occupant(Protocol):
    """The part of a request that rows look at."""

    @property
    def request_id(self) -> str:
        """Unique among the requests in flight."""

    @property
    def prompt(self) -> np.ndarray:
        """Int32 [tokens]."""

    @property
    def sampling(self) -> Sampling:
        """How its tokens are drawn."""


R = TypeVar("R", bound=Occupant)


@dataclass(frozen=True, slots=True)
class Ready(Generic[R]):
    """Requests that lack nothing but a draw.

    Attributes:
        logits: float32 [m, vocab], to be overwritten.
        requests: the m requests.
        rows: the m rows they are in.
    """

    logits: torch.Tensor
    requests: Sequence[R]
    rows: Sequence[int]


class Rows(Protocol[R]):
    """Rows of a KV cache and the requests in them. Only the step thread calls it."""

    @property
    def prefilled(self) -> int:
        """Tokens computed in prefill; padding and those taken over from another row are not among them."""

    @property
    def reused(self) -> int:
        """Prompt tokens taken over from another row."""

    @property
    def in_step(self) -> tuple[int, int]:
        """Rows and tokens of the pass that is running or ran last."""

    @property
    def requests(self) -> Sequence[R]:
        """Requests that have a row."""

    def admit(self, request: R) -> bool:
        """Give the request a row, or say that it has to wait."""

    def step(self) -> Sequence[Ready[R]]:
        """Compute some tokens; what is returned must be appended to before the next call."""

    def append(self, ready: Ready[R], tokens: np.ndarray) -> None:
        """Add one drawn token, int32 [m], to each row."""

    def remove(self, leaving: Collection[R], broken: Collection[R] = ()) -> None:
        """Free the rows of ``leaving``; nothing that ``broken`` ones, a part of them, computed is used again."""

    def forget(self) -> None:
        """The weights changed: requests in rows compute all their tokens again, nothing else is kept."""

    def clear(self) -> None:
        """Free all memory."""
