"""Rules about vLLM: what NeMo RL says in two places agrees; what would break a promise is refused with the reason."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from gymloop.config.rules.violation import Rule, Violation
from gymloop.config.schema import Recipe

CFG = "policy.generation.vllm_cfg"
KWARGS = "policy.generation.vllm_kwargs"
SERVING = f"{CFG}.http_server_serving_chat_kwargs"

_IDS = "a rollout's tokens would no longer be what the model sampled"
_LOGPROBS = "logprobs would be of another distribution than the one that is sampled from"
_OWN = {
    "model": "it is policy.model_name",
    "tokenizer": "vLLM gets no tokenizer: gymloop renders and reads text itself",
    "skip_tokenizer_init": "vLLM gets no tokenizer: gymloop renders and reads text itself",
    "dtype": "it is policy.precision",
    "seed": "it is grpo.seed",
    "max_model_len": "it is policy.max_total_sequence_length",
    "max_num_seqs": f"it is {CFG}.max_num_seqs",
    "tensor_parallel_size": f"it is {CFG}.tensor_parallel_size, which places the engines",
    "pipeline_parallel_size": f"an engine is split by {CFG}.tensor_parallel_size only",
    "data_parallel_size": "engines beside each other are policy.generation.replicas",
    "gpu_memory_utilization": f"it is {CFG}.gpu_memory_utilization",
    "kv_cache_memory_bytes": f"it is {CFG}.kv_cache_memory_bytes",
    "kv_cache_dtype": f"it is {CFG}.kv_cache_dtype",
    "enforce_eager": f"it is {CFG}.enforce_eager",
    "load_format": f"it is {CFG}.load_format",
    "enable_prefix_caching": f"it is {CFG}.enable_prefix_caching",
    "enable_sleep_mode": "the run sleeps and wakes the engine around its weight syncs",
    "worker_cls": "gymloop's weight updates need vLLM's own worker",
    "worker_extension_cls": "it is where gymloop's weight updates arrive",
    "weight_transfer_config": "weights go by policy.generation.refit_transport",
    "generation_config": f"sampling settings of the model's folder would apply, and {_LOGPROBS}",
    "override_generation_config": _LOGPROBS,
    "logprobs_mode": _LOGPROBS,
    "logits_processors": _LOGPROBS,
    "watermark_config": _LOGPROBS,
    "quantization": f"engine and trainer would compute with different weights, and {_LOGPROBS}",
    "speculative_config": f"a draft model is not updated with the policy, and {_IDS}",
    "enable_lora": "weights are whole models",
    "stream_interval": "weight versions are told token by token",
}
"""Arguments of vLLM's engine that ``vllm_kwargs`` may not set, and why."""


def _only_with_vllm(recipe: Recipe, _folder: Path) -> Iterator[Violation]:
    generation = recipe.policy.generation
    if generation.backend == "vllm":
        return
    if generation.vllm_cfg is not None:
        yield Violation((CFG, "policy.generation.backend"), "has no effect with backend 'torch'; expected 'vllm'")
    if generation.vllm_kwargs:
        yield Violation((KWARGS, "policy.generation.backend"), "has no effect with backend 'torch'; expected 'vllm'")


def _kwargs(recipe: Recipe, _folder: Path) -> Iterator[Violation]:
    for name in recipe.policy.generation.vllm_kwargs:
        if name in _OWN:
            yield Violation((f"{KWARGS}.{name}", KWARGS), f"may not be set: {_OWN[name]}")


def _said_twice(recipe: Recipe, _folder: Path) -> Iterator[Violation]:
    cfg, policy = recipe.policy.generation.vllm_cfg, recipe.policy
    if cfg is None:
        return
    for key, value, other, expected in (
        ("precision", cfg.precision, "policy.precision", policy.precision),
        (
            "max_model_len", cfg.max_model_len, "policy.max_total_sequence_length", policy.max_total_sequence_length,
        ),
    ):  # fmt: skip
        if value is not None and value != expected:
            yield Violation(
                (f"{CFG}.{key}", other), f"is {value} and {other} is {expected}; expected the same, or null here"
            )


