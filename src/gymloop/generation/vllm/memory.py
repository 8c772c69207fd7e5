"""vLLM's KV cache in bytes, planned before it starts: engine and policy load at once, and a profile taken meanwhile
would measure the other.

As much as every row full takes, or what the memory holds beside the weights, whichever is less.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from gymloop.errors import ConfigError
from gymloop.generation import capacity
from gymloop.gpu import gpu_of
from gymloop.models.load import tensor_elements

BLOCK_TOKENS = 128
"""vLLM's largest default block; a row's last block is counted whole."""
SPARE_BLOCKS = 2
"""vLLM keeps one empty block for itself."""
_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


def kv_cache_bytes(
    config: Any, precision: str, kv_dtype: str, max_model_len: int, rows: int, room: int, device: str, ranks: int = 1
) -> int:
    """Bytes of one worker process's KV cache.

    Args:
        config: the decoder's configuration.
        precision: ``float32`` or ``bfloat16``.
        kv_dtype: vLLM's ``kv_cache_dtype``; ``auto`` is the precision, what is smaller than 16 bits one byte.
        max_model_len: tokens of a full row.
        rows: requests decoded together.
        room: bytes that the cache may take of one device.
        device: as torch names it.
        ranks: tensor-parallel ranks, over which the key-value heads are split.

    Raises:
        ConfigError: not even one full row fits.
    """
    tokens = math.ceil(max_model_len / BLOCK_TOKENS) * BLOCK_TOKENS
    row = capacity.row_bytes(config, precision, tokens)
    if kv_dtype != "auto":
        row = row * _BYTES.get(kv_dtype, 1) // _BYTES[precision]
    row = max(1, row // min(ranks, _kv_heads(config)))
    spare = SPARE_BLOCKS * row * BLOCK_TOKENS // tokens
    if room < row + spare:
        key = "policy.generation.vllm_cfg"
        more = f"free memory, of which half is planned with, or set {key}.kv_cache_memory_bytes to {row + spare}"
        if device.startswith("cuda"):
            more = f"raise {key}.gpu_memory_utilization"
        raise ConfigError(
            f"the KV cache of one request of {max_model_len} tokens takes {(row + spare) / 1e9:.2f} GB and "
            f"{max(room, 0) / 1e9:.2f} GB are left for it beside the weights; lower policy.max_total_sequence_length, "
            f"or {more}"
        )
    return min(rows * row + spare, room)


def _kv_heads(config: Any) -> int:
    heads = getattr(config, "num_attention_heads", None) or 1
    return int(getattr(config, "num_key_value_heads", None) or heads)


def room_for_cache(weights: int, device: str, share: float, ranks: int = 1) -> int:
    """Bytes that one device has for the cache.

    Args:
        weights: bytes of all weights, in the precision they are held in.
        device: as torch names it.
        share: of a GPU's whole memory that the engine may take; of a CPU's free memory beside the weights, half.
        ranks: over which the weights are split.
    """
    if not device.startswith("cuda"):
        return int((capacity.free_bytes(device) - weights) * capacity.SHARE)
    total = gpu_of(device).memory
    activations = max(2 << 30, total // 20)
    return int(total * share) - weights // ranks - activations


def weight_bytes(folder: Path, precision: str) -> int:
    """Bytes of a checkpoint's weights once they are held in ``precision``."""
    return sum(tensor_elements(folder).values()) * _BYTES[precision]
