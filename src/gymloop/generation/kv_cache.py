"""A dense KV cache whose rows each stand at their own position, and the attention that reads it in place.

One forward pass computes a *packed step*: a sequence of tokens of many rows, laid end to end in one batch row of the
model. The first ``n`` tokens belong to rows ``0..n-1``, one each (decoding); after them come chunks of several tokens
of one row each (prefill). Keys and values are written to each row's own positions and then read as views: neither the
cache nor its heads are ever copied for attention. The model builds no mask; the attention here alone decides what a
token sees, which is its own row up to and including its own position.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from transformers import Cache

from gymloop import compat
from gymloop.errors import ConfigError

ATTENTION = "gymloop_dense"
GROWTH = 128
UNSUPPORTED_KEYWORDS = ("softcap", "s_aux", "position_bias")


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
        rows: int64 [tokens], row of every token; ``positions`` likewise.
        longest: cache length that the decode rows need, the current token included; 0 without decode rows.
    """

    decode_positions: torch.Tensor
    chunks: Sequence[Chunk]
    rows: torch.Tensor
    positions: torch.Tensor
    longest: int
    dtype: torch.dtype
    _masks: dict[tuple[int | None, Chunk | None], torch.Tensor | None] = field(default_factory=dict)
    _slots: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)

    def head_slots(self, kv_heads: int, capacity: int) -> torch.Tensor:
        """Where the tokens lie in a buffer seen as [rows * kv_heads * capacity, dim]: int64 [kv_heads * tokens]."""
        key = (kv_heads, capacity)
        if key not in self._slots:
            heads = torch.arange(kv_heads, device=self.rows.device)[:, None]
            self._slots[key] = (((self.rows * kv_heads + heads) * capacity) + self.positions).flatten()
        return self._slots[key]

    def decode_mask(self, window: int | None) -> torch.Tensor | None:
        """Additive mask [n, 1, 1, longest] of the decode rows; None where every row sees everything."""
        key = (window, None)
        if key not in self._masks:
            kv = torch.arange(self.longest, device=self.decode_positions.device)
            own = self.decode_positions[:, None]
            self._masks[key] = self._additive(_visible(own, kv, window)[:, None, None, :])
        return self._masks[key]

    def chunk_mask(self, chunk: Chunk, window: int | None) -> torch.Tensor | None:
        """Additive mask [count, start + count] of a chunk."""
        key = (window, chunk)
        if key not in self._masks:
            kv = torch.arange(chunk.start + chunk.count, device=self.rows.device)
            own = kv[chunk.start :, None]
            self._masks[key] = self._additive(_visible(own, kv, window))
        return self._masks[key]

    def _additive(self, visible: torch.Tensor) -> torch.Tensor | None:
        if bool(visible.all()):
            return None
        return torch.zeros(visible.shape, dtype=self.dtype, device=visible.device).masked_fill_(~visible, -torch.inf)


class DenseCache(Cache):
    """Keys and values of all layers: per layer one buffer [rows, kv_heads, capacity, head_dim] each.

    Capacity is the same for all rows and grows by doubling up to ``max_len``; layers are allocated when first written.
    Positions beyond a row's tokens are read under a mask, and a masked NaN is still a NaN: every position is finite
    from the start, and ``clean`` makes a row finite again.
    """

    def __init__(self, rows: int, max_len: int):
        super().__init__(layers=[])
        self.rows = rows
        self.max_len = max_len
        self.capacity = 0
        self.step: PackedStep | None = None
        self._buffers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Always 0: positions are given to the model explicitly and differ between rows."""
        return 0

    def reserve(self, length: int, used: int, used_rows: int) -> None:
        """Make room for ``length`` positions per row, keeping positions below ``used`` of the first ``used_rows``."""
        if length <= self.capacity:
            return
        wanted = max(length, 2 * self.capacity, GROWTH)
        self.capacity = min(self.max_len, -(-wanted // GROWTH) * GROWTH)
        for layer, (keys, values) in self._buffers.items():
            grown = (self._empty(keys), self._empty(values))
            for new, old in zip(grown, (keys, values), strict=True):
                new[:used_rows, :, :used].copy_(old[:used_rows, :, :used])
            self._buffers[layer] = grown

    def clean(self, row: int) -> None:
        """Forget the whole row, and with it whatever is not finite in it."""
        for buffers in self._buffers.values():
            for buffer in buffers:
                buffer[row].zero_()

    def clear(self) -> None:
        """Free all memory."""
        self._buffers.clear()
        self.capacity = 0

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the packed step's keys and values [1, kv_heads, tokens, dim] and return the layer's whole buffers."""
        if self.step is None:
            raise RuntimeError("DenseCache.update outside a packed step")
        buffers = self._buffers.get(layer_idx)
        if buffers is None:
            buffers = self._buffers[layer_idx] = (self._allocate(key_states), self._allocate(value_states))
        kv_heads, tokens = key_states.shape[1:3]
        slots = self.step.head_slots(kv_heads, self.capacity)
        for buffer, states in zip(buffers, (key_states, value_states), strict=True):
            flat = buffer.view(self.rows * kv_heads * self.capacity, -1)
            flat.index_copy_(0, slots, states[0].reshape(kv_heads * tokens, -1))
        return buffers

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        """Give row ``target`` the first ``length`` positions of row ``source``."""
        for buffers in self._buffers.values():
            for buffer in buffers:
                buffer[target, :, :length].copy_(buffer[source, :, :length])

    def swap(self, a: int, b: int, length_a: int, length_b: int) -> None:
        """Exchange two rows of which ``length_a`` and ``length_b`` positions are in use."""
        for buffers in self._buffers.values():
            for buffer in buffers:
                if length_a == 0:
                    buffer[a, :, :length_b].copy_(buffer[b, :, :length_b])
                elif length_b == 0:
                    buffer[b, :, :length_a].copy_(buffer[a, :, :length_a])
                else:
                    kept = buffer[a, :, :length_a].clone()
                    buffer[a, :, :length_b].copy_(buffer[b, :, :length_b])
                    buffer[b, :, :length_a].copy_(kept)

    def _allocate(self, states: torch.Tensor) -> torch.Tensor:
        shape = (self.rows, states.shape[1], self.capacity, states.shape[3])
        return torch.zeros(shape, dtype=states.dtype, device=states.device)

    def _empty(self, old: torch.Tensor) -> torch.Tensor:
        return torch.zeros((self.rows, old.shape[1], self.capacity, old.shape[3]), dtype=old.dtype, device=old.device)