def _parsers(recipe: Recipe, _folder: Path) -> Iterator[Violation]:
    cfg, tokenizer = recipe.policy.generation.vllm_cfg, recipe.policy.tokenizer
    if cfg is None:
        return
    serving = cfg.http_server_serving_chat_kwargs
    for key, value, other, said in (
        (f"{SERVING}.tool_parser", serving.tool_parser, "tool_parser", tokenizer.tool_parser != "hermes"),
        (
            f"{SERVING}.reasoning_parser", serving.reasoning_parser, "reasoning_parser",
            tokenizer.reasoning_parser is not None,
        ),
        (
            f"{CFG}.tool_parser_plugin", cfg.tool_parser_plugin, "tool_parser_plugin",
            tokenizer.tool_parser_plugin is not None,
        ),
        (
            f"{CFG}.reasoning_parser_plugin", cfg.reasoning_parser_plugin, "reasoning_parser_plugin",
            tokenizer.reasoning_parser_plugin is not None,
        ),
    ):  # fmt: skip
        if value is not None and said and value != getattr(tokenizer, other):
            yield Violation(
                (key, f"policy.tokenizer.{other}"),
                f"is {value!r} and policy.tokenizer.{other} is {getattr(tokenizer, other)!r}; expected one of the two",
            )


def _switches(recipe: Recipe, _folder: Path) -> Iterator[Violation]:
    cfg = recipe.policy.generation.vllm_cfg
    if cfg is None:
        return
    serving = cfg.http_server_serving_chat_kwargs
    for key, value, why in (
        (f"{CFG}.async_engine", cfg.async_engine, "rollouts join and leave the batch at any step"),
        (f"{CFG}.expose_http_server", cfg.expose_http_server, "rollouts go through the generation server"),
        (f"{SERVING}.enable_auto_tools", serving.enable_auto_tools, "tool calls are always read"),
    ):
        if not value:
            yield Violation((key,), f"is false, and {why}; expected true")
    if cfg.skip_tokenizer_init is False:
        yield Violation(
            (f"{CFG}.skip_tokenizer_init",),
            "is false, and vLLM gets no tokenizer in any case: gymloop renders and reads text; expected true or null",
        )


def _compile(recipe: Recipe, _folder: Path) -> Iterator[Violation]:
    cfg = recipe.policy.generation.vllm_cfg
    if cfg is None or not cfg.compile:
        return
    if cfg.enforce_eager:
        yield Violation(
            (f"{CFG}.compile", f"{CFG}.enforce_eager"), "is true, and so is enforce_eager; expected one of the two"
        )
    if "compilation_config" in recipe.policy.generation.vllm_kwargs:
        yield Violation(
            (f"{CFG}.compile", f"{KWARGS}.compilation_config"),
            "is true, and vllm_kwargs.compilation_config says how vLLM compiles; expected one of the two",
        )


def _deterministic(recipe: Recipe, _folder: Path) -> Iterator[Violation]:
    if recipe.deterministic and recipe.policy.generation.backend == "vllm":
        yield Violation(
            ("deterministic", "policy.generation.backend"),
            "is true, and what vLLM computes for a request depends on which others share its step; expected backend "
            "'torch'",
        )


def _cpu(recipe: Recipe, _folder: Path) -> Iterator[Violation]:
    cfg = recipe.policy.generation.vllm_cfg
    if cfg is not None and recipe.cluster.gpus_per_node == 0 and cfg.tensor_parallel_size > 1:
        yield Violation(
            (f"{CFG}.tensor_parallel_size", "cluster.gpus_per_node"),
            f"is {cfg.tensor_parallel_size} without GPUs; expected 1, or cluster.gpus_per_node",
        )


RULES: tuple[Rule, ...] = (_only_with_vllm, _kwargs, _said_twice, _parsers, _switches, _compile, _deterministic, _cpu)
