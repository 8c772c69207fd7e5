"""What vLLM's core imports before it does anything: loaded once, in the process that it is forked from."""

import vllm.v1.engine.core
from vllm.platforms import current_platform

import gymloop.generation.vllm.extension  # noqa: F401

if current_platform.is_cuda():
    import vllm.v1.worker.gpu_worker  # noqa: F401
