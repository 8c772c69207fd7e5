"""Variables that vLLM reads when it is imported, and its processes when they start."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

ENVIRONMENT = {
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # a fork of a process with threads may hang
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # engine and policy take turns on the same cores
}
LOGGING = "VLLM_LOGGING_CONFIG_PATH"


def of_threads(count: int | None) -> dict[str, str]:
    """The variables for so many threads; None takes all cores of this process."""
    return {"OMP_NUM_THREADS": str(count or len(os.sched_getaffinity(0)))}


@contextmanager
def setting(values: Mapping[str, str]) -> Iterator[None]:
    """``ENVIRONMENT`` and these variables are set within the block, but for those that the user has set."""
    new = {name: value for name, value in {**ENVIRONMENT, **values}.items() if name not in os.environ}
    os.environ.update(new)
    try:
        yield
    finally:
        for name in new:
            os.environ.pop(name, None)
