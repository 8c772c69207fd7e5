"""Opening a model folder: weights in one type on one device, and the tokens that end its answers."""

from __future__ import annotations

import json
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


def end_token_ids(folder: str | Path) -> tuple[int, ...]:
    """Tokens that end an answer, without duplicates.

    The end tokens of ``generation_config.json`` come first, then those of ``config.json``, then the tokenizer's.

    Raises:
        ConfigError: none of the three names one.
    """
    folder = Path(folder)
    found: dict[int, None] = {}
    for name in ("generation_config.json", "config.json"):
        value = _read_json(folder / name).get("eos_token_id")
        found.update(dict.fromkeys([value] if isinstance(value, int) else value or []))
    tokenizer_end = _tokenizer_end_id(folder)
    if tokenizer_end is not None:
        found[tokenizer_end] = None
    if not found:
        raise ConfigError(
            f"{folder} names no end token: expected eos_token_id in generation_config.json or config.json, "
            "or eos_token in tokenizer_config.json"
        )
    return tuple(found)


def _tokenizer_end_id(folder: Path) -> int | None:
    """The id of the tokenizer's ``eos_token``, looked up among its added tokens and then its vocabulary."""
    token = _read_json(folder / "tokenizer_config.json").get("eos_token")
    token = token or _read_json(folder / "special_tokens_map.json").get("eos_token")
    if isinstance(token, dict):
        token = token.get("content")
    if token is None:
        return None
    tokenizer = _read_json(folder / "tokenizer.json")
    for added in tokenizer.get("added_tokens", []):
        if added.get("content") == token:
            return int(added["id"])
    vocab = tokenizer.get("model", {}).get("vocab", {})
    if isinstance(vocab, dict) and token in vocab:
        return int(vocab[token])
    return None


def _read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; empty where there is no such file."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} holds a {type(value).__name__}; an object was expected")
    return value


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
