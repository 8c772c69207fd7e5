"""vLLM in recipes: NeMo RL's keys, in NeMo RL's places; what would break a promise is refused with its reason."""

import math
from dataclasses import fields
from types import SimpleNamespace
from typing import get_args

import pytest

from gymloop.config.parsers import settled_parsers
from gymloop.config.plan import compile_plan
from gymloop.config.rules.vllm import _OWN, LEAST_TEMPERATURE
from gymloop.config.schema import KvCacheDtype
from gymloop.errors import ConfigError
from gymloop.generation import vllm_engine
from gymloop.generation.engine import Sampling
from gymloop.generation.vllm.support import ARGUMENTS

VLLM = "policy.generation.backend=vllm"
CFG = "policy.generation.vllm_cfg"
SERVING = f"{CFG}.http_server_serving_chat_kwargs"


def cfg(text: str) -> str:
    return f"+{CFG}={text}"


@pytest.mark.parametrize(
    ("overrides", "key", "reason"),
    [
        ([cfg("{enforce_eager: true}")], CFG, "has no effect with backend 'torch'"),
        (["+policy.generation.vllm_kwargs={max_num_batched_tokens: 64}"], "policy.generation.vllm_kwargs", "no effect"),
        ([VLLM, cfg("{precision: bfloat16}"), "policy.precision=float32"], f"{CFG}.precision", "is bfloat16 and"),
        ([VLLM, cfg("{max_model_len: 7}")], f"{CFG}.max_model_len", "is 7 and policy.max_total_sequence_length is"),
        ([VLLM, cfg("{async_engine: false}")], f"{CFG}.async_engine", "join and leave the batch"),
        ([VLLM, cfg("{expose_http_server: false}")], f"{CFG}.expose_http_server", "go through the generation server"),
        ([VLLM, cfg("{skip_tokenizer_init: false}")], f"{CFG}.skip_tokenizer_init", "gets no tokenizer in any case"),
        (
            [VLLM, cfg("{http_server_serving_chat_kwargs: {enable_auto_tools: false}}")],
            f"{SERVING}.enable_auto_tools",
            "always read",
        ),
        (
            [VLLM, cfg("{http_server_serving_chat_kwargs: {tool_parser: mistral}}"),
             "policy.tokenizer.tool_parser=openai"],
            f"{SERVING}.tool_parser",
            "is 'mistral' and policy.tokenizer.tool_parser is 'openai'; expected one of the two",
        ),
        ([VLLM, cfg("{compile: true, enforce_eager: true}")], f"{CFG}.compile", "and so is enforce_eager"),
        (
            [VLLM, cfg("{compile: true}"), "+policy.generation.vllm_kwargs={compilation_config: {mode: 3}}"],
            f"{CFG}.compile",
            "vllm_kwargs.compilation_config says how vLLM compiles",
        ),
        ([VLLM, cfg("{tensor_parallel_size: 2}")], f"{CFG}.tensor_parallel_size", "is 2 without GPUs"),
        ([VLLM, "deterministic=true"], "deterministic", "depends on which others share its step"),
        ([VLLM, cfg("{tool_parser_plugin: gone.py}")], "policy.tokenizer.tool_parser_plugin", "there is no file"),
        ([VLLM, cfg("{load_format: gguf}")], f"{CFG}.load_format", "dummy"),
        ([VLLM, cfg("{use_deep_gemm: true}")], f"{CFG}.use_deep_gemm", "share one precision"),
        (
            [VLLM, cfg("{kv_cache_memory_bytes: 1}")],
            f"{CFG}.kv_cache_memory_bytes",
            "is 1; expected at least 1048576",
        ),
        ([VLLM, cfg("{kv_cache_dtype: fp9}")], f"{CFG}.kv_cache_dtype", "did you mean 'fp8'?"),
        (
            [VLLM, "policy.generation.temperature=0.005"],
            "policy.generation.temperature",
            "is 0.005, and vLLM would sample at 0.01 in its place; expected at least 0.01, or backend 'torch'",
        ),
        (
            [VLLM, "policy.generation.val_temperature=0.0099", "+data.validation={environment: sums, num_tasks: 2}"],
            "policy.generation.val_temperature",
            "expected 0 or at least 0.01",
        ),
        (
            [VLLM, "+policy.generation.vllm_kwargs={enable_chunked_prefill: true}"],
            "policy.generation.vllm_kwargs.enable_chunked_prefill",
            "vLLM dies of a prompt that is split over two steps",
        ),
        ([VLLM, "policy.generation.top_p=0.9"], "policy.generation.top_p", "expected 1.0"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_with_its_reason(files, overrides, key, reason):
    said = files.said("base.yaml", *overrides)
    assert any(f": {key}: " in line and reason in line for line in said), said


@pytest.mark.parametrize("name", _OWN)
def test_arguments_that_would_break_a_promise_are_refused_by_name(files, name):
    said = files.said("base.yaml", VLLM, f"+policy.generation.vllm_kwargs={{{name}: 1}}")
    assert any(f": policy.generation.vllm_kwargs.{name}: may not be set: {_OWN[name]}" in line for line in said), said


@pytest.mark.parametrize(
    "overrides",
    [
        ["policy.generation.temperature=0.005"],  # the embedded engine samples at any
        [VLLM, f"policy.generation.temperature={LEAST_TEMPERATURE}"],
        [VLLM, "policy.generation.val_temperature=0", "+data.validation={environment: sums, num_tasks: 2}"],
        [VLLM, "+policy.generation.vllm_kwargs={enable_chunked_prefill: false}"],
        [VLLM, "+policy.generation.vllm_kwargs={enable_chunked_prefill: true}", "cluster.gpus_per_node=1"],
        [VLLM, "+policy.generation.vllm_kwargs={decode_context_parallel_size: 1, mamba_ssm_cache_dtype: float32}"],
    ],
)
def test_what_breaks_no_promise_is_taken(files, overrides):
    files.load("base.yaml", *overrides)


def test_the_least_temperature_is_the_engines():
    assert LEAST_TEMPERATURE == vllm_engine.LEAST_TEMPERATURE
    engine = SimpleNamespace(_vocab=9)
    vllm_engine.VllmEngine._check_sampling(engine, Sampling(4, temperature=LEAST_TEMPERATURE))
    with pytest.raises(ConfigError, match="expected 0 or at least"):
        vllm_engine.VllmEngine._check_sampling(engine, Sampling(4, temperature=math.nextafter(LEAST_TEMPERATURE, 0)))


def test_whatever_gymloop_probes_for_and_sets_in_every_place_may_not_be_set():
    """But for the switches that a recipe may have better reasons for."""
    assert set(ARGUMENTS) - set(_OWN) == {
        "disable_log_stats", "compilation_config", "enable_chunked_prefill", "max_num_batched_tokens"
    }  # fmt: skip


@pytest.mark.vllm
def test_vllms_own_names_are_known():
    from vllm import AsyncEngineArgs
    from vllm.config.cache import CacheDType

    assert set(get_args(CacheDType)) <= set(get_args(KvCacheDtype))
    of_other_versions = {"override_attention_dtype", "calculate_kv_scales", "watermark_config"}
    assert set(_OWN) - of_other_versions <= {field.name for field in fields(AsyncEngineArgs)}


def test_nemo_rls_block_is_taken_and_its_parsers_are_the_servers(files):
    files.write("mine.py", "")
    block = (
        "{async_engine: true, precision: auto, tensor_parallel_size: 1, gpu_memory_utilization: 0.8, "
        "enforce_eager: false, kv_cache_dtype: auto, expose_http_server: true, skip_tokenizer_init: null, "
        "tool_parser_plugin: mine.py, load_format: dummy, "
        "http_server_serving_chat_kwargs: {enable_auto_tools: true, tool_parser: mine, reasoning_parser: deepseek_r1}}"
    )
    kwargs = "+policy.generation.vllm_kwargs={max_num_batched_tokens: 512}"
    recipe = files.load("base.yaml", VLLM, cfg(block), kwargs).recipe
    found = settled_parsers(recipe)
    assert (found.tool_parser, found.tool_parser_plugin, found.reasoning_parser) == ("mine", "mine.py", "deepseek_r1")
    assert recipe.policy.generation.vllm_kwargs == {"max_num_batched_tokens": 512}
    plan = compile_plan(recipe, files.folder / "base.yaml", "run")
    assert plan.tool_parser_plugin == (files.folder / "mine.py").absolute()


def test_a_parser_of_vllms_own_may_be_named_without_a_plug_in(files):
    recipe = files.load("base.yaml", VLLM, "policy.tokenizer.tool_parser=kimi_k2").recipe
    assert settled_parsers(recipe).tool_parser == "kimi_k2"


def test_tensor_parallel_engines_take_that_many_gpus(files):
    gpus = ["cluster.gpus_per_node=2", VLLM, cfg("{tensor_parallel_size: 2}")]
    said = files.said("base.yaml", *gpus)
    assert not any("tensor_parallel_size" in line for line in said), said


def test_a_kv_cache_may_be_as_large_as_a_gpu(files):
    large = files.load("base.yaml", VLLM, cfg("{kv_cache_memory_bytes: 60000000000}"))
    settings = large.recipe.policy.generation.vllm_cfg
    assert settings is not None
    assert settings.kv_cache_memory_bytes == 60_000_000_000
