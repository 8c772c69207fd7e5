"""The embedded engine passes the whole kit, for every family of model it is meant for, fast and deterministic."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    LlamaConfig,
    Phi3Config,
    PhiConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from gymloop.generation.torch_engine import TorchEngine

from . import engine as kit

SMALL: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.4,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}
TIED = SMALL | {"tie_word_embeddings": True}
WINDOW = {"head_dim": 8, "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
MIXTURE = {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
FAMILIES: dict[str, Any] = {
    "llama": LlamaConfig(**SMALL),
    "gemma3-tied": Gemma3TextConfig(**TIED, **WINDOW),
    "llama-tied": LlamaConfig(**TIED),
    "gemma3": Gemma3TextConfig(**SMALL, **WINDOW),
    "gemma2-tied": Gemma2Config(**TIED, **WINDOW, attn_logit_softcapping=5.0, final_logit_softcapping=9.0),
    "qwen3": Qwen3Config(**SMALL, head_dim=16),
    "qwen3-tied": Qwen3Config(**TIED, head_dim=16),
    "phi3": Phi3Config(**SMALL, sliding_window=8),
    "phi": PhiConfig(**SMALL),
    "qwen3-moe": Qwen3MoeConfig(**SMALL, **MIXTURE),
    "qwen3-moe-tied": Qwen3MoeConfig(**TIED, **MIXTURE),
}
WHOLE = {("llama", "fast"), ("llama", "deterministic"), ("gemma3-tied", "fast")}
"""What the whole kit runs on by default; the whole matrix is slow."""
CORE = {
    "greedy_equals_generate_when_requests_join_at_random_times",
    "new_weights_answer_as_a_fresh_engine_on_them_and_again_after_a_second_sync",
}
"""What runs by default on every family, fast."""
LONG = {("llama", "deterministic", "draws_follow_the_distribution")}
ROUNDED = {
    "greedy_equals_generate_when_requests_join_at_random_times",
    "f07_logprobs_equal_a_full_forward_at_temperature_1",
    "logprobs_are_of_the_distribution_after_bias_and_penalties",
}
REPEATED = ROUNDED | {
    "a_seed_or_key_repeats_its_draw_in_any_company",
    "concurrent_requests_equal_lone_ones",
    "requests_wait_through_a_pause_and_keep_their_state",
    "new_weights_answer_as_a_fresh_engine_on_them_and_again_after_a_second_sync",
}
"""What runs in bfloat16, on one family. A token at the edge of a filter may fall on either side of it there, and only
the deterministic engine gives the same tokens in other company."""
BFLOAT16 = {"fast-bfloat16": ROUNDED, "deterministic-bfloat16": REPEATED}
MODES = {
    "fast": partial(TorchEngine, dtype="float32"),
    "deterministic": partial(TorchEngine, dtype="float32", deterministic=True),
    "fast-bfloat16": partial(TorchEngine, dtype="bfloat16"),
    "deterministic-bfloat16": partial(TorchEngine, dtype="bfloat16", deterministic=True),
}
# The model's logits spread over some ten nats; two orders of the same sums in bfloat16 differed by up to 0.23.
LOOSE: dict[str, Any] = {"dtype": "bfloat16", "tolerance": 0.4}


def save(config: Any, folder: Path) -> Path:
    """A random model whose folder asks for sampling settings that nobody may ever use."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    asked = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "repetition_penalty": 1.05}
    (folder / "generation_config.json").write_text(json.dumps(asked))
    return folder


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny models gain nothing from more threads, and lose much where other processes want the cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def subject_of(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str, str], kit.Subject]]:
    folders: dict[str, Path] = {}
    subjects: dict[tuple[str, str], kit.Subject] = {}

    def get(family: str, mode: str) -> kit.Subject:
        if family not in folders:
            folders[family] = save(FAMILIES[family], tmp_path_factory.mktemp(family))
        if (family, mode) not in subjects:
            scratch = tmp_path_factory.mktemp(f"{family}-{mode}")
            loose = LOOSE if mode in BFLOAT16 else {}
            subjects[family, mode] = kit.Subject(MODES[mode], folders[family], scratch, **loose)
        return subjects[family, mode]

    yield get
    for subject in subjects.values():
        subject.close()


def cases() -> list[Any]:
    found = []
    for family in FAMILIES:
        for mode in MODES:
            for name in kit.CHECKS:
                if mode in BFLOAT16 and (family != "llama" or name not in BFLOAT16[mode]):
                    continue
                always = mode in BFLOAT16 or (family, mode) in WHOLE or (name in CORE and mode == "fast")
                marks = [] if always and (family, mode, name) not in LONG else [pytest.mark.slow]
                found.append(pytest.param(family, mode, name, id=f"{family}-{mode}-{name}", marks=marks))
    return found


@pytest.mark.parametrize(("family", "mode", "name"), cases())
async def test_engine_conforms(
    subject_of: Callable[[str, str], kit.Subject], family: str, mode: str, name: str
) -> None:
    await kit.CHECKS[name].run(subject_of(family, mode))


async def test_a_capability_that_an_engine_lacks_is_reported_by_name(
    subject_of: Callable[[str, str], kit.Subject],
) -> None:
    whole = subject_of("llama", "fast")
    lacking = kit.Subject(whole.make, whole.folder, whole.scratch, capabilities=kit.CAPABILITIES - {"pause"})
    with pytest.raises(pytest.skip.Exception, match="the engine lacks pause"):
        await kit.CHECKS["requests_wait_through_a_pause_and_keep_their_state"].run(lacking)
