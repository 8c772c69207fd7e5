"""Which tokens the next forward pass computes: rows, their known and computed tokens, and prefix reuse. No torch here.

A row holds ``known`` tokens (prompt and samples) of which the first ``computed`` have keys and values in the cache.
Active rows are ``0..active-1``; the rows after them are free but retain the tokens of the request that left, so that a
later request with a common prefix computes only the rest. A row that lacks exactly one token decodes; a row that lacks
more is in prefill. The same rule covers a first prompt, a second turn, and a restart after new weights.

The table tells the cache to move data through two calls, ``copy_prefix`` and ``swap``, and knows nothing else of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import numpy as np

WORTH_WAITING_FOR = 16
"""Tokens; a request waits for a prefix that another row is computing when it saves at least this many."""

R = TypeVar("R")


class RowStore(Protocol):
    """The part of the KV cache that follows the table's moves."""

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        """Give row ``target`` the first ``length`` positions of row ``source``."""

    def swap(self, a: int, b: int, length_a: int, length_b: int) -> None:
        """Exchange two rows of which ``length_a`` and ``length_b`` positions are in use."""


@dataclass(frozen=True, slots=True)
class Work:
    """Tokens of one row to compute: ``count`` of them from position ``start``."""

    row: int
    start: int
    count: int


class RowTable(Generic[R]):
    """Rows of the cache and the requests in them.

    Attributes:
        active: number of rows with a request; they are the first ones.
        tokens: int32 [rows, max_len]; -1 beyond ``known``.
        known: int64 [rows]; ``computed`` likewise, at most ``known``.
        requests: the request of each active row.
        reused: prompt tokens that were not computed again, in total.
    """

    def __init__(self, rows: int, max_len: int, store: RowStore):
        self.rows = rows
        self.active = 0
        self.tokens = np.full((rows, max_len), -1, dtype=np.int32)
        self.known = np.zeros(rows, dtype=np.int64)
        self.computed = np.zeros(rows, dtype=np.int64)
        self.requests: list[R | None] = [None] * rows
        self.reused = 0
        self._order = np.zeros(rows, dtype=np.int64)
        self._clock = 0
        self._store = store

    def admit(self, prompt: np.ndarray, request: R) -> bool:
        """Give a request the next row, with the longest prefix any row offers.

        Args:
            prompt: int32 [tokens], at least one.
            request: what the row then holds.

        Returns:
            False where every row is taken, or where a row in prefill will soon offer a much longer prefix.
        """
        if self.active == self.rows:
            return False
        # The last token is always computed again: its logits start the sample.
        shared = np.minimum(self._shared(prompt), len(prompt) - 1)
        offered = np.minimum(shared, self.computed)
        best = int(offered.argmax())
        reuse = int(offered[best])
        coming = np.where(self._in_prefill(), shared, 0)
        if int(coming.max()) >= reuse + WORTH_WAITING_FOR:
            return False
        target = self.active
        # A free row is continued when the prompt keeps most of it; else its tokens stay, as they may serve others.
        if best >= self.active and 2 * reuse >= int(self.computed[best]):
            self._swap(target, best)
        else:
            oldest = self.active + int(self._order[self.active :].argmin())
            if oldest != best:
                self._clear(oldest)
            self._swap(target, oldest)
            # The swap may have moved the source itself.
            offered[:] = np.minimum(np.minimum(self._shared(prompt), len(prompt) - 1), self.computed)
            best = int(offered.argmax())
            if reuse and best != target:
                self._store.copy_prefix(best, target, reuse)
        self.tokens[target, : len(prompt)] = prompt
        self.tokens[target, len(prompt) :] = -1
        self.known[target] = len(prompt)
        self.computed[target] = reuse
        self.requests[target] = request
        self._touch(target)
        self.active += 1
        self.reused += reuse
        return True

    def plan(self, budget: int, idle_budget: int) -> tuple[int, list[Work]]:
        """Choose the next step: every decoding row, and a bounded prefill, oldest request first.

        Moves decoding rows to the front.

        Args:
            budget: prefill tokens at most, while rows are decoding and would be kept waiting.
            idle_budget: likewise, while no row is.

        Returns:
            The number of decoding rows, which are then rows ``0..n-1``, and the prefill work.
        """
        lacking = self.known[: self.active] - self.computed[: self.active]
        n = int((lacking == 1).sum())
        late = [row for row in range(n, self.active) if lacking[row] == 1]
        early = [row for row in range(n) if lacking[row] != 1]
        for a, b in zip(early, late, strict=True):
            self._swap(a, b)
        work: list[Work] = []
        left = budget if n else idle_budget
        for row in sorted(range(n, self.active), key=self._order.__getitem__):
            if left <= 0:
                break
            start = int(self.computed[row])
            count = min(left, int(self.known[row]) - start)
            work.append(Work(row, start, count))
            left -= count
        return n, work

    def append(self, rows: Sequence[int], tokens: np.ndarray) -> None:
        """Add one sampled token to each of the rows."""
        index = np.asarray(rows, dtype=np.int64)
        self.tokens[index, self.known[index]] = tokens
        self.known[index] += 1

    def release(self, row: int) -> None:
        """Take the request out of a row; its tokens are retained behind the active rows."""
        self.requests[row] = None
        self._touch(row)
        self.active -= 1
        self._swap(row, self.active)

    def forget(self) -> None:
        """The weights changed: nothing in the cache is valid, active rows compute all their tokens again."""
        self.computed[:] = 0
        self.known[self.active :] = 0
        self.tokens[self.active :] = -1

    def _clear(self, row: int) -> None:
        self.computed[row] = self.known[row] = 0
        self.tokens[row] = -1

    def _shared(self, prompt: np.ndarray) -> np.ndarray:
        """Length of the common prefix of the prompt with every row, int64 [rows]."""
        differs = self.tokens[:, : len(prompt)] != prompt
        return np.where(differs.any(axis=1), differs.argmax(axis=1), len(prompt))

    def _in_prefill(self) -> np.ndarray:
        rows = np.arange(self.rows)
        return (rows < self.active) & (self.known - self.computed > 1)

    def _touch(self, row: int) -> None:
        self._clock += 1
        self._order[row] = self._clock

    def _swap(self, a: int, b: int) -> None:
        if a == b:
            return
        if self.computed[a] or self.computed[b]:
            self._store.swap(a, b, int(self.computed[a]), int(self.computed[b]))
        for array in (self.known, self.computed, self._order):
            array[[a, b]] = array[[b, a]]
        self.tokens[[a, b]] = self.tokens[[b, a]]
        self.requests[a], self.requests[b] = self.requests[b], self.requests[a]
