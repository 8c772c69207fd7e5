"""Everything that differs between the supported versions of transformers and torch is here, and nowhere else.

Supported: transformers 5.17 to 5.24, torch 2.11 to 2.14. Code elsewhere asks this module, never a version number.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from typing import Any, Literal

from gymloop.gpu import gpu_of

Precision = Literal["float32", "bfloat16"]


def skip_docstrings() -> None:
    """Let transformers import a model's configuration without the model's code, in this process from here on.

    Before 5.21 the docstring that it writes for every class of a model needs that code, seconds of imports.
    """
    from transformers import __version__

    if tuple(map(int, __version__.split(".")[:2])) < (5, 21):
        writer = importlib.import_module("transformers.utils.auto_docstring")
        writer.auto_class_docstring = lambda cls, **_: cls  # type: ignore[attr-defined]


def cache_argument(model: Any) -> str:
    """Name of the forward argument that takes the KV cache: ``past_key_values``, renamed to ``cache`` in 5.24."""
    parameters = inspect.signature(type(model).forward).parameters
    return "cache" if "cache" in parameters else "past_key_values"


def register_attention(name: str, function: Callable[..., Any]) -> None:
    """Make an attention function known to transformers by name.

    No mask function is registered beside it, so models that run it build no mask (transformers then passes None).
    """
    from transformers import AttentionInterface

    AttentionInterface.register(name, function)


def set_attention(model: Any, name: str) -> bool:
    """Let every attention layer of a model call the function registered under ``name``.

    Returns:
        Whether the model and its text part took it; models that predate the interface keep their own.
    """
    if not model._supports_attention_backend:
        return False
    model.set_attn_implementation(name)
    return model.config.get_text_config(decoder=True)._attn_implementation == name


def apply_softcap(model: Any) -> None:
    """Let a model that caps its attention scores really cap them.

    Before 5.24 such models (Gemma 2) took PyTorch's fused attention by default, which ignores the cap without a word.
    """
    config = model.config.get_text_config(decoder=True)
    if getattr(config, "attn_logit_softcapping", None) is not None and config._attn_implementation == "sdpa":
        model.set_attn_implementation("eager")


def fix_expert_shapes(model: Any) -> bool:
    """Let a mixture of experts compute each token with its experts' weights gathered for it, one product per token.

    The default gathers the tokens of each expert instead, so that its shapes follow from the whole batch's routing.

    Returns:
        Whether the model took it, or has no experts.
    """
    config = model.config.get_text_config(decoder=True)
    counts = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    if not any((getattr(config, name, None) or 0) > 1 for name in counts):
        return True
    if not model._can_set_experts_implementation():
        return False
    model.set_experts_implementation("batched_mm")
    return True


def has_native_bfloat16(device: str) -> bool:
    """Whether matrix products in bfloat16 are at least as fast as in float32 on this device, as torch names it."""
    import torch

    if not device.startswith("cpu"):
        return device.startswith("cuda") and (torch.version.hip is not None or gpu_of(device).capability >= (8, 0))
    probes = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")  # private names; absent ones count as no
    return any(probe() for name in probes if (probe := getattr(torch.cpu, name, None)) is not None)


def settle_precision(wanted: Precision | Literal["auto"], device: str) -> Precision:
    """The compute type that ``auto`` means on this device: bfloat16 where it is native, else float32."""
    if wanted != "auto":
        return wanted
    return "bfloat16" if has_native_bfloat16(device) else "float32"
