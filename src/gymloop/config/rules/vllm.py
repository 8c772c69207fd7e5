"""Rules about vLLM: what NeMo RL says in two places agrees; what would break a promise is refused with the reason."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from gymloop.config.rules.violation import Rule, Violation
from gymloop.config.schema import Recipe

CFG = "policy.generation.vllm_cfg"
KWARGS = "policy.generation.vllm_kwargs"
SERVING = f"{CFG}.http_server_serving_chat_kwargs"

LEAST_TEMPERATURE = 0.01
"""Below it, but for 0, vLLM samples at it instead."""

_IDS = "a rollout's tokens would no longer be what the model sampled"
_LOGPROBS = "logprobs would be of another distribution than the one that is sampled from"
_WEIGHTS = f"the engine's model would no longer be the trainer's, and {_LOGPROBS}"
_NO_TOKENIZER = "vLLM gets no tokenizer: gymloop renders and reads text itself"
_FOLDER = "vLLM gets the folder that policy.model_name is or was brought to, and reads no revision"
_GENERATES = "rollouts need a model that generates"
_ONE_ENGINE = f"an engine is split by {CFG}.tensor_parallel_size only"
_ONE_NODE = "an engine's processes and GPUs are of one node, and are reserved before it starts"
_BESIDE = "engines beside each other are policy.generation.replicas"
_NO_DRAFT = f"a draft model is not updated with the policy, and {_IDS}"
_OFFLOAD = "weight updates are written to parameters that stay on their device"
_OLD_KEYS = "keys and values of old weights would outlive a weight sync, which drops those of the engine itself only"
_OWN = {
    "model": "it is policy.model_name",
    "dtype": "it is policy.precision",
    "override_attention_dtype": "it is policy.precision",
    "seed": "it is grpo.seed",
    "max_model_len": "it is policy.max_total_sequence_length",
    "max_num_seqs": f"it is {CFG}.max_num_seqs",
    "tensor_parallel_size": f"it is {CFG}.tensor_parallel_size, which places the engines",
    "distributed_executor_backend": "vLLM's processes are the engine's own children, reserved for and watched",
    "device_ids": "an engine has the GPUs that were reserved for it",
    "gpu_memory_utilization": f"it is {CFG}.gpu_memory_utilization",
    "kv_cache_memory_bytes": f"it is {CFG}.kv_cache_memory_bytes",
    "num_gpu_blocks_override": f"the KV cache is as large as {CFG}.kv_cache_memory_bytes, or as planned",
    "kv_cache_dtype": f"it is {CFG}.kv_cache_dtype",
    "calculate_kv_scales": f"scales are calculated once, for weights that the next sync replaces, and {_LOGPROBS}",
    "enforce_eager": f"it is {CFG}.enforce_eager",
    "load_format": f"it is {CFG}.load_format",
    "enable_prefix_caching": f"it is {CFG}.enable_prefix_caching",
    "enable_sleep_mode": "the run sleeps and wakes the engine around its weight syncs",
    "worker_cls": "gymloop's weight updates need vLLM's own worker",
    "scheduler_cls": "requests stand still and go on around a weight sync, as vLLM's own scheduler lets them",
    "worker_extension_cls": "it is where gymloop's weight updates arrive",
    "weight_transfer_config": "weights go by policy.generation.refit_transport",
    "generation_config": f"sampling settings of the model's folder would apply, and {_LOGPROBS}",
    "override_generation_config": _LOGPROBS,
    "logprobs_mode": _LOGPROBS,
    "logits_processors": _LOGPROBS,
    "watermark_config": _LOGPROBS,
    "quantization": f"engine and trainer would compute with different weights, and {_LOGPROBS}",
    "quantization_config": f"engine and trainer would compute with different weights, and {_LOGPROBS}",
    "reasoning_parser": "it is policy.tokenizer.reasoning_parser",
    "reasoning_parser_plugin": "it is policy.tokenizer.reasoning_parser_plugin",
    "enable_lora": "weights are whole models",
    "stream_interval": "weight versions are told token by token",
    **dict.fromkeys(("tokenizer", "tokenizer_mode", "tokenizer_revision", "skip_tokenizer_init"), _NO_TOKENIZER),
    **dict.fromkeys(("revision", "code_revision"), _FOLDER),
    **dict.fromkeys(
        ("hf_overrides", "hf_config_path", "config_format", "model_weights", "model_class_overrides"), _WEIGHTS
    ),
    **dict.fromkeys(("runner", "convert"), _GENERATES),
    **dict.fromkeys(
        (
            "pipeline_parallel_size", "prefill_context_parallel_size",
            "enable_ep_weight_filter", "enable_eplb", "enable_elastic_ep",
        ),
        _ONE_ENGINE,
    ),
    **dict.fromkeys(("nnodes", "node_rank", "master_addr", "master_port"), _ONE_NODE),
    **dict.fromkeys(
        (
            "data_parallel_size", "data_parallel_size_local", "data_parallel_rank", "data_parallel_start_rank",
            "data_parallel_address", "data_parallel_rpc_port", "data_parallel_backend", "data_parallel_hybrid_lb",
            "data_parallel_external_lb", "data_parallel_multi_port_external_lb",
        ),
        _BESIDE,
    ),
    **dict.fromkeys(("speculative_config", "spec_method", "spec_model", "spec_tokens"), _NO_DRAFT),
    **dict.fromkeys(
        (
            "cpu_offload_gb", "cpu_offload_params", "offload_backend", "offload_group_size", "offload_num_in_group",
            "offload_params", "offload_prefetch_step",
        ),
        _OFFLOAD,
    ),
    **dict.fromkeys(("kv_transfer_config", "kv_offloading_size", "kv_offloading_backend"), _OLD_KEYS),
}  # fmt: skip
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


def _temperature(recipe: Recipe, _folder: Path) -> Iterator[Violation]:
    """The trainer's logprobs are at the recipe's temperature, so the engine has to sample at just that."""
    generation = recipe.policy.generation
    if generation.backend != "vllm":
        return
    for name, greedy in (("temperature", ""), ("val_temperature", "0 or ")):
        value = getattr(generation, name)
        if value is not None and 0 < value < LEAST_TEMPERATURE:
            yield Violation(
                (f"policy.generation.{name}", "policy.generation.backend"),
                f"is {value}, and vLLM would sample at {LEAST_TEMPERATURE} in its place; expected {greedy}at least "
                f"{LEAST_TEMPERATURE}, or backend 'torch'",
            )


def _cpu(recipe: Recipe, _folder: Path) -> Iterator[Violation]:
    cfg, gpus = recipe.policy.generation.vllm_cfg, "cluster.gpus_per_node"
    if recipe.cluster.gpus_per_node:
        return
    if cfg is not None and cfg.tensor_parallel_size > 1:
        yield Violation(
            (f"{CFG}.tensor_parallel_size", gpus), f"is {cfg.tensor_parallel_size} without GPUs; expected 1, or {gpus}"
        )
    if recipe.policy.generation.vllm_kwargs.get("enable_chunked_prefill"):
        yield Violation(
            (f"{KWARGS}.enable_chunked_prefill", KWARGS, gpus),
            "is true without GPUs, where vLLM dies of a prompt that is split over two steps and whose request has a "
            "seed; expected false, or nothing",
        )


RULES: tuple[Rule, ...] = (
    _only_with_vllm,
    _kwargs,
    _said_twice,
    _parsers,
    _switches,
    _compile,
    _deterministic,
    _temperature,
    _cpu,
)
