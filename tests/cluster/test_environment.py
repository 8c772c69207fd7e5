"""Which variables a worker sees, and which travel to it; the processes themselves are in ``test_local``."""

import os
import subprocess

import pytest

from gymloop.cluster.environment import carried, is_needed, python_without


@pytest.mark.parametrize(
    "name",
    ["PATH", "HOME", "LC_ALL", "CUDA_VISIBLE_DEVICES", "NCCL_DEBUG", "OMP_NUM_THREADS", "HF_HOME", "PYTHONPATH",
     "GYMLOOP_RUN", "RAY_JOB_ID", "RAY_AUTH_TOKEN", "VLLM_CACHE_ROOT", "XDG_CACHE_HOME", "VIRTUAL_ENV"],
)  # fmt: skip
def test_what_programs_libraries_and_ray_need_stays(name):
    assert is_needed(name)


@pytest.mark.parametrize(
    "name",
    ["HF_TOKEN", "WANDB_API_KEY", "OPENAI_API_KEY", "AWS_SECRET_ACCESS_KEY", "VLLM_API_KEY", "MY_SETTING",
     "SSH_AUTH_SOCK", "GITHUB_TOKEN", "TORCH_HUB_TOKEN", "DATABASE_URL", "SLURM_JOB_ID", "https_proxy"],
)  # fmt: skip
def test_secrets_and_whatever_no_worker_is_known_to_need_go(name):
    assert not is_needed(name)
    assert is_needed(name, (name,)), "unless the recipe names it"


SHOWN, UNSHOWN, FALLBACK, STAYS = "shown", "unshown", "fallback", "stays"


@pytest.mark.parametrize(
    ("name", "value", "named", "how"),
    [
        # A node that has interfaces of its own keeps them, unless the recipe names the variable.
        ("NCCL_SOCKET_IFNAME", "ib0", False, FALLBACK),
        ("GLOO_SOCKET_IFNAME", "ib0", False, FALLBACK),
        ("NCCL_IB_HCA", "mlx5", False, FALLBACK),
        ("UCX_NET_DEVICES", "mlx5_0:1", False, FALLBACK),
        ("NCCL_SOCKET_IFNAME", "ib0", True, SHOWN),
        ("NCCL_DEBUG", "INFO", False, SHOWN),
        ("VLLM_LOGGING_LEVEL", "INFO", False, SHOWN),
        ("GYMLOOP_CACHE", "/shared/cache", False, SHOWN),
        ("XDG_CACHE_HOME", "/shared", False, SHOWN),
        ("HF_HUB_CACHE", "/shared/hub", False, SHOWN),
        ("HF_HUB_OFFLINE", "1", False, SHOWN),
        ("HF_ENDPOINT", "https://mirror:8443", False, SHOWN),
        ("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64", False, SHOWN),
        ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "", False, SHOWN),
        ("CUDA_LAUNCH_BLOCKING", "1", False, SHOWN),
        # Ray would take a $ for a variable of the worker's node, and not every byte of a path is text.
        ("VLLM_CACHE_ROOT", "/shared/$x", False, UNSHOWN),
        ("TRITON_CACHE_DIR", "/shared/\udcff", False, UNSHOWN),
        # Of one machine, unless it is asked for by name.
        ("PATH", "/usr/bin", False, STAYS),
        ("LD_LIBRARY_PATH", "/opt/lib", False, STAYS),
        ("LD_LIBRARY_PATH", "/opt/lib", True, SHOWN),
        ("PYTHONPATH", "/opt/python", False, STAYS),
        ("PYTHONPATH", "/opt/python", True, SHOWN),
        ("PYTHONPYCACHEPREFIX", "/tmp/pyc", False, STAYS),
        ("HOME", "/root", False, STAYS),
        ("TMPDIR", "/scratch", False, STAYS),
        ("VIRTUAL_ENV", "/venv", False, STAYS),
        ("CUDA_HOME", "/usr/local/cuda", False, STAYS),
        ("XDG_RUNTIME_DIR", "/run/user/1000", False, STAYS),
        ("VLLM_HOST_IP", "10.0.0.1", False, STAYS),
        ("VLLM_LOGGING_CONFIG_PATH", "/home/me/log.json", False, STAYS),
        ("VLLM_NCCL_SO_PATH", "/opt/libnccl.so", False, STAYS),
        ("CUDNN_PATH", "/opt/cudnn", False, STAYS),
        ("GOMP_CPU_AFFINITY", "0-3", False, STAYS),
        ("TORCHELASTIC_RUN_ID", "7", False, STAYS),
        ("GYMLOOP_RUN", "mark", False, STAYS),
        ("GYMLOOP_SECRETS", "/home/me/secrets", False, STAYS),
        # Ray's to say, whatever is asked for.
        ("CUDA_VISIBLE_DEVICES", "0,1", False, STAYS),
        ("CUDA_VISIBLE_DEVICES", "0,1", True, STAYS),
        ("RAY_ADDRESS", "10.0.0.1:6379", False, STAYS),
        ("RAY_AUTH_TOKEN", "t", True, STAYS),
        # Secrets by their name or value, and what nothing is known of.
        ("HF_TOKEN", "hf_x", False, STAYS),
        ("HF_TOKEN", "hf_x", True, UNSHOWN),
        ("HF_TOKEN_PATH", "/home/me/token", False, STAYS),
        ("VLLM_API_KEY", "k", False, STAYS),
        ("HF_ENDPOINT", "https://me:pw@mirror", False, UNSHOWN),
        ("HF_ENDPOINT", "https://hf_token@mirror/models", False, UNSHOWN),
        ("HF_ENDPOINT", "https://mirror/models@main", False, SHOWN),
        ("VLLM_S3_ACCESS_KEY_ID", "AKIA", False, UNSHOWN),
        ("MY_SETTING", "v", False, STAYS),
        ("MY_SETTING", "v", True, UNSHOWN),
        ("https_proxy", "http://proxy", False, STAYS),
    ],
)
def test_what_a_worker_needs_travels_and_what_may_be_a_secret_is_not_shown(name, value, named, how):
    got = carried({name: value, "OTHER": "o"}, (name, "ABSENT") if named else ())
    assert got.shown == ({name: value} if how == SHOWN else {})
    assert got.unshown == ({name: value} if how == UNSHOWN else {})
    assert got.fallback == ({name: value} if how == FALLBACK else {})


def test_the_command_that_starts_python_takes_away_the_rest_and_shows_no_value():
    environment = {"PATH": os.environ["PATH"], "HF_TOKEN": "hf_x", "MY KEY": "v", "OMP_NUM_THREADS": "3", "KEPT": "k"}
    command = python_without(environment, ("KEPT",))
    assert "hf_x" not in command
    done = subprocess.run(
        ["bash", "-c", f"exec {command} -c 'import os; print(sorted(os.environ))'"],
        env=environment, capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    seen = set(eval(done.stdout))
    assert {"PATH", "OMP_NUM_THREADS", "KEPT"} <= seen
    assert not seen & {"HF_TOKEN", "MY KEY"}
