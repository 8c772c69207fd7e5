"""Which variables a worker sees; the processes themselves are in ``test_local``."""

import os
import subprocess

import pytest

from gymloop.cluster.environment import is_needed, python_without


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
