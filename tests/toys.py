"""Tiny model folders, made offline in milliseconds, whose token ids can be written by hand.

The tokenizer is byte level: byte b has id ``BASE + b``, so ``"A"`` is 81 and a newline is 26. There is exactly one
merge, ``o`` + ``k`` -> ``OK_ID``: a model that samples the ids of ``o`` and ``k`` writes text that re-tokenises to
another list. Keep the letters "ok" out of texts unless that trap is wanted. Family ``s`` has characters and bytes as
tokens instead. ``generation_config.json`` asks for
temperature 0.6, top_k 20, top_p 0.95 and a repetition penalty, none of which may ever be used.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import tokenizers

BASE = 16
"""Ids below are reserved for control tokens."""
OK_ID = BASE + 256
VOCAB_SIZE = BASE + 257
FOR_VLLM = {"head_dim": 32, "tie_word_embeddings": True}
"""vLLM's attention on a CPU has no smaller heads; a tied output head is what weight updates go wrong with."""
S_VOCAB_SIZE = BASE + 256 + 2 + 94


def small_vllm(**more: Any) -> dict[str, Any]:
    """Arguments of a small vLLM, of which two share a GPU where there is one."""
    import torch

    on_gpu = {"enable_sleep_mode": True, "gpu_memory_utilization": 0.1} if torch.cuda.is_available() else {}
    return {"enforce_eager": True, "kv_cache_memory_bytes": 32 << 20, **on_gpu, **more}


@dataclass(frozen=True)
class Family:
    """Control tokens by id, the tokenizer's own end token, the end tokens of the generation config, the template."""

    control: dict[int, str]
    eos: str
    end_ids: tuple[int, ...]
    template: str | None
    bos: str | None = None


QWEN_TEMPLATE = r"""
{%- set ns = namespace(last=-1) -%}
{%- for m in messages -%}{%- if m.role == 'user' -%}{%- set ns.last = loop.index0 -%}{%- endif -%}{%- endfor -%}
{%- if tools %}{{ '<|im_start|>system\nTOOLS ' + (tools | tojson) + '<|im_end|>\n' }}{% endif -%}
{%- for m in messages -%}
{%- if m.role == 'tool' -%}
{{ '<|im_start|>user\n<tool_response>\n' + m.content + '\n</tool_response><|im_end|>\n' }}
{%- elif m.role == 'assistant' -%}
{%- set c = m.content if m.content is string else '' -%}
{%- set r = m.reasoning_content if m.reasoning_content is string else '' -%}
{%- if not r and '</think>' in c -%}
{%- set r = c.split('</think>')[0].replace('<think>', '').strip('\n') -%}
{%- set c = c.split('</think>')[1].lstrip('\n') -%}
{%- endif -%}
{{ '<|im_start|>assistant\n' }}
{%- if r and loop.index0 > ns.last -%}{{ '<think>\n' + r + '\n</think>\n\n' }}{%- endif -%}
{{ c }}
{%- for t in (m.tool_calls or []) -%}
{{ '\n<tool_call>\n{"name": "' + t.function.name + '", "arguments": ' }}
{{- t.function.arguments if t.function.arguments is string else (t.function.arguments | tojson) }}
{{- '}\n</tool_call>' }}
{%- endfor -%}
{{ '<|im_end|>\n' }}
{%- else -%}
{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif -%}
"""

LLAMA_TEMPLATE = r"""
{{- bos_token -}}
{%- for m in messages -%}
{{ '<|start_header_id|>' + ('ipython' if m.role == 'tool' else m.role) + '<|end_header_id|>\n\n' }}
{{- (m.content or '') + '<|eot_id|>' }}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif -%}
"""

NEMOTRON_TEMPLATE = r"""
{%- for m in messages -%}
{{ '<|im_start|>' + ('user' if m.role == 'tool' else m.role) + '\n' + (m.content or '') + '<|im_end|>\n' }}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif -%}
"""

GEMMA_TEMPLATE = r"""
{{- bos_token -}}
{%- for m in messages -%}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) -%}
{{ raise_exception('roles must alternate user/assistant') }}
{%- endif -%}
{{ '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' + (m.content | trim) }}
{{- '<end_of_turn>\n' }}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif -%}
"""

MAPPING_TEMPLATE = r"""
{%- for m in messages -%}
{{ '<|im_start|>' ~ ('user' if m.role == 'tool' else m.role) ~ '\n' ~ m.content }}
{%- for t in (m.tool_calls or []) -%}
{{ '\n<function=' ~ t.function.name ~ '>' }}
{%- for k, v in t.function.arguments | items -%}{{ '\n<parameter=' ~ k ~ '>' ~ v ~ '</parameter>' }}{%- endfor -%}
{{ '\n</function>' }}
{%- endfor -%}
{{ '<|im_end|>\n' }}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif -%}
"""

CHATML = {0: "<|endoftext|>", 1: "<|im_start|>", 2: "<|im_end|>"}
MISTRAL_TEMPLATE = r"""
{{- bos_token -}}
{%- for m in messages -%}
{%- if m.role == 'tool' -%}
{%- set before = messages[loop.index0 - 1] -%}
{%- if before.role != 'tool' and not before.tool_calls -%}
{{ raise_exception('a tool result must answer a call') }}
{%- endif -%}
{{ '[TOOL_RESULTS] ' + m.content + ' [/TOOL_RESULTS]' }}
{%- elif m.role == 'assistant' -%}
{{ m.content }}
{%- for t in (m.tool_calls or []) -%}
{{ '[TOOL_CALLS] ' + t.function.name + ' ' + (t.function.arguments | tojson) }}
{%- endfor -%}
{{ '</s>' }}
{%- else -%}
{{ '[INST] ' + m.content + ' [/INST]' }}
{%- endif -%}
{%- endfor -%}
"""