def _visible(own: torch.Tensor, kv: torch.Tensor, window: int | None) -> torch.Tensor:
    """Causal visibility, limited to the last ``window`` positions (the token's own included) where there is one."""
    visible = kv <= own
    return visible if window is None else visible & (kv > own - window)


def dense_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    packed_step: PackedStep | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of a packed step over whole-layer buffers, under transformers' attention interface.

    Query heads that share a kv head are handled together, so keys and values are never repeated.

    Args:
        module: the attention layer.
        query: [1, heads, tokens, dim].
        key: buffer [rows, kv_heads, capacity, dim]; ``value`` likewise, its dim may differ.
        attention_mask: None; the packed step decides visibility.
        scaling: factor on the scores, None is ``dim ** -0.5``.
        sliding_window: positions a token sees, its own included.
        packed_step: travels as a keyword argument of the model's forward.

    Returns:
        [1, tokens, heads, dim] and None for the weights.

    Raises:
        ConfigError: the layer needs something this attention does not compute.
    """
    unsupported = [name for name in UNSUPPORTED_KEYWORDS if kwargs.get(name) is not None]
    if unsupported or packed_step is None or attention_mask is not None or not getattr(module, "is_causal", True):
        reason = (
            f"its attention uses {unsupported[0]}" if unsupported else "its attention is not plain causal attention"
        )
        raise ConfigError(f"{type(module).__name__} cannot run on the torch engine: {reason}")

    heads, tokens, dim = query.shape[1:]
    kv_heads = key.shape[1]
    group = heads // kv_heads
    by_token = query[0].transpose(0, 1)
    output = query.new_empty((tokens, heads, value.shape[3]))

    n = packed_step.decode_positions.shape[0]
    if n:
        attended = _attend(
            by_token[:n].reshape(n, kv_heads, group, dim),
            key[:n, :, : packed_step.longest],
            value[:n, :, : packed_step.longest],
            packed_step.decode_mask(sliding_window),
            scaling,
        )
        output[:n] = attended.reshape(n, heads, -1)
    for chunk in packed_step.chunks:
        end = chunk.start + chunk.count
        piece = slice(chunk.offset, chunk.offset + chunk.count)
        whole = chunk.start == 0 and (sliding_window is None or sliding_window >= end)
        attended = F.scaled_dot_product_attention(
            query[0, :, piece].reshape(kv_heads, group, chunk.count, dim),
            key[chunk.row, :, None, :end].expand(-1, group, -1, -1),
            value[chunk.row, :, None, :end].expand(-1, group, -1, -1),
            attn_mask=None if whole else packed_step.chunk_mask(chunk, sliding_window),
            is_causal=whole,
            scale=scaling,
        )
        output[piece] = attended.reshape(heads, chunk.count, -1).transpose(0, 1)
    return output[None], None


def _attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, scaling: float | None
) -> torch.Tensor:
    """Attention of few queries [n, kv_heads, group, dim] over [n, kv_heads, length, dim] views.

    In float32 on a CPU two batched products took 14 to 24 % less time than the fused kernel (64 rows, 100 to 512
    positions, one thread), whose blocks are made for many queries; elsewhere the fused kernel is used.
    """
    if query.device.type != "cpu" or query.dtype != torch.float32:
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling)
    n, kv_heads, group, dim = query.shape
    # Row and head strides of the views fold into one, so none of these flattenings copies keys or values.
    scores = torch.bmm(query.reshape(n * kv_heads, group, dim), key.flatten(0, 1).transpose(1, 2))
    scores = scores.view(n, kv_heads, group, -1).mul_(dim**-0.5 if scaling is None else scaling)
    if mask is not None:
        scores.add_(mask)
    weights = torch.softmax(scores, dim=-1)
    return torch.bmm(weights.flatten(0, 1), value.flatten(0, 1)).view(n, kv_heads, group, -1)


compat.register_attention(ATTENTION, dense_attention)
