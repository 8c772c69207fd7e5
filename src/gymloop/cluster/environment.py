"""Workers see the environment variables that a worker needs, and no secret of whoever started the run.

Ray hands a process that it starts the environment of its node, which on a cluster started here is that of the driver:
tokens of hubs and loggers, keys of model servers. A worker needs where programs and libraries are, and how numerical
libraries and Ray behave. Everything else is taken away, before the process starts where the run started the cluster,
and before a worker is built in any case. ``cluster.worker_env`` names exceptions.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Collection, Iterable

from gymloop.config.secrets import is_secret

_NEEDED = frozenset(
    {
        "PATH", "HOME", "USER", "LOGNAME", "SHELL", "PWD", "LANG", "LANGUAGE", "TZ", "TMPDIR", "TMP", "TEMP",
        "LD_LIBRARY_PATH", "LD_PRELOAD", "VIRTUAL_ENV", "CONDA_PREFIX", "HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE",
        "TOKENIZERS_PARALLELISM", "NO_COLOR", "SSL_CERT_FILE", "SSL_CERT_DIR", "CPATH", "CC", "CXX",
    }
)  # fmt: skip
_FAMILIES = (
    "GYMLOOP_", "PYTHON", "LC_", "XDG_", "CUDA", "NVIDIA_", "NCCL_", "NVSHMEM_", "GLOO_", "OMP_", "MKL_", "KMP_",
    "OPENBLAS_", "GOMP_", "MALLOC_", "TORCH", "PYTORCH_", "TRITON_", "INDUCTOR_", "CUBLAS_", "CUDNN_", "VLLM_",
    "FLASHINFER_", "TRANSFORMERS_", "SAFETENSORS_", "UCX_", "FI_", "COVERAGE_",
)  # fmt: skip
_RAYS_OWN = ("RAY_", "__RAY_")
"""Ray's processes find each other by them, also by what looks like a secret."""


def is_needed(name: str, further: Collection[str] = ()) -> bool:
    """Whether a worker sees the variable of this name.

    Args:
        further: ``cluster.worker_env``.
    """
    if name in further or name.startswith(_RAYS_OWN):
        return True
    return (name in _NEEDED or name.startswith(_FAMILIES)) and not is_secret(name)


def python_without(names: Iterable[str], further: Collection[str] = ()) -> str:
    """The shell command that starts this Python without those of the variables that a worker does not need."""
    dropped = sorted(name for name in names if not is_needed(name, further))
    unset = [word for name in dropped for word in ("-u", name)]
    return shlex.join(["env", *unset, sys.executable])
