"""Tiny random models of several architectures, saved once a session."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gymloop.models.tensors import persistent_buffers

VOCABULARY = 61
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "eos_token_id": 1,
    "bos_token_id": None,
    "pad_token_id": None,
}


def config_of(name: str):
    import transformers

    match name:
        case "llama":
            return transformers.LlamaConfig(**SIZES, tie_word_embeddings=True)
        case "llama-untied":
            return transformers.LlamaConfig(**SIZES, tie_word_embeddings=False)
        case "qwen3":
            return transformers.Qwen3Config(**SIZES, head_dim=16, tie_word_embeddings=True)
        case "mistral-window":
            return transformers.MistralConfig(**SIZES, sliding_window=6)
        case "phi-bias":
            return transformers.PhiConfig(**{**SIZES, "num_key_value_heads": 4})
        case "gemma2-softcap":
            return transformers.Gemma2Config(**{**SIZES, "pad_token_id": 0}, head_dim=8, query_pre_attn_scalar=8)
        case "mamba":
            return transformers.MambaConfig(vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, state_size=4)
        case "apertus":
            return transformers.ApertusConfig(**SIZES, rope_parameters={"rope_type": "default", "rope_theta": 1e4})
        case "gemma4":
            return transformers.Gemma4TextConfig(
                **{**SIZES, "pad_token_id": 0}, head_dim=8, global_head_dim=8, hidden_size_per_layer_input=0,
                layer_types=["sliding_attention", "full_attention"],
            )  # fmt: skip
        case "glm4-moe":
            return transformers.Glm4MoeConfig(
                **SIZES, n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, n_shared_experts=1,
                first_k_dense_replace=1, n_group=1, topk_group=1,
            )  # fmt: skip
    raise KeyError(name)


@pytest.fixture(autouse=True, scope="package")
def one_thread() -> Iterator[None]:
    """Models this small only wait for threads, most of all on a busy machine."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """``tiny(name)`` is a model folder with random weights large enough for logprobs to differ; see ``config_of``."""
    root = tmp_path_factory.mktemp("tiny")

    def get(name: str) -> Path:
        folder = root / name
        if not folder.exists():
            import torch
            from transformers import AutoModelForCausalLM

            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(1)
                model = AutoModelForCausalLM.from_config(config_of(name))
                with torch.no_grad():
                    for parameter in model.parameters():
                        if parameter.ndim > 1:
                            parameter.mul_(6)
                    for buffer in persistent_buffers(model).values():  # no two alike, and none as the config makes it
                        buffer.add_(torch.rand_like(buffer) * 0.5 + 0.1)
                model.save_pretrained(folder)
        return folder

    return get
