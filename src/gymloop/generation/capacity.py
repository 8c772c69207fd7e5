"""How long a context and how many rows an engine gets when nobody says: what the model has, what the memory holds.

The dense KV cache is as long as its longest row, for all rows. So the rows are chosen such that the cache fits into
half of the free memory with every row full: a server that starts can then serve whatever it accepts.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from gymloop import compat
from gymloop.errors import ConfigError

MOST_ROWS = 64
SHARE = 0.5
"""Of the memory that is free beside the weights; activations and other processes take from the rest."""
_DTYPE_BYTES = {"float32": 4, "bfloat16": 2}
_CGROUP = Path("/sys/fs/cgroup")
_MEMINFO = Path("/proc/meminfo")


def text_config(folder: str | Path) -> Any:
    """The decoder's configuration of a model folder.

    Raises:
        ConfigError: it cannot be read.
    """
    compat.skip_docstrings()
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(str(folder), local_files_only=True).get_text_config(decoder=True)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(
            f"the config.json in {folder} cannot be read: {str(error).strip().splitlines()[0]}"
        ) from error


def context_length(config: Any) -> int:
    """Positions of the model (``max_position_embeddings``).

    Raises:
        ConfigError: its configuration does not say.
    """
    positions = getattr(config, "max_position_embeddings", None)
    if not isinstance(positions, int) or positions < 2:
        raise ConfigError("the model's config.json names no max_position_embeddings; give the context length in tokens")
    return positions


def row_bytes(config: Any, precision: str, max_model_len: int) -> int:
    """Bytes of one full row of the KV cache: keys and values of all layers; 0 for a model without attention heads."""
    heads = getattr(config, "num_attention_heads", None)
    if not heads:
        return 0  # no engine here decodes such a model; the engine says so
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    return 2 * config.num_hidden_layers * kv_heads * head_dim * _DTYPE_BYTES[precision] * max_model_len


def rows_that_fit(row: int, weights: int, free: int) -> int:
    """Rows of ``row`` bytes beside ``weights`` bytes in ``free`` bytes, 1 to 64."""
    return max(1, min(MOST_ROWS, int((free - weights) * SHARE) // max(row, 1)))


def free_bytes(device: str) -> int:
    """Memory that this process could still take on a device; half of the machine's where the system does not say."""
    if device.startswith("cuda"):
        import torch

        return torch.cuda.mem_get_info(device)[0]
    machine, container = _machine_bytes(), _cgroup_bytes()
    return machine if container is None else min(machine, container)


def _machine_bytes() -> int:
    half = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    try:
        lines = _MEMINFO.read_text().splitlines()
    except OSError:
        return half
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), half)


def _cgroup_bytes() -> int | None:
    """Room under a container's memory limit, which the machine's own numbers do not show."""
    try:
        limit, used = ((_CGROUP / name).read_text().strip() for name in ("memory.max", "memory.current"))
    except OSError:
        return None
    return None if limit == "max" else max(0, int(limit) - int(used))