FAMILIES = {
    # like Qwen3: tool result as user turn, drops <think> before the last user turn
    "q": Family(CHATML, "<|im_end|>", (2, 0), QWEN_TEMPLATE),
    # like Llama 3: turns close with a token that is not the tokenizer's eos
    "l": Family(
        {
            0: "<|begin_of_text|>",
            1: "<|end_of_text|>",
            2: "<|start_header_id|>",
            3: "<|end_header_id|>",
            4: "<|eom_id|>",
            5: "<|eot_id|>",
        },
        "<|end_of_text|>",
        (1, 4, 5),
        LLAMA_TEMPLATE,
        bos="<|begin_of_text|>",
    ),
    # like Nemotron: the generation prompt opens <think>
    "n": Family(
        {0: "<unk>", 1: "<s>", 2: "</s>", 10: "<|im_start|>", 11: "<|im_end|>"},
        "<|im_end|>",
        (2, 11),
        NEMOTRON_TEMPLATE,
        bos="<s>",
    ),
    # like Gemma: user and assistant must alternate, no system and no tool role
    "g": Family(
        {0: "<pad>", 1: "<eos>", 2: "<bos>", 5: "<start_of_turn>", 6: "<end_of_turn>"},
        "<eos>",
        (1, 6),
        GEMMA_TEMPLATE,
        bos="<bos>",
    ),
    # walks tool arguments as a mapping
    "m": Family(CHATML, "<|im_end|>", (2, 0), MAPPING_TEMPLATE),
    # like Mistral: no generation prompt, a tool result only behind a call; SentencePiece-like vocabulary (see below)
    "s": Family({0: "<unk>", 1: "<s>", 2: "</s>"}, "</s>", (2,), MISTRAL_TEMPLATE, bos="<s>"),
    # no chat template
    "bare": Family({0: "<|endoftext|>"}, "<|endoftext|>", (0,), None),
}


def text_ids(text: str) -> list[int]:
    """The ids of ``text`` as plain bytes: no control token, no merge."""
    return [BASE + byte for byte in text.encode()]


def build_toy(folder: Path, family: str, weights: bool = True, config: str = "LlamaConfig", **shape: Any) -> Path:
    """Write ``folder/family`` with tokenizer, configs and, if asked, a one-layer random Llama; return that path.

    ``config`` makes another model of it, and ``shape`` are further fields of its config, such as ``FOR_VLLM``.
    """
    from tokenizers import AddedToken
    from transformers import PreTrainedTokenizerFast

    spec = FAMILIES[family]
    path = Path(folder) / family
    path.mkdir(parents=True, exist_ok=True)

    control = {spec.control.get(index, f"<|unused_{index}|>"): index for index in range(BASE)}
    core = _sentence_pieces(control) if family == "s" else _byte_level(control)
    core.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in spec.control.values()])
    names = {"eos_token": spec.eos} | ({"bos_token": spec.bos} if spec.bos else {})
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, clean_up_tokenization_spaces=False, **names)
    if spec.template is not None:
        tokenizer.chat_template = spec.template.strip("\n")
    tokenizer.save_pretrained(path)

    if weights:
        _save_model(path, config, list(spec.end_ids), S_VOCAB_SIZE if family == "s" else VOCAB_SIZE, shape)
    sampling = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "repetition_penalty": 1.05}
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": list(spec.end_ids), **sampling}))
    return path


def _byte_level(control: dict[str, int]) -> tokenizers.Tokenizer:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    vocab = {char: BASE + byte for byte, char in _byte_characters().items()} | control | {"ok": OK_ID}
    core = Tokenizer(models.BPE(vocab=vocab, merges=[("o", "k")]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    return core


def _sentence_pieces(control: dict[str, int]) -> tokenizers.Tokenizer:
    """Characters are tokens, a space is ``▁``, and a character without a token becomes one token a byte."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    vocab = control | {f"<0x{byte:02X}>": BASE + byte for byte in range(256)}
    for char in ("ok", "\u2581", *map(chr, range(33, 127))):
        vocab[char] = len(vocab)
    core = Tokenizer(models.BPE(vocab=vocab, merges=[("o", "k")], byte_fallback=True, unk_token="<unk>"))
    core.normalizer = normalizers.Replace(" ", "\u2581")
    core.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    return core


def _save_model(path: Path, config: str, end_ids: list[int], vocab_size: int, shape: dict[str, Any]) -> None:
    import torch
    import transformers

    from gymloop.models.tensors import persistent_buffers

    small = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 4096,
        "eos_token_id": end_ids,
        "bos_token_id": None,
        "pad_token_id": None,
    }
    made = getattr(transformers, config)(vocab_size=vocab_size, **{**small, **shape})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(made)
        for buffer in persistent_buffers(model).values():  # not as the config makes them: only the checkpoint tells
            buffer.add_(torch.rand_like(buffer) * 0.5 + 0.1)
        model.save_pretrained(path)


def _byte_characters() -> dict[int, str]:
    """The printable stand-in of every byte in byte-level BPE (GPT-2's table)."""
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in visible]
    return {byte: chr(byte) for byte in visible} | {byte: chr(256 + rank) for rank, byte in enumerate(hidden)}
