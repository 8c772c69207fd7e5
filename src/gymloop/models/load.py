"""Opening a model folder: its weights in one type on one device, or one sentence that says why not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gymloop.errors import ConfigError

DTYPES = ("float32", "bfloat16")


def load_causal_lm(folder: str | Path, dtype: str, device: str) -> Any:
    """Load a causal language model for inference or as the start of training.

    Args:
        folder: a Hugging Face model folder (``config.json`` and safetensors).
        dtype: ``float32`` or ``bfloat16``; all floating parameters get it.
        device: as torch names it, for example ``cpu`` or ``cuda:0``.

    Returns:
        The transformers model, in eval mode.

    Raises:
        ConfigError: the folder, its weights or the type cannot be used.
    """
    if dtype not in DTYPES:
        raise ConfigError(f"dtype {dtype!r} is not supported; expected one of {', '.join(DTYPES)}")
    folder = Path(folder)
    if not (folder / "config.json").is_file():
        raise ConfigError(f"{folder} is not a model folder: it has no config.json")
    import torch
    from transformers import AutoModelForCausalLM

    try:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype), local_files_only=True)
    except (OSError, ValueError) as error:
        raise ConfigError(f"the model in {folder} cannot be loaded: {_first_line(error)}") from error
    return model.to(device).eval()


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
