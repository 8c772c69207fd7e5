"""What a recipe may say about vLLM, in plain values, and what it becomes: the arguments of vLLM's engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class VllmSettings:
    """The part of an engine's spec that only vLLM knows; names are NeMo RL's and vLLM's.

    Attributes:
        tensor_parallel_size: processes, each with a device of its own, that share one model.
        gpu_memory_utilization: share of a GPU's memory that weights, KV cache and activations may take together.
        kv_cache_memory_bytes: of each process; None plans it, see ``vllm.memory``.
        enforce_eager: no CUDA graphs; None captures them on a GPU, the only place that has them.
        compile: let torch.compile fuse the model's kernels.
        load_format: ``dummy`` starts with random weights, and nothing is served before the first sync.
        kv_cache_dtype: as vLLM names it.
        enable_prefix_caching: requests that begin alike share keys and values.
        repeatable_draws: see ``VllmEngine``.
        kwargs: further arguments of vLLM's engine; they have the last word.
    """

    tensor_parallel_size: int = 1
    gpu_memory_utilization: float = 0.6
    kv_cache_memory_bytes: int | None = None
    enforce_eager: bool | None = None
    compile: bool = False
    load_format: str = "auto"
    kv_cache_dtype: str = "auto"
    enable_prefix_caching: bool = True
    repeatable_draws: bool = False
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    @property
    def waits_for_weights(self) -> bool:
        """Whether the engine starts without weights worth sampling from."""
        return self.load_format == "dummy"

    def arguments(self, device: str, kv_bytes: int, max_model_len: int) -> dict[str, Any]:
        """Fields of vLLM's ``AsyncEngineArgs``.

        Args:
            device: as torch names it.
            kv_bytes: of one process's KV cache.
            max_model_len: tokens of a full row.
        """
        gpu = device.startswith("cuda")
        eager = not (gpu or self.compile) if self.enforce_eager is None else self.enforce_eager
        graphs_alone = {"compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY" if gpu else "NONE"}}
        # On a CPU vLLM dies of a prompt that is split over two steps and whose request has a seed, as ours have.
        whole_prompts = {"enable_chunked_prefill": False, "max_num_batched_tokens": max(4096, max_model_len)}
        return {
            "tensor_parallel_size": self.tensor_parallel_size,
            "gpu_memory_utilization": self.gpu_memory_utilization,
            "kv_cache_memory_bytes": kv_bytes,
            "enforce_eager": eager,
            "load_format": self.load_format,
            "kv_cache_dtype": self.kv_cache_dtype,
            "enable_prefix_caching": self.enable_prefix_caching,
            "enable_sleep_mode": gpu,
            **({} if eager or self.compile else graphs_alone),
            **({} if gpu else whole_prompts),
            **self.kwargs,
        }
