"""Workers see the environment variables that a worker needs, and no secret of whoever started the run.

Ray hands a process that it starts the environment of its node, which on a cluster started here is that of the driver:
tokens of hubs and loggers, keys of model servers. A worker needs where programs and libraries are, and how numerical
libraries and Ray behave. Everything else is taken away, before the process starts where the run started the cluster,
and before a worker is built in any case. ``cluster.worker_env`` names exceptions.

On a cluster that was joined, Ray's processes have the environment of whoever started them. So what a worker needs and
the driver has travels with the worker, but for what is of one machine: ``carried`` says what and how. Ray writes the
variables of a runtime environment into its logs, shows them on its dashboard, and expands a ``$`` in them. What may be
a secret, or would arrive as something else, therefore goes as an argument of the actor.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from gymloop.config.secrets import is_secret, literals

_NEEDED = frozenset(
    {
        "PATH", "HOME", "USER", "LOGNAME", "SHELL", "PWD", "LANG", "LANGUAGE", "TZ", "TMPDIR", "TMP", "TEMP",
        "LD_LIBRARY_PATH", "LD_PRELOAD", "VIRTUAL_ENV", "CONDA_PREFIX", "TOKENIZERS_PARALLELISM", "NO_COLOR",
        "SSL_CERT_FILE", "SSL_CERT_DIR", "CPATH", "CC", "CXX",
    }
)  # fmt: skip
_FAMILIES = (
    "GYMLOOP_", "PYTHON", "LC_", "XDG_", "CUDA", "NVIDIA_", "NCCL_", "NVSHMEM_", "GLOO_", "OMP_", "MKL_", "KMP_",
    "OPENBLAS_", "GOMP_", "MALLOC_", "TORCH", "PYTORCH_", "TRITON_", "INDUCTOR_", "CUBLAS_", "CUDNN_", "VLLM_",
    "FLASHINFER_", "TRANSFORMERS_", "SAFETENSORS_", "UCX_", "FI_", "HF_", "COVERAGE_",
)  # fmt: skip
_RAYS_OWN = ("RAY_", "__RAY_")
"""Ray's processes find each other by them, also by what looks like a secret."""
_RAY_SETS = "CUDA_VISIBLE_DEVICES"
_OF_ITS_MACHINE = frozenset(
    {
        "PATH", "HOME", "USER", "LOGNAME", "SHELL", "PWD", "LANG", "LANGUAGE", "TMPDIR", "TMP", "TEMP",
        "LD_LIBRARY_PATH", "LD_PRELOAD", "VIRTUAL_ENV", "CONDA_PREFIX", "SSL_CERT_FILE", "SSL_CERT_DIR", "CPATH",
        "CC", "CXX", "CUDA_HOME", "CUDA_PATH", "CUDA_ROOT", "CUDACXX", "CUDAHOSTCXX", "CUDNN_PATH", "CUDNN_ROOT",
        "NVIDIA_VISIBLE_DEVICES", "NVIDIA_DRIVER_CAPABILITIES", "VLLM_HOST_IP", "VLLM_PORT", "VLLM_NCCL_SO_PATH",
        "VLLM_LOGGING_CONFIG_PATH", "NCCL_HOSTID", "NCCL_TOPO_FILE", "GOMP_CPU_AFFINITY", "KMP_AFFINITY", "OMP_PLACES",
        "HF_TOKEN_PATH", "HF_STORED_TOKENS_PATH",
    }
)  # fmt: skip
_FAMILIES_OF_ITS_MACHINE = ("PYTHON", "LC_", "XDG_", "GYMLOOP_", "CUDA_MPS_", "COVERAGE_", "TORCHELASTIC_")
_INTERFACES = ("_IFNAME", "_IFACE", "_HCA", "_NET_DEVICES")
"""Ends of names: a node of another kind has other interfaces, which whoever started its Ray has named."""
_LIKE_A_SECRET = re.compile(r"(?:^|_)(?:KEY_ID|PAT|AUTH\w*)$")
_WITH_USER = re.compile(r"://[^/\s]*@")
_YET_OF_ALL = frozenset({"XDG_CACHE_HOME", "GYMLOOP_CACHE"})
"""Caches are where all nodes see them, as models and results are."""


@dataclass(frozen=True, slots=True)
class Carried:
    """The driver's variables that travel with a worker.

    Attributes:
        shown: for Ray's runtime environment: there when the process begins; Ray logs and shows them.
        unshown: for the actor's arguments, which nothing logs or shows: there before the worker is built.
        fallback: likewise, where the worker's node has no value of its own.
    """

    shown: dict[str, str]
    unshown: dict[str, str]
    fallback: dict[str, str]


def carried(environment: Mapping[str, str], further: Collection[str] = ()) -> Carried:
    """What of the driver's environment a worker gets, whichever node it is on.

    Args:
        environment: the driver's.
        further: ``cluster.worker_env``.
    """
    travels = {name: environment[name] for name in sorted(environment) if _travels(name, further)}
    fallback = {name: travels.pop(name) for name in list(travels) if name.endswith(_INTERFACES) and name not in further}
    shown = {name: value for name, value in travels.items() if is_needed(name) and _may_be_shown(name, value)}
    return Carried(shown, {name: value for name, value in travels.items() if name not in shown}, fallback)


def _travels(name: str, further: Collection[str]) -> bool:
    if name.startswith(_RAYS_OWN) or name == _RAY_SETS:
        return False
    return name in further or (is_needed(name) and not _of_its_machine(name))


def _of_its_machine(name: str) -> bool:
    return name in _OF_ITS_MACHINE or (name.startswith(_FAMILIES_OF_ITS_MACHINE) and name not in _YET_OF_ALL)


def _may_be_shown(name: str, value: str) -> bool:
    """Whether it is no secret, by name or as a URL's user or password, and arrives through Ray as it is."""
    secret = any(literals({name: value})) or _LIKE_A_SECRET.search(name) or _WITH_USER.search(value)
    return value.isascii() and "$" not in value and not secret


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
