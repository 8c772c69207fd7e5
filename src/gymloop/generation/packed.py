"""The fast rows: one pass per step holds one token of every decoding row and a bounded number of prefill tokens.

The first ``n`` tokens of a packed step belong to rows ``0..n-1``, one each (decoding); after them come chunks of
several tokens of one row each (prefill). Shapes follow from whoever is there, so a request's last bits depend on its
company.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Generic

import numpy as np
import torch
import torch.nn.functional as F

from gymloop.generation.decoder import Decoder
from gymloop.generation.kv_cache import DenseCache, ScoreRule, Slots, visible
from gymloop.generation.rows import R, Ready
from gymloop.generation.scheduler import RowTable, Work

PREFILL_TOKENS = {"cpu": 512, "cuda": 4096}
"""Prefill per step: what decoding rows may be kept waiting for."""
IDLE_PREFILL_FACTOR = 4
"""So much more while no row is decoding: many rows then start together and stay one batch."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Consecutive tokens of one row: ``count`` of them from position ``start``, at ``offset`` in the packed step."""

    row: int
    start: int
    count: int
    offset: int


@dataclass(slots=True)
class PackedStep:
    """Which row and position every token of a forward pass has.

    Attributes:
        decode_positions: int64 [n], position of the single token of rows ``0..n-1``.
        chunks: the longer pieces, in packed order, after the ``n`` single tokens.
        position_ids: int64 [tokens], of every token.
        slots: where the tokens lie in a layer's buffers.
        longest: cache length that the decode rows need, the current token included; 0 without decode rows.
    """

    decode_positions: torch.Tensor
    chunks: Sequence[Chunk]
    position_ids: torch.Tensor
    slots: Slots
    longest: int
    dtype: torch.dtype
    _masks: dict[tuple[int | None, Chunk | None], torch.Tensor | None] = field(default_factory=dict)

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rule: ScoreRule) -> torch.Tensor:
        """Attention as ``Step.attend`` says; query heads that share a kv head are handled together."""
        tokens, heads, dim = query.shape
        kv_heads = key.shape[1]
        group = heads // kv_heads
        output = query.new_empty((tokens, heads, value.shape[3]))
        n = self.decode_positions.shape[0]
        if n:
            attended = _attend_few(
                query[:n].reshape(n, kv_heads, group, dim),
                key[:n, :, : self.longest],
                value[:n, :, : self.longest],
                self._decode_mask(rule.window),
                rule,
            )
            output[:n] = attended.reshape(n, heads, -1)
        for chunk in self.chunks:
            end = chunk.start + chunk.count
            piece = slice(chunk.offset, chunk.offset + chunk.count)
            attended = _attend_many(
                query[piece].transpose(0, 1).reshape(kv_heads, group, chunk.count, dim),
                key[chunk.row, :, None, :end],
                value[chunk.row, :, None, :end],
                self._chunk_mask(chunk, rule.window),
                rule,
            )
            output[piece] = attended.reshape(heads, chunk.count, -1).transpose(0, 1)
        return output

    def _decode_mask(self, window: int | None) -> torch.Tensor | None:
        """Additive mask [n, 1, 1, longest] of the decode rows; None where every row sees everything."""
        key = (window, None)
        if key not in self._masks:
            kv = torch.arange(self.longest, device=self.decode_positions.device)
            own = self.decode_positions[:, None]
            self._masks[key] = self._additive(visible(own, kv, window)[:, None, None, :])
        return self._masks[key]

    def _chunk_mask(self, chunk: Chunk, window: int | None) -> torch.Tensor | None:
        """Additive mask [count, start + count] of a chunk; None where plain causal attention is the same."""
        end = chunk.start + chunk.count
        if chunk.start == 0 and (window is None or window >= end):
            return None
        key = (window, chunk)
        if key not in self._masks:
            kv = torch.arange(end, device=self.position_ids.device)
            seen = visible(kv[chunk.start :, None], kv, window)
            self._masks[key] = torch.zeros(seen.shape, dtype=self.dtype, device=seen.device).masked_fill_(
                ~seen, -torch.inf
            )
        return self._masks[key]

    def _additive(self, seen: torch.Tensor) -> torch.Tensor | None:
        if bool(seen.all()):
            return None
        return torch.zeros(seen.shape, dtype=self.dtype, device=seen.device).masked_fill_(~seen, -torch.inf)


def _attend_few(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, rule: ScoreRule
) -> torch.Tensor:
    """Attention of few queries [n, kv_heads, group, dim] over [n, kv_heads, length, dim] views.

    In float32 on a CPU two batched products took 14 to 24 % less time than the fused kernel (64 rows, 100 to 512
    positions, one thread), whose blocks are made for many queries; elsewhere the fused kernel is used.
    """
    if rule.softcap is None and (query.device.type != "cpu" or query.dtype != torch.float32):
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=rule.scaling)
    n, kv_heads, group, dim = query.shape
    # Row and head strides of the views fold into one, so none of these flattenings copies keys or values.
    products = torch.bmm(query.reshape(n * kv_heads, group, dim), key.flatten(0, 1).transpose(1, 2))
    scores = rule.scores(products.view(n, kv_heads, group, -1))
    if mask is not None:
        scores.add_(mask)
    weights = torch.softmax(scores, dim=-1)
    return torch.bmm(weights.flatten(0, 1), value.flatten(0, 1)).view(n, kv_heads, group, -1)


