"""What a model folder holds, in two short strings: they tell it from any other, and are cheap at every start.

The architecture is the hash of the configuration and of every tensor's name, type and shape. The weights are a
fingerprint of their bytes: all of a small file, evenly spaced blocks of a large one. Training moves every block, so
two models that differ in use differ here. Neither depends on where the folder lies or what it is called.
"""

from __future__ import annotations

import hashlib
import json
import struct
from pathlib import Path

from gymloop.errors import ConfigError

BLOCK = 64 * 1024
BLOCKS = 256
"""Of one weight file: 16 MiB at most are read."""

_INCIDENTAL = {"_name_or_path", "transformers_version", "dtype", "torch_dtype"}
"""Keys of ``config.json`` that say how it was written, not what the model is."""


def model_identity(folder: Path) -> dict[str, str]:
    """Describe a Hugging Face model folder without loading it.

    Returns:
        ``architecture`` and ``weights``, hex digests of SHA-256.

    Raises:
        ConfigError: the folder has no configuration or no weights, or they are not whole.
    """
    folder = Path(folder)
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        files = sorted(folder.glob("*.safetensors")) or sorted(folder.glob("pytorch_model*.bin"))
        if not files:
            raise ConfigError(f"{folder} is not a model folder: it has no weights (*.safetensors)")
        architecture = hashlib.sha256(_canonical({k: v for k, v in config.items() if k not in _INCIDENTAL}))
        weights = hashlib.sha256()
        for path in files:
            if path.suffix == ".safetensors":
                architecture.update(_canonical(_tensors(path)))
            _add_blocks(path, weights)
    except (OSError, ValueError, AttributeError, LookupError, TypeError, struct.error) as error:
        raise ConfigError(f"the model in {folder} cannot be read: {error}") from error
    return {"architecture": architecture.hexdigest(), "weights": weights.hexdigest()}


def _tensors(path: Path) -> dict[str, tuple[str, list[int]]]:
    """Name, type and shape of every tensor of a safetensors file: eight bytes of length, then JSON."""
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        if length > path.stat().st_size:
            raise ValueError(f"{path.name} is not a safetensors file")
        header = json.loads(file.read(length))
    ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
    whole = 8 + length + max(ends, default=0)
    if path.stat().st_size < whole:
        raise ValueError(f"{path.name} is cut off: {path.stat().st_size} of {whole} bytes are there")
    return {name: (entry["dtype"], entry["shape"]) for name, entry in header.items() if name != "__metadata__"}


def _add_blocks(path: Path, digest: hashlib._Hash) -> None:
    size = path.stat().st_size
    digest.update(struct.pack("<Q", size))
    with path.open("rb") as file:
        if size <= BLOCK * BLOCKS:
            digest.update(file.read())
            return
        for number in range(BLOCKS):
            file.seek((size - BLOCK) * number // (BLOCKS - 1))
            digest.update(file.read(BLOCK))


def _canonical(value: object) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()
