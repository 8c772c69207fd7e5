"""A dense KV cache whose rows each stand at their own position, and the attention that reads it in place.

One forward pass computes a *step*: tokens of one or many rows, laid end to end in one batch row of the model. Keys and
values are written to each row's own positions and then read as views: neither the cache nor its heads are ever copied
for attention. The model builds no mask; the step alone decides what a token sees, which is its own row up to and
including its own position.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from transformers import Cache

from gymloop import compat
from gymloop.errors import ConfigError

ATTENTION = "gymloop_dense"
GROWTH = 128
UNSUPPORTED_KEYWORDS = ("s_aux", "position_bias")


@dataclass(frozen=True, slots=True)
class ScoreRule:
    """How a layer turns products of queries and keys into scores.

    Attributes:
        scaling: factor on the products.
        window: positions a token sees, its own included; None is all before it.
        softcap: scores become ``softcap * tanh(score / softcap)``; None leaves them.
    """

    scaling: float
    window: int | None
    softcap: float | None

    def scores(self, products: torch.Tensor) -> torch.Tensor:
        """Scale and cap, in place, before any mask."""
        scores = products.mul_(self.scaling)
        return scores if self.softcap is None else scores.div_(self.softcap).tanh_().mul_(self.softcap)


class Step(Protocol):
    """Which row and position every token of one forward pass has, and how it attends."""

    position_ids: torch.Tensor
    """int64 [tokens]: positions as the model sees them."""

    def slots(self, kv_heads: int, capacity: int) -> torch.Tensor:
        """Where the tokens lie in a buffer seen as [rows * kv_heads * capacity, dim]: int64 [kv_heads * tokens]."""

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rule: ScoreRule) -> torch.Tensor:
        """Attention of query [tokens, heads, dim] over buffers [rows, kv_heads, capacity, dim]; shaped like query."""


class Slots:
    """The slots of given rows and positions, computed once per shape of a layer's buffers."""

    def __init__(self, rows: torch.Tensor, positions: torch.Tensor):
        self._rows = rows
        self._positions = positions
        self._known: dict[tuple[int, int], torch.Tensor] = {}

    def __call__(self, kv_heads: int, capacity: int) -> torch.Tensor:
        """Int64 [kv_heads * tokens], as ``Step.slots`` says."""
        key = (kv_heads, capacity)
        if key not in self._known:
            heads = torch.arange(kv_heads, device=self._rows.device)[:, None]
            self._known[key] = (((self._rows * kv_heads + heads) * capacity) + self._positions).flatten()
        return self._known[key]


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
        self.step: Step | None = None
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
        """Write the step's keys and values [1, kv_heads, tokens, dim] and return the layer's whole buffers."""
        if self.step is None:
            raise RuntimeError("DenseCache.update outside a step")
        buffers = self._buffers.get(layer_idx)
        if buffers is None:
            buffers = self._buffers[layer_idx] = (self._allocate(key_states), self._allocate(value_states))
        kv_heads, tokens = key_states.shape[1:3]
        slots = self.step.slots(kv_heads, self.capacity)
        for buffer, states in zip(buffers, (key_states, value_states), strict=True):
            flat = buffer.view(self.rows * kv_heads * self.capacity, -1)
            flat.index_copy_(0, slots, states[0].reshape(kv_heads * tokens, -1))
        return buffers

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        """Give row ``target`` the first ``length`` positions of row ``source``."""
        self.copy_span(source, target, 0, length)

    def copy_span(self, source: int, target: int, start: int, end: int) -> None:
        """Give row ``target`` the positions from ``start`` to before ``end`` of row ``source``."""
        for buffers in self._buffers.values():
            for buffer in buffers:
                buffer[target, :, start:end].copy_(buffer[source, :, start:end])

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


def visible(own: torch.Tensor, kv: torch.Tensor, window: int | None) -> torch.Tensor:
    """Causal visibility, limited to the last ``window`` positions (the token's own included) where there is one."""
    seen = kv <= own
    return seen if window is None else seen & (kv > own - window)


def dense_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    dense_step: Step | None = None,
    windows_seen: set[int | None] | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of a step over whole-layer buffers, under transformers' attention interface.

    Args:
        module: the attention layer.
        query: [1, heads, tokens, dim].
        key: buffer [rows, kv_heads, capacity, dim]; ``value`` likewise, its dim may differ.
        attention_mask: None; the step decides visibility.
        scaling: factor on the scores, None is ``dim ** -0.5``.
        sliding_window: positions a token sees, its own included.
        softcap: as in ``ScoreRule``.
        dense_step: travels as a keyword argument of the model's forward.
        windows_seen: likewise; collects the windows that layers ask for.

    Returns:
        [1, tokens, heads, dim] and None for the weights.

    Raises:
        ConfigError: the layer needs something this attention does not compute.
    """
    unsupported = [name for name in UNSUPPORTED_KEYWORDS if kwargs.get(name) is not None]
    if unsupported or dense_step is None or attention_mask is not None or not getattr(module, "is_causal", True):
        reason = (
            f"its attention uses {unsupported[0]}" if unsupported else "its attention is not plain causal attention"
        )
        raise ConfigError(f"{type(module).__name__} cannot run on the torch engine: {reason}")
    if windows_seen is not None:
        windows_seen.add(sliding_window)
    rule = ScoreRule(query.shape[3] ** -0.5 if scaling is None else scaling, sliding_window, softcap)
    return dense_step.attend(query[0].transpose(0, 1), key, value, rule)[None], None


compat.register_attention(ATTENTION, dense_attention)