def _attend_many(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, rule: ScoreRule
) -> torch.Tensor:
    """Attention of many queries [kv_heads, group, count, dim] over [kv_heads, 1, length, dim]; no mask is causal."""
    if rule.softcap is None:
        group = query.shape[1]
        return F.scaled_dot_product_attention(
            query,
            key.expand(-1, group, -1, -1),
            value.expand(-1, group, -1, -1),
            attn_mask=mask,
            is_causal=mask is None,
            scale=rule.scaling,
        )
    kv_heads, group, count, dim = query.shape
    products = torch.matmul(query.reshape(kv_heads, group * count, dim), key[:, 0].transpose(1, 2))
    scores = rule.scores(products).view(kv_heads, group, count, -1)
    if mask is None:
        hidden = torch.ones((count, count), dtype=torch.bool, device=scores.device).triu_(1)
        scores.masked_fill_(hidden, -torch.inf)
    else:
        scores.add_(mask)
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    attended = torch.matmul(weights.view(kv_heads, group * count, -1), value[:, 0])
    return attended.view(kv_heads, group, count, -1)


class PackedRows(Generic[R]):
    """``Rows`` on a ``RowTable``: rows move so that decoding ones come first, prefixes are taken over freely.

    Args:
        decoder: computes the passes.
        rows: requests at once, at most.
        max_len: tokens per row.
        budget: prefill tokens per step while rows decode; None takes the device's default.
    """

    def __init__(self, decoder: Decoder, rows: int, max_len: int, budget: int | None = None):
        self.prefilled = 0
        self.in_step = (0, 0)
        self._decoder = decoder
        self._cache = DenseCache(rows, max_len)
        self._table: RowTable[R] = RowTable(rows, max_len, self._cache)
        self._budget = PREFILL_TOKENS.get(decoder.device.type, 512) if budget is None else budget

    @property
    def reused(self) -> int:
        """Prompt tokens taken over from another row."""
        return self._table.reused

    @property
    def requests(self) -> Sequence[R]:
        """Requests that have a row."""
        return [request for request in self._table.requests[: self._table.active] if request is not None]

    def admit(self, request: R) -> bool:
        """Give the request a row; it waits while all are taken or its prefix is being computed."""
        return self._table.admit(request.prompt, request)

    def step(self) -> Sequence[Ready[R]]:
        """One pass over every decoding row and some prefill."""
        table = self._table
        n, work = table.plan(self._budget, IDLE_PREFILL_FACTOR * self._budget)
        logits, rows = self._forward(n, work)
        requests = [request for row in rows if (request := table.requests[row]) is not None]
        return [Ready(logits, requests, rows)] if rows else []

    def append(self, ready: Ready[R], tokens: np.ndarray) -> None:
        """Add one drawn token to each row."""
        self._table.append(ready.rows, tokens)

    def remove(self, leaving: Collection[R], broken: Collection[R] = ()) -> None:
        """Free the rows; what broken requests computed is cleaned away."""
        gone = {id(request) for request in leaving}
        ruined = {id(request) for request in broken}
        # Releasing moves the last active row into the gap, so the last ones leave first.
        for row in range(self._table.active - 1, -1, -1):
            key = id(self._table.requests[row])
            if key not in gone:
                continue
            if key in ruined:
                self._cache.clean(row)
                self._table.computed[row] = 0
            self._table.release(row)

    def forget(self) -> None:
        """The weights changed: nothing in the cache is valid."""
        self._table.forget()

    def clear(self) -> None:
        """Free all memory."""
        self._cache.clear()

    def _forward(self, n: int, work: Sequence[Work]) -> tuple[torch.Tensor, list[int]]:
        """Compute the planned tokens.

        Returns:
            Float32 logits [m, vocab] and the m rows, of those rows that now lack nothing.
        """
        table = self._table
        starts = table.computed[:n]
        ids = [table.tokens[np.arange(n), starts]]
        positions = [starts]
        owners = [np.arange(n)]
        chunks: list[Chunk] = []
        drawn = list(range(n))
        drawn_at = list(range(n))
        offset = n
        for piece in work:
            end = piece.start + piece.count
            ids.append(table.tokens[piece.row, piece.start : end])
            positions.append(np.arange(piece.start, end))
            owners.append(np.full(piece.count, piece.row))
            chunks.append(Chunk(piece.row, piece.start, piece.count, offset))
            offset += piece.count
            if end == table.known[piece.row]:
                drawn.append(piece.row)
                drawn_at.append(offset - 1)
        self.in_step = (n + len(work), offset)
        self.prefilled += offset - n

        longest = int(starts.max()) + 1 if n else 0
        needed = max([longest, *(piece.start + piece.count for piece in work)])
        if needed > self._cache.capacity:
            filled = table.computed.nonzero()[0]
            self._cache.reserve(needed, int(table.computed.max()), int(filled.max(initial=-1)) + 1)
        tensor = self._decoder.tensor
        position_ids = tensor(np.concatenate(positions))
        step = PackedStep(
            decode_positions=tensor(starts),
            chunks=chunks,
            position_ids=position_ids,
            slots=Slots(tensor(np.concatenate(owners)), position_ids),
            longest=longest,
            dtype=self._decoder.dtype,
        )
        logits = self._decoder.forward(self._cache, step, np.concatenate(ids), drawn_at)
        table.computed[:n] += 1
        for piece in work:
            table.computed[piece.row] += piece.count
        return logits, drawn
