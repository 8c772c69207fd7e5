"""Opening a model folder: its weights in one type on one device, or one sentence that says why not.

Progress is told in bytes of the checkpoint. It costs one call per parameter and no reading of its own: transformers
goes over the parameters under a progress bar, and that bar is replaced.
"""

from __future__ import annotations

import json
import math
import struct
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gymloop import compat
from gymloop.errors import ConfigError

DTYPES = ("float32", "bfloat16")
OnBytes = Callable[[int, int], None]
"""Called with the bytes of weights that are loaded and their total; in the thread that loads."""

_BAR = "Loading weights"
"""Description of the bar under which transformers 5.17 to 5.24 load parameters."""
_LONGEST_HEADER = 100 << 20
"""Bytes; the format's own limit."""
_watching = threading.local()
_install = threading.Lock()
_default_type = threading.Lock()
"""While transformers makes a model, torch's default type is the model's, in every thread of the process: two loads at
once would give each other parameters of the wrong type, and leave a wrong default behind."""


def load_causal_lm(folder: str | Path, dtype: str, device: str, on_bytes: OnBytes | None = None) -> Any:
    """Load a causal language model for inference or as the start of training.

    Args:
        folder: a Hugging Face model folder (``config.json`` and safetensors).
        dtype: ``float32`` or ``bfloat16``; all floating parameters get it.
        device: as torch names it, for example ``cpu`` or ``cuda:0``.
        on_bytes: hears of the progress, from ``(0, total)`` to ``(total, total)``; None leaves the bar of transformers.

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
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM

    try:
        with _default_type, _watched(folder, on_bytes):
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype), local_files_only=True)
    except (OSError, ValueError, SafetensorError) as error:
        raise ConfigError(f"the model in {folder} cannot be loaded: {_first_line(error)}") from error
    compat.apply_softcap(model)
    return model.to(device).eval()


def tensor_bytes(folder: str | Path) -> dict[str, int]:
    """Size in bytes of every tensor in a folder's ``model*.safetensors`` files, from their headers.

    The format (huggingface/safetensors): eight bytes of little-endian length, a JSON header, then the tensors.
    Unreadable files have no share: loading says what is wrong with them.
    """
    return _of_headers(folder, lambda entry: int(entry["data_offsets"][1]) - int(entry["data_offsets"][0]))


def tensor_elements(folder: str | Path) -> dict[str, int]:
    """Number of elements of each of them."""
    return _of_headers(folder, lambda entry: math.prod(map(int, entry["shape"])))


def _of_headers(folder: str | Path, told: Callable[[dict[str, Any]], int]) -> dict[str, int]:
    found: dict[str, int] = {}
    for path in sorted(Path(folder).glob("model*.safetensors")):
        try:
            with path.open("rb") as file:
                (length,) = struct.unpack("<Q", file.read(8))
                header = json.loads(file.read(min(length, _LONGEST_HEADER)))
            found |= {name: told(entry) for name, entry in header.items() if name != "__metadata__"}
        except (OSError, ValueError, struct.error, KeyError, TypeError, AttributeError, IndexError):
            continue
    return found


@contextmanager
def _watched(folder: Path, on_bytes: OnBytes | None) -> Iterator[None]:
    if on_bytes is None:
        yield
        return
    _replace_bars()
    sizes = tensor_bytes(folder)
    on_bytes(0, sum(sizes.values()))
    _watching.load = (sizes, on_bytes)
    try:
        yield
    finally:
        _watching.load = None


def _replace_bars() -> None:
    """Route the bars of transformers through ``_bar``, once; the hook is global there, what it does is per thread."""
    from transformers.utils import logging

    with _install:
        previous = logging.set_tqdm_hook(None)
        if getattr(previous, "gymloop", False):
            logging.set_tqdm_hook(previous)
            return

        def bar(factory: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            load = getattr(_watching, "load", None)
            if load is not None and kwargs.get("desc") == _BAR and args:
                return _told(args[0], *load)
            return previous(factory, args, kwargs) if previous else factory(*args, **kwargs)

        bar.gymloop = True  # type: ignore[attr-defined]
        logging.set_tqdm_hook(bar)


def _told(items: Iterable[tuple[str, Any]], sizes: Mapping[str, int], on_bytes: OnBytes) -> Iterator[tuple[str, Any]]:
    """The parameters to load, telling after each what is done.

    A parameter that the checkpoint holds under another name, or in pieces, counts as the mean of such.
    """
    items = list(items)
    total = sum(sizes.values())
    known = {name: sizes[name] for name, _ in items if name in sizes}
    renamed = len(items) - len(known)
    share = (total - sum(known.values())) / renamed if renamed else 0.0
    done = 0.0
    for name, mapping in items:
        yield name, mapping
        done += known.get(name, share)
        on_bytes(min(int(done), total), total)
    on_bytes(total, total)


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
