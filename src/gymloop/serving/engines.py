"""Which engine a replica runs, and how it is sized: the one place that knows them both."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from gymloop import gpu
from gymloop.compat import Precision, settle_precision
from gymloop.generation import capacity
from gymloop.generation.engine import Engine
from gymloop.generation.vllm.environment import of_threads
from gymloop.generation.vllm.settings import VllmSettings
from gymloop.generation.vllm_engine import VllmEngine
from gymloop.models.load import tensor_bytes
from gymloop.serving.engine_spec import EngineSpec
from gymloop.serving.receiving import InThisProcess, InVllmsProcesses, Receiving

OnProgress = Callable[[str, int, int], None]
"""Called with what is being loaded, the bytes of it that are there, and their total (0 where nobody knows)."""


class ServedEngine(Engine, Protocol):
    """An engine that a worker holds."""

    def require_alive(self) -> None:
        """Raise InfraError, with the cause, where the engine is dead or closed."""

    def sleep(self, level: int = 1) -> None:
        """Leave the device's memory to others; see ``EngineWorker.sleep``."""

    def wake(self, tags: Sequence[str] | None = None) -> None:
        """Take it back; see ``EngineWorker.wake_up``."""


def settled_device(device: str, on_vllm: bool) -> str:
    """The device that ``auto`` means in this process, which computes on it itself unless the engine is vLLM."""
    if device != "auto":
        return device
    return "cuda" if (gpu.is_there() if on_vllm else torch.cuda.is_available()) else "cpu"


def load_engine(
    spec: EngineSpec, folder: Path, device: str, on_progress: OnProgress, meanwhile: Callable[[], None]
) -> tuple[ServedEngine, Receiving, dict[str, Any]]:
    """Start the engine that the spec asks for.

    Args:
        spec: of the replica.
        folder: of the model.
        device: settled.
        on_progress: hears how the load gets on.
        meanwhile: what else has to be done before the engine can be used; beside the load where that is in processes of
            its own, before it where it is here. What it raises ends the load.

    Returns:
        The engine, how it takes weights, and facts for the startup table: backend, precision, device, context length,
        rows.

    Raises:
        ConfigError: the folder does not hold a model that this engine can run.
        InfraError: a process of the engine died.
    """
    precision = settle_precision(spec.precision, device)
    max_model_len, rows = _size(spec, folder, precision, device)
    facts = {"precision": precision, "device": device, "max_model_len": max_model_len, "max_batch_size": rows}
    if spec.vllm is None:
        meanwhile()
        embedded = _torch(spec, folder, device, precision, max_model_len, rows, on_progress)
        return embedded, InThisProcess(embedded, device), {"backend": "torch", **facts}
    engine, more = _vllm(spec, spec.vllm, folder, device, precision, max_model_len, rows, on_progress, meanwhile)
    receiving = InVllmsProcesses(engine, device, spec.vllm.tensor_parallel_size)
    return engine, receiving, {"backend": "vllm", **facts, **more}


def _torch(
    spec: EngineSpec,
    folder: Path,
    device: str,
    precision: Precision,
    max_model_len: int,
    rows: int,
    on_progress: OnProgress,
) -> ServedEngine:
    from gymloop.generation.torch_engine import TorchEngine

    if spec.threads is not None:
        torch.set_num_threads(spec.threads)
    return TorchEngine(
        folder,
        dtype=precision,
        device=device,
        max_batch_size=rows,
        max_model_len=max_model_len,
        seed=spec.seed,
        deterministic=spec.deterministic,
        on_loading=lambda done, total: on_progress("the weights", done, total),
    )


def _vllm(
    spec: EngineSpec,
    settings: VllmSettings,
    folder: Path,
    device: str,
    precision: Precision,
    max_model_len: int,
    rows: int,
    on_progress: OnProgress,
    meanwhile: Callable[[], None],
) -> tuple[VllmEngine, dict[str, Any]]:
    from gymloop.generation.vllm import memory, support
    from gymloop.generation.vllm.caches import compile_cache

    version = support.installed_version()
    kv_bytes = settings.kv_cache_memory_bytes
    if kv_bytes is None:
        ranks = settings.tensor_parallel_size
        weights = memory.weight_bytes(folder, precision)
        room = memory.room_for_cache(weights, device, settings.gpu_memory_utilization, ranks)
        config, kv_dtype = capacity.text_config(folder), settings.kv_cache_dtype
        kv_bytes = memory.kv_cache_bytes(config, precision, kv_dtype, max_model_len, rows, room, device, ranks)
    arguments = settings.arguments(device, kv_bytes, max_model_len)
    sizes = {"dtype": precision, "max_model_len": max_model_len, "max_num_seqs": rows}
    cache = compile_cache(folder, {**sizes, **arguments}, version, device)
    cache.prepare()
    engine = VllmEngine(
        folder,
        dtype=precision,
        max_batch_size=rows,
        max_model_len=max_model_len,
        seed=spec.seed,
        device=device,
        arguments=arguments,
        environment={**cache.environment, **of_threads(spec.threads)},
        repeatable_draws=settings.repeatable_draws,
        on_loading=lambda what, resident: on_progress(f"{what}, {resident >> 20} MiB resident", 0, 0),
        meanwhile=meanwhile,
    )
    cache.mark()
    return engine, {"vllm": version, "kv_cache_bytes": kv_bytes, "compile_cache": cache.found}


def _size(spec: EngineSpec, folder: Path, precision: str, device: str) -> tuple[int, int]:
    """Context length and rows of the engine: as given, else what model and memory allow."""
    if spec.max_model_len is not None and spec.max_batch_size is not None:
        return spec.max_model_len, spec.max_batch_size
    config = capacity.text_config(folder)
    max_model_len = spec.max_model_len or capacity.context_length(config)
    row = capacity.row_bytes(config, precision, max_model_len)
    weights = sum(tensor_bytes(folder).values())
    rows = spec.max_batch_size or capacity.rows_that_fit(row, weights, capacity.free_bytes(device))
    return max_model_len, rows
